# SPDX-License-Identifier: Apache-2.0
"""Sets of numbers as people write them: (1, 2], 1 < x \\le 2, x \\ne 3, |x| > 2, \\mathbb{R} \\setminus \\{3\\}.

They are taken apart here; whether two are the same is `math.py`'s question.
"""

from __future__ import annotations

import re
from itertools import pairwise

from sparse_rl.grading import symbolic
from sparse_rl.grading.latex import cuts, split, wrapped

ORDER = ("<", ">", "\\le", "\\ge")
FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
VARIABLE = re.compile(r"(?:[A-Za-z]\([a-z]\)|\\?[A-Za-z]+(?:_\{?\w+\}?)?)")  # x, x_1, \theta, f(x)
REALS = r"\\(?:mathbb\{R\}|R(?![A-Za-z]))"
BOUND = re.compile(VARIABLE.pattern + rf"(?: ?\\in ?{REALS})?")
ABSOLUTE = re.compile(r"\|(\\?[A-Za-z]+)\| ?(<|>|\\le|\\ge) ?(.+)")
EXCEPT = re.compile(rf"(?:{REALS}|\(-\\infty, ?\\infty\)) ?(?:\\setminus|\\backslash|-) ?\\\{{(.+)\\\}}")


def interval(text: str) -> tuple[str, str, str] | None:
    """(opening, "a, b, ...", closing) of a tuple, an interval, or a chain a < x <= b that says the same."""
    whole = wrapped(text)
    if whole and whole[0] in "([" and len(split(whole[1], (",", ";"))) > 1:
        return whole
    if (absolute := ABSOLUTE.fullmatch(text)) and absolute[2] in ("<", "\\le"):
        name, sign, bound = absolute.groups()
        text = f"-({bound}) {sign} {name} {sign} {bound}"
    bounded = chain(text)
    if bounded is None or variable_of(text) is None:
        return None
    sides, signs = bounded
    if len(sides) == 3:
        brackets = ["(" if signs[0] == "<" else "[", ")" if signs[1] == "<" else "]"]
        return brackets[0], f"{sides[0]}, {sides[2]}", brackets[1]
    if VARIABLE.fullmatch(sides[0]):
        return "(", f"-\\infty, {sides[1]}", ")" if signs[0] == "<" else "]"
    return "(" if signs[0] == "<" else "[", f"{sides[0]}, \\infty", ")"


def chain(text: str) -> tuple[list[str], list[str]] | None:
    """Sides and signs of an ascending chain of inequalities; a descending one is turned round."""
    signs = [match.group() for match in cuts(text, ORDER)]
    if not signs:
        return None
    sides = split(text, ORDER)
    if all(sign in (">", "\\ge") for sign in signs):
        return sides[::-1], [FLIPPED[sign] for sign in reversed(signs)]
    return sides, signs


def variable_of(text: str) -> str | None:
    """The variable that a chain bounds: a < x < b, x < a, a < x."""
    bounded = chain(text)
    if bounded is None or any(sign not in ("<", "\\le") for sign in bounded[1]):
        return None
    sides = bounded[0]
    places = {2: sides, 3: sides[1:2]}.get(len(sides), [])
    names = [side for side in places if VARIABLE.fullmatch(side) and side != "\\infty"]
    return names[0] if len(names) == 1 else None


def union(text: str) -> list[str] | None:
    """The parts of a union, however it is written; None if the text is none."""
    parts = split(text, ("\\cup",))
    if len(parts) > 1:
        return parts
    if (absolute := ABSOLUTE.fullmatch(text)) and absolute[2] in (">", "\\ge"):
        name, sign, bound = absolute.groups()
        return [f"{name} {FLIPPED[sign]} -({bound})", f"{name} {sign} {bound}"]
    if exception := EXCEPT.fullmatch(text):
        return _between(split(exception[1], (",",)))
    items = [item for item in split(text, (",",)) if not BOUND.fullmatch(item)]
    sides = [split(item, ("\\ne",)) for item in items]
    names = {pair[0] for pair in sides if len(pair) > 1}
    if len(names) == 1 and len(sides[0]) == 2 and all(map(VARIABLE.fullmatch, names)):  # x \ne 1, 2 too
        return _between([pair[-1] for pair in sides])
    return None


def pieces(text: str) -> list[str]:
    """The parts of "x < 1, x > 2" or "(1, 2), (3, 4)", which is a union if the other answer is one."""
    items = split(text, (",",))
    of_one = len({variable_of(item) for item in items}) == 1
    return items if of_one and all(map(interval, items)) else [text]


def _between(points: list[str]) -> list[str] | None:
    """The intervals that are left of the real line without some points."""
    points = [point.replace("\\pm", sign) for point in points for sign in (("", "-") if "\\pm" in point else ("",))]
    values = [symbolic.value(point) for point in points]
    known = [value for value in values if value is not None]
    if len(known) < len(points) and len(points) > 1:
        return None
    order = sorted(range(len(points)), key=known.__getitem__) if len(points) > 1 else [0]
    ends = ["-\\infty", *(points[i] for i in order), "\\infty"]
    return [f"({low}, {high})" for low, high in pairwise(ends)]
