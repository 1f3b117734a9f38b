# SPDX-License-Identifier: Apache-2.0
"""The rows of a benchmark: read from a file, checked, brought from other layouts into ours.

    {"id": "math500-17", "problem": "What is 1 + 1?", "answer": "2", "level": 1, "subject": "Algebra"}

`level` and `subject` may be absent; code sets have columns with their tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]


class HubError(Exception):
    """Why a data set cannot be had from the hub."""


@dataclass(frozen=True, slots=True)
class Hub:
    """A data set of the Hugging Face hub, and how a row of it becomes one of ours (given the row and its number)."""

    path: str
    config: str | None
    split: str
    convert: Callable[[Row, int], Row]

    def rows(self) -> list[Row]:
        """Its rows, brought from the hub or its cache, in our layout."""
        try:
            from datasets import load_dataset
        except ImportError as error:
            raise HubError("the package datasets is missing: pip install 'sparse-rl[data]'") from error
        try:
            loaded = list(load_dataset(self.path, self.config, split=self.split))
        except Exception as error:  # whatever the network, the hub or its cache may say
            raise HubError(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}") from error
        try:
            return [self.convert(row, number) for number, row in enumerate(loaded)]
        except KeyError as error:
            raise HubError(f"it has no column {error}") from error


def read_lines(path: Path) -> tuple[list[tuple[str, Any]], list[str]]:
    """The JSON values of a file, each with where it stands, and what is wrong with the other lines."""
    values: list[tuple[str, Any]] = []
    complaints = []
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return [], [f"byte {error.start} is not text in UTF-8"]
    for number, line in enumerate(text.split("\n"), start=1):  # other separators may stand inside a problem
        if not line.strip():
            continue
        try:
            values.append((f"line {number}", json.loads(line)))
        except (ValueError, RecursionError) as error:
            complaints.append(f"line {number} is not JSON ({error})")
    return values, complaints if values or complaints else ["it has no rows"]


def read_rows(path: Path, columns: tuple[str, ...] = ()) -> tuple[list[Row], list[str]]:
    """The rows of a JSONL file that are well, and what is wrong with the others, a sentence part each."""
    lines, not_json = read_lines(path)
    good, complaints = check_rows(lines, columns)
    return good, not_json + complaints


def check_rows(rows: Iterable[tuple[str, Any]], columns: tuple[str, ...] = ()) -> tuple[list[Row], list[str]]:
    """The rows that are well, ids and answers as strings, and what is wrong with the others.

    Each comes with where it stands. An answer may be empty; it may not be absent.
    """
    good: list[Row] = []
    complaints = []
    seen: dict[str, str] = {}
    for where, row in rows:
        if not isinstance(row, dict):
            complaints.append(f"{where} is not a JSON object")
        elif missing := [key for key in ("id", "problem", "answer", *columns) if key not in row]:
            complaints.append(f"{where} has no {', '.join(missing)}")
        elif not isinstance(row["problem"], str) or not row["problem"].strip():
            complaints.append(f"{where} has no problem that is a text")
        elif isinstance(row["answer"], bool) or not isinstance(row["answer"], str | int | float | None):
            complaints.append(f"{where} has the answer {str(row['answer'])[:40]!r}, which is neither text nor number")
        elif (name := str(row["id"])) in seen:
            complaints.append(f"{where} has the id {name!r} of {seen[name]}")
        else:
            seen[name] = where
            answer = "" if row["answer"] is None else str(row["answer"])
            good.append(row | {"id": name, "answer": answer})
    return good, complaints


def renamed(prefix: str, **columns: str) -> Callable[[Row, int], Row]:
    """A conversion from columns, ours="theirs"; ids are `prefix` with their id, or with the row's number if unnamed."""

    def convert(row: Row, number: int) -> Row:
        ours = {key: row[theirs] for key, theirs in columns.items()}
        answer = ours["answer"]
        if isinstance(answer, list):  # OlympiadBench: one string, or several answers
            answer = ",".join(map(str, answer))
        elif isinstance(answer, float) and answer.is_integer():
            answer = int(answer)
        return ours | {"id": f"{prefix}{ours.get('id', number)}", "answer": answer}

    return convert


def mbpp_text(row: Row) -> Row:
    """MBPP says the function's name only in its tests, so they belong to the problem."""
    return row | {"problem": f"{row['problem']}\nYour code must pass these tests:\n" + "\n".join(row["test_list"])}


def livecodebench_text(row: Row) -> Row:
    """How the program gets its input: through the starter code's function, or from stdin."""
    if row.get("starter_code"):
        more = f"Complete this code:\n```python\n{row['starter_code'].rstrip()}\n```"
    else:
        more = "Read the input from stdin and print the output to stdout."
    return row | {"problem": f"{row['problem']}\n\n{more}"}


def gaokao_subject(row: Row) -> Row:
    """The exam without the number of the question: 2023BJ.../01Q.en is 2023BJ..."""
    return row | {"subject": row["subject"].split("/")[0]} if row.get("subject") else row
