# SPDX-License-Identifier: Apache-2.0
"""From the tokens of all runs to statistics by context length, and to the schedule that they give.

Nothing is sampled here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from sparse_rl.calibrate.config import CalibrationConfig
from sparse_rl.calibrate.search import Found, as_schedule, cheapest, pool_bins
from sparse_rl.calibrate.statistics import describe
from sparse_rl.calibrate.tokens import Tokens
from sparse_rl.kv.schedule import Schedule
from sparse_rl.metrics import MANY_ANOMALOUS

STUDIED = (0.75, 0.80, 0.86, 0.92)  # targets whose schedules are shown beside one's own


def measure_dense(floor: Tokens, config: CalibrationConfig) -> dict[str, Any]:
    """The bins, the dense cache's statistics in them, and what is asked of the budgets' tails there."""
    chosen = floor.entropy > config.entropy if config.tokens == "decision" else np.ones(len(floor.contexts), dtype=bool)
    counts = np.bincount(floor.contexts[chosen] // config.bin) if chosen.any() else np.zeros(1, dtype=int)
    bins = pool_bins(counts.tolist(), config.bin, config.min_tokens)
    if counts.sum() < config.min_tokens:
        kind = "decision tokens" if config.tokens == "decision" else "tokens"
        raise ValueError(
            f"the dense cache sampled {counts.sum():,} {kind}, fewer than --min-tokens "
            f"({config.min_tokens:,}); give more prompts, more samples (--n), or lower --min-tokens."
        )
    dense = described(floor, bins, config)
    return {"bins": bins, "floor": dense, "targets": targets(config, _floors(dense, config))}


def analyse(
    dense: dict[str, Any], budgets: list[int], run: Callable[[int], Tokens], config: CalibrationConfig
) -> dict[str, Any]:
    """Statistics of all runs, one in memory at a time, and the schedule that they give; budgets ascend."""
    bins = dense["bins"]
    found = {budget: described(run(budget), bins, config) for budget in budgets}
    tails = np.array([tail_row(found[budget], config) for budget in budgets])
    fitted = cheapest(tails, budgets, [start for start, _ in bins], dense["targets"])
    floors = _floors(dense["floor"], config)
    others = {}
    for target in STUDIED:
        other = cheapest(tails, budgets, [start for start, _ in bins], targets(config, floors, target))
        others[f"{target:.2f}"] = {**asdict(other.schedule), "met": list(other.met)}
    return {
        **dense,
        "budgets": budgets,
        "runs": [{"budget": budget, **found[budget]} for budget in budgets],
        "schedule": {**asdict(fitted.schedule), "met": list(fitted.met)},
        "studied": others,
        "notes": _notes(fitted, dense, tails, config),
    }


def described(tokens: Tokens, bins: list[tuple[int, int]], config: CalibrationConfig) -> dict[str, Any]:
    least = max(20, config.min_tokens // 2)  # a sparse sampler's answers are not as long as the dense one's
    return describe(tokens, bins, entropy=config.entropy, bootstrap=config.bootstrap, least=least)


def tail_row(run: dict[str, Any], config: CalibrationConfig) -> list[float]:
    """The statistic that is asked for, of each bin; nan where a bin has too few tokens."""
    if config.sure:
        return [_lower_end(each, config) for each in run["bins"]]
    groups = [each[config.overlap][config.tokens] for each in run["bins"]]
    return [float("nan") if group is None else group[config.tail] for group in groups]


def unreached(run: dict[str, Any], config: CalibrationConfig) -> list[int]:
    """The bins in which a run has too few tokens to say anything."""
    return [i for i, each in enumerate(run["bins"]) if each[config.overlap][config.tokens] is None]


def unreachable(results: dict[str, Any], config: CalibrationConfig) -> list[int]:
    """The bins whose target is above what the dense cache itself has."""
    tails = tail_row(results["floor"], config)
    return [i for i, (tail, target) in enumerate(zip(tails, results["targets"], strict=True)) if tail < target]


def contexts(bins: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"{start}-{end}" for start, end in bins)


def targets(config: CalibrationConfig, floors: list[float], target: float | None = None) -> list[float]:
    """What each bin's tail must reach."""
    target = config.goal if target is None else target
    return [target * floor if config.relative else target for floor in floors]


def met(schedule: Schedule, results: dict[str, Any], config: CalibrationConfig) -> list[bool]:
    """Of each bin, whether the tail that its budget had from the beginning on meets the target."""
    tails = {run["budget"]: tail_row(run, config) for run in results["runs"]}
    budgets = [schedule.at(start) for start, _ in results["bins"]]
    return [tails[budget][i] >= results["targets"][i] for i, budget in enumerate(budgets)]


def doubts(results: dict[str, Any], config: CalibrationConfig) -> list[str]:
    """At most one note: why training on the schedule may go badly though it meets its targets, and what to do."""
    bins, schedule = results["bins"], as_schedule(results["schedule"])
    alone = {run["budget"]: run for run in results["runs"]}
    ran = [results.get("verified", alone[schedule.at(start)]) for start, _ in bins]
    lows = [_lower_end(run["bins"][i], config) for i, run in enumerate(ran)]
    weak = [i for i, (low, target) in enumerate(zip(lows, results["targets"], strict=True)) if low < target]
    weak = [i for i in weak if i not in unreachable(results, config)]  # of those `judge_dense` speaks
    rejected = max(run["rejected_frac"] for run in ran)
    missed = [span for i, span in enumerate(bins) if i in unreached(ran[i], config)]
    reasons, samples = [], "more samples (--n, with another --output) or a larger --target"
    if missed:
        reasons.append(
            f"its answers have too few tokens in the contexts {contexts(missed)}, so nothing is verified there, and "
            f"answers that get shorter are a warning sign: give {samples}"
        )
    if weak:
        reasons.append(
            f"the tail's 95 % interval reaches below the target in the contexts {contexts([bins[i] for i in weak])}, "
            f"down to {min(lows[i] for i in weak):.3f}: give {'' if config.sure else '--sure, '}{samples}"
        )
    if rejected > MANY_ANOMALOUS:
        reasons.append(
            f"a veto at xi < 1e-4 would reject {100 * rejected:.1f} % of the rollouts (training warns above "
            f"{100 * MANY_ANOMALOUS:.0f} %): {_gentler(results, config)}"
        )
    return [f"training on this schedule may go badly: {'; '.join(reasons)}."] if reasons else []


def _gentler(results: dict[str, Any], config: CalibrationConfig) -> str:
    """How to have fewer rollouts rejected."""
    remedy = "ask for a larger --target" if config.tail == "p01" else "ask more of the tail (--resume --tail p01)"
    few = [run for run in results["runs"] if run["rejected_frac"] <= MANY_ANOMALOUS]
    if few:
        least = min(few, key=lambda run: run["budget"])
        remedy += f", or take a constant budget: {least['budget']} rejects {100 * least['rejected_frac']:.1f} %"
    return remedy


def _floors(dense: dict[str, Any], config: CalibrationConfig) -> list[float]:
    """What a relative target is a share of: the dense cache's tail itself, no end of its interval."""
    return tail_row(dense, replace(config, sure=False))


def _lower_end(measured: dict[str, Any], config: CalibrationConfig) -> float:
    """Of the tail's interval in a bin; nan where there is none."""
    group = measured[config.overlap][config.tokens] or {}
    return float(group.get(f"{config.tail}_interval", [float("nan")])[0])


def _notes(found: Found, dense: dict[str, Any], tails: np.ndarray, config: CalibrationConfig) -> list[str]:
    notes, bins, beyond = [], dense["bins"], unreachable(dense, config)
    blank = [i for i, measured in enumerate(found.measured) if not measured]
    if blank:
        notes.append(
            f"no budget has enough tokens in the contexts {contexts([bins[i] for i in blank])}, which keep the "
            "budget before them; give more prompts, more samples (--n), or lower --min-tokens."
        )
    short = [i for i, met in enumerate(found.met) if not met and i not in blank and i not in beyond]
    if short:
        lowest = min(tail_row(dense["floor"], config)[i] for i in short)
        notes.append(
            f"no budget meets the target in the contexts {contexts([bins[i] for i in short])}, where the largest is "
            f"taken; the dense cache itself has {lowest:.3f} or more there. Try larger budgets, or lower the target."
        )
    known = ~np.isnan(tails)
    if known.any() and (tails >= dense["targets"])[known].all():
        notes.append(
            f"every budget meets the target: {config.tail} over {config.tokens} tokens does not tell them apart here. "
            "Look at the curves; ask more of it (tail p01, tokens decision, a higher target), or try smaller budgets."
        )
    return notes
