# SPDX-License-Identifier: Apache-2.0
"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]], align: str = "") -> str:
    """Its lines, without an end of the last; `align` has a letter a column, r for right, without it all are left."""
    rule = ["---:" if letter == "r" else "---" for letter in align or "l" * len(head)]
    lines = [[cell.replace("|", r"\|") for cell in line] for line in (head, rule, *rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
