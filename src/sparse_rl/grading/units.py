# SPDX-License-Identifier: Apache-2.0
"""Units behind an answer: which text is a unit, what it measures, and how many of the base unit it is.

5 m and 500 cm are equal, 5 m and 5 cm are not, 5 and 5 m may be: a missing unit contradicts nothing. Words that are no
unit ("18 ways") say nothing either.

What the value before it is worth is found in `numbers.py` and `symbolic.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from sparse_rl.grading.latex import COUNTED, SCALES

# dimension: {names: size}; a name's plural with s is understood
TABLE: dict[str, dict[str, str]] = {
    "length": {
        "m meter metre": "1", "mm millimeter millimetre": "1/1000", "cm centimeter centimetre": "1/100",
        "dm decimeter decimetre": "1/10", "km kilometer kilometre": "1000", "inch inches in": "127/5000",
        "ft foot feet": "381/1250", "yd yard": "1143/1250", "mi mile": "201168/125", "nm nanometer": "1/1000000000",
    },
    "time": {
        "s sec second": "1", "min minute": "60", "h hr hour": "3600", "day": "86400", "week": "604800", "ms": "1/1000",
        "month": "2629746", "year yr": "31556952",
    },
    "mass": {
        "g gm gram": "1", "mg milligram": "1/1000", "kg kilogram": "1000", "lb pound": "45359237/100000",
        "oz ounce": "45359237/1600000", "ton tonne": "1000000",
    },
    "money": {"dollar usd buck": "1", "cent": "1/100"},
    "euro": {"euro eur": "1"},
    "rupee": {"rupee rs inr": "1"},
    "angle": {"deg degree": "1"},
    "radian": {"rad radian": "1"},
    "energy": {"j joule": "1", "kj kilojoule": "1000"},
    "electronvolt": {"ev": "1", "kev": "1000"},
    "power": {"w watt": "1", "kw kilowatt": "1000", "mw": "1000000"},
    "force": {"n newton": "1", "kn": "1000"},
    "frequency": {"hz hertz": "1", "khz": "1000", "mhz": "1000000"},
    "kelvin": {"k kelvin": "1"},
    "celsius": {"celsius centigrade": "1"},
    "fahrenheit": {"fahrenheit": "1"},
    "unit": {"unit": "1"},
    "charge": {"coulomb": "1"},
    "voltage": {"v volt": "1"},
    "amount": {"mol mole": "1"},
}  # fmt: skip
COMPOUND = {
    "mph": "mile/hour", "kmph": "km/h", "kmh": "km/h", "kph": "km/h", "cc": "cm^3",
    "l": "dm^3", "liter": "dm^3", "litre": "dm^3", "ml": "cm^3", "milliliter": "cm^3",
}  # fmt: skip
# Words that say more than what is counted: "5 or more", "3 over two", "7 tenths" are not 5, 3 and 7.
NO_NOUN = re.compile(
    rf"(?:{'|'.join([*COUNTED, *SCALES])}|and|or|plus|minus|over|divided|less|than|least|most|not|except|but|negative|"
    r"squared|cubed|half|halves|quarter|third|fourth|(?:fif|six|seven|eigh|nin|ten|hundred|thousand|million)th|thirty|"
    r"forty|fifty|sixty|seventy|eighty|ninety|root|factorial|mod|modulo|to|approximately|infinity|pi)s?",
    re.IGNORECASE,
)
AREA = {"acre": Fraction(40468564224, 10**7), "hectare": Fraction(10_000)}


@dataclass(frozen=True, slots=True)
class Unit:
    """What it measures, as (dimension, power) pairs, and its size."""

    dimensions: tuple[tuple[str, int], ...]
    size: Fraction


def _names() -> dict[str, Unit]:
    return {
        name: Unit(((dimension, 1),), Fraction(size))
        for dimension, names in TABLE.items()
        for spellings, size in names.items()
        for name in spellings.split()
    }


NAMES = _names()
WORD = re.compile(r"([A-Za-z]+)\.?|\^?\{?(-?[1-9])\}?|(/)")
LONG = "|".join(sorted((n for n in [*NAMES, *COMPOUND, *AREA] if len(n) > 1 and n != "in"), key=len, reverse=True))
LONGEST = 300  # characters of an answer that may have a unit; the patterns take the square of it
POWER = r"(?:\^\{?-?\d\}?)?"
BARE_WORD = rf"(?:square|sq|cubic|cu|units?|{LONG})(?:e?s)?\.?{POWER}"
BARE_NEXT = rf"\s*(?:/|per|\\cdot|\s)\s*(?:{BARE_WORD}|[a-z]\b)"
TEXT = rf"\\text\{{(?:[^{{}}\d=<>+*,;:|^]|\^-?\d)*\}}{POWER}"  # \text{ or 6} is no unit
# what stands before \text{...}; before known words; a number before any words; before a letter; a formula before one
IN_TEXT = re.compile(rf"(?P<value>.*[^\s+\-*/=<>(,\[{{^_])\s*(?P<unit>{TEXT}(?:{TEXT}|\s|/|\\cdot)*)")
BARE = re.compile(
    rf"(?P<value>.*?[\d}})%\]a-z])(?:(?<![A-Za-z])\s*|\s+)(?P<unit>{BARE_WORD}(?:{BARE_NEXT})*)", re.IGNORECASE
)
AFTER_NUMBER = re.compile(r"(?P<value>[-+]?[\d.,/]+%?|.*\\deg)\s+(?P<unit>[A-Za-z]{2,}(?:[.\s/-]+[A-Za-z]{2,})*[.\s]*)")
NUMBER_AND_LETTER = re.compile(rf"(?P<value>-?\d+(?:\.\d+)?)\s+(?P<unit>[mgshL](?:/[a-z]{POWER})?)")
ONE_LETTER = re.compile(rf"(?P<value>.*[\d}})])\s+(?P<unit>(?P<letter>[mgshLKNJWVCA]){POWER}(?:/[a-z]{POWER})?)")


def split_unit(text: str, variables: str | None = None) -> tuple[str, str]:
    """(value, unit as text) of a normalised answer; the unit is empty where there is none.

    A letter behind a formula ("\\sqrt{2} m") is a unit only if `variables`, the letters of the right answer, lack it.
    """
    if len(text) > LONGEST:
        return text, ""
    if text.endswith("\\deg") and "\\" not in text.removesuffix("\\deg"):
        return text.removesuffix("\\deg").strip(), "deg"
    for pattern in (IN_TEXT, BARE, AFTER_NUMBER, NUMBER_AND_LETTER):
        if match := pattern.fullmatch(text):
            words = re.findall(r"(?<!\\)[A-Za-z]+", match["unit"])
            none = any(map(NO_NOUN.fullmatch, words)) or words[-1] in ("x", "y", "z")
            return (text, "") if none else (match["value"].strip(), match["unit"])
    if variables is not None and (match := ONE_LETTER.fullmatch(text)) and match["letter"] not in variables:
        return match["value"].strip(), match["unit"]
    return text, ""


def parse_unit(text: str) -> Unit | None:
    """The unit a text is, None if any word of it is none."""
    text = re.sub(r"\\text\{([^{}]*)\}", r"\1 ", text).replace("\\cdot", " ").strip()
    powers: dict[str, int] = {}
    size, sign, exponent_of_next = Fraction(1), 1, 1
    last: Unit | None = None
    for match in WORD.finditer(text):
        word, exponent, over = match.groups()
        if over or word == "per":
            sign, last = -1, None
        elif word:
            lower = word.lower()
            if lower in ("square", "sq", "cubic", "cu"):
                exponent_of_next = 2 if lower.startswith("s") else 3
                continue
            last = _named({"c": "celsius", "f": "fahrenheit"}.get(lower, lower) if "angle" in powers else lower)
            if last is None:
                return None
            size *= last.size ** (sign * exponent_of_next)
            for dimension, power in last.dimensions:
                powers[dimension] = powers.get(dimension, 0) + sign * exponent_of_next * power
            exponent_of_next = 1
        elif last is not None:
            size *= last.size ** (sign * (int(exponent) - 1))
            for dimension, power in last.dimensions:
                powers[dimension] = powers.get(dimension, 0) + sign * (int(exponent) - 1) * power
    if "celsius" in powers or "fahrenheit" in powers:  # degrees of these are no angle
        powers.pop("angle", None)
    dimensions = tuple(sorted((dimension, power) for dimension, power in powers.items() if power))
    return Unit(dimensions, size) if dimensions else None


def factor(given: str, right: str) -> Fraction | None:
    """What turns the given value into one in the right unit; None where the units contradict each other."""
    mine, theirs = parse_unit(given), parse_unit(right)
    if mine is None or theirs is None:
        return Fraction(1)
    kinds = {mine.dimensions, theirs.dimensions}
    if len(kinds) == 1:
        return mine.size / theirs.size
    vague = _is_vague(mine, theirs) or _is_vague(theirs, mine)
    return Fraction(1) if vague else None


def _is_vague(one: Unit, other: Unit) -> bool:
    """Degrees may be those of a temperature, units those of anything, square units those of an area."""
    (name, power), *more = one.dimensions
    if more or name not in ("angle", "unit"):
        return False
    if name == "angle":
        return other.dimensions in ((("celsius", 1),), (("fahrenheit", 1),))
    return power == 1 or other.dimensions == (("length", power),)


def _named(word: str) -> Unit | None:
    for name in (word, word.removesuffix("s"), word.removesuffix("es")):
        if name in NAMES:
            return NAMES[name]
        if name in COMPOUND:
            return parse_unit(COMPOUND[name])
        if name in AREA:
            return Unit((("length", 2),), AREA[name])
    return None
