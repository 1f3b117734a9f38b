# SPDX-License-Identifier: Apache-2.0
"""Part d: what, measured before training, foretells how training ends?

    python benchmarks/evidence/part_d.py --testbed short

Measurements of the testbed's model before training, for every policy and budget that anything is trained with, and
naive runs with other policies and budgets than part a's: at one policy every statistic falls with the budget, and
nothing could tell them apart. The short testbed has those; of a longer one part a's runs are measured.
"""

from __future__ import annotations

from dataclasses import asdict

from cells import SEEDS, Cell, Testbed, start, training
from pool import main

OTHERS = ("snapkv", "streaming")


def cells(bed: Testbed) -> list[Cell]:
    budgets = sorted({*bed.sweep, *bed.budgets})
    found = [measurement(bed, "full", 0, seed) for seed in SEEDS]
    found += [measurement(bed, "rkv", budget, seed) for budget in budgets for seed in SEEDS]
    tried = budgets[:5] if bed.whole else []  # lenient budgets ruin nobody
    for policy in OTHERS:
        found += [measurement(bed, policy, budget, seed) for budget in tried for seed in SEEDS]
        found += [training("d", bed, "naive", budget, seed, policy=policy) for budget in tried for seed in SEEDS]
    others = [budget for budget in tried if budget not in bed.budgets]
    return found + [training("d", bed, "naive", budget, seed) for budget in others for seed in SEEDS]


def measurement(bed: Testbed, policy: str, budget: int, seed: int) -> Cell:
    settings = {"testbed": asdict(bed), "policy": policy, "budget": budget, "seed": seed}
    name = f"{bed.name}-before-{policy}" + (f"-{budget}" if budget else "")
    return Cell(name=f"{name}-s{seed}", part="d", work="measure", settings=settings, needs=start(bed))


if __name__ == "__main__":
    main({"d": cells}, __doc__)
