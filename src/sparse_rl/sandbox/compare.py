# SPDX-License-Identifier: Apache-2.0
"""When a returned value or a printed text is right. Everything compared here is plain data.

Values are compared as EvalPlus does: equal, or within the task's tolerance (1e-6 for floats where the task has none)
and of one type; `oracle` names the tasks that are judged otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

_RELATIVE = 1e-7  # numpy's allclose, as EvalPlus calls it


def as_expected(value: Any, oracle: str) -> Any:
    """What is kept of a canonical solution's result."""
    return value is not None if oracle == "not_none" else value


def right(returned: Any, expected: Any, given: Any, atol: float, oracle: str) -> bool:
    """Whether a call with the arguments `given` returned what it should."""
    try:
        if oracle == "root":
            value = sum(factor * math.pow(returned, i) for i, factor in enumerate(given[0]))
            return isinstance(returned, int | float) and abs(value) <= atol
        if oracle in _ORACLES and _ORACLES[oracle](returned, expected, given, atol):
            return True
        if oracle in ("set", "not_none"):
            return False
        return bool(returned == expected) or _close(returned, expected, atol)
    except (TypeError, ValueError, OverflowError, AttributeError):
        return False  # a value of another kind than the comparison is for


def _close(returned: Any, expected: Any, atol: float) -> bool:
    if atol == 0 and _floats(expected):
        atol = 1e-6
    return atol != 0 and type(returned) is type(expected) and _all_close(returned, expected, atol)


def _floats(value: Any) -> bool:
    if isinstance(value, list | tuple) and value:
        return all(isinstance(item, float) for item in value)
    return isinstance(value, float)


def _all_close(returned: Any, expected: Any, atol: float) -> bool:
    if isinstance(expected, list | tuple):
        if not isinstance(returned, list | tuple) or len(returned) != len(expected):
            return False
        return all(_all_close(a, b, atol) for a, b in zip(returned, expected, strict=True))
    numbers = int | float | complex
    if not isinstance(returned, numbers) or not isinstance(expected, numbers):
        return False
    return returned == expected or abs(returned - expected) <= atol + _RELATIVE * abs(expected) < math.inf


def _surface_area(base: float, height: float) -> int:
    """Mbpp/581 with `height` read as the pyramid's own, not the slant one."""
    return round(base**2 + 2 * base * math.hypot(base / 2, height))


def _digit_distance(first: int, second: int) -> int:
    """Mbpp/558 for numbers of unequal length, the shorter one with zeros in front."""
    width = max(len(str(first)), len(str(second)))
    return sum(abs(int(a) - int(b)) for a, b in zip(str(first).zfill(width), str(second).zfill(width), strict=True))


def _lists(value: Any) -> Any:
    return [_lists(item) for item in value] if isinstance(value, list | tuple) else value


# oracle: (returned, expected, arguments, atol) -> also right
_ORACLES: dict[str, Callable[[Any, Any, Any, float], bool]] = {
    "any": lambda out, expected, given, atol: True,
    "or_zero": lambda out, expected, given, atol: out == 0,
    "surface_area": lambda out, expected, given, atol: _all_close(out, _surface_area(*given), atol),
    "digit_distance": lambda out, expected, given, atol: out == _digit_distance(*given),
    "set": lambda out, expected, given, atol: set(out) == set(expected),
    "not_none": lambda out, expected, given, atol: expected == (out if isinstance(out, bool) else out is not None),
    "json": lambda out, expected, given, atol: _lists(out) == expected,  # JSON has no tuples
}


def same_text(printed: str, expected: str) -> bool:
    """Whether two outputs agree line by line, up to white space and the way a number is written."""
    lines, wanted = printed.strip().split("\n"), expected.strip().split("\n")
    return len(lines) == len(wanted) and all(map(_same_line, lines, wanted))


def _same_line(line: str, wanted: str) -> bool:
    words, goal = line.split(), wanted.split()
    return words == goal or (len(words) == len(goal) and all(map(_same_word, words, goal)))


def _same_word(word: str, wanted: str) -> bool:
    if word == wanted:
        return True
    if len(word) > 400:
        return False
    from decimal import Decimal, InvalidOperation  # the checker has no use for it, and starts sooner without

    try:
        return Decimal(word) == Decimal(wanted)
    except InvalidOperation:
        return False
