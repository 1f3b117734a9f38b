# SPDX-License-Identifier: Apache-2.0
"""Reward functions by name, and from the user's own files.

math                               a name from REWARDS
overlong:limit=1024,buffer=256     with settings of its own (see `specs`)
rewards.py:accuracy                a function of a file
package.module:function            a function of a module

What a reward function has to be is in `base.py`.
"""

from __future__ import annotations

import importlib
import importlib.util
import reprlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import Any

from sparse_rl.specs import build, cut, suggestion
from sparse_rl.tasks.base import Reward, ends_the_process
from sparse_rl.tasks.countdown import Countdown
from sparse_rl.tasks.exact import Exact
from sparse_rl.tasks.form import Format, Kind, Overlong
from sparse_rl.tasks.last_number import LastNumber
from sparse_rl.tasks.lookup import RightValue
from sparse_rl.tasks.preserved import one_process, open_streams, preserved


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
        if not 0 < self.timeout_s <= TIMEOUT_MAX:
            raise ValueError(f"grading.timeout_s is {self.timeout_s}; it must be above 0 and finite.")


def _code(
    grading: GradingConfig, timeout_s: float = 10.0, memory_mb: int = 1024, packages: str | None = None
) -> Reward:
    """Programs run against the row's tests: seconds, address space, and packages ("numpy+pandas") that one may take."""
    from sparse_rl.grading.code import CodeReward
    from sparse_rl.sandbox.process import Limits

    allowed = None if packages is None else tuple(filter(None, packages.split("+")))
    limits = Limits(timeout_s=timeout_s, memory_mb=memory_mb, packages=allowed)
    return CodeReward.build(limits, grading.workers, grading.unsafe_code)


def _countdown(grading: GradingConfig, format_score: float = 0.0) -> Reward:
    return Countdown(format_score)


def _exact(grading: GradingConfig, ignore_case: bool = False) -> Reward:
    return Exact(ignore_case)


def _format(grading: GradingConfig, kind: Kind = "boxed", pattern: str | None = None) -> Reward:
    return Format(kind, pattern)


def _last_number(grading: GradingConfig) -> Reward:
    return LastNumber()


def _math(grading: GradingConfig) -> Reward:
    from sparse_rl.grading.reward import MathReward

    return MathReward(grading.workers, grading.timeout_s)


def _model(grading: GradingConfig, path: str, device: str | None = None) -> Reward:
    from sparse_rl.tasks.reward_model import RewardModel

    return RewardModel(path, device)


def _overlong(grading: GradingConfig, limit: int, buffer: int) -> Reward:
    return Overlong(limit, buffer)


def _right_value(grading: GradingConfig) -> Reward:
    return RightValue()


# name: a maker that takes the settings of grading and the reward's own, whose types are those of its parameters
REWARDS: dict[str, Callable[..., Reward]] = {
    "code": _code,
    "countdown": _countdown,
    "exact": _exact,
    "format": _format,
    "last_number": _last_number,
    "math": _math,
    "model": _model,
    "overlong": _overlong,
    "right_value": _right_value,
}
LISTED = 10  # functions of a file, where the one that was meant is not there


def build_reward(spec: str, grading: GradingConfig | None = None) -> Reward:
    """The reward function that a name with settings, or "module:function", or "file.py:function" stands for."""
    if spec.partition(":")[0] not in REWARDS:
        return import_function(spec)
    return build("reward", spec, REWARDS, grading or GradingConfig())


def import_function(path: str) -> Reward:
    """The function that "module:function" or "path/file.py:function" names."""
    module_name, colon, function_name = path.rpartition(":")
    hint = suggestion(path.partition(":")[0], REWARDS)
    if path.endswith(".py") and Path(path).is_file():
        raise ValueError(f"reward {path!r} is a file; name a function of it, {path}:FUNCTION.")
    if not colon or not module_name or not function_name:
        raise ValueError(
            f'reward {path!r}{hint} is not of the form "module:function" or "file.py:function", nor one of '
            f"{', '.join(REWARDS)}."
        )
    if module_name.endswith(".py") and not Path(module_name).is_file():
        raise ValueError(f"reward {path!r}{hint}: there is no file {module_name}; check the path.")
    try:
        with preserved(module_name), open_streams(), one_process():
            module = _import_file(Path(module_name)) if module_name.endswith(".py") else _import_module(module_name)
    except BaseException as error:
        if ends_the_process(error):
            raise
        raise ValueError(
            f"reward {path!r}{hint} cannot be imported: {type(error).__name__}: {cut(str(error))}."
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        own = [
            name
            for name, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", "") == module.__name__
        ]
        has = f"it has {', '.join(own[:LISTED])}{', ...' if len(own) > LISTED else ''}" if own else "it has none"
        other = function_name in vars(module)
        why = f" (it is {reprlib.repr(function)}, which cannot be called)" if other else suggestion(function_name, own)
        raise ValueError(f"reward {path!r}: {module_name} has no function {function_name!r}{why}; {has}.")
    found: Reward = function
    return found


def _import_module(name: str) -> Any:
    if "" not in sys.path:
        sys.path.insert(0, "")  # a module in the current folder is found, as with `python -m`
    return importlib.import_module(name)


def _import_file(path: Path) -> Any:
    """The file as a module of its own, which does not stand in the way of others of its name."""
    name = f"reward file {path}".replace(".", " ")  # a dot would ask for a package
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look there
    spec.loader.exec_module(module)
    return module
