# SPDX-License-Identifier: Apache-2.0
"""A reward for problems with a number as answer: is it the last number of the completion?

"so she pays $1,200.50." gives 1200.50.

Answers in boxes, and formulas, are for grading/reward.py.
"""

from __future__ import annotations

from typing import Any

from sparse_rl.grading.answer import last_number
from sparse_rl.grading.completion import text_of
from sparse_rl.grading.numbers import Number, numbers_equal, parse_number, without_thousands


class LastNumber:
    """1 where the completion's last number is the answer, else 0."""

    __name__ = "last_number"

    def __call__(self, completions: list[Any], answer: list[Any], **columns: Any) -> list[float]:
        return [float(_same(text_of(c), a)) for c, a in zip(completions, answer, strict=True)]

    def check(self, columns: dict[str, Any]) -> str | None:
        """What is wrong with a row, if anything."""
        answer = columns.get("answer")
        right = isinstance(answer, str | int | float) and not isinstance(answer, bool) and _number(answer)
        return None if right else f"has the answer {answer!r}, which is not a number"


def _same(text: str, answer: Any) -> bool:
    given, right = parse_number(last_number(text) or ""), _number(answer)
    return given is not None and right is not None and numbers_equal(given, right)


def _number(answer: Any) -> Number | None:
    """What stands behind the last ####, as in GSM8K's solutions, or all of it."""
    return parse_number(without_thousands(str(answer).rpartition("####")[2].strip("$ \n")))
