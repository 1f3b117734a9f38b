# SPDX-License-Identifier: Apache-2.0
"""Rewards for the form of a completion, whatever it says: its shape, and its length.

Shapes by name:

    boxed          exactly one \\boxed{...} with something in it
    think          <think>...</think> first, once, then something
    think_answer   <think>...</think> and <answer>...</answer>, once each, and nothing else
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sparse_rl.grading.answer import last_boxed
from sparse_rl.grading.completion import text_of

Kind = Literal["boxed", "think", "think_answer"]
SHAPES = {
    "think": re.compile(r"\s*<think>(.*?)</think>\s*\S.*", re.DOTALL),
    "think_answer": re.compile(r"\s*<think>(.*?)</think>\s*<answer>(.*?)</answer>\s*", re.DOTALL),
}
TAG = re.compile(r"</?(?:think|answer)>")
TAGS = {"think": ["<think>", "</think>"], "think_answer": ["<think>", "</think>", "<answer>", "</answer>"]}


class Format:
    """1 for a completion of the right shape, else 0: one of the kinds, or a pattern that all of it matches.

    A pattern is the user's, and runs here without a time limit: one that backtracks without end, like (a+)+b, hangs.
    """

    __name__ = "format"

    def __init__(self, kind: Kind = "boxed", pattern: str | None = None) -> None:
        if kind not in get_args(Kind):
            raise ValueError(f"kind is {kind!r}; choose one of {', '.join(get_args(Kind))}.")
        try:
            self.pattern = re.compile(pattern, re.DOTALL) if pattern is not None else None
        except re.error as error:
            raise ValueError(f"pattern is {pattern!r}, which is not a regular expression ({error}).") from error
        self.kind = kind

    def __call__(self, completions: list[Any], **columns: Any) -> list[float]:
        return [float(self.fits(text_of(completion))) for completion in completions]

    def fits(self, text: str) -> bool:
        if self.pattern is not None:
            return self.pattern.fullmatch(text) is not None
        if self.kind == "boxed":
            return text.count("\\boxed{") == 1 and bool((last_boxed(text) or "").strip())
        # With each tag there once, the search tries one place for each; with thousands, it would try all pairs.
        return TAG.findall(text) == TAGS[self.kind] and SHAPES[self.kind].fullmatch(text) is not None


@dataclass(frozen=True, slots=True)
class Overlong:
    """DAPO's soft penalty (arXiv 2503.14476, equation 13) for a completion of T tokens.

    0 up to T = limit - buffer, from there (limit - buffer - T) / buffer, and -1 from T = limit on.
    """

    limit: int
    buffer: int

    def __post_init__(self) -> None:
        if not all(type(value) is int for value in (self.limit, self.buffer)) or not 1 <= self.buffer <= self.limit:
            raise ValueError(
                f"limit is {self.limit!r} and buffer {self.buffer!r}; give whole numbers with 1 <= buffer <= limit."
            )

    @property
    def __name__(self) -> str:
        return "overlong"

    def __call__(self, completion_ids: list[list[int]], **columns: Any) -> list[float]:
        free = self.limit - self.buffer
        return [max(-1.0, min(0.0, (free - len(ids)) / self.buffer)) for ids in completion_ids]
