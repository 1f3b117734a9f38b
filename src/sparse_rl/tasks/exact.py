# SPDX-License-Identifier: Apache-2.0
"""A reward: is the completion, without spaces around it, the answer?

Where 1/2 may stand for 0.5, grading/reward.py has the reward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparse_rl.grading.completion import text_of


@dataclass(frozen=True, slots=True)
class Exact:
    """1 where the completion is the answer, character by character, else 0; `ignore_case` compares letters alike."""

    ignore_case: bool = False

    @property
    def __name__(self) -> str:
        return "exact"

    def __call__(self, completions: list[Any], answer: list[Any], **columns: Any) -> list[float]:
        pairs = zip(completions, answer, strict=True)
        return [float(self._plain(text_of(text)) == self._plain(str(right))) for text, right in pairs]

    def check(self, columns: dict[str, Any]) -> str | None:
        """What is wrong with a row, if anything."""
        return 'has no "answer"' if columns.get("answer") is None else None

    def _plain(self, text: str) -> str:
        return text.strip().casefold() if self.ignore_case else text.strip()
