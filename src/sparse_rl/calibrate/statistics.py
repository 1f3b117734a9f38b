# SPDX-License-Identifier: Apache-2.0
"""The numbers of one cache: overlap by context length, and what a veto on xi would do to its rollouts.

    {"rollouts": 128, "mean_length": 179.0, "rejected_frac": 0.07, "hazard": 4e-4, "kv_saved_frac": 0.6, ...
     "bins": [{"tokens": 2304, "top20": {"all": {"mean": ..., "p05": ..., "p05_interval": [...], "beta": {...}}, ...

Intervals are 95 %, from resampled rollouts: tokens of one rollout are not independent.

Which budget is enough is decided in `analysis.py`.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from sparse_rl.calibrate.beta import PERFECT, fit
from sparse_rl.calibrate.tokens import Tokens
from sparse_rl.objective.mismatch import CATASTROPHIC, weighted_quantiles

SCALES = ("top20", "lower")
GROUPS = ("all", "decision")
QUANTILES = {"p01": 0.01, "p05": 0.05}
TAILS = (*QUANTILES, "mean")
BARS = 40  # of the histogram of imperfect tokens, over [0, 0.999]
LEVELS = 1000  # steps of overlap that intervals are found to


def describe(
    tokens: Tokens, bins: list[tuple[int, int]], *, entropy: float, bootstrap: int, least: int
) -> dict[str, Any]:
    """Of one cache; `least` is how many tokens a bin needs for a tail."""
    counts = resampled(tokens.num_rollouts, bootstrap, seed=0)
    return {
        "rollouts": tokens.num_rollouts,
        "tokens": len(tokens.contexts),
        "mean_length": len(tokens.contexts) / tokens.num_rollouts,
        **veto(tokens),
        "kv_saved_frac": 1.0 - tokens.held / tokens.full if tokens.full else 0.0,
        "kv_read_frac": tokens.read / tokens.full if tokens.full else 1.0,
        "bins": [_bin(tokens, span, entropy, counts, least) for span in open_ended(bins)],
    }


def open_ended(bins: list[tuple[int, int]]) -> list[tuple[float, float]]:
    """The bins, the last without an end: too sparse a cache writes on where the dense one stopped."""
    return [*bins[:-1], (bins[-1][0], math.inf)]


def veto(tokens: Tokens) -> dict[str, float]:
    """Rollouts a veto at xi < 1e-4 would reject, and its hazard: rejections a token that was still unrejected.

    A constant hazard h rejects 1 - exp(-h L) of the rollouts of L tokens.
    """
    broken = np.flatnonzero(tokens.log_xi < math.log(CATASTROPHIC))
    rejected, places = np.unique(tokens.rollouts[broken], return_index=True)  # rollouts ascend: its first is the first
    starts = np.cumsum(tokens.lengths) - tokens.lengths
    survived = tokens.lengths.astype(np.float64)
    survived[rejected] = broken[places] - starts[rejected] + 1
    return {
        "rejected_frac": len(rejected) / tokens.num_rollouts,
        "hazard": len(rejected) / float(survived.sum()) if survived.sum() else 0.0,
        "catastrophic_frac": len(broken) / max(1, len(tokens.log_xi)),
    }


def _bin(tokens: Tokens, span: tuple[float, float], entropy: float, counts: np.ndarray, least: int) -> dict[str, Any]:
    inside = (tokens.contexts >= span[0]) & (tokens.contexts < span[1])
    groups = {"all": inside, "decision": inside & (tokens.entropy > entropy)}
    found: dict[str, Any] = {
        "tokens": int(inside.sum()),
        "decision_tokens": int(groups["decision"].sum()),
        "catastrophic_frac": float((tokens.log_xi[inside] < math.log(CATASTROPHIC)).mean()) if inside.any() else None,
        "upper_p05": quantiles(tokens.upper[inside], [0.05])[0] if inside.sum() >= least else None,
    }
    for scale in SCALES:
        values = getattr(tokens, scale)
        found[scale] = {
            name: _group(values[chosen], tokens.rollouts[chosen], counts) if chosen.sum() >= least else None
            for name, chosen in groups.items()
        }
    return found


def _group(values: np.ndarray, rollouts: np.ndarray, counts: np.ndarray) -> dict[str, Any]:
    fitted = fit(values)
    beta = None
    if fitted is not None:
        beta = {**asdict(fitted), "p05": fitted.quantile(0.05)}
    return {
        "mean": float(values.mean(dtype=np.float64)),
        **dict(zip(QUANTILES, quantiles(values, list(QUANTILES.values())), strict=True)),
        **intervals(values, rollouts, counts),
        "perfect": float((values > PERFECT).mean()),
        "histogram": np.histogram(values[values <= PERFECT], BARS, (0.0, PERFECT))[0].tolist(),
        "beta": beta,
    }


def quantiles(values: np.ndarray, at: list[float]) -> list[float]:
    """As training has them (objective/mismatch.py), each token counted once."""
    given = torch.from_numpy(values).double()
    return weighted_quantiles(given, torch.ones_like(given), at)


def resampled(num_rollouts: int, times: int, seed: int) -> np.ndarray:
    """How often each rollout is drawn, resample by resample."""
    draw = np.random.default_rng(seed)
    return draw.multinomial(num_rollouts, np.full(num_rollouts, 1.0 / num_rollouts), size=times).astype(np.float32)


def intervals(values: np.ndarray, rollouts: np.ndarray, counts: np.ndarray) -> dict[str, list[float]]:
    """95 % of the resamples' statistics, to 1 / LEVELS: all resamples' histograms are one product."""
    if len(counts) == 0:
        return {}
    seen, own = np.unique(rollouts, return_inverse=True)
    level = np.ceil(values * LEVELS - 1e-6).clip(0, LEVELS).astype(np.int64)
    width = LEVELS + 1
    histograms = np.bincount(own * width + level, minlength=len(seen) * width).reshape(-1, width)
    sums = np.bincount(own, values, minlength=len(seen))
    drawn = counts[:, seen]
    totals = drawn @ histograms.sum(axis=1)
    some = totals > 0
    below = (drawn[some] @ histograms.astype(np.float32)).cumsum(axis=1, dtype=np.float64)
    found = {"mean": (drawn[some] @ sums) / totals[some]}
    for name, at in QUANTILES.items():
        found[name] = (below >= at * totals[some, None] - 1e-6).argmax(axis=1) / LEVELS
    return {f"{name}_interval": np.quantile(each, [0.025, 0.975]).tolist() for name, each in found.items()}
