# SPDX-License-Identifier: Apache-2.0
"""A measurement as JSON: what was run, where, by which code; one file holds several, one a label.

Nothing is timed here.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from sparse_rl.runfolder import write_json


def check(path: Path) -> None:
    """Raise if no record can be put into the file."""
    read(path)
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.touch()
        beside.unlink()
    except OSError as error:
        raise ValueError(f"--result {str(path)!r} cannot be written ({error.strerror}); name another file.") from error


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file, none if there is no such file."""
    if not path.exists():
        if not path.absolute().parent.is_dir():
            raise ValueError(f"--result {str(path)!r}: there is no folder {path.parent}; make it first.")
        return []
    if path.is_dir():
        raise ValueError(f"--result {str(path)!r} is a folder; name a file in it.")
    try:
        records = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"--result {str(path)!r} is not JSON ({error}); name another file.") from error
    if not isinstance(records, list) or not all(isinstance(r, dict) and "label" in r for r in records):
        raise ValueError(f"--result {str(path)!r} holds something else than measurements; name another file.")
    return records


def merge(path: Path, record: dict[str, Any]) -> None:
    """Put a record into the file, in the place of an earlier one with its label."""
    records, record = read(path), rounded(record)
    places = [i for i, known in enumerate(records) if known["label"] == record["label"]]
    if places:
        records[places[0]] = record
    else:
        records.append(record)
    write_json(path, records, remedy="name another file")


def rounded(value: Any) -> Any:
    """Floats with six digits, more is noise, and None for one that is no number."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    if not isinstance(value, float):
        return value
    return None if math.isnan(value) else float(f"{value:.6g}")
