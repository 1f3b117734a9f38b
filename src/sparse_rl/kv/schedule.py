# SPDX-License-Identifier: Apache-2.0
"""How many KV entries a token may use, by how long its context is.

Schedule(starts=(0, 2000, 4000), budgets=(512, 1024, 1536)).at(2500)    # 1024
load(512)                           # the same for every context
load("sparrow/qwen3-1.7b-0.86")     # a published one, sparrow.json
load("schedule.json")               # a file that `save` wrote
load("512@0+1024@2000")             # its steps, 512 entries from 0 tokens on, as `text` writes them

How one is found is in calibrate/calibrate.py, how it moves while training in train/control.py.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from dataclasses import asdict, dataclass
from functools import cache
from itertools import pairwise
from os.path import isfile  # false of a text too long for a name, where Path's raises
from pathlib import Path
from typing import Any, TypeVar

import torch

from sparse_rl.runfolder import write_json
from sparse_rl.specs import suggestion, unique

STEPS = re.compile(r"\d+@\d+(\+\d+@\d+)*")
N = TypeVar("N", int, torch.Tensor)  # one context, or a row of them
MOST = 1 << 24  # entries or tokens, more than any model's context


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps over context length: from `starts[i]` tokens on, the prompt included, `budgets[i]` entries.

    Budgets never fall: a longer context takes no fewer entries to stay as close to the dense cache. So a cache may hold
    the most at its longest context, and is not due for compression before its entries have reached what is due now.
    """

    starts: tuple[int, ...]  # ascending, the first is 0
    budgets: tuple[int, ...]

    def __post_init__(self) -> None:
        for name in ("starts", "budgets"):
            for value in getattr(self, name):
                if type(value) is not int:
                    raise ValueError(f"its {name} have {value!r} among them; they must be whole numbers.")
                if value > MOST:
                    raise ValueError(f"its {name} have {value} among them; they must be at most {MOST}.")
        if len(self.starts) != len(self.budgets):
            raise ValueError(f"it has {len(self.starts)} starts and {len(self.budgets)} budgets; give as many of both.")
        if self.starts[:1] != (0,):
            raise ValueError(f"its first start is {self.starts[0] if self.starts else 'missing'}; it must be 0.")
        if self.budgets[0] < 1:
            raise ValueError(f"its first budget is {self.budgets[0]}; it must be at least 1.")
        for before, start in pairwise(self.starts):
            if start <= before:
                raise ValueError(f"its start {start} follows {before}; starts must ascend.")
        for start, (before, budget) in zip(self.starts[1:], pairwise(self.budgets), strict=True):
            if budget < before:
                raise ValueError(
                    f"its budget falls from {before} to {budget} at {start} tokens; budgets must not fall."
                )

    @property
    def most(self) -> int:
        return self.budgets[-1]

    @property
    def text(self) -> str:
        """Its steps in a word that `load` reads; those that change nothing are left out."""
        steps = list(zip(self.budgets, self.starts, strict=True))
        told = steps[:1] + [step for before, step in pairwise(steps) if step[0] != before[0]]
        return "+".join(f"{budget}@{start}" for budget, start in told)

    def at(self, context: N) -> N:
        if isinstance(context, torch.Tensor):
            starts, budgets = _tables(self, context.device)
            return budgets[torch.bucketize(context.long(), starts, right=True) - 1]
        return self.budgets[bisect_right(self.starts, context) - 1]


@cache  # so that only the first use of a schedule waits for the device
def _tables(schedule: Schedule, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.inference_mode(False):
        return torch.tensor(schedule.starts, device=device), torch.tensor(schedule.budgets, device=device)


def constant(budget: int) -> Schedule:
    return Schedule((0,), (budget,))


@cache
def load(budget: int | str) -> Schedule:
    """What a `budget` setting stands for: a number, a published schedule, steps, or a file, read once a process."""
    if not isinstance(budget, str):
        return constant(budget)
    if budget in published():
        return published()[budget]
    if budget == "auto":
        raise ValueError(
            "kv.budget is 'auto', which `sparse-rl train` holds by what it measures; elsewhere give 512, "
            "schedule.json or the like (in Python, Trainer takes control=ControlConfig(auto=True))."
        )
    if STEPS.fullmatch(budget):
        steps = [tuple(map(int, step.split("@"))) for step in budget.split("+")]
        try:
            return Schedule(tuple(start for _, start in steps), tuple(count for count, _ in steps))
        except ValueError as error:
            raise ValueError(f"kv.budget is {budget!r}: {error}") from error
    if not isfile(budget):
        if isfile(inside := str(Path(budget) / "schedule.json")):
            raise ValueError(f"kv.budget is {budget!r}, a folder; give {inside!r}.")
        if budget.endswith(".json"):
            raise ValueError(f"kv.budget is {budget!r}, but there is no such file; check the path.")
        raise ValueError(
            f"kv.budget is {budget!r}, which is neither a whole number nor a file nor a published schedule"
            f"{suggestion(budget, ['auto', *published()])}; give 512, schedule.json, sparrow/qwen3-1.7b-0.86 or the "
            "like; `sparse-rl train` also takes auto."
        )
    try:
        found = json.loads(Path(budget).read_text(encoding="utf-8"), object_pairs_hook=unique)
        if not isinstance(found, dict) or not all(isinstance(found.get(key), list) for key in ("starts", "budgets")):
            raise ValueError('it must be an object with the lists "starts" and "budgets".')
        return Schedule(tuple(found["starts"]), tuple(found["budgets"]))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"kv.budget is {budget!r}, a file without a schedule: {error}") from error


def save(schedule: Schedule, path: Path, **provenance: Any) -> None:
    """Write a file that `load` reads; what else it says is for people, but for what `origin` returns."""
    write_json(path, {**provenance, **asdict(schedule)})


def is_path(budget: object) -> bool:
    """Whether a `budget` setting stands for a file, be it there or not."""
    return isinstance(budget, str) and budget not in ("auto", *published()) and not STEPS.fullmatch(budget)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a calibration says of a schedule: its policy with settings, its model, the most tokens of a context."""

    kv: dict[str, Any]
    model: str | None = None
    longest: int | None = None


def origin(budget: object) -> Origin:
    """Where the schedule of a file comes from; of other budgets nothing is known."""
    if not is_path(budget) or not isfile(path := str(budget)):
        return Origin(kv={})
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    kv, model, longest = (found.get(name) for name in ("kv", "model", "longest"))
    return Origin(
        kv=kv if isinstance(kv, dict) else {},
        model=model if isinstance(model, str) else None,
        longest=longest if type(longest) is int else None,
    )


def beyond(budget: object, longest: int) -> str:
    """That contexts of up to `longest` tokens are longer than those a schedule was calibrated on; empty if not."""
    seen = origin(budget).longest
    if seen is None or longest <= seen:
        return ""
    return f"{budget} was calibrated with contexts of at most {seen} tokens; beyond them its last budget is kept"


@cache
def published() -> dict[str, Schedule]:
    """Schedules by name."""
    file = json.loads(Path(__file__).with_name("sparrow.json").read_text(encoding="utf-8"))
    return {f"sparrow/{name}": _sparrow(file, table) for name, table in file["pages"].items()}


def _sparrow(file: dict[str, Any], table: str) -> Schedule:
    """Pages a bin, "29*2 45" for 29 29 45: the reserved ones come on top."""
    runs = [word.partition("*") for word in table.split()]
    pages = [int(count) for count, _, times in runs for _ in range(int(times or 1))]
    starts = tuple(file["bin_tokens"] * i for i in range(len(pages)))
    return Schedule(starts, tuple(file["page_tokens"] * (count + file["reserved_pages"]) for count in pages))
