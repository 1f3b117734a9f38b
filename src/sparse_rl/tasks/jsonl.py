# SPDX-License-Identifier: Apache-2.0
"""Prompts from JSONL files, graded by the user's own functions.

A row is one JSON object with a key "prompt", a string or a list of chat messages; its other keys go to the reward
functions by name. Rows are shuffled anew each epoch.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import PreTrainedTokenizerBase

from sparse_rl.tasks.base import Reward, Rewards
from sparse_rl.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlConfig:
    """Your own prompts and rewards.

    train_file: JSONL file with a key "prompt" in every row
    eval_file: the same, for evaluation; without it, nothing is evaluated
    rewards: functions as "module:function" or "path/file.py:function"
    reward_weights: one a function; 1 each, if none are given
    """

    name: ClassVar[str] = "jsonl"

    train_file: str = ""
    eval_file: str | None = None
    rewards: tuple[str, ...] = ()
    reward_weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.train_file:
            raise ValueError("task.train_file is missing; name a JSONL file with a prompt in every row.")
        if not self.rewards:
            raise ValueError('task.rewards is missing; name a function as "module:function" or "file.py:function".')

    def build(self, tokenizer: PreTrainedTokenizerBase) -> Rows:
        return Rows(
            read_rows(Path(self.train_file)),
            Rewards(tuple(import_function(path) for path in self.rewards), self.reward_weights),
            tokenizer,
            read_rows(Path(self.eval_file)) if self.eval_file else [],
        )


class Rows:
    """A task from rows in memory: dicts with a "prompt" and any other columns."""

    def __init__(
        self,
        rows: list[dict[str, Any]],
        rewards: Rewards,
        tokenizer: PreTrainedTokenizerBase,
        eval_rows: list[dict[str, Any]] | None = None,
    ) -> None:
        if not rows:
            raise ValueError("there are no rows to train on.")
        self.rewards = rewards
        self.train = [make_prompt(row, f"row {i}", tokenizer) for i, row in enumerate(rows)]
        self.eval = [make_prompt(row, f"evaluation row {i}", tokenizer) for i, row in enumerate(eval_rows or [])]

    def stream(self, start: int, count: int, seed: int) -> list[Prompt]:
        size = len(self.train)
        last = (start + count - 1) // size
        orders = {epoch: _shuffled(size, seed, epoch) for epoch in range(start // size, last + 1)}
        return [self.train[orders[i // size][i % size]] for i in range(start, start + count)]

    def held_out(self, count: int) -> list[Prompt]:
        return self.eval[:count]


def make_prompt(row: Any, where: str, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """A row as a prompt; `where` names it in errors."""
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str | list):
        raise ValueError(f'{where} has no "prompt" that is a string or a list of messages; mend or remove it.')
    columns = {key: value for key, value in row.items() if key != "prompt"}
    messages = prompt if isinstance(prompt, list) else []
    chat = isinstance(prompt, list)
    if chat and tokenizer.chat_template is None:
        raise ValueError(f"{where} is a list of messages, but the model has no chat template; give it as a string.")
    try:
        text = str(
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) if chat else prompt
        )
        ids = tuple(tokenizer(text, add_special_tokens=not chat).input_ids)
    except Exception as error:  # a template's own complaint, or text that is not Unicode
        what = "the model's chat template refuses" if chat else "the tokenizer cannot read"
        raise ValueError(f"{where}: {what} it ({type(error).__name__}: {error}); mend it.") from error
    if not ids:
        raise ValueError(f"{where} is empty; mend or remove it.")
    return Prompt(ids=ids, text=text, messages=tuple(messages), columns=columns)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 (byte {error.start}); convert it.") from error
    return parse_rows(text, str(path))


def parse_rows(text: str, name: str) -> list[dict[str, Any]]:
    """JSON objects with a prompt, one a line; errors name the line."""
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):  # other separators may stand inside a prompt
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"line {number} of {name} is not JSON ({error}); mend or remove it.") from error
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str | list):
            raise ValueError(
                f'line {number} of {name} has no "prompt" that is a string or a list of messages; mend or remove it.'
            )
        rows.append(row)
    if not rows:
        raise ValueError(f"{name} has no rows; write one JSON object a line.")
    return rows


def import_function(path: str) -> Reward:
    """The function that "module:function" or "path/file.py:function" names."""
    module_name, colon, function_name = path.rpartition(":")
    if not colon or not module_name or not function_name:
        raise ValueError(f'reward {path!r} is not of the form "module:function" or "file.py:function".')
    try:
        is_file = module_name.endswith(".py")
        module = _import_file(Path(module_name)) if is_file else importlib.import_module(module_name)
    except Exception as error:
        raise ValueError(f"reward {path!r} cannot be imported: {type(error).__name__}: {error}.") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"reward {path!r}: {module_name} has no function {function_name!r}.")
    return function


def _import_file(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _shuffled(size: int, seed: int, epoch: int) -> list[int]:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed + 1_000_003 * (epoch + 1))).tolist()
