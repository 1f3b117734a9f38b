# SPDX-License-Identifier: Apache-2.0
"""Numbers as people write them, exactly: 1,234.50, -3/4, 2\\frac{5}{8}, 2.88e16, 4.5 \\times 10^{33}, 62.5%.

Roots, letters and sums are `symbolic.py`'s, units `units.py`'s.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

DIGITS = r"\d{1,60}"
PLAIN = re.compile(
    rf"([-+]?)({DIGITS}(?:\.\d{{0,60}})?|\.{DIGITS})"
    r"(?:[eE]([-+]?\d{1,3})|(?:\\times|\\cdot|\*)10\^(?:\{([-+]?\d{1,3})\}|(\d)))?"
)
POWER_OF_TEN = re.compile(r"([-+]?)10\^(?:\{([-+]?\d{1,3})\}|(\d))")
RATIO = re.compile(rf"([-+]?)(?:\\frac\{{([-+]?{DIGITS}\.?\d*)\}}\{{([-+]?{DIGITS}\.?\d*)\}}|({DIGITS}\.?)/({DIGITS}))")
MIXED = re.compile(rf"([-+]?)({DIGITS})(?: ?\\frac\{{({DIGITS})\}}\{{({DIGITS})\}}| ({DIGITS})/({DIGITS}))")
# 12,345 alone is one number; "100,200" may also be two, so the caller tries both.
THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3}(?:,\d{3})+)(?!\d|,\d)")
SEPARATED = re.compile(r"(?:\(|\[|\\\{)[^()\[\]{}]*(?:\)|\]|\\\})")  # the innermost brackets
REPEATING = re.compile(r"([-+]?)(\d{0,20})\.(\d{0,20})\\(?:overline|bar)\{(\d{1,20})\}")


@dataclass(frozen=True, slots=True)
class Number:
    """Its value; for a decimal also half a unit of the last decimal it gives (else None); whether a % follows."""

    value: Fraction
    half_unit: Fraction | None = None
    percent: bool = False


def parse_number(text: str) -> Number | None:
    """The number that a normalised text is, None if it is anything else (or has more than 60 digits in a row)."""
    text = text.strip()
    percent = text.endswith("%")
    text = text.removesuffix("%").strip()
    if mixed := MIXED.fullmatch(text):
        sign, whole, *parts = mixed.groups()
        top, bottom = (Fraction(part) for part in parts if part)
        return Number(_signed(sign, int(whole) + top / bottom), None, percent) if bottom else None
    if re.search(r"\d \d", text) and not re.fullmatch(r"[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?", text):
        return None  # two numbers
    text = text.replace(" ", "")
    if plain := PLAIN.fullmatch(text):
        sign, digits, *exponents = plain.groups()
        exponent = next((int(value) for value in exponents if value), None)
        scale = Fraction(10) ** (exponent or 0)
        decimals = len(digits.partition(".")[2])
        written_as_decimal = "." in digits.rstrip(".") or exponent is not None
        half_unit = scale / 10**decimals / 2 if written_as_decimal else None
        return Number(_signed(sign, Fraction(digits.rstrip(".")) * scale), half_unit, percent)
    if repeating := REPEATING.fullmatch(text):
        sign, whole, fixed, period = repeating.groups()
        value = Fraction(int(whole + fixed + period) - int(whole + fixed or 0), 10 ** len(period) - 1)
        return Number(_signed(sign, value / 10 ** len(fixed)), None, percent)
    if power := POWER_OF_TEN.fullmatch(text):
        sign, braced, digit = power.groups()
        return Number(_signed(sign, Fraction(10) ** int(braced or digit)), None, percent)
    if ratio := RATIO.fullmatch(text):
        sign, *parts = ratio.groups()
        top, bottom = (Fraction(part.rstrip(".")) for part in parts if part)
        return Number(_signed(sign, top / bottom), None, percent) if bottom else None
    return None


def without_thousands(text: str) -> str:
    """With commas between thousands taken out; in brackets some comma has to stay, since (20,100) is a pair."""

    def inside(match: re.Match[str]) -> str:
        joined = _joined(match.group())
        return joined if "," in joined else match.group().replace(",", ", ")

    return _joined(SEPARATED.sub(inside, text))


def _joined(text: str) -> str:
    return THOUSANDS.sub(lambda match: match.group().replace(",", ""), text)


def numbers_equal(given: Number, right: Number) -> bool:
    """The same value, or as near as a right answer that is a decimal allows; 64% is 64 and 0.64."""
    if given.percent == right.percent:
        same = given.value == right.value
    else:
        percent, number = (given.value, right.value) if given.percent else (right.value, given.value)
        same = number in (percent, percent / 100)
    if same:
        return True
    return right.half_unit is not None and near(given.value, right)


def near(value: Fraction, right: Number) -> bool:
    """Equal to the decimals that the right answer gives, and to 1e-4 of it."""
    # 1e-4 is what the evaluation code behind the papers' Minerva numbers allows. On its own it would take 1204.55 for
    # 1204.5; half a unit on its own would take 1.46 for 1.5.
    assert right.half_unit is not None
    return abs(value - right.value) < min(right.half_unit, abs(right.value) / 10_000)


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign == "-" else value
