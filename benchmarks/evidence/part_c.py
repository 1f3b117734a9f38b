# SPDX-License-Identifier: Apache-2.0
"""Part c: does training on a sparse cache pay when the model is used with one?

    python benchmarks/evidence/part_c.py --testbed short

Models of part a, trained with the dense cache, naively, and with sparse_rl, each evaluated with the dense cache and
with three policies at two budgets, matched and mismatched. A model that is not at hand is trained again.
"""

from __future__ import annotations

from dataclasses import asdict

from cells import SEEDS, Cell, Testbed, start, training
from pool import main

POLICIES = ("rkv", "snapkv", "streaming")


def cells(bed: Testbed) -> list[Cell]:
    settings = {"testbed": asdict(bed), "policies": POLICIES, "budgets": bed.budgets[1:]}
    before = Cell(
        name=f"{bed.name}-under-start",
        part="c",
        work="matrix",
        settings=settings | {"arm": "start", "trained_at": 0, "seed": 0},
        needs=start(bed),
    )
    found = [before]
    trained = [("dense", 0), *((arm, budget) for budget in bed.budgets[1:] for arm in ("naive", "sparse_rl"))]
    for arm, budget in trained:
        for seed in SEEDS:
            model = training("a", bed, arm, budget, seed).name
            own = {"arm": arm, "trained_at": budget, "seed": seed}
            name = model.replace(bed.name, f"{bed.name}-under", 1)
            found.append(Cell(name=name, part="c", work="matrix", settings=settings | own, needs=(model,)))
    return found


if __name__ == "__main__":
    main({"c": cells}, __doc__)
