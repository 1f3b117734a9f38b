# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct after a supervised warm start on word problems: three arms and part c's matrix.

    python scripts/word_problems.py DATA data/words --warm-only gsm8k
    python benchmarks/evidence/part_smollm2.py --jobs 5

The task is look-up among ten keys and values. On word problems the dense arm gains too little to tell arms apart: 0.05
in 60 steps (benchmarks/results/smollm2_words.json), and a testbed needs 0.10.

In 60 steps every arm of look-up reaches 1.0 (benchmarks/results/smollm2_lookup.json), where none can be told from
another; after 20 they were at 0.96, 0.89 and 0.84. So a run has 30 steps. All ten cells are planned to fit eight
minutes of an H200 with five jobs. They belong together: the warm model is too large to be kept with the results.

A sweep over the warm model finds the budget, by the rule of benchmarks/smollm2.py. A run is evaluated at its end, with
the dense cache and with three policies at that budget and at three quarters of it.
"""

from __future__ import annotations

from cells import SEEDS, Cell, Testbed
from pool import main

ARMS = ("dense", "naive", "sparse_rl")
SETTINGS = {
    "task": "lookup",
    "warm": True,
    "data": "data/words",
    "steps": 30,
    "prompts": 32,
    "lr": 1e-5,
    "epochs": 2.0,
    "problems": 256,
    "sweep": 64,
}


def cells(_: Testbed) -> list[Cell]:
    """The same whatever the testbed."""
    own = SETTINGS | {"seed": 0}
    found = [Cell(name="smollm2-start", part="smollm2", work="begin", settings=own, alone=True, start=True)]
    for seed in SEEDS:
        for arm in ARMS:
            own = SETTINGS | {"arm": arm, "seed": seed}
            needs = ("smollm2-start",)
            found.append(Cell(name=f"smollm2-{arm}-s{seed}", part="smollm2", work="arm", settings=own, needs=needs))
    return found


if __name__ == "__main__":
    main({"smollm2": cells}, __doc__)
