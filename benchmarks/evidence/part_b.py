# SPDX-License-Identifier: Apache-2.0
"""Part b: the veto's threshold, the budget, and how rejection grows with length.

    python benchmarks/evidence/part_b.py --testbed short

eps        sparse_rl at the middle and the severe budget with other thresholds than part a's 1e-4
budget     sparse_rl at parts of the mean length that part a does not have
length     part d's measurements before training say at which token a veto falls; no cells here
"""

from __future__ import annotations

from cells import SEEDS, Cell, Testbed, training
from pool import main

EPS = (1e-5, 1e-3, 1e-2)


def cells(bed: Testbed) -> list[Cell]:
    others = [budget for budget in bed.sweep if budget not in bed.budgets]
    found = [training("b", bed, "sparse_rl", budget, seed) for budget in others for seed in SEEDS]
    for budget in bed.budgets[1:]:
        found += [training("b", bed, "sparse_rl", budget, seed, eps=eps) for eps in EPS for seed in SEEDS]
    return found


if __name__ == "__main__":
    main({"b": cells}, __doc__)
