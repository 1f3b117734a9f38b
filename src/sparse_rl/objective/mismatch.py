# SPDX-License-Identifier: Apache-2.0
"""How far the sampler is from the dense model. Pure functions of log-probs.

Everything is reduced over all tokens the sampler chose, never over survivors. Where only some rollouts were scored,
each carries the inverse of its chance of being scored as a weight.

What is done about the gap is in `correction.py`; the gap by context length is in `tail.py`.
"""

from __future__ import annotations

import math

import torch

from sparse_rl.objective.correction import MAX_LOG_RATIO, sum_rows

CATASTROPHIC = 1e-4  # xi below this: the dense model finds the token all but impossible
EXACT_VOCABULARY, TOP = 4096, 20  # up to this size overlap is exact, above it from this many ids
QUANTILES = {"p01": 0.01, "p05": 0.05, "p50": 0.5, "p99": 0.99}


def overlap_ids(vocab_size: int) -> int:
    """How many of the sampler's most likely ids to ask for."""
    return vocab_size if vocab_size <= EXACT_VOCABULARY else TOP


def overlap_bounds(
    sampler_logprobs_Tk: torch.Tensor, dense_logprobs_Tk: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lower and upper bound of sum_v min(p, q) a token, from both log-probs at the sampler's top k ids.

    The rest of the vocabulary adds at most the smaller of the two masses left over. With k = V both are exact.
    """
    q, p = sampler_logprobs_Tk.exp(), dense_logprobs_Tk.exp()
    lower = torch.minimum(p, q).sum(dim=-1)
    left_over = torch.minimum(1.0 - q.sum(dim=-1), 1.0 - p.sum(dim=-1)).clamp(min=0.0)
    return lower.clamp(max=1.0), (lower + left_over).clamp(max=1.0)


def overlap_top(
    sampler_ids_Tk: torch.Tensor,
    sampler_logprobs_Tk: torch.Tensor,
    dense_ids_Tk: torch.Tensor,
    dense_logprobs_Tk: torch.Tensor,
) -> torch.Tensor:
    """Sparrow's acceptance rate, (T,): min(p, q) summed over the tokens in both top lists; 0.86 is on this scale."""
    same_Tkk = sampler_ids_Tk[:, :, None] == dense_ids_Tk[:, None, :]
    shared_Tkk = torch.minimum(sampler_logprobs_Tk[:, :, None], dense_logprobs_Tk[:, None, :]).exp()
    return torch.where(same_Tkk, shared_Tkk, 0.0).sum(dim=(1, 2))


def diagnose(
    log_xi: torch.Tensor,  # (T,)
    mask: torch.Tensor,  # (T,) bool
    rows: torch.Tensor,  # (T,)
    row_weights: torch.Tensor,  # (R,) 1 over each rollout's chance of being scored
    overlap: dict[str, torch.Tensor] | None = None,  # (T,) each, by name
) -> dict[str, float]:
    """The `mismatch/*` and `rollout_corr/*` metrics, as metrics.py defines them."""
    num_rows = len(row_weights)
    raw, rows = log_xi[mask].double(), rows[mask]
    row_weights = row_weights.double()
    weights = row_weights[rows]
    log_ratio = raw.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    xi = log_ratio.exp()

    def mean(values: torch.Tensor) -> float:
        return float((values * weights).sum() / weights.sum())

    lowest_R = torch.full_like(row_weights, math.inf).scatter_reduce(0, rows, raw, "amin")
    present_R = sum_rows(torch.ones_like(raw), rows, num_rows) > 0
    metrics = {
        "rollout_corr/kl": mean(-log_ratio),
        "rollout_corr/k3_kl": mean(xi - log_ratio - 1.0),
        "mismatch/ess_frac": float((weights * xi).sum() ** 2 / ((weights * xi * xi).sum() * weights.sum())),
        "mismatch/catastrophic_frac": mean((raw < math.log(CATASTROPHIC)).double()),
        "mismatch/catastrophic_rollout_frac": float(
            (row_weights * (lowest_R < math.log(CATASTROPHIC))).sum() / row_weights[present_R].sum()
        ),
        "mismatch/lowest_log_xi_mean": float((lowest_R * row_weights)[present_R].sum() / row_weights[present_R].sum()),
    }
    for name, value in zip(QUANTILES, weighted_quantiles(xi, weights, list(QUANTILES.values())), strict=True):
        metrics[f"mismatch/xi_{name}"] = value
    for name, values in (overlap or {}).items():
        shared = values[mask].double()
        p05, p01 = weighted_quantiles(shared, weights, [0.05, 0.01])
        metrics |= {f"mismatch/{name}_mean": mean(shared), f"mismatch/{name}_p05": p05, f"mismatch/{name}_p01": p01}
    return metrics


def weighted_quantiles(values: torch.Tensor, weights: torch.Tensor, at: list[float]) -> list[float]:
    """The smallest value with at least a fraction `at` of the weight at or below it."""
    ordered, index = values.sort()
    mass = weights[index].cumsum(0) / weights.sum()
    wanted = torch.tensor(at, dtype=mass.dtype, device=mass.device) - 1e-12
    where = torch.searchsorted(mass, wanted).clamp(max=len(values) - 1)
    return ordered[where].tolist()
