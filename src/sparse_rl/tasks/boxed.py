# SPDX-License-Identifier: Apache-2.0
"""A reward in TRL's signature: is the last \\boxed{...} of the completion the answer?

Compared as text and as a number; 1/2 and 0.5 are the same, \\frac{1}{2} is not.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from sparse_rl.grading.answer import last_boxed

THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
NUMBER = re.compile(r"[-+]?\d{1,50}(\.\d{1,50})?(/0*[1-9]\d{0,50})?")  # bounded: the text is the model's


def boxed_answer(completions: list[Any], answer: list[Any], **columns: Any) -> list[float]:
    """1 for the right answer, else 0."""
    texts = [text if isinstance(text, str) else text[-1]["content"] for text in completions]
    return [float(same(last_boxed(text), str(right))) for text, right in zip(texts, answer, strict=True)]


def same(given: str | None, right: str) -> bool:
    if given is None:
        return False
    given, right = plain(given), plain(right)
    if NUMBER.fullmatch(given) and NUMBER.fullmatch(right):
        return Fraction(given) == Fraction(right)
    return given == right


def is_number(text: str) -> bool:
    """Whether `same` compares the text as a number."""
    return NUMBER.fullmatch(plain(text)) is not None


def plain(text: str) -> str:
    """Without spaces, dollar signs around it, and commas between thousands."""
    return THOUSANDS.sub("", text.replace(" ", "").strip("$"))
