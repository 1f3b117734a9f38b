# SPDX-License-Identifier: Apache-2.0
"""Completions to imitate, from files and datasets (see `files`).

A row has a "prompt" (a string or a list of chat messages) and a "completion" (a string or an assistant's message), or
"messages" that end with an assistant's; other keys are not read. A chat goes through the model's template up to where
its answer begins. The completion is what the model should write there, and ends with the model's end token.

How completions are learnt is in train/sft.py.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import transformers

from sparse_rl.tasks.files import Table, read_table
from sparse_rl.tasks.layouts import LAYOUTS, is_answer
from sparse_rl.tasks.prompts import check_known, make_prompt, short_enough
from sparse_rl.tasks.rows import take
from sparse_rl.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt and the completion to learn.

    Example(prompt=Prompt(text="2+2=", ids=(50, 43, 50, 61)), token_ids=tensor([52, 2]))
    """

    prompt: Prompt
    token_ids: torch.Tensor  # (T,) int64, the end token last

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.ids) + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Examples:
    """Rows to learn from and rows to evaluate on."""

    train: list[Example]
    eval: list[Example] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=lambda: {"train_file": None})  # what a run's record says of them

    def stream(self, start: int, count: int, seed: int) -> list[Example]:
        """Rows number `start` to `start + count` of the endless stream that belongs to the seed."""
        return take(self.train, start, count, seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExamplesConfig:
    """The rows.

    train_file: file or dataset with "prompt" (a string or chat messages) and "completion", or "messages", in every row
    eval_file: the same, held out; without it, nothing is evaluated and no checkpoint is the best
    max_length: rows of more tokens, prompt and completion together, are left out; by default the model's context
    """

    train_file: str = ""
    eval_file: str | None = None
    max_length: int | None = None

    def __post_init__(self) -> None:
        if not self.train_file:
            raise ValueError(
                "data.train_file is missing; name a file or a dataset with a prompt and a completion in every row."
            )
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"data.max_length is {self.max_length}; it must be at least 2.")

    def build(
        self, tokenizer: transformers.PreTrainedTokenizerBase, end_ids: tuple[int, ...], context: int
    ) -> Examples:
        """Read the files. The first of `end_ids` ends a completion that does not end with one of them already."""
        if self.max_length is not None and self.max_length > context:
            raise ValueError(f"data.max_length is {self.max_length}, but the model's context is {context}; lower it.")
        limit = self.max_length or context
        table = read_table(self.train_file)
        remedy = "raise data.max_length" if limit < context else "give a model with a longer context"
        train = make_examples(table, tokenizer, end_ids, limit, remedy)
        held = make_examples(read_table(self.eval_file), tokenizer, end_ids, limit, remedy) if self.eval_file else []
        return Examples(train=train, eval=held, settings={**asdict(self), "train_sha256": table.sha256[:16]})


def make_examples(
    table: Table,
    tokenizer: transformers.PreTrainedTokenizerBase,
    end_ids: tuple[int, ...],
    max_length: int,
    remedy: str,
) -> list[Example]:
    """The rows that are short enough; errors name them, and the remedy for those that are not."""
    examples = {}
    for row in table.rows:
        prompt, columns = LAYOUTS["trl"].split(row)
        examples[row.where] = make_example({**columns, "prompt": prompt}, row.where, tokenizer, end_ids)
    return short_enough(examples, lambda example: example.num_tokens, max_length, remedy)


def make_example(
    row: dict[str, Any], where: str, tokenizer: transformers.PreTrainedTokenizerBase, end_ids: tuple[int, ...]
) -> Example:
    """A row as an example; `where` names it in errors."""
    completion = row.get("completion")
    if isinstance(completion, list) and len(completion) == 1 and is_answer(completion):
        completion = completion[0].get("content")  # TRL's way to write it in a chat
    if not isinstance(completion, str):
        raise ValueError(f'{where} has no "completion" that is a string; mend or remove it.')
    if not completion:
        raise ValueError(f"{where} has an empty completion; mend or remove it.")
    prompt = make_prompt({"prompt": row.get("prompt")}, where, tokenizer)
    try:
        ids = list(tokenizer(completion, add_special_tokens=False).input_ids)
    except Exception as error:  # text that is not Unicode
        raise ValueError(
            f"{where}: the tokenizer cannot read the completion ({type(error).__name__}: {error}); mend it."
        ) from error
    check_known(completion, ids, where, tokenizer)
    if not ids or ids[-1] not in end_ids:
        ids.append(end_ids[0])
    return Example(prompt=prompt, token_ids=torch.tensor(ids))
