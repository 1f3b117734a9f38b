# SPDX-License-Identifier: Apache-2.0
"""What is measured: testbeds, cells, and the file a part's results go to.

A cell is one training run or one measurement. Its name says what it is (`short-naive-45-s0`), its settings all that it
depends on. Results are JSON lines, one a cell; of two lines with one name the later counts.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
STARTS = HERE / "start"  # models that the results of a testbed began with
ARMS = {  # KV policy of the rollouts, correction preset
    "dense": ("full", "none"),
    "naive": ("rkv", "none"),
    "reject_only": ("rkv", "reject_only"),
    "reweight_only": ("rkv", "reweight_only"),
    "sparse_rl": ("rkv", "sparse_rl"),
    "bounded": ("rkv", "bounded"),
    "sparse_rl_release": ("rkv", "sparse_rl_release"),
    "tis": ("rkv", "tis"),
    "icepop": ("rkv", "icepop"),
}
SEEDS = (0, 1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Testbed:
    """The look-up chain at one length, and the model that writes it.

    model: "embedded", or the cell that trains it
    warm: flags of scripts/pretrain_chain.py, where the model is not the embedded one
    budgets: lenient, middle, severe
    sweep: of part b, parts of the mean length
    """

    name: str
    model: str = "embedded"
    warm: tuple[str, ...] = ()
    letters: int = 8
    steps: int = 16
    filler: int = 2
    dtype: str = "float32"
    updates: int = 40  # steps of training
    prompts: int = 32  # a step, n completions each
    n: int = 16
    lr: float = 2e-4
    max_tokens: int = 65536  # of a learner forward
    interval: int = 8
    budgets: tuple[int, int, int] = (67, 45, 32)
    sweep: tuple[int, ...] = (22, 45, 67, 90, 134, 179)
    problems: int = 1024  # held out
    whole: bool = True  # or without parts f and g and the runs of part d, which a shorter one has
    compiled: bool = False  # the decode step: fewer kernels, where runs are long enough to pay for it


SHORT = Testbed(name="short")
LONG = Testbed(
    name="long",
    model="long-warm",
    warm=(
        *("--steps", "92", "--hidden", "256", "--noise", "0.005", "--accuracy", "0.65", "--seconds", "450"),
        *("--ramp", "1200", "--tokens", "120000", "--every", "125"),
    ),
    steps=92,
    dtype="bfloat16",
    updates=30,
    prompts=24,
    max_tokens=32768,
    interval=32,
    budgets=(254, 127, 63),
    sweep=(63, 127, 254, 381, 508, 761, 1015),
    problems=512,
    whole=False,
    compiled=True,
)
# A few minutes on a CPU: for trying the scripts, never for evidence.
TRIAL = Testbed(name="trial", updates=2, prompts=4, n=4, sweep=(22, 45, 67), problems=8)
TESTBEDS = {bed.name: bed for bed in (SHORT, LONG, TRIAL)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    name: str
    part: str
    work: str  # a function of work.py, timing.py (part e) or real.py (SmolLM2)
    settings: dict[str, Any] = field(default_factory=dict)
    needs: tuple[str, ...] = ()  # cells whose model it starts from, or whose schedule it trains on
    alone: bool = False  # nothing else may run beside it: it measures time or memory
    start: bool = False  # makes the model that all of a testbed begin with


def training(
    part: str,
    bed: Testbed,
    arm: str,
    budget: int,
    seed: int,
    *,
    policy: str | None = None,
    eps: float | None = None,
    updates: int = 1,
    keep: bool = False,
) -> Cell:
    """One run: `arm` at a KV budget (0 with the dense cache), with what differs from part a's in its name."""
    kv, preset = ARMS[arm]
    name = f"{bed.name}-{arm}" + (f"-{budget}" if kv != "full" else "")
    name += (f"-{policy}" if policy else "") + (f"-eps{eps:g}" if eps else "") + (f"-u{updates}" if updates > 1 else "")
    settings = {
        "testbed": asdict(bed),
        "arm": arm,
        "policy": policy or kv,
        "preset": preset,
        "budget": budget if kv != "full" else 0,
        "eps": eps,
        "updates_per_rollout": updates,
        "seed": seed,
        "keep": keep,
    }
    return Cell(name=f"{name}-s{seed}", part=part, work="train", settings=settings, needs=start(bed))


def start(bed: Testbed) -> tuple[str, ...]:
    """The cell that makes the testbed's model, if it is not in the package."""
    return () if bed.model == "embedded" else (bed.model,)


def warm_cells(bed: Testbed) -> list[Cell]:
    settings = {"testbed": asdict(replace(bed, compiled=False))}  # the script compiles nothing
    return [Cell(name=name, part="warm", work="warm", settings=settings, alone=True, start=True) for name in start(bed)]


def read_results(folder: Path, parts: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The newest record of each cell, by name."""
    found = {}
    for part in parts:
        path = folder / f"{part}.jsonl"
        for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else (), 1):
            try:
                record = json.loads(line)
                found[record["cell"]] = record
            except (ValueError, KeyError, TypeError):
                print(f"{path}: line {number}, cut off or no record, is left out", file=sys.stderr)
    return found


def write_result(folder: Path, record: dict[str, Any]) -> None:
    """Append a line, so that a stop at any moment loses at most the cell at hand."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{record['part']}.jsonl"
    cut = path.exists() and not path.read_bytes().endswith(b"\n")
    with open(path, "a") as file:
        file.write("\n" * cut + json.dumps(record, separators=(",", ":")) + "\n")
