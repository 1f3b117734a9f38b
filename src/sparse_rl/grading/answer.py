# SPDX-License-Identifier: Apache-2.0
"""Where the final answer stands in a completion: the last \\boxed, else what follows "answer is", else the last number.

Every search runs in time linear in the text: the text is the model's, and may be 100 kB of anything.
"""

from __future__ import annotations

import re

BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
ANNOUNCED = re.compile(r"(?:\banswer(?:\*\*)? ?(?:is|:|=|to the (?:problem|question) is)|####)", re.IGNORECASE)
# A sentence ends at a line's end, or at a full stop before a space; in braces, as of \text{ sq. units}, it does not.
SENTENCE = re.compile(r"\\.|[{}]|(?P<end>\n|\.(?=\s|$|\*|\\\))|[!?](?=\s|$))")
# Sign, whole part, decimals, denominator. A minus after a digit or a word ("10-4") is no sign; a 2 in "CO2" no number.
NUMBER = re.compile(
    r"(?<!\w)([-+]?)\$?((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?)((?<=\d)(?:\.\d+)?|\.\d+)((?:/\d+|[eE][-+]?\d{1,3}(?!\w))?)",
    re.ASCII,
)

FILLER = re.compile(
    r"\A(?:\*{0,2}(?:therefore|thus|hence|then|so|simply|just|indeed|exactly|equal to|given by)\b[\s,:]*)+"
)
WORD = re.compile(r"(?<![\\A-Za-z_])[A-Za-z]{2,}(?![A-Za-z])")
IN_TEXT = re.compile(r"\\[A-Za-z]+\s*\{[^{}]*\}")
FORMULA = re.compile(r"\$([^$]+)\$")


def final_answer(text: str) -> str | None:
    """The answer as written, without box, dollar signs and full stop; None if the text has none."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    announced = after_answer_is(text)
    return announced if announced else last_number(text)


def last_boxed(text: str) -> str | None:
    """What stands in the last whole \\boxed{...} or \\fbox{...}, or after a \\boxed without braces; else None."""
    boxes = [match.end() for match in BOX.finditer(text)]
    if not boxes:
        return None
    # An unclosed box at the end, of a completion that was cut, hides no whole one before it: look at the last two.
    for start in reversed(boxes[-2:]):
        rest = text[start:].lstrip()
        if not rest.startswith("{"):
            bare = re.match(r"[^\s$.,;]+(?:\.\d+)?", rest)
            return bare.group() if bare else None
        inside = balanced(rest)
        if inside is not None:
            return inside
    return None


def balanced(text: str) -> str | None:
    """What stands between the brace that opens the text and the one that closes it; \\{ and \\} count for nothing."""
    depth = 0
    for match in re.finditer(r"\\.|[{}]", text, re.DOTALL):
        depth += {"{": 1, "}": -1}.get(match.group(), 0)
        if depth == 0 and match.group() == "}":
            return text[1 : match.start()]
    return None


def after_answer_is(text: str) -> str | None:
    """What follows the last "answer is", "answer:" or "####", up to the sentence's end; None if nothing does."""
    found = None
    for found in ANNOUNCED.finditer(text):  # noqa: B007 - the last one is wanted
        pass
    if found is None:
        return None
    rest = text[found.end() :].lstrip(" \t\n:*")
    if rest.startswith("\\[") or rest.startswith("$$"):  # a displayed formula: its line breaks end nothing
        close = rest.find("\\]" if rest.startswith("\\[") else "$$", 2)
        rest = rest[2:close] if close >= 0 else rest[2:]
        return rest.strip().rstrip(".,") or None
    depth, end = 0, len(rest)
    for match in SENTENCE.finditer(rest):
        depth = max(0, depth + {"{": 1, "}": -1}.get(match.group(), 0))
        if match["end"] and depth == 0:
            end = match.start()
            break
    return _without_prose(FILLER.sub("", rest[:end].strip()).strip().strip("*").strip()) or None


def _without_prose(sentence: str) -> str:
    """The formula or number of a sentence with more than three words: the first if it opens with one, else the last."""
    if len(WORD.findall(IN_TEXT.sub("", sentence))) <= 3:
        return sentence
    formulas = [formula for formula in FORMULA.findall(sentence) if not WORD.search(IN_TEXT.sub("", formula))]
    if formulas:
        return formulas[0] if sentence.startswith("$" + formulas[0]) else formulas[-1]
    opening = NUMBER.match(sentence)
    return opening.group() if opening else last_number(sentence) or sentence


def last_number(text: str) -> str | None:
    """The last number of a text, without dollar sign and commas, or None: "so she pays $1,200.50." gives 1200.50."""
    found = NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    if not found:
        return None
    sign, whole, decimals, denominator = found[-1]
    return f"{sign}{whole.replace(',', '') or '0'}{decimals}{denominator}"
