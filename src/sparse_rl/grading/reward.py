# SPDX-License-Identifier: Apache-2.0
"""The math reward in TRL's signature: 1 if the completion's final answer is the right one, else 0.

The answer is found in `answer.py` and compared in `math.py`, by processes with a time limit (`workers.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sparse_rl.grading.answer import after_answer_is, last_boxed
from sparse_rl.grading.completion import text_of
from sparse_rl.grading.outcome import Failed
from sparse_rl.grading.workers import Workers

LONGEST_SOLUTION = 200  # characters of a solution without a box that may be the answer itself


class MathReward:
    """Grades against the column `answer` or `answers` (any of a list will do), or a `solution`'s last \\boxed.

    workers: processes that grade at the same time; 0 takes one a core, at most 8
    timeout_s: seconds a completion may take; one that takes longer is `Failed`
    """

    def __init__(self, workers: int = 0, timeout_s: float = 5.0) -> None:
        self.__name__ = "math"
        self.workers = Workers("sparse_rl.grading.math:grade", count=workers, timeout_s=timeout_s)

    def __call__(
        self,
        completions: Sequence[Any],
        answer: Sequence[Any] | None = None,
        answers: Sequence[Any] | None = None,
        solution: Sequence[Any] | None = None,
        **columns: Any,
    ) -> list[float | Failed | None]:
        """One reward a completion; None for a row without a usable answer."""
        none = [None] * len(completions)
        if answer is None and answers is None and solution is None:
            raise ValueError('the math reward needs a column "answer", "answers" or "solution"; the dataset has none.')
        rights = list(map(right_of, answer or none, answers or none, solution or none))
        futures = [
            right and self.workers.submit({"completion": text_of(completion), "right": right})
            for completion, right in zip(completions, rights, strict=True)
        ]
        return [future.result() if future else None for future in futures]

    def check(self, columns: dict[str, Any]) -> str | None:
        """What is wrong with a row, if anything."""
        right = right_of(columns.get("answer"), columns.get("answers"), columns.get("solution"))
        return None if right else 'has no right answer in "answer", "answers" or "solution"'


def right_of(answer: Any, answers: Any, solution: Any) -> str | list[str] | None:
    """The right answer of a row with these columns."""
    return right_answer(answer) or right_answer(answers) or solved(solution)


def right_answer(value: Any) -> str | list[str] | None:
    """What a column holds as one answer or several; numbers as text; None where there is nothing."""
    if isinstance(value, list | tuple):
        several = [str(one) for one in map(right_answer, value) if one]
        return several or None
    if value is None or value != value or isinstance(value, bool | dict):  # NaN is what a table has for nothing
        return None
    text = str(value).strip()
    if "####" in text:  # as GSM8K has it: the solution, then #### and the answer
        text = text.rpartition("####")[2].strip()
    return last_boxed(text) or text or None


def solved(solution: Any) -> str | None:
    """The answer that a worked solution ends in; a short one without a box is the answer itself."""
    if not isinstance(solution, str) or not solution.strip():
        return None
    found = last_boxed(solution) or after_answer_is(solution)
    return found or (solution.strip() if len(solution) <= LONGEST_SOLUTION else None)
