# SPDX-License-Identifier: Apache-2.0
"""`sparse-rl data check`: which benchmarks are at hand, whether their files are well, what may be done with them.

Which there are is in tasks/benchmarks.py. Nothing is downloaded: `sparse-rl eval` does that.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparse_rl.cli.parsing import make_parser, parse

if TYPE_CHECKING:
    from sparse_rl.tasks.benchmarks import Benchmark, Found

USAGE = """usage: sparse-rl data check [--data-dir DIR]

  check   which benchmarks are at hand, what their licences restrict, and how to get the others
"""

DESCRIPTION = """Which benchmarks are at hand, what their licences restrict, and how to get the others.

A benchmark is the file DIR/NAME/test.jsonl, one JSON object a line:

  {"id": "math500-17", "problem": "What is 1 + 1?", "answer": "2", "level": 1, "subject": "Algebra"}

level and subject are optional; code sets have columns with their tests, which this command names. gsm8k and svamp are
in the package, lookup is generated, and where the Hugging Face hub has a set, `sparse-rl eval` reads it from there.
Every other *.jsonl of DIR's folders (training files) is read and counted too. Nothing is downloaded.

Exit status 0: what is there is well, whatever is missing; 1: a file is damaged (not JSON, keys missing or empty, an id
twice).

  sparse-rl data check
  sparse-rl data check --data-dir ~/data
"""


def run(arguments: list[str]) -> None:
    if arguments[:1] != ["check"]:
        if arguments[:1] and arguments[0] in ("-h", "--help"):
            print(USAGE, end="")
            return
        given = f"knows no {arguments[0]!r}" if arguments else "needs to know what to do"
        raise ValueError(f"data {given}; write `sparse-rl data check`.")
    parser = make_parser("data check", DESCRIPTION)
    parser.add_argument("--data-dir", type=str | None, default=None, help="folder with NAME/test.jsonl in it")
    data_dir = parse(parser, arguments[1:]).data_dir
    from sparse_rl.tasks.benchmarks import BENCHMARKS, look, shortened

    folder = Path(data_dir).expanduser() if data_dir is not None else None
    found = {name: look(benchmark, folder) for name, benchmark in BENCHMARKS.items()}
    table: list[tuple[str, ...]] = [("benchmark", "found", "rows", "licence", "restriction")]
    table += [_line(BENCHMARKS[name], each) for name, each in found.items()]
    _print_columns(table)
    complaints = {each.path: each.complaints for each in found.values() if each.path}
    if folder and (others := _other_files(folder, set(complaints))):
        print()
        _print_columns([("other file", "rows"), *((str(path), str(rows)) for path, (rows, _) in others.items())])
        complaints |= {path: wrong for path, (_, wrong) in others.items()}
    _print_list("cautions:", _cautions(BENCHMARKS, found))
    _print_missing([BENCHMARKS[name] for name, each in found.items() if each.where == "missing"])
    damage = [f"{path}: {wrong}" for path, each in complaints.items() for wrong in shortened(each)]
    _print_list("damaged; mend these files or fetch them again:", damage)
    if damage:
        sys.stdout.flush()
        sys.exit(1)


def _line(benchmark: Benchmark, found: Found) -> tuple[str, ...]:
    where = "damaged" if found.complaints else found.where
    rows = f"{len(found.rows) if found.where != 'missing' else '-'} / {benchmark.rows}"
    return benchmark.name, where, rows, benchmark.licence, benchmark.restriction or ""


def _other_files(folder: Path, known: set[Path]) -> dict[Path, tuple[int, tuple[str, ...]]]:
    """Rows and complaints of the JSONL files in the folder's folders that are no benchmark's; any layout will do."""
    from sparse_rl.tasks.benchmark_rows import check_rows, read_lines

    results = {}
    for path in sorted(set(folder.glob("*/*.jsonl")) - known):
        rows, complaints = read_lines(path)
        if any("problem" in row.columns for row in rows):
            complaints += check_rows(rows)[1]
        results[path] = len(rows), tuple(complaints)
    return results


def _cautions(benchmarks: dict[str, Benchmark], found: dict[str, Found]) -> list[str]:
    said = []
    for name, each in found.items():
        if each.where == "missing":
            continue
        if not each.complaints and len(each.rows) != benchmarks[name].rows:
            said.append(f"{name} has {len(each.rows)} rows here and {benchmarks[name].rows} as published.")
        if each.unanswered:
            said.append(f"{name}: {len(each.unanswered)} rows have no answer and are left out.")
        if caution := benchmarks[name].caution:
            said.append(f"{name}: {caution}.")
    return said


def _print_missing(benchmarks: list[Benchmark]) -> None:
    if not benchmarks:
        return
    print("\nmissing; write DIR/NAME/test.jsonl with id, problem, answer and these columns, and give --data-dir DIR.")
    print("Where the hub is named, `pip install 'sparse-rl[data]'` and a connection will do.\n")
    table = [("benchmark", "hub", "rows are those of", "more columns")]
    for each in benchmarks:
        table.append((each.name, each.hub.path if each.hub else "-", each.source, " ".join(each.columns)))
    _print_columns(table)


def _print_columns(rows: Sequence[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _print_list(title: str, items: list[str]) -> None:
    if items:
        print(f"\n{title}")
        print("\n".join(f"  {item}" for item in items))
