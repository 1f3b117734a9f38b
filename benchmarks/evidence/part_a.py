# SPDX-License-Identifier: Apache-2.0
"""Part a: which correction learns? Nine arms x three budgets x three seeds.

python benchmarks/evidence/part_a.py --testbed short
python benchmarks/evidence/part_a.py --only short-naive-45-s0
"""

from __future__ import annotations

from cells import ARMS, SEEDS, Cell, Testbed, training
from pool import main

KEPT = ("dense", "naive", "sparse_rl")  # part c evaluates them under other caches


def cells(bed: Testbed) -> list[Cell]:
    """The first six arms first; what ends early then has whole rows."""
    found = [training("a", bed, "dense", 0, seed, keep=True) for seed in SEEDS]
    for arms in (list(ARMS)[1:6], list(ARMS)[6:]):
        for budget in bed.budgets[1:] + bed.budgets[:1]:
            found += [training("a", bed, arm, budget, s, keep=arm in KEPT) for arm in arms for s in SEEDS]
    return found


if __name__ == "__main__":
    main({"a": cells}, __doc__)
