# SPDX-License-Identifier: Apache-2.0
"""The program in a completion. Text only: what a model wrote is never parsed here, since parsers can be crashed."""

from __future__ import annotations

import re
import textwrap
from itertools import zip_longest

_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*(\n?)", re.MULTILINE)  # no part of it can match in two ways
_PYTHON = ("python", "python3", "py", "python2")


def extract_program(completion: str) -> str:
    """The last block fenced as Python, else the last fenced block without a language, else the whole text."""
    fences = list(_FENCE.finditer(completion))
    pairs = zip_longest(fences[::2], fences[1::2])  # the last block may be cut off
    blocks = [
        (start[1].lower(), completion[start.end() : end.start() if end else None]) for start, end in pairs if start[2]
    ]
    for languages in (_PYTHON, ("",)):
        found = [body for language, body in blocks if language in languages]
        if found:
            return textwrap.dedent(found[-1])
    return completion


def complete(prompt: str, program: str, entry_point: str) -> str:
    """A program for a prompt that is itself code: after the prompt, which holds imports and helpers.

    A program that defines the function replaces the prompt's unfinished one; anything else is that function's body.
    """
    future = re.search(r"^from __future__ ", program, re.MULTILINE)  # has to come first in a file
    if future or not entry_point or not _defines(prompt, entry_point):
        return program
    if _defines(program, entry_point):
        return f"{prompt.rstrip()}\n    pass\n\n\n{program}"
    return f"{prompt.rstrip()}\n{_indented(program)}"


def _defines(program: str, name: str) -> bool:
    name = re.escape(name)
    pattern = rf"^(?:(?:async[ \t]+)?def|class)[ \t]+{name}\b|^{name}[ \t]*[:=]"
    return re.search(pattern, program, re.MULTILINE) is not None


def _indented(body: str) -> str:
    """A function's body, whether it came with its indentation, without, or without that of its first line."""
    first, *rest = [line for line in body.splitlines() if line.strip()] or [""]
    if first[:1].isspace():
        return body
    if rest and not first.rstrip().endswith(":") and all(line.startswith("    ") for line in rest):
        return "    " + body.lstrip()
    return textwrap.indent(body, "    ")
