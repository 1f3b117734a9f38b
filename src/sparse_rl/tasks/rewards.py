# SPDX-License-Identifier: Apache-2.0
"""Reward functions by name, and from the user's own files.

math                                    a name from REWARDS
overlong:limit=1024,buffer=256          with settings of its own
format:{"pattern": "a{1,2}, b=c"}       as JSON, where a value has a comma in it
rewards.py:accuracy                     a function of a file
package.module:function                 a function of a module
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from sparse_rl.tasks.base import Reward
from sparse_rl.tasks.boxed import boxed_answer
from sparse_rl.tasks.countdown import Countdown
from sparse_rl.tasks.exact import Exact
from sparse_rl.tasks.form import Format, Overlong
from sparse_rl.tasks.last_number import LastNumber
from sparse_rl.tasks.lookup import right_value


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


def _model(grading: GradingConfig, path: str, device: str | None = None) -> Reward:
    from sparse_rl.tasks.reward_model import RewardModel

    return RewardModel(str(path), device)


def _math(grading: GradingConfig) -> Reward:
    from sparse_rl.grading.reward import MathReward

    return MathReward(grading.workers, grading.timeout_s)


def _code(grading: GradingConfig, timeout_s: float = 10, memory_mb: int = 1024) -> Reward:
    """Programs run against the row's tests: seconds and address space that one of them may take."""
    from sparse_rl.grading.code import CodeReward
    from sparse_rl.sandbox.process import Limits

    limits = Limits(timeout_s=float(timeout_s), memory_mb=int(memory_mb))
    return CodeReward.build(limits, grading.workers, grading.unsafe_code)


# name: a maker that takes the settings of grading and the reward's own
REWARDS: dict[str, Callable[..., Reward]] = {
    "boxed": lambda grading: boxed_answer,
    "code": _code,
    "countdown": lambda grading, format_score=0.0: Countdown(format_score),
    "exact": lambda grading, ignore_case=False: Exact(ignore_case),
    "format": lambda grading, kind="boxed", pattern=None: Format(kind, pattern),
    "last_number": lambda grading: LastNumber(),
    "math": _math,
    "model": _model,
    "overlong": lambda grading, limit, buffer: Overlong(limit, buffer),
    "right_value": lambda grading: right_value,
}


def build_reward(spec: str, grading: GradingConfig | None = None) -> Reward:
    """The reward function that a name with settings, or "module:function", or "file.py:function" stands for."""
    name, _, rest = spec.partition(":")
    if name not in REWARDS:
        return import_function(spec)
    given = _settings(spec, rest)
    _, *parameters = inspect.signature(REWARDS[name]).parameters.values()  # grading comes first
    known = [parameter.name for parameter in parameters]
    for key in given:
        if key not in known:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            raise ValueError(f"reward {spec!r}: {key!r} is not a setting of {name!r}; {takes}.")
    for parameter in parameters:
        if parameter.default is inspect.Parameter.empty and parameter.name not in given:
            raise ValueError(f"reward {spec!r}: {parameter.name!r} is missing; write {name}:{parameter.name}=...")
    return REWARDS[name](grading or GradingConfig(), **given)


def _settings(spec: str, text: str) -> dict[str, Any]:
    """key=value,key=value, or a JSON object; numbers, true and false are read as in JSON, everything else is text."""
    if text.lstrip().startswith("{"):
        try:
            found: dict[str, Any] = json.loads(text)
            return found
        except ValueError as error:
            raise ValueError(f"reward {spec!r}: its settings are not JSON ({error}).") from error
    given: dict[str, Any] = {}
    for part in filter(None, text.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise ValueError(
                f"reward {spec!r}: {part!r} is not of the form key=value; where a value has a comma in it, write the "
                'settings as JSON, NAME:{"key": "value"}.'
            )
        try:
            given[key.strip()] = json.loads(value)
        except ValueError:
            given[key.strip()] = value
    return given


def import_function(path: str) -> Reward:
    """The function that "module:function" or "path/file.py:function" names."""
    module_name, colon, function_name = path.rpartition(":")
    if not colon or not module_name or not function_name:
        close = get_close_matches(path.partition(":")[0], REWARDS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f", nor one of {', '.join(REWARDS)}."
        raise ValueError(f'reward {path!r} is not of the form "module:function" or "file.py:function"{hint}')
    try:
        module = _import_file(Path(module_name)) if module_name.endswith(".py") else _import_module(module_name)
    except (Exception, SystemExit) as error:
        close = get_close_matches(path.partition(":")[0], REWARDS, n=1)
        hint = f" Did you mean {close[0]!r}?" if close and isinstance(error, ModuleNotFoundError) else ""
        raise ValueError(f"reward {path!r} cannot be imported: {type(error).__name__}: {error}.{hint}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"reward {path!r}: {module_name} has no function {function_name!r}.")
    found: Reward = function
    return found


def _import_module(name: str) -> Any:
    if "" not in sys.path:
        sys.path.insert(0, "")  # a module in the current folder is found, as with `python -m`
    return importlib.import_module(name)


def _import_file(path: Path) -> Any:
    """The file as a module of its own, which does not stand in the way of others of its name."""
    spec = importlib.util.spec_from_file_location(f"reward file {path}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
