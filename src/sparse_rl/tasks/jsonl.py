# SPDX-License-Identifier: Apache-2.0
"""Prompts from JSONL files, graded by the user's own functions.

A row is one JSON object with a key "prompt", a string or a list of chat messages; its other keys go to the reward
functions by name. Rows are shuffled anew each epoch.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from sparse_rl.tasks.base import GIVEN, Reward, Rewards
from sparse_rl.types import Prompt

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonlConfig:
    """Your own prompts and rewards.

    train_file: JSONL file; its rows have a "prompt" (jsonl), or a "question" and an "answer" (words)
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
        rewards = Rewards(tuple(import_function(path) for path in self.rewards), self.reward_weights)
        train = read_prompts(Path(self.train_file), tokenizer)
        held_out = read_prompts(Path(self.eval_file), tokenizer) if self.eval_file else []
        return Rows(train, rewards, tokenizer, held_out, settings=file_settings(self))


class Rows:
    """A task from rows in memory: dicts with a "prompt" and any other columns, or prompts that are ready."""

    def __init__(
        self,
        rows: Sequence[dict[str, Any] | Prompt],
        rewards: Rewards,
        tokenizer: PreTrainedTokenizerBase,
        eval_rows: Sequence[dict[str, Any] | Prompt] = (),
        settings: dict[str, Any] | None = None,
    ) -> None:
        if not rows:
            raise ValueError("there are no rows to train on.")
        self.rewards = rewards
        self.settings = settings or {"name": "rows", "rewards": list(rewards.names)}  # what a run's record says of it
        self.train = [_as_prompt(row, f"row {i}", tokenizer) for i, row in enumerate(rows)]
        self.eval = [_as_prompt(row, f"evaluation row {i}", tokenizer) for i, row in enumerate(eval_rows)]

    def stream(self, start: int, count: int, seed: int) -> list[Prompt]:
        return take(self.train, start, count, seed)

    def held_out(self, count: int) -> list[Prompt]:
        return self.eval[:count]


def file_settings(config: Any) -> dict[str, Any]:
    """What a run's record says of a task that reads a file: its settings, and which file it was."""
    digest = hashlib.sha256(Path(config.train_file).read_bytes()).hexdigest()[:16]
    return {"name": config.name, **asdict(config), "train_sha256": digest}


def _as_prompt(row: dict[str, Any] | Prompt, where: str, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    return row if isinstance(row, Prompt) else make_prompt(row, where, tokenizer)


def as_turn(text: str, tokenizer: PreTrainedTokenizerBase) -> str | list[dict[str, str]]:
    """A user's turn where the tokenizer has a chat template, else the text and a new line."""
    return [{"role": "user", "content": text}] if tokenizer.chat_template else f"{text}\n"


def make_prompt(row: Any, where: str, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    """A row as a prompt; `where` names it in errors."""
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(prompt, str | list):
        raise ValueError(f'{where} has no "prompt" that is a string or a list of messages; mend or remove it.')
    columns = {key: value for key, value in row.items() if key != "prompt"}
    for name in GIVEN:
        if name in columns:
            raise ValueError(f"{where} has a column {name!r}, a name that reward functions know otherwise; rename it.")
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


def read_prompts(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """The rows of a JSONL file as prompts; errors name the line."""
    rows = parse_rows(read_text(path.read_bytes(), str(path)), str(path))
    return [make_prompt(row, f"line {number} of {path}", tokenizer) for number, row in rows]


def read_text(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line} of {name} is not text in UTF-8; convert it.") from error


def parse_rows(text: str, name: str) -> list[tuple[int, dict[str, Any]]]:
    """JSON objects with a prompt, one a line, each with its line's number."""
    rows = parse_lines(text, name)
    for number, row in rows:
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str | list):
            raise ValueError(
                f'line {number} of {name} has no "prompt" that is a string or a list of messages; mend or remove it.'
            )
    return rows


def parse_lines(text: str, name: str) -> list[tuple[int, Any]]:
    """JSON values, one a line, each with its line's number."""
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):  # other separators may stand inside a prompt
        if not line.strip():
            continue
        try:
            rows.append((number, json.loads(line)))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} of {name} is not JSON ({error}); mend or remove it.") from error
    if not rows:
        raise ValueError(f"{name} has no rows; write one JSON object a line.")
    return rows


def import_function(path: str) -> Reward:
    """The function that "module:function" or "path/file.py:function" names."""
    module_name, colon, function_name = path.rpartition(":")
    if not colon or not module_name or not function_name:
        raise ValueError(f'reward {path!r} is not of the form "module:function" or "file.py:function".')
    try:
        module = _import_file(Path(module_name)) if module_name.endswith(".py") else _import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ValueError(f"reward {path!r} cannot be imported: {type(error).__name__}: {error}.") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"reward {path!r}: {module_name} has no function {function_name!r}.")
    return function


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


def take(items: Sequence[T], start: int, count: int, seed: int) -> list[T]:
    """Items number `start` to `start + count` of the endless stream in which every epoch has an order of its own."""
    size = len(items)
    last = (start + count - 1) // size
    orders = {epoch: _shuffled(size, seed, epoch) for epoch in range(start // size, last + 1)}
    return [items[orders[i // size][i % size]] for i in range(start, start + count)]


def _shuffled(size: int, seed: int, epoch: int) -> list[int]:
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed + 1_000_003 * (epoch + 1))).tolist()
