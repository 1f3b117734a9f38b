# SPDX-License-Identifier: Apache-2.0
"""A reward for countdown: reach the target with all of the numbers, each once (TinyZero's rule).

    {"problem": "Using the numbers 3, 5 and 2, make 16.", "nums": [3, 5, 2], "target": 16}       (5 + 3) * 2

The expression is what stands in the last <answer>...</answer>, else in the last \\boxed{...}, else in the last line;
"= 16" after it may stay. It is computed in fractions, so 8 / (3 - 8 / 3) is 24 exactly.

Problems are not made here: they come from files (`rows.py`, `benchmarks.py`).
"""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from sparse_rl.grading.answer import last_boxed
from sparse_rl.grading.completion import text_of

LONGEST = 200  # characters of an expression; the text is the model's
OPEN, CLOSE = "<answer>", "</answer>"
WRITTEN = {"\\times": "*", "\\cdot": "*", "\\div": "/", "×": "*", "·": "*", "÷": "/", "\N{MINUS SIGN}": "-", "$": ""}
ALLOWED = re.compile(r"[0-9+\-*/() ]+")
SIGNS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


@dataclass(frozen=True, slots=True)
class Countdown:
    """1 where the expression reaches the target, else 0, or `format_score` if it is an expression at all."""

    format_score: float = 0.0

    @property
    def __name__(self) -> str:
        return "countdown"

    def __call__(self, completions: list[Any], nums: list[Any], target: list[Any], **columns: Any) -> list[float]:
        return [self._score(text_of(c), n, t) for c, n, t in zip(completions, nums, target, strict=True)]

    def check(self, columns: dict[str, Any]) -> str | None:
        """What is wrong with a row, if anything."""
        nums, target = columns.get("nums"), columns.get("target")
        if isinstance(nums, list) and nums and all(type(value) is int for value in [*nums, target]):
            return None
        return f"has nums {nums!r} and target {target!r}; they are a list of whole numbers and a whole number"

    def _score(self, text: str, nums: list[int], target: int) -> float:
        expression = find_expression(text)
        computed = compute(expression) if expression is not None else None
        if computed is None:
            return 0.0
        value, used = computed
        return 1.0 if value == target and Counter(used) == Counter(nums) else self.format_score


def find_expression(text: str) -> str | None:
    """The expression of a completion, without what it is said to equal."""
    end = text.rfind(CLOSE)
    start = text.rfind(OPEN, 0, end) if end >= 0 else -1
    lines = text.strip().splitlines()
    found = text[start + len(OPEN) : end] if start >= 0 else last_boxed(text) or (lines[-1] if lines else None)
    if found is None:
        return None
    for sign, plain in WRITTEN.items():
        found = found.replace(sign, plain)
    return " ".join(found.partition("=")[0].split())


def compute(expression: str) -> tuple[Fraction | None, list[int]] | None:
    """The value (None: it divides by 0) and the numbers in it; None for what is no expression of + - * / ( )."""
    if len(expression) > LONGEST or not ALLOWED.fullmatch(expression):
        return None
    try:
        tree = ast.parse(expression, mode="eval").body
        used = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
        return _value(tree), [number for number in used if isinstance(number, int)]
    except ZeroDivisionError:
        return None, []
    except (SyntaxError, TypeError, MemoryError, RecursionError):
        return None


def _value(node: ast.expr) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in SIGNS:
        return SIGNS[type(node.op)](_value(node.left), _value(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand)
        return -value if isinstance(node.op, ast.USub) else value
    raise TypeError(f"{type(node).__name__} is no arithmetic")
