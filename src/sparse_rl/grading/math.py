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
from dataclasses import replace
from fractions import Fraction
from typing import Any

from sparse_rl.grading import symbolic
from sparse_rl.grading.answer import final_answer
from sparse_rl.grading.intervals import BOUND, VARIABLE, chain, interval, pieces, union, variable_of
from sparse_rl.grading.latex import COUNTED, normalise, plain_text, split, squeezed, wrapped
from sparse_rl.grading.numbers import near, numbers_equal, parse_number, without_thousands
from sparse_rl.grading.units import factor, parse_unit, split_unit

LONGEST = 2000  # characters; a longer answer is compared as text alone
NAME = re.compile(r"[A-Za-z]\^\{(?:-1|\\prime)\}(?:\([a-z]\))?|[^+\-*/^<>=\d{][^+\-*/^<>=]*|\\text\{[^{}]*\}.*")
CHOICE = re.compile(r"\(?([A-Z])\)?[.:,]?")
NO_OTHER_CHOICE = r"(?!.*(?<![A-Za-z])[A-Z](?![A-Za-z]))"
CHOICE_WITH_TEXT = re.compile(
    r"(?:[Oo]ption |[Cc]hoice |[Aa]nswer )?(?:\(([A-Z])\)|([A-Z])[.:)]|([A-Z])$)" + NO_OTHER_CHOICE + ".*"
)
TIME = re.compile(r"(\d{1,2})((?::\d\d){0,2}) ?(?:([ap])\.? ?m\.?)?", re.IGNORECASE)
COLUMN = re.compile(r"\\begin\{[pb]matrix\}([^&]*)\\end\{[pb]matrix\}")
TUPLE_NAMED = re.compile(r"\(([^()]*)\) ?= ?\((.*)\)")
EQUAL = ("=", "\\approx", "\\equiv")
ZEROS = re.compile(r"\d,0\d\d(?!\d)")  # 35,000 is no list
FUNCTION = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
WORD = re.compile(r"[A-Za-z]{3,}|no", re.IGNORECASE)
BASE = re.compile(r"(-?[0-9A-Fa-f.]+)_\{?(?:\\text\{)?(\d+|\w{3,})\}?\}?")


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
    joined = without_thousands(text)
    return [joined] if ZEROS.search(text) else list(dict.fromkeys((text, joined)))


def _same(given: str, right: str) -> bool:
    """Compare by shape: words, unions, lists, sets, tuples and intervals, relations, equations, single values."""
    given, right = _bare(given), _bare(right)
    if squeezed(given) == squeezed(right):
        return True
    given, right = _unnamed(given, right), _unnamed(right, given)
    if (verdict := _words(given, right)) is not None:
        return verdict
    for shape in (_remainders, _unions, _lists, _brackets, _relations, _equations):
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
    if re.fullmatch(r"all real(?:s| numbers)", plain_text(text).casefold()):
        text = "(-\\infty, \\infty)"
    parts = split(text, ("\\in",))
    return parts[1] if len(parts) == 2 and VARIABLE.fullmatch(parts[0]) and len(split(parts[1], (",",))) == 1 else text


def _unnamed(text: str, other: str) -> str:
    """Without the name of x = 5, (x, y) = (2, 4) and P(2, 4), where the other answer has none; a column as a tuple."""
    sides = split(text, ("=",))
    if len(sides) == 2 and "=" not in other and NAME.fullmatch(sides[0]) and len(split(sides[0], (",",))) == 1:
        return _bare(sides[1])
    if (named := TUPLE_NAMED.fullmatch(text)) and "=" in other and not wrapped(other):
        names, values = split(named[1], (",",)), split(named[2], (",",))
        return ", ".join(map("=".join, zip(names, values, strict=False))) if len(names) == len(values) else text
    if (column := COLUMN.fullmatch(text)) and wrapped(other):
        return f"({column[1].strip().strip(chr(92)).replace(chr(92) * 2, ',')})"
    return text[1:] if re.match(r"[A-Z]\(", text) and wrapped(text[1:]) and wrapped(other) else text


def _words(given: str, right: str) -> bool | None:
    """Choices (A) and answers in words; None where the right answer is neither."""
    given, right = plain_text(given), plain_text(right)
    if choice := CHOICE.fullmatch(right) or re.fullmatch(r"\(([A-Z])\) .+", right):
        chosen = CHOICE.fullmatch(given) or CHOICE_WITH_TEXT.fullmatch(given)
        return next(filter(None, chosen.groups())) == choice[1] if chosen else None
    if (theirs := TIME.fullmatch(right)) and (theirs[2] or theirs[3]):
        if (ours := TIME.fullmatch(given)) is None:
            return None
        half_days = {(time[3] or "").lower() for time in (ours, theirs)}
        same = int(ours[1]) == int(theirs[1]) and (ours[2] or ":00") == (theirs[2] or ":00")
        return same and half_days != {"a", "p"}
    mine, said = _said(given), _said(right)
    if not any(map(_is_word, said)) or re.search(r"[=<>^_\\,;/]", right) or re.match(r"[-\d]", right):
        return None
    if mine == said:
        return True
    return False if all(map(_is_word, mine + said)) else None


def _said(text: str) -> list[str]:
    """Words (in small letters and the singular), numbers, and every other sign; quotes and full stops say nothing.

    Nor does an article at the start.
    """
    text = re.sub(r"^(?:an?|the) (?=[a-z]{3})", "", text.strip(), flags=re.IGNORECASE)
    text = re.sub(r"(?<=[A-Za-z]{3})-(?=[A-Za-z]{3})", " ", text)
    tokens = re.findall(r"[A-Za-z]+|[\d.]*\d|[^\s\"'.,!]", text)
    return [re.sub(r"(?<=[a-z]{3})s$", "", token.lower()) if _is_word(token) else token for token in tokens]


def _is_word(text: str) -> bool:
    """Whether letters are a word and not a product as abc or xyz."""
    low = text.lower()
    product = low in "abcdefghijklmnopqrstuvwxyz" and low != "no"
    return bool(WORD.fullmatch(text) and re.search("[aeiouy]", low)) and not product


def _base(text: str) -> str:
    return str(COUNTED.index(text.lower())) if text.lower() in COUNTED else text


def _remainders(given: str, right: str) -> bool | None:
    """3 \\pmod 7: the modulus may be missing, but not another one."""
    ours, theirs = split(given, ("\\pmod",)), split(right, ("\\pmod",))
    if len(ours) == 1 and len(theirs) == 1:
        return None
    return _same(ours[0], theirs[0]) and (len(ours) != len(theirs) or _same(ours[-1], theirs[-1]))


def _unions(given: str, right: str) -> bool | None:
    ours, theirs = union(given), union(right)
    return None if ours is None and theirs is None else _match(ours or pieces(given), theirs or pieces(right))


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
    if theirs is None and len(listed) == 2 and "\\pm" not in given:  # 1/2, or 0.5: one value in two spellings
        return squeezed(listed[0]) != squeezed(listed[1]) and all(_same(item, right) for item in listed)
    if theirs is None:
        return len(listed) == 1 and _same(listed[0], right)
    return len(listed) == 1 and _same(given, listed[0])


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
    ours, theirs = interval(given), interval(right)
    if ours is None or theirs is None:
        return None if ours is None and theirs is None else False
    if variable_of(given) and variable_of(right) and variable_of(given) != variable_of(right):
        return False
    ends, other_ends = split(ours[1], (",", ";")), split(theirs[1], (",", ";"))
    same_brackets = (ours[0], ours[2]) == (theirs[0], theirs[2]) or len(ends) > 2
    return same_brackets and _in_order(ends, other_ends)


def _relations(given: str, right: str) -> bool | None:
    """Inequalities that bound no single variable; != and the like are compared side by side."""
    ours, theirs = chain(given), chain(right)
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
    ours, theirs = split(given, EQUAL), split(right, EQUAL)
    if len(ours) == 1 and len(theirs) == 1:
        return None
    if len(ours) > 1 and len(theirs) > 1:
        if squeezed(ours[0]) == squeezed(theirs[0]) or _same_graph(ours[0], theirs[0]):
            return _same(ours[-1], theirs[-1])
        if _in_order([ours[0], ours[-1]], [theirs[0], theirs[-1]]):
            return True
        return symbolic.multiples((ours[0], ours[-1]), (theirs[0], theirs[-1]))
    mine, right_values = _equal_values(ours), _equal_values(theirs)
    return any(_same(one, value) for one in mine for value in right_values)


def _equal_values(sides: list[str]) -> list[str]:
    """The exact and the rounded value of x = 1/3 = 0.333; none where the sides contradict each other."""
    named = len(sides) > 1 and NAME.fullmatch(sides[0]) and symbolic.value(sides[0]) is None
    values = sides[1:] if named else sides
    numbers = [symbolic.value(side) for side in values]
    first = numbers[0]
    if len(values) > 1 and (
        first is None or any(number is None or abs(number - first) > abs(first) / 100 for number in numbers)
    ):
        return []
    return [values[0], values[-1]]


def _same_graph(name: str, other: str) -> bool:
    """y = ... and f(x) = ... say the same."""
    return any(
        re.fullmatch(r"[A-Za-z]", one) and re.fullmatch(rf"[A-Za-z]\((?!{one})[A-Za-z]\)", two)
        for one, two in ((name, other), (other, name))
    )


def _values(given: str, right: str) -> bool:
    """Single values: numbers exactly, units converted, bases, ratios, formulas."""
    value, unit = split_unit(right)
    if unit and not re.search(r"[\d\\A-Za-z]", value):
        value, unit = right, ""
    letters = "".join(re.findall(r"[A-Za-z]", re.sub(r"\\text\{[^{}]*\}|\\[A-Za-z]+", "", value)))
    mine, my_unit = split_unit(given, variables=letters)
    scale = factor(my_unit, unit)
    if scale is None or (value.endswith("%") and parse_unit(my_unit)) or (mine.endswith("%") and parse_unit(unit)):
        return False
    base, other = BASE.fullmatch(squeezed(value)), BASE.fullmatch(squeezed(mine))
    if base is None and other is not None and parse_number(value):
        return False
    if base is not None:
        digits, number_base = other.groups() if other else (squeezed(mine), base[2])
        return (digits.upper(), _base(number_base)) == (base[1].upper(), _base(base[2]))
    mine, value = _tidy(mine), _tidy(value)
    if squeezed(mine) == squeezed(value) and scale == 1:
        return True
    ours, theirs = parse_number(mine), parse_number(value)
    if ours is not None and theirs is not None:
        return numbers_equal(replace(ours, value=ours.value * scale), theirs)
    if theirs is not None and theirs.half_unit is not None:  # a formula for a decimal
        number = symbolic.value(mine)
        return number is not None and abs(number) < 1e300 and near(Fraction(number) * scale, theirs)
    mine = mine if scale == 1 else f"\\frac{{{scale.numerator}}}{{{scale.denominator}}} \\cdot ({mine})"
    return symbolic.formulas_equal(mine, value)


def _tidy(text: str) -> str:
    """Without degree signs, but those of an argument of a function; a ratio 3:4 as the fraction it is."""
    radians = r"{(\1 \\cdot \\frac{\\pi}{180})}" if FUNCTION.search(text) else r"\1"
    text = re.sub(r"(\d+(?:\.\d+)?|[A-Za-z]|(?<=\}))\s*\\deg", radians, text).replace("\\deg", "").strip()
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
