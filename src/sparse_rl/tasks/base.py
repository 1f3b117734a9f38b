# SPDX-License-Identifier: Apache-2.0
"""What a task is: an endless stream of prompts, some held-out ones, and functions that grade completions.

A reward function has TRL's signature. It is called with keywords, one list each, and returns one number a completion,
or None for a completion it declines to grade:

    def reward(prompts, completions, completion_ids, **columns) -> list[float | None]

It may be an `async def`: all of those run at the same time. `columns` are the other keys of the dataset's rows, None
where a row lacks one. A function that raises, or returns anything else, stops the run: a broken grader and a wrong
answer are different things. One that could not grade a single completion (it hung, or its worker was killed) returns a
`Failed` in that place: the completion is counted and left out, whatever the other functions say of it. A function may
have a method `check(columns)`, which says what is wrong with a row of a file, or None.
"""

from __future__ import annotations

import inspect
import math
import numbers
import signal
import traceback
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
import transformers

from sparse_rl.grading import Failed
from sparse_rl.specs import cut
from sparse_rl.tasks.event_loop import run_together
from sparse_rl.tasks.preserved import one_process, open_streams, preserved
from sparse_rl.types import Prompt, Rollout

if TYPE_CHECKING:
    from sparse_rl.tasks.rewards import GradingConfig

GIVEN = ("prompts", "completions", "completion_ids")  # what every reward function gets beside the columns
ANY_NAME = inspect.Parameter.VAR_KEYWORD
BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY, ANY_NAME)
Given = Sequence[float | Failed | None]
Reward = Callable[..., Given | Awaitable[Given]]


class Task(Protocol):
    """A task as the trainer sees it."""

    @property
    def rewards(self) -> Rewards: ...

    def stream(self, start: int, count: int, seed: int) -> list[Prompt]:
        """Prompts number `start` to `start + count` of the endless stream that belongs to the seed."""

    def held_out(self, count: int) -> list[Prompt]:
        """At most `count` prompts to evaluate on, always the same."""


class TaskConfig(Protocol):
    """A task's settings: a frozen dataclass, its name, and the task it makes for a tokenizer and a model's context."""

    name: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def build(
        self,
        tokenizer: transformers.PreTrainedTokenizerBase,
        *,
        context: int | None = None,
        grading: GradingConfig | None = None,
    ) -> Task: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Graded:
    """Rewards of R completions."""

    rewards: torch.Tensor  # (R,) fp64, the weighted sum; nan where every function declined or one failed
    by_function: dict[str, torch.Tensor]  # (R,) fp64 each, nan where it declined or failed
    failures: dict[str, dict[int, str]] = field(default_factory=dict)  # of each function, why by completion

    @property
    def num_failed(self) -> int:
        """Completions at which some function failed."""
        return len({i for why in self.failures.values() for i in why})

    def metrics(self) -> dict[str, float]:
        values = {"reward": _mean(self.rewards), "reward_std": _std(self.rewards)}
        for name, rewards in self.by_function.items():
            values[f"rewards/{name}/mean"] = _mean(rewards)
            values[f"rewards/{name}/std"] = _std(rewards)
            values[f"rewards/{name}/failed"] = float(len(self.failures.get(name, {})))
        return values


@dataclass(frozen=True, slots=True)
class Rewards:
    """Reward functions with their weights (1 each, if none are given)."""

    functions: tuple[Reward, ...]
    weights: tuple[float, ...] = ()
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.functions, tuple | list) or not all(map(callable, self.functions)):
            raise ValueError(f"functions are {self.functions!r}; give a tuple of functions, Rewards((mine,)).")
        if not self.functions:
            raise ValueError("a task needs at least one reward function.")
        if not all(math.isfinite(weight) for weight in self.weights):
            raise ValueError(f"a reward weight of {self.weights} is not finite; give numbers.")
        if self.weights and len(self.weights) != len(self.functions):
            raise ValueError(
                f"there are {len(self.functions)} reward functions and {len(self.weights)} weights; give one each."
            )
        names = tuple(getattr(function, "__name__", type(function).__name__) for function in self.functions)
        if len(set(names)) < len(names):
            raise ValueError(f"two reward functions share a name ({', '.join(names)}); rename one.")
        object.__setattr__(self, "names", names)
        self.check_keywords(GIVEN)

    def check_keywords(self, keywords: Iterable[str]) -> None:
        """Raise unless every function can be called with these."""
        for name, function in zip(self.names, self.functions, strict=True):
            taken = {parameter.name: parameter.kind for parameter in keywords_of(function)}
            missing = [keyword for keyword in keywords if keyword not in taken]
            if missing and ANY_NAME not in taken.values():
                raise ValueError(
                    f"reward function {name!r} does not take {', '.join(missing)}; it is called with "
                    f"{', '.join(GIVEN)} and every column as keywords: add **kwargs to its parameters."
                )

    def check(self, columns: dict[str, Any]) -> str | None:
        """What is wrong with a row, as the first function has it that cannot grade it."""
        for name, function in zip(self.names, self.functions, strict=True):
            check: Any = getattr(function, "check", None)
            if check is not None and (wrong := check(columns)) is not None:
                return f"{wrong} (reward {name!r})"
        return None

    def grade(self, rollouts: list[Rollout], tokenizer: transformers.PreTrainedTokenizerBase) -> Graded:
        """Call every function once with all completions; what it changes of the process's global state is put back."""
        inputs = _inputs(rollouts, completion_texts(rollouts, tokenizer))
        with preserved(f"a reward function ({', '.join(self.names)})"):
            given = self._called(inputs)
        return self._graded(given, len(rollouts))

    def grade_texts(self, rollouts: list[Rollout], texts: list[str]) -> Graded:
        """The same of decoded completions, beside a thread whose global state this is as well: it is left alone."""
        return self._graded(self._called(_inputs(rollouts, texts)), len(rollouts))

    def _graded(self, called: dict[str, Any], count: int) -> Graded:
        """The weighted sum of what the functions returned."""
        by_function, failures = {}, {}
        for name, given in called.items():
            try:
                by_function[name], failures[name] = _checked(given, name, count)
            except BaseException as error:
                if isinstance(error, ValueError) or ends_the_process(error):
                    raise
                raise ValueError(
                    f"reward function {name!r} returned {type(given).__name__} that cannot be read "
                    f"({type(error).__name__}); it must return a list, one number a completion."
                ) from error
        stacked = torch.stack(list(by_function.values()))
        weights = torch.tensor(self.weights or [1.0] * len(self.functions), dtype=torch.float64)
        total = (stacked * weights[:, None]).nansum(dim=0)
        total[stacked.isnan().all(dim=0)] = math.nan
        total[[i for failed in failures.values() for i in failed]] = math.nan
        return Graded(rewards=total, by_function=by_function, failures=failures)

    def _called(self, inputs: dict[str, list[Any]]) -> dict[str, Any]:
        """What each function returns; async ones run last, at the same time."""
        given: dict[str, Any] = {}
        try:
            with open_streams(), one_process():
                for name, function in zip(self.names, self.functions, strict=True):
                    try:
                        given[name] = function(**inputs)
                    except BaseException as error:
                        if ends_the_process(error):
                            raise
                        raise _broken(name, function, error, inputs) from error
                waiting = [name for name, value in given.items() if inspect.isawaitable(value)]
                if waiting:
                    given |= zip(waiting, run_together([given[name] for name in waiting]), strict=True)
        finally:
            for value in given.values():
                if inspect.iscoroutine(value):
                    value.close()  # another function raised before it began
        for name, function in zip(self.names, self.functions, strict=True):
            if isinstance(value := given[name], BaseException):
                raise _broken(name, function, value, inputs) from value
        return given


def ends_the_process(error: BaseException) -> bool:
    """Whether it is Ctrl-C. Where a run hears the signal itself, only the code inside raises KeyboardInterrupt."""
    return isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler


def keywords_of(function: Reward) -> list[inspect.Parameter]:
    """The parameters that it can be given by name, **kwargs among them; that alone where it does not say."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some functions written in C say nothing
        return [inspect.Parameter("kwargs", ANY_NAME)]
    return [parameter for parameter in parameters if parameter.kind in BY_NAME]


def _broken(name: str, function: Reward, error: BaseException, inputs: dict[str, list[Any]]) -> ValueError:
    """What it raised, and the last line of the function's own file on the way there."""
    code = getattr(inspect.unwrap(function), "__code__", None) or getattr(type(function).__call__, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if code is not None and frame.filename == code.co_filename]
    where = f" ({own[-1].filename}, line {own[-1].lineno})" if own else ""
    hint = ""
    if isinstance(error, AttributeError | TypeError) and isinstance(next(iter(inputs["completions"]), None), list):
        hint = ' (prompts are chats here, and each completion a list, [{"role": "assistant", "content": ...}])'
    what = f"{type(error).__name__}: {cut(_text(error))}"
    return ValueError(f"reward function {name!r} raised {what}{where}{hint}; mend it, then resume.")


def _text(value: Any) -> str:
    """Of an exception or a value whose own text may raise anything."""
    try:
        return str(value) if isinstance(value, BaseException) else repr(value)
    except BaseException as error:
        if ends_the_process(error):
            raise
        return f"{type(value).__name__} without a text"


def completion_texts(rollouts: list[Rollout], tokenizer: transformers.PreTrainedTokenizerBase) -> list[str]:
    """What the model wrote, as graders read it."""
    ids = [rollout.token_ids.tolist() for rollout in rollouts]
    return [str(text) for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]


def _inputs(rollouts: list[Rollout], texts: list[str]) -> dict[str, list[Any]]:
    """Prompts and completions as the dataset has them (chats as messages), ids, and every column of any row."""
    chats = [list(rollout.prompt.messages) for rollout in rollouts]
    columns = dict.fromkeys(column for rollout in rollouts for column in rollout.prompt.columns)
    return {column: [rollout.prompt.columns.get(column) for rollout in rollouts] for column in columns} | {
        "prompts": [chat or rollout.prompt.text for chat, rollout in zip(chats, rollouts, strict=True)],
        "completions": [
            [{"role": "assistant", "content": text}] if chat else text for chat, text in zip(chats, texts, strict=True)
        ],
        "completion_ids": [rollout.token_ids.tolist() for rollout in rollouts],
    }


def _checked(given: Any, name: str, count: int) -> tuple[torch.Tensor, dict[int, str]]:
    """One number a completion, nan where there is None, and what failed; lists, arrays and tensors will do."""
    with suppress(Exception):  # what cannot be read as a list is none
        given = given.tolist() if hasattr(given, "tolist") else given
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        kind = type(given).__name__
        raise ValueError(f"reward function {name!r} returned {kind}; it must return a list, one number a completion.")
    if len(given) != count:
        raise ValueError(
            f"reward function {name!r} returned {len(given)} rewards for {count} completions; it is called "
            "once with all of them, and must return one number each."
        )
    rewards, failures = [], {}
    for i, value in enumerate(given):
        if isinstance(value, Failed):
            failures[i], value = value.reason, None
        try:
            number = value.item() if hasattr(value, "item") else value
            if number is not None and (not isinstance(number, numbers.Real) or not math.isfinite(number)):
                raise ValueError
            rewards.append(math.nan if number is None else float(number))
        except Exception as error:  # whatever a value that is no number raises
            raise ValueError(
                f"reward function {name!r} returned {_text(value)[:40]} for completion {i}; "
                "it must be a finite number, or None to leave the completion out."
            ) from error
    return torch.tensor(rewards, dtype=torch.float64), failures


def _mean(values: torch.Tensor) -> float:
    return float(values.nanmean())


def _std(values: torch.Tensor) -> float:
    values = values[~values.isnan()]
    return float(values.std()) if len(values) > 1 else 0.0 if len(values) else math.nan
