# SPDX-License-Identifier: Apache-2.0
"""Whether two answers to a math problem are the same.

Text first, then exact numbers, then formulas (symbolic.py). The shape of an answer is ours to judge: order counts in
tuples and intervals, not in sets and plain lists; open and closed bounds differ; a unit may be missing but not another
one. A right answer that is a decimal is met by what equals it to the decimals it gives and to 1e-4 of it; any other is
met exactly. This may take for ever on hostile input: workers.py bounds it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from sparse_rl.grading import symbolic
from sparse_rl.grading.answer import final_answer
from sparse_rl.grading.latex import cuts, normalise, plain_text, split, squeezed, wrapped
from sparse_rl.grading.numbers import near, numbers_equal, parse_number, without_thousands
from sparse_rl.grading.units import factor, parse_unit, split_unit

LONGEST = 2000  # characters; a longer answer is compared as text alone
ORDER = {"<": "<", ">": ">", "\\le": "\\le", "\\ge": "\\ge"}
FLIPPED = {"<": ">", ">": "<", "\\le": "\\ge", "\\ge": "\\le"}
NAME = re.compile(r"[^+\-*/^<>=\d{][^+\-*/^<>=]*|\\text\{[^{}]*\}.*")
VARIABLE = re.compile(r"\\?[A-Za-z]+(?:_\{?\w+\}?)?")
BOUND = re.compile(VARIABLE.pattern + r"(?: ?\\in ?\\(?:mathbb\{R\}|R))?")
CHOICE = re.compile(r"\(?([A-Z])\)?[.:,]?")
NO_OTHER_CHOICE = r"(?!.*(?<![A-Za-z])[A-Z](?![A-Za-z]))"
CHOICE_WITH_TEXT = re.compile(
    r"(?:[Oo]ption |[Cc]hoice |[Aa]nswer )?(?:\(([A-Z])\)|([A-Z])[.:)]|([A-Z])$)" + NO_OTHER_CHOICE + ".*"
)
TIME = re.compile(r"(\d{1,2})((?::\d\d){0,2}) ?(?:([ap])\.? ?m\.?)?", re.IGNORECASE)
BASE = re.compile(r"([0-9A-Fa-f.]+)_\{?(?:\\text\{)?(\d+|\w{3,})\}?\}?")


def grade(item: dict[str, Any]) -> float:
    """1 if the final answer of `completion` equals `right`, else 0: what a worker runs."""
    given = final_answer(item["completion"])
    return float(given is not None and equal(given, item["right"]))


def warm() -> None:
    """Import what takes a second, so that no item is charged for it."""
    equal("x + 1", "1 \\cdot x + 1")


def equal(given: str, right: str | Sequence[str]) -> bool:
    """Whether the given answer is the right one, or one of several acceptable ones."""
    if not isinstance(right, str):
        return any(equal(given, one) for one in right)
    if given.strip() == right.strip():
        return True
    if len(given) > LONGEST or len(right) > LONGEST:
        return False
    given, right = normalise(given), normalise(right)
    if not given or not right:
        return given == right
    # "100,200" is a number or a list: whatever makes them equal was meant.
    readings = [(mine, theirs) for theirs in _readings(right) for mine in _readings(given)]
    return any(_same(mine, theirs) for mine, theirs in readings)


def _readings(text: str) -> list[str]:
    return list(dict.fromkeys((text, without_thousands(text))))


def _same(given: str, right: str) -> bool:
    """Compare by shape: words, unions, lists, sets, tuples and intervals, relations, equations, single values."""
    given, right = _bare(given), _bare(right)
    if squeezed(given) == squeezed(right):
        return True
    if (verdict := _words(given, right)) is not None:
        return verdict
    for shape in (_unions, _lists, _brackets, _relations, _equations):
        if (verdict := shape(given, right)) is not None:
            return verdict
    return _values(given, right)


def _bare(text: str) -> str:
    """Without brackets around a single value, and {x | ...}, x \\in ... as what they say."""
    text = re.sub(r"^\\text\{([^{}]*[^A-Za-z{}][^{}]*|[A-Za-z])\}$", r"\1", text.strip()).strip()
    while (whole := wrapped(text)) is not None:
        opening, inside, closing = whole
        if opening == "\\{" and len(parts := split(inside, ("|", ":"))) == 2 and BOUND.fullmatch(parts[0]):
            text = parts[1]
        elif (opening, closing) in (("(", ")"), ("{", "}")) and len(split(inside, (",", ";"))) == 1:
            if CHOICE.fullmatch(text):
                return text
            text = inside
        else:
            break
    text = {"\\mathbb{R}": "(-\\infty, \\infty)", "\\R": "(-\\infty, \\infty)", "\\{\\}": "\\emptyset"}.get(text, text)
    parts = split(text, ("\\in",))
    return parts[1] if len(parts) == 2 and VARIABLE.fullmatch(parts[0]) and "," not in text[: len(parts[0])] else text


def _words(given: str, right: str) -> bool | None:
    """Choices (A) and answers in words; None where the right answer is neither."""
    given, right = plain_text(given), plain_text(right)
    if choice := CHOICE.fullmatch(right):
        mine = CHOICE.fullmatch(given) or CHOICE_WITH_TEXT.fullmatch(given)
        return next(filter(None, mine.groups())) == choice[1] if mine else None
    if (theirs := TIME.fullmatch(right)) and (theirs[2] or theirs[3]):
        if (ours := TIME.fullmatch(given)) is None:
            return None
        half_days = {(time[3] or "").lower() for time in (ours, theirs)}
        return (ours[1], ours[2] or ":00") == (theirs[1], theirs[2] or ":00") and half_days != {"a", "p"}
    if not re.search(r"(?<![\\A-Za-z])[A-Za-z]{2,}", right) or re.search(r"[=<>^_\\,;/]", right):
        return None
    if re.search(r"\d", right) and not re.match(r"[A-Za-z]", right):
        return None
    letters = [re.sub(r"[\W_]+", "", text).casefold() for text in (given, right)]
    return True if letters[0] == letters[1] else None


def _unions(given: str, right: str) -> bool | None:
    ours, theirs = split(given, ("\\cup",)), split(right, ("\\cup",))
    if len(ours) == 1 and len(theirs) == 1:
        return None
    return _match(ours, theirs)


def _lists(given: str, right: str) -> bool | None:
    """Plain lists and sets: order does not count. None where both are single values or brackets."""
    ours, theirs = _items(given), _items(right)
    if ours is None and theirs is None:
        return None
    if ours is not None and theirs is not None:
        return _match(ours, theirs)
    other = wrapped(right if theirs is None else given)
    listed = ours if ours is not None else theirs
    assert listed is not None
    if other is not None and not (wrapped(given) and wrapped(right)):  # 6, 5 without the parentheses of (6, 5)
        parts = split(other[1], (",", ";"))
        return (
            other[0] == "(" and other[2] == ")" and _in_order(*((listed, parts) if theirs is None else (parts, listed)))
        )
    single = right if theirs is None else given
    return len(listed) == 1 and _same(*((listed[0], single) if theirs is None else (single, listed[0])))


def _items(text: str) -> list[str] | None:
    """The items of a list or a set; a +- b is a list of two."""
    whole = wrapped(text)
    items = split(whole[1] if whole and whole[0] == "\\{" else text, (",", ";"))
    items = [item for item in items if item]
    if "\\pm" in text:
        signs = {True: [("+", "-"), ("-", "+")], False: [("", "")]}
        return [
            item.replace("\\pm", plus).replace("\\mp", minus) for item in items for plus, minus in signs["\\pm" in item]
        ]
    return items if len(items) > 1 or (whole and whole[0] == "\\{") else None


def _brackets(given: str, right: str) -> bool | None:
    """Tuples, points, intervals: order counts, and so do the brackets of a pair."""
    ours, theirs = _interval(given), _interval(right)
    if ours is None or theirs is None:
        return None if ours is None and theirs is None else False
    if _variable_of(given) and _variable_of(right) and _variable_of(given) != _variable_of(right):
        return False
    ends, other_ends = split(ours[1], (",", ";")), split(theirs[1], (",", ";"))
    same_brackets = (ours[0], ours[2]) == (theirs[0], theirs[2]) or len(ends) > 2
    return same_brackets and _in_order(ends, other_ends)


def _interval(text: str) -> tuple[str, str, str] | None:
    """(opening, "a, b, ...", closing) of a tuple, an interval, or a chain a < x <= b that says the same."""
    whole = wrapped(text)
    if whole and whole[0] in "([" and len(split(whole[1], (",", ";"))) > 1:
        return whole
    chain = _chain(text)
    if chain is None or _variable_of(text) is None:
        return None
    sides, signs = chain
    if len(sides) == 3:
        brackets = ["(" if signs[0] == "<" else "[", ")" if signs[1] == "<" else "]"]
        return brackets[0], f"{sides[0]}, {sides[2]}", brackets[1]
    if VARIABLE.fullmatch(sides[0]):
        return "(", f"-\\infty, {sides[1]}", ")" if signs[0] == "<" else "]"
    return "(" if signs[0] == "<" else "[", f"{sides[0]}, \\infty", ")"


def _chain(text: str) -> tuple[list[str], list[str]] | None:
    """Sides and signs of an ascending chain of inequalities; a descending one is turned round."""
    signs = [match.group() for match in cuts(text, tuple(ORDER))]
    if not signs:
        return None
    sides = split(text, tuple(ORDER))
    if all(sign in (">", "\\ge") for sign in signs):
        return sides[::-1], [FLIPPED[sign] for sign in reversed(signs)]
    return sides, signs


def _variable_of(text: str) -> str | None:
    """The variable that a chain bounds: a < x < b, x < a, a < x."""
    chain = _chain(text)
    if chain is None or any(sign not in ("<", "\\le") for sign in chain[1]):
        return None
    sides = chain[0]
    middle = {2: [side for side in sides if VARIABLE.fullmatch(side) and side != "\\infty"], 3: sides[1:2]}.get(
        len(sides), []
    )
    return middle[0] if len(middle) == 1 and VARIABLE.fullmatch(middle[0]) else None


def _relations(given: str, right: str) -> bool | None:
    """Inequalities that bound no single variable; != and the like are compared side by side."""
    ours, theirs = _chain(given), _chain(right)
    if ours is None and theirs is None:
        return None
    if ours is None or theirs is None or len(ours[0]) != len(theirs[0]) or ours[1] != theirs[1]:
        return False
    if _in_order(ours[0], theirs[0]):
        return True
    return len(ours[0]) == 2 and symbolic.multiples(
        (ours[0][0], ours[0][1]), (theirs[0][0], theirs[0][1]), positive=True
    )


def _equations(given: str, right: str) -> bool | None:
    """x = 5 is 5 where the other side names no variable; two equations may be multiples of each other."""
    ours, theirs = split(given, ("=",)), split(right, ("=",))
    if len(ours) == 1 and len(theirs) == 1:
        return None
    if len(ours) > 1 and len(theirs) > 1:
        if squeezed(ours[0]) == squeezed(theirs[0]):
            return _same(ours[-1], theirs[-1])
        if _in_order([ours[0], ours[-1]], [theirs[0], theirs[-1]]):
            return True
        return symbolic.multiples((ours[0], ours[-1]), (theirs[0], theirs[-1]))
    named = (ours if len(ours) > 1 else theirs)[0]
    if NAME.fullmatch(named) or not re.search(r"[A-Za-z]", re.sub(r"\\[a-z]+", "", named)):
        return _same(ours[-1], theirs[-1])
    return False


def _values(given: str, right: str) -> bool:
    """Single values: numbers exactly, units converted, bases, ratios, formulas."""
    letters = "".join(re.findall(r"[A-Za-z]", re.sub(r"\\text\{[^{}]*\}|\\[A-Za-z]+", "", right)))
    value, unit = split_unit(right)
    mine, my_unit = split_unit(given, variables=letters)
    if unit and not re.search(r"[\d\\A-Za-z]", value):
        value, unit = right, ""
    scale = factor(my_unit, unit)
    if scale is None or (value.endswith("%") and parse_unit(my_unit)) or (mine.endswith("%") and parse_unit(unit)):
        return False
    if (base := BASE.fullmatch(squeezed(value))) is not None:
        other = BASE.fullmatch(squeezed(mine))
        digits, number_base = other.groups() if other else (squeezed(mine), base[2])
        return (digits.upper(), number_base) == (base[1].upper(), base[2])
    mine, value = _tidy(mine), _tidy(value)
    if squeezed(mine) == squeezed(value) and scale == 1:
        return True
    ours, theirs = parse_number(mine), parse_number(value)
    if ours is not None and theirs is not None:
        scaled = type(ours)(ours.value * scale, ours.half_unit, ours.percent)
        return numbers_equal(scaled, theirs)
    if theirs is not None and theirs.half_unit is not None:  # a formula for a decimal
        number = symbolic.value(mine)
        return number is not None and abs(number) < 1e300 and near(Fraction(number) * scale, theirs)
    mine = mine if scale == 1 else f"\\frac{{{scale.numerator}}}{{{scale.denominator}}} \\cdot ({mine})"
    return symbolic.formulas_equal(mine, value)


def _tidy(text: str) -> str:
    """Without degree signs; a ratio 3:4 as the fraction it is."""
    text = text.replace("\\deg", "").strip()
    sides = text.split(":")
    if len(sides) == 2 and all(parse_number(side) for side in sides):
        return "\\frac{" + sides[0].strip() + "}{" + sides[1].strip() + "}"
    return text


def _match(ours: list[str], theirs: list[str]) -> bool:
    """Whether the items of two lists are the same, each used once, in any order."""
    left = list(theirs)
    if len(ours) != len(left) or len(ours) > 100:
        return False
    for item in ours:
        found = next((i for i, other in enumerate(left) if squeezed(item) == squeezed(other)), None)
        found = next((i for i, other in enumerate(left) if _same(item, other)), None) if found is None else found
        if found is None:
            return False
        del left[found]
    return True


def _in_order(ours: list[str], theirs: list[str]) -> bool:
    return len(ours) == len(theirs) and all(_same(mine, right) for mine, right in zip(ours, theirs, strict=True))
