# SPDX-License-Identifier: Apache-2.0
"""Part f: four updates a rollout. Does staleness on top of sparsity need more than either?

    python benchmarks/evidence/part_f.py --testbed short

One update a rollout is part a's. The four share a rollout batch, a quarter each, at the same learning rate; what
staleness does alone is `dense` with four.
"""

from __future__ import annotations

from cells import SEEDS, Cell, Testbed, training
from pool import main

UPDATES = 4


def cells(bed: Testbed) -> list[Cell]:
    if not bed.whole:
        return []
    middle = bed.budgets[1]
    arms = [("dense", 0), ("naive", middle), ("sparse_rl", middle), ("sparse_rl_release", middle), ("tis", middle)]
    return [training("f", bed, arm, budget, seed, updates=UPDATES) for arm, budget in arms for seed in SEEDS]


if __name__ == "__main__":
    main({"f": cells}, __doc__)
