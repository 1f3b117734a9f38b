# SPDX-License-Identifier: Apache-2.0
"""Whether the dense cache itself meets the target: if not, no budget can be expected to, and that is known at once.

On a scale of 20 ids it has less than 1, since a model that is unsure spreads its probability over more of them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from sparse_rl.calibrate.analysis import contexts, tail_row, unreachable
from sparse_rl.calibrate.config import SPARROW_SHARE, CalibrationConfig


def judge_dense(dense: dict[str, Any], config: CalibrationConfig) -> list[str]:
    """At most one note, of the bins in which the dense cache is below the target; raises if it is in all of them."""
    bins, tails, below = dense["bins"], tail_row(dense["floor"], config), unreachable(dense, config)
    if not below:
        return []
    low = min(range(len(bins)), key=tails.__getitem__)
    high = max(range(len(bins)), key=tails.__getitem__)
    if len(below) < len(bins):
        low = min(below, key=tails.__getitem__)
        return [
            f"the dense cache itself is below the target in the contexts {contexts([bins[i] for i in below])}: its "
            f"{config.statistic} is as low as {tails[low]:.3f}, and {config.asks} is asked for. Where no budget meets "
            f"the target either, the largest is taken. {_remedy(dense, tails, config)}"
        ]
    span = f"{tails[low]:.3f} (contexts {contexts([bins[low]])})"
    if high != low:
        span += f" to {tails[high]:.3f} ({contexts([bins[high]])})"
    raise ValueError(
        f"the dense cache itself is below the target, {config.asks}, in every bin of contexts: its {config.statistic} "
        f"is {span}. So no budget can be expected to meet it. {_remedy(dense, tails, config)}"
    )


def _remedy(dense: dict[str, Any], tails: list[float], config: CalibrationConfig) -> str:
    own, below = tail_row(dense["floor"], replace(config, sure=False)), unreachable(dense, config)
    if any(own[i] < dense["targets"][i] for i in below):
        flags = "--relative" if config.target is None else f"--relative --target {SPARROW_SHARE}"
        return (
            f"Give the same command with {flags} --resume: the target is then {SPARROW_SHARE} of the dense cache's own "
            f"{config.tail} in each bin, as Sparrow's 0.86 is of its 0.94, and what was run is not run again."
        )
    # the tail itself meets it, as it always does its own share, so it is the interval's lower end that is too low
    lower = math.floor(100 * min(tails[i] * config.goal / dense["targets"][i] for i in below)) / 100
    other = f"--target {lower:g} or less" if lower > 0 else "no --sure"
    return (
        "The samples are too few to be sure of that much: give more of them (--num-prompts, --n) and another --output, "
        f"or the same command with --resume and {other}."
    )
