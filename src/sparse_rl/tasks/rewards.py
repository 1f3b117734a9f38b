# SPDX-License-Identifier: Apache-2.0
"""Reward functions by name, and from the user's own files.

math                          a name from REWARDS
overlong:limit=1024,buffer=256    with settings of its own
rewards.py:accuracy           a function of a file
package.module:function       a function of a module
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparse_rl.tasks.base import Reward
from sparse_rl.tasks.boxed import boxed_answer
from sparse_rl.tasks.words import last_number_right


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingConfig:
    """How completions are graded.

    workers: processes that grade at the same time; 0 takes one a core, at most 8
    timeout_s: seconds a math answer may take to grade; one that takes longer is left out and counted
    unsafe_code: run programs of the code reward without isolation where the machine offers none
    """

    workers: int = 0
    timeout_s: float = 5.0
    unsafe_code: bool = False

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ValueError(f"grading.workers is {self.workers}; it must be at least 0.")
        if self.timeout_s <= 0:
            raise ValueError(f"grading.timeout_s is {self.timeout_s}; it must be above 0.")


def _code(grading: GradingConfig, timeout_s: str = "10", memory_mb: str = "1024") -> Reward:
    """Programs run against the row's tests: seconds and address space that one of them may take."""
    from sparse_rl.grading.code import CodeReward
    from sparse_rl.sandbox.process import Limits

    limits = Limits(timeout_s=float(timeout_s), memory_mb=int(memory_mb))
    return CodeReward.build(limits, grading.workers, grading.unsafe_code)


# name: a maker that takes the settings of grading and the reward's own (as strings)
REWARDS: dict[str, Callable[..., Reward]] = {
    "boxed": lambda grading: boxed_answer,
    "last_number": lambda grading: last_number_right,
    "code": _code,
}


def build_reward(spec: str, grading: GradingConfig | None = None) -> Reward:
    """The reward function that a name with settings, or "module:function", or "file.py:function" stands for."""
    from sparse_rl.tasks.jsonl import import_function

    name, _, rest = spec.partition(":")
    if name not in REWARDS:
        return import_function(spec)
    given: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"reward {spec!r}: {part!r} is not of the form key=value.")
        given[key] = value
    return REWARDS[name](grading or GradingConfig(), **given)
