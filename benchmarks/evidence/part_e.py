# SPDX-License-Identifier: Apache-2.0
"""Part e: where time and memory go, dense against sparse, at three lengths (Qwen2.5-1.5B's shape, random weights).

    python benchmarks/evidence/part_e.py --jobs 1
    python benchmarks/evidence/part_e.py --jobs 1 --only qwen2.5-1.5b-sparse-2048

At the two longer lengths scoring and updates are timed on 8 of the completions (`learnt`) and told for all: they are
sums over packed forwards of `max_tokens`, each as long as the next; the optimiser's step is then told four times. All
six cells are planned to fit eight minutes of an H200.
"""

from __future__ import annotations

from cells import Cell, Testbed
from pool import main

LEARNT = {2048: 32, 8192: 8, 16384: 8}  # completions, by their length
SETTINGS = {
    "shape": "qwen2.5-1.5b",
    "sequences": 32,
    "prompt": 128,
    "interval": 128,
    "max_tokens": 16512,
    "activations": "keep",
}


def cells(_: Testbed) -> list[Cell]:
    """The same whatever the testbed; each has the GPU for itself."""
    return [
        Cell(
            name=f"{SETTINGS['shape']}-{kind}-{response}",
            part="e",
            work="step",
            settings=SETTINGS | {"response": response, "learnt": learnt, "budget": budget},
            alone=True,
        )
        for response, learnt in LEARNT.items()
        for kind, budget in (("dense", 0), ("sparse", 512))
    ]


if __name__ == "__main__":
    main({"e": cells}, __doc__)
