# SPDX-License-Identifier: Apache-2.0
"""Word problems from JSONL files, right if the last number of the completion is the answer.

    {"question": "Tom has 3 apples and buys 4. How many has he?", "answer": "7"}

The question is a turn of a chat where the tokenizer has a chat template, else plain text and a new line.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from sparse_rl.grading.answer import last_number
from sparse_rl.tasks.base import Rewards
from sparse_rl.tasks.boxed import is_number, same
from sparse_rl.tasks.jsonl import Rows, as_turn, file_settings, make_prompt, parse_lines, read_text
from sparse_rl.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """Word problems with a number as answer.

    train_file: JSONL file; its rows have a "prompt" (jsonl), or a "question" and an "answer" (words)
    eval_file: the same, for evaluation; without it, nothing is evaluated
    """

    name: ClassVar[str] = "words"

    train_file: str = ""
    eval_file: str | None = None

    def __post_init__(self) -> None:
        if not self.train_file:
            raise ValueError("task.train_file is missing; name a JSONL file of questions and answers.")

    def build(self, tokenizer: PreTrainedTokenizerBase) -> Rows:
        train = read_problems(Path(self.train_file), tokenizer)
        held_out = read_problems(Path(self.eval_file), tokenizer) if self.eval_file else []
        return Rows(train, Rewards((last_number_right,)), tokenizer, held_out, settings=file_settings(self))


def read_problems(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """The rows of a JSONL file as prompts; errors name the line."""
    prompts = []
    for number, row in parse_lines(read_text(path.read_bytes(), str(path)), str(path)):
        where = f"line {number} of {path}"
        question = row.get("question") if isinstance(row, dict) else None
        if not isinstance(question, str):
            raise ValueError(f'{where} has no "question" that is a string; mend or remove it.')
        answer = row.get("answer")
        if isinstance(answer, bool) or not isinstance(answer, str | int | float) or not is_number(str(answer)):
            raise ValueError(f"{where} has the answer {answer!r}, which is not a number; mend or remove it.")
        columns = {key: value for key, value in row.items() if key != "question"}
        prompts.append(make_prompt(columns | {"prompt": as_turn(question, tokenizer)}, where, tokenizer))
    return prompts


def last_number_right(completions: list[Any], answer: list[Any], **columns: Any) -> list[float]:
    """1 where the completion's last number is the answer, else 0."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [float(same(last_number(text), str(right))) for text, right in zip(texts, answer, strict=True)]
