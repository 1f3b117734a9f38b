# SPDX-License-Identifier: Apache-2.0
"""Part g: Sparrow's experiment. From which tail of the overlap on is training stable, and what does holding it cost?

    python benchmarks/evidence/part_g.py --testbed short

calibrate      the model before training at a grid of budgets, and a schedule for each of four targets of P05
schedule       training on each of them, with truncated weights (tis) as Sparrow has them
auto           from the lenient budget, which then follows the tail that training measures, held at the threshold
auto_distill   the same with a sampler that has an adapter of its own
tis            constant budgets beside part a's
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from cells import SEEDS, Cell, Testbed, start, training
from pool import main

THRESHOLD = 0.86  # Sparrow's, of the 5th percentile
TARGETS = (THRESHOLD, 0.02, 0.30, 0.99)  # at it; far below, below, above: on this model P05 rises steeply
BIN = 80  # tokens of context: three of them
BUDGETS = 12  # of the grid, from an eighth of the length to lenient
DISTILL = {"r": 8, "lr": 1e-4}  # where entries are evicted a larger rate lowers the overlap (docs/distill.md)


def cells(bed: Testbed) -> list[Cell]:
    if not bed.whole:
        return []
    name = f"{bed.name}-calibrate"
    grid = {"smallest": bed.sweep[0], "largest": bed.budgets[0], "budgets": BUDGETS, "bin": BIN}
    settings = {"testbed": asdict(bed), "policy": "rkv", "targets": TARGETS, **grid}
    found = [Cell(name=name, part="g", work="calibrate", settings=settings, needs=start(bed))]
    found += [_run(bed, "schedule", target, seed, grid, calibration=name) for target in TARGETS for seed in SEEDS]
    found += [_run(bed, "auto", THRESHOLD, seed, grid) for seed in SEEDS]
    found += [_run(bed, "auto_distill", THRESHOLD, seed, grid, distill=DISTILL) for seed in SEEDS]
    others = [budget for budget in bed.sweep if budget not in bed.budgets]
    return found + [training("g", bed, "tis", budget, seed) for budget in others[:2] for seed in SEEDS]


def _run(
    bed: Testbed,
    arm: str,
    target: float,
    seed: int,
    grid: dict[str, int],
    *,
    calibration: str = "",
    distill: dict[str, Any] | None = None,
) -> Cell:
    """A run of `tis` on the calibration's schedule, or on a budget that holds the target by itself."""
    like = training("g", bed, "tis", bed.budgets[0], seed)
    settings = like.settings | {"arm": arm, "target": target, "distill": distill or {}}
    settings |= {"budget": calibration or bed.budgets[0]}
    settings["control"] = {"auto": not calibration, "target": target, "multiple": 1, **grid}
    needs = like.needs + ((calibration,) if calibration else ())
    return Cell(name=f"{bed.name}-{arm}-{target:g}-s{seed}", part="g", work="train", settings=settings, needs=needs)


if __name__ == "__main__":
    main({"g": cells}, __doc__)
