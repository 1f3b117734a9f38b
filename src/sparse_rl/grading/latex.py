# SPDX-License-Identifier: Apache-2.0
"""One spelling for each thing LaTeX spells in several ways, and the top-level parts of a formula.

All of it stays text: what a formula is worth is found in `numbers.py` and `symbolic.py`.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

UNICODE = {
    "\N{MINUS SIGN}": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": "/", "∞": r"\infty ",
    "π": r"\pi ", "θ": r"\theta ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ",
    "∈": r"\in ", "±": r"\pm ", "°": r"^\circ ", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}",
    "¾": r"\frac{3}{4}", "≈": r"\approx ", "∅": r"\emptyset ", "\u00a0": " ", "\u2009": " ", "\u202f": " ",
    "“": '"', "”": '"', "’": "'", "√": "sqrt ",
}  # fmt: skip
RAISED, LOWERED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+"), re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋ₙ]+")
POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
SCALES = {name: 10**power for name, power in POWERS.items()} | {"dozen": 12}
SCALED = re.compile(
    rf"(?<![\w.,^{{])(\d[\d,]*(?:\.\d+)?)\s*(\\text\{{)?\s*({'|'.join(SCALES)})s?(?![A-Za-z])", re.IGNORECASE
)
COUNTED = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen", "twenty",
]  # fmt: skip

# (pattern, replacement) in order; commands end where no letter follows.
RULES = [
    (r"\\\\\s*\[[\d.]+ ?(?:pt|em|ex|mm|cm)\]", r"\\\\"),  # the space between rows
    (r"\\(?:left|right|[bB]igg?[lrm]?|displaystyle|textstyle|limits|nonumber|mathstrut|hfill)(?![A-Za-z])\.?", ""),
    (r"(?<=\d)(?:\{,\}|,\\! *|\\!, *|\\,)(?=\d{3}(?!\d))", ""),  # thousands: 10{,}000, 10,\!000, 10\,000
    (r"(?<!\\)\\[!/]|\{\}", ""),
    (r"(?<!\\)\\[,;: >]|\\(?:quad|qquad|enspace|thinspace|hspace\*?\{[^{}]*\})(?![A-Za-z])|~|&nbsp;", " "),
    (r"(?<!\\)\\[\[\]()]", " "),
    (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
    (r"\\[dt]binom(?![A-Za-z])", r"\\binom"),
    (r"\{([^{}]*)\\choose(?![A-Za-z])([^{}]*)\}", r"\\binom{\1}{\2}"),
    (r"^\s*(?:minus|negative)\s+(?=[\d.\\])", "-"),
    (r"\\(?:leqslant|leqq|leq)(?![A-Za-z])", r"\\le "),
    (r"\\(?:geqslant|geqq|geq)(?![A-Za-z])", r"\\ge "),
    (r"\\neq(?![A-Za-z])", r"\\ne "),
    (r"\\lt(?![A-Za-z])", "<"),
    (r"\\gt(?![A-Za-z])", ">"),
    (r"<=", r"\\le "),
    (r">=", r"\\ge "),
    (r"\\(?:text)?color\s*\{[A-Za-z]*\}|\\+$", ""),
    (r"(?<=[A-Za-z)])'|\^\s*\\prime(?![A-Za-z])", r"^{\\prime}"),
    (r"\\langle(?![A-Za-z])", "("),
    (r"\\rangle(?![A-Za-z])", ")"),
    (r"\\(?:lbrace)(?![A-Za-z])", r"\\{"),
    (r"\\(?:rbrace)(?![A-Za-z])", r"\\}"),
    (r"\\(?:mid|vert)(?![A-Za-z])", "|"),
    (r"\\(?:bmod|mod)(?![A-Za-z])", r" \\mod "),
    (r"\\(?:varnothing)(?![A-Za-z])", r"\\emptyset "),
    (r"\\(?:mathrm|mathbf|mathit|textbf|textit|textrm|textnormal|textsf|mbox|hbox|operatorname\*?|rm|bf)(?=\s*\{)",
     r"\\text"),
    (r"\\text\s*\{", r"\\text{"),
    (r"\\text\{([ie])\}", r" \1 "),
    (r"(?<![A-Za-z])([A-Z]),? (?:and|or) (?=[A-Z](?![A-Za-z]))", r"\1, "),
    (r"\\text\{([^{}]*)\^\{(-?\d)\}([^{}]*)\}", r"\\text{\1^\2\3}"),
    (r"\{\\(?:rm|bf|it)\s+([^{}]*)\}", r"\\text{\1}"),
    (r"\^\s*\{\s*\\circ\s*\}|\^\s*\\circ(?![A-Za-z])|\\degree(?![A-Za-z])", r"\\deg "),
    (r"\bnp\.|\bmath\.|\bsympy\.", ""),
    (r"\\deg\s*(?:\\text\{\s*([CF])\s*\}|([CF])(?![A-Za-z]))", r"\\text{ degrees \1\2}"),
    (r"(?<=\d)\s*(?:\\text\{\s*per ?cent\s*\}|per ?cent(?![A-Za-z]))", "%"),
    (r"\\(mathbb|bar|overline|vec) ([A-Za-z\d])(?![A-Za-z])", r"\\\1{\2}"),
    (r"(?<![\\A-Za-z])sqrt\s*(\d+(?:\.\d+)?)", r"\\sqrt{\1}"),
    (r"(?<![\\A-Za-z])(arc(?:sin|cos|tan)|sin|cos|tan|ln|log|exp|sqrt|pi|infinity|infty)(?![A-Za-z])", r"\\\1"),
    (r"\\infinity", r"\\infty"),
    (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
    (r"\\sqrt\s*([0-9A-Za-z])", r"\\sqrt{\1}"),
    (r"\\sqrt\s+(?=[{\[])", r"\\sqrt"),
    (r"\\frac\s*([0-9A-Za-z])\s*([0-9A-Za-z])", r"\\frac{\1}{\2}"),
    (r"\\frac\s*([0-9A-Za-z])\s*\{", r"\\frac{\1}{"),
    (r"\\frac\s+\{", r"\\frac{"),
    (r"\\frac\s*(\{[^{}]*\})\s*([0-9A-Za-z])", r"\\frac\1{\2}"),
    (r"\\frac\s*(\{(?:[^{}]|\{[^{}]*\})*\})\s*\{", r"\\frac\1{"),
    (r"(?<!\*)\*\*(?!\*)", "^"),
    (r"\+\s*\\infty", r"\\infty"),
]  # fmt: skip
COMPILED = [(re.compile(pattern), replacement) for pattern, replacement in RULES]
TRAILING = re.compile(r"[\s.,;:]+$")
# k\pi, k \in Z: that a letter stands for any integer may go without saying
WHOLE = re.compile(r"[,;(]\s*([a-z])\s*\\in\s*(?:\\mathbb\{Z\}|\\text\{Z\}|Z)\s*\)?$")
SIGNS = {"": "", "minus": "-", "negative": "-"}
OPEN, CLOSE = "([{", ")]}"
TOKEN = re.compile(r"\\[A-Za-z]+|\\.|.", re.DOTALL)


def normalise(text: str) -> str:
    """The text in one spelling; spaces are kept as single ones, since units and words need them."""
    text = text.strip("* \n\t")  # bold
    if re.fullmatch(r"-?\\?\$ ?[\d.,]+", text):
        text = text.replace("\\", "").replace("$", "") + "\\text{ dollars}"
    text = RAISED.sub(lambda run: "^{" + unicodedata.normalize("NFKC", run.group()) + "}", text)
    text = LOWERED.sub(lambda run: "_{" + unicodedata.normalize("NFKC", run.group()) + "}", text)
    for char, spelling in UNICODE.items():
        text = text.replace(char, spelling)
    text = text.replace("\\$", "").replace("$", "").replace("\\%", "%")
    for pattern, replacement in COMPILED:
        text = pattern.sub(replacement, text)
    text = SCALED.sub(_scaled, text)
    text = re.sub(r"\\text\{\s*(?:,?\s*(?:and|or)|,)\s*\}", ", ", text)
    text = re.sub(r"(?<![A-Za-z\\{]),?\s+(?:and|or)\s+(?![A-Za-z]+\s[A-Za-z]+)", ", ", text)
    text = re.sub(r"^\s*\\text\{[^{}]*(?:\bis|\bare|:|=)\s*\}(?=.)", "", text)
    text = re.sub(r"^\s*(?:\\approx|\\simeq|\\therefore|=|approximately|about)(?![A-Za-z])", "", text)
    text = TRAILING.sub("", " ".join(text.split()))
    whole = WHOLE.search(text)
    if whole and re.search(rf"(?<![A-Za-z\\]){whole[1]}(?![A-Za-z])", text[: whole.start()]):
        text = text[: whole.start()].strip()
    sign, _, word = plain_text(text).casefold().rpartition(" ")
    return f"{SIGNS[sign]}{COUNTED.index(word)}" if word in COUNTED and sign in SIGNS else text


def _scaled(match: re.Match[str]) -> str:
    """5 million as 5000000."""
    value = Fraction(match[1].replace(",", "")) * SCALES[match[3].lower()]
    return f"{value if value.denominator == 1 else float(value)}{match[2] or ''}"


def squeezed(text: str) -> str:
    """Without spaces but those that end a command before a letter or part two numbers: what is compared as text."""
    text = re.sub(r"(\\[A-Za-z]+(?= [A-Za-z])|\d(?= \d)) ", "\\1\0", text).replace(" ", "").replace("\0", " ")
    # ^{2} and ^2, _{0} and _0 are the same
    return re.sub(r"([\^_])\{([0-9A-Za-z])\}", r"\1\2", text)


def plain_text(text: str) -> str:
    """With \\text{...} replaced by its content."""
    return " ".join(re.sub(r"\\text\{([^{}]*)\}", r" \1 ", text).split())


def cuts(text: str, separators: tuple[str, ...]) -> list[re.Match[str]]:
    """Where separators (commands or single characters) stand in no bracket and no environment."""
    found, depth = [], 0
    for match in TOKEN.finditer(text):
        token = match.group()
        if depth == 0 and token in separators:
            found.append(match)
        elif token in OPEN or token in ("\\{", "\\begin", "\\lfloor", "\\lceil"):
            depth += 1
        elif token in CLOSE or token in ("\\}", "\\end", "\\rfloor", "\\rceil"):
            depth -= 1
    return found


def split(text: str, separators: tuple[str, ...]) -> list[str]:
    """The parts between the separators."""
    found = cuts(text, separators)
    starts = [0, *(match.end() for match in found)]
    ends = [*(match.start() for match in found), len(text)]
    return [text[start:end].strip() for start, end in zip(starts, ends, strict=True)]


def wrapped(text: str) -> tuple[str, str, str] | None:
    """(opening bracket, inside, closing bracket) if one pair of brackets holds the whole text; [1, 2) counts as one."""
    first = TOKEN.match(text)
    if first is None or first.group() not in ("(", "[", "\\{", "{"):
        return None
    depth = 0
    for match in TOKEN.finditer(text):
        token = match.group()
        if token in OPEN or token == "\\{":
            depth += 1
        elif token in CLOSE or token == "\\}":
            depth -= 1
            if depth == 0:
                whole = match.end() == len(text)
                return (first.group(), text[first.end() : match.start()].strip(), token) if whole else None
    return None
