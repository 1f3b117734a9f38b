# SPDX-License-Identifier: Apache-2.0
"""Where the final answer stands: the last \\boxed, else the last <answer>, "answer is", or the last number.

Every search runs in time linear in the text: the text is the model's, and may be 100 kB of anything.

Whether the answer is right is `math.py`'s question.
"""

from __future__ import annotations

import re

from sparse_rl.grading.units import parse_unit

BOX = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])")
ANNOUNCED = re.compile(r"(?:\banswer(?:\*\*)? ?(?:is|:|=|to the (?:problem|question) is)|####)", re.IGNORECASE)
# A sentence ends at a line's end, a closing tag, a full stop before a space; not in braces, as of \text{ sq. units}.
SENTENCE = re.compile(r"\\.|[{}]|(?P<end>\n|</(?=[a-z])|\.(?=\s|$|\*|\\\))|[!?](?=\s|$))")
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
TAG, END_TAG = "<answer>", "</answer>"
BULLET = re.compile(r"\s*\n\s*[-*] +")
# Tom has 5; 18 because 3 * 6 = 18; 5 (five)
VERB = re.compile(
    r"(?<=\s)(?:is|are|was|were|has|have|had|gets?|needs?|pays?|costs?|takes?|makes?|equals?) (?=[-$\d\\])"
)
REASON = re.compile(r"(?<=\s)(?:because|since|which)(?=\s)")
REMARK = re.compile(r"(\$[^$]+\$|\S+)\s+\(([A-Za-z][^()$\\]{2,})\)")


def final_answer(text: str) -> str | None:
    """The answer as written, without box, dollar signs and full stop; None if the text has none."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed.strip()
    tagged = in_tags(text)
    return after_answer_is(tagged) or tagged_answer(tagged) or after_answer_is(text) or last_number(text)


def in_tags(text: str) -> str:
    """What stands in the last <answer>...</answer>, or after an <answer> that was cut; "" where there is none."""
    inside = text.rpartition(TAG)[2] if TAG in text else ""
    return inside.partition(END_TAG)[0].strip()


def tagged_answer(inside: str) -> str:
    """All of it, or the last line of prose."""
    last = inside.rpartition("\n")[2] if WORD.search(IN_TEXT.sub("", inside)) else inside
    return _without_prose(last.strip().rstrip(".").strip("*").strip())


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
    rest = text[found.end() :].lstrip(" \t:*")
    bullet = BULLET.match(rest)
    rest = rest[bullet.end() :] if bullet else rest.lstrip(" \t\n:*")
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
    """The formula or number of a sentence with more than three words: the first if it opens with one, else the last.

    With less it is what stands after a verb ("Tom has"), and before a reason or a remark in brackets.
    """
    if len(WORD.findall(IN_TEXT.sub("", sentence))) <= 3:
        reason = REASON.search(sentence)
        sentence = sentence[: reason.start()].rstrip(" ,") if reason else sentence
        sentence = VERB.split(sentence)[-1]
        remark = REMARK.fullmatch(sentence)
        said = remark is not None and not remark[2].startswith("mod") and parse_unit(remark[2]) is None
        return remark[1] if remark is not None and said else sentence
    formulas: list[str] = [
        formula for formula in FORMULA.findall(sentence) if not WORD.search(IN_TEXT.sub("", formula))
    ]
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
