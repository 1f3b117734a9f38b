# SPDX-License-Identifier: Apache-2.0
"""The rows of a benchmark: read from a file, checked, brought from other layouts into ours.

    {"id": "math500-17", "problem": "What is 1 + 1?", "answer": "2", "level": 1, "subject": "Algebra"}

`level` and `subject` may be absent; code sets have columns with their tests.

Which benchmarks there are is in `benchmarks.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparse_rl.tasks.countdown import Countdown
from sparse_rl.tasks.files import HUB, Row, read_table, read_text, scan_lines

Problem = dict[str, Any]
Check = Callable[[Problem], str | None]  # what is wrong with a row
MAY_BE_EMPTY = ("plus_input",)  # a task of MBPP+ has none


@dataclass(frozen=True, slots=True)
class Hub:
    """A data set of the Hugging Face hub, and how a row of it becomes one of ours (given the row and its number)."""

    path: str
    config: str | None
    split: str
    convert: Callable[[Problem, int], Problem]

    def rows(self) -> list[Row]:
        """Its rows, brought from the hub or its cache, in our layout."""
        source = HUB + ":".join(filter(None, (self.path, self.config, self.split)))
        rows = read_table(source).rows
        try:
            return [Row(row.where, self.convert(row.columns, number)) for number, row in enumerate(rows)]
        except KeyError as error:
            raise ValueError(f"{source} has no column {error}") from error


def read_lines(path: Path) -> tuple[list[Row], list[str]]:
    """The rows of a JSONL file, and what is wrong with its other lines."""
    try:
        found = list(scan_lines(read_text(path.read_bytes(), path.name)))
    except OSError as error:
        return [], [f"it cannot be read ({error.strerror})"]
    except ValueError as error:
        return [], [str(error)]
    rows = [Row(where, value) for where, value in found if isinstance(value, dict)]
    wrong = [f"{where} {value}" for where, value in found if isinstance(value, ValueError)]
    return rows, wrong if found else ["it has no rows"]


def row_check(reward: str) -> Check | None:
    """What the reward of a name says of the columns it needs, where it has some; it need not be able to grade here."""
    if reward == "countdown":
        return Countdown().check
    if reward == "code":
        from sparse_rl.grading.code import CodeReward
        from sparse_rl.sandbox.process import Limits, Sandbox

        return CodeReward(Sandbox(None, Limits()), 1).check  # runs nothing
    return None


def check_rows(
    rows: Iterable[Row], columns: tuple[str, ...] = (), check: Check | None = None
) -> tuple[list[Problem], list[str]]:
    """The rows that are well, ids and answers as strings, and what is wrong with the others.

    An answer may be empty; it may not be absent. The `columns` are there, not empty, and `check` finds nothing wrong.
    """
    good: list[Problem] = []
    complaints = []
    seen: dict[str, str] = {}
    for row in rows:
        where, problem = row.where, row.columns
        if missing := [key for key in ("id", "problem", "answer", *columns) if key not in problem]:
            complaints.append(f"{where} has no {', '.join(missing)}")
        elif empty := [key for key in columns if problem[key] in (None, "", []) and key not in MAY_BE_EMPTY]:
            complaints.append(f"{where} has nothing in {', '.join(empty)}")
        elif wrong := check(problem) if check else None:
            complaints.append(f"{where} {wrong}")
        elif not isinstance(problem["problem"], str) or not problem["problem"].strip():
            complaints.append(f"{where} has no problem that is a text")
        elif isinstance(answer := problem["answer"], bool) or not isinstance(answer, str | int | float | None):
            complaints.append(f"{where} has the answer {str(answer)[:40]!r}, which is neither text nor number")
        elif (name := str(problem["id"])) in seen:
            complaints.append(f"{where} has the id {name!r} of {seen[name]}")
        else:
            seen[name] = where
            good.append(problem | {"id": name, "answer": "" if answer is None else str(answer)})
    return good, complaints


def renamed(prefix: str, **columns: str) -> Callable[[Problem, int], Problem]:
    """A conversion from columns, ours="theirs"; ids are `prefix` with their id, or with the row's number if unnamed."""

    def convert(row: Problem, number: int) -> Problem:
        ours = {key: row[theirs] for key, theirs in columns.items()}
        answer = ours["answer"]
        if isinstance(answer, list):  # OlympiadBench: one string, or several answers
            answer = ",".join(map(str, answer))
        elif isinstance(answer, float) and answer.is_integer():
            answer = int(answer)
        return ours | {"id": f"{prefix}{ours.get('id', number)}", "answer": answer}

    return convert


def mbpp_text(row: Problem) -> Problem:
    """MBPP says the function's name only in its tests, so they belong to the problem."""
    return row | {"problem": f"{row['problem']}\nYour code must pass these tests:\n" + "\n".join(row["test_list"])}


def livecodebench_text(row: Problem) -> Problem:
    """How the program gets its input: through the starter code's function, or from stdin."""
    if row.get("starter_code"):
        more = f"Complete this code:\n```python\n{row['starter_code'].rstrip()}\n```"
    else:
        more = "Read the input from stdin and print the output to stdout."
    return row | {"problem": f"{row['problem']}\n\n{more}"}


def gaokao_subject(row: Problem) -> Problem:
    """The exam without the number of the question: 2023BJ.../01Q.en is 2023BJ..."""
    return row | {"subject": row["subject"].split("/")[0]} if row.get("subject") else row
