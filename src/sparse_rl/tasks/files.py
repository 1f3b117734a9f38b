# SPDX-License-Identifier: Apache-2.0
"""The rows of a dataset, wherever they lie, each with its place for errors.

rows.jsonl                    one JSON object a line
rows.json                     a list of JSON objects (or one a line)
rows.csv, rows.tsv            a header line, every value a text
rows.parquet                  needs the extra `data`, as the following do
folder                        what datasets' save_to_disk wrote
hub:openai/gsm8k:main:train   a dataset of the hub: hub:NAME, hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT

What the columns mean is in `layouts.py`.
"""

from __future__ import annotations

import csv
import hashlib
import importlib
import io
import json
import reprlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparse_rl.specs import first_line, unique

HUB = "hub:"
SEPARATORS = {".csv": ",", ".tsv": "\t"}
INSTALL = "pip install 'sparse-rl[data]'"


@dataclass(frozen=True, slots=True)
class Row:
    """Row("line 3 of train.jsonl", {"prompt": "2+2=", "answer": "4"})"""

    where: str
    columns: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """At least one row, and the hash of what they were read from (of themselves, for a dataset)."""

    name: str
    rows: list[Row]
    sha256: str


def read_table(source: str) -> Table:
    """The rows that a file, a folder or a name of the hub stands for; errors name the row."""
    if source.startswith(HUB):
        return _dataset_table(source, _from_hub(source))
    path = Path(source)
    if path.is_dir():
        return _dataset_table(source, _from_folder(path))
    content, suffix = path.read_bytes(), path.suffix.lower()
    if suffix == ".parquet":
        rows = _numbered(_from_parquet(content, source), source)
    elif suffix in SEPARATORS:
        rows = _from_csv(read_text(content, source), source, SEPARATORS[suffix])
    else:
        text = read_text(content, source)
        is_list = suffix == ".json" and text.lstrip().startswith("[")
        rows = _numbered(_parse_list(text, source), source) if is_list else parse_lines(text, source)
    return Table(source, rows, hashlib.sha256(content).hexdigest())


def read_text(content: bytes, name: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ValueError(f"line {line} of {name} is not text in UTF-8; convert it.") from error


def parse_lines(text: str, name: str) -> list[Row]:
    """JSON objects, one a line, each with its line's number."""
    rows = [_row(value, f"{line} of {name}") for line, value in scan_lines(text)]
    if not rows:
        raise ValueError(f"{name} has no rows; write one JSON object a line.")
    return rows


def scan_lines(text: str) -> Iterator[tuple[str, dict[str, Any] | ValueError]]:
    """Each line that is not blank: "line 3", and its JSON object or what is wrong with it."""
    for number, line in enumerate(text.split("\n"), start=1):  # other separators may stand inside a prompt
        if line.strip():
            yield f"line {number}", _object(_parse(line))


def _parse(text: str) -> Any:
    """What the JSON says, or why it is none."""
    try:
        return json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        return ValueError(f"is not JSON ({error})")


def _parse_list(text: str, name: str) -> Any:
    if isinstance(found := _parse(text), ValueError):
        raise ValueError(f"{name} {found}; mend it.") from found
    return found


def _object(value: Any) -> dict[str, Any] | ValueError:
    if isinstance(value, dict | ValueError):
        return value
    return ValueError(f"is {reprlib.repr(value)}; a row is an object with keys and values")


def _numbered(values: Iterable[Any], name: str) -> list[Row]:
    """Rows counted from 1."""
    rows = [_row(_object(value), f"row {i} of {name}") for i, value in enumerate(values, start=1)]
    if not rows:
        raise ValueError(f"{name} has no rows; choose another file.")
    return rows


def _row(value: dict[str, Any] | ValueError, where: str) -> Row:
    if isinstance(value, ValueError):
        raise ValueError(f"{where} {value}; mend or remove it.") from value
    return Row(where, value)


def _from_csv(text: str, name: str, separator: str) -> list[Row]:
    """Rows under a header, each with the number of the line it begins on; blank lines are none."""
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))  # a prompt may be long
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    header: list[str] = []
    rows: list[Row] = []
    while True:
        where = f"line {reader.line_num + 1} of {name}"
        try:
            values = next(reader, None)
        except csv.Error as error:
            raise ValueError(f"{where} cannot be read ({error}); mend it.") from error
        if values is None:
            break
        if values and not header:
            header = _header(values, where, separator)
        elif values and len(values) != len(header):
            count = f"{len(values)} value{'s' if len(values) > 1 else ''}"
            raise ValueError(
                f"{where} has {count}, and the header {len(header)}; mend it, or put quotes around a value with a "
                "separator in it."
            )
        elif values:
            rows.append(Row(where, dict(zip(header, values, strict=True))))
    if not rows:
        raise ValueError(f"{name} has no rows; write a header line, then a line a row.")
    return rows


def _header(values: list[str], where: str, separator: str) -> list[str]:
    """The names of the columns."""
    names = [value.strip() for value in values]
    if len(names) == 1 and ";" in names[0]:
        raise ValueError(
            f"{where}, the header, is {names[0]!r}; separate columns by {'commas' if separator == ',' else 'tabs'}."
        )
    if "" in names:
        raise ValueError(f"{where}, the header, has no name for column {names.index('') + 1}; name or remove it.")
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"{where}, the header, has two columns {twice!r}; rename or remove one.")
    return names


def _from_parquet(content: bytes, name: str) -> list[dict[str, Any]]:
    parquet, arrow = _optional("pyarrow.parquet", name), _optional("pyarrow", name)
    try:
        file = parquet.ParquetFile(arrow.BufferReader(content))
        columns = file.schema_arrow.names
        twice = next((column for column in columns if columns.count(column) > 1), None)
        rows: list[dict[str, Any]] = file.read().to_pylist() if twice is None else []
    except (arrow.ArrowException, OSError) as error:
        raise ValueError(f"{name} is not a parquet file ({first_line(error)}); convert it.") from error
    if twice is not None:
        raise ValueError(f"{name} has two columns {twice!r}; rename or remove one.")
    return rows


def _from_folder(path: Path) -> Any:
    if not any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        raise ValueError(f"{path} is a folder without a dataset that save_to_disk wrote; name a file.")
    datasets = _optional("datasets", str(path))
    found = datasets.load_from_disk(str(path))
    if isinstance(found, datasets.DatasetDict):
        choices = ", ".join(str(path / split) for split in found)
        raise ValueError(f"{path} has several splits; name one of {choices}.")
    return found


def _from_hub(source: str) -> Any:
    parts = source.removeprefix(HUB).split(":")
    if not all(parts) or len(parts) > 3:
        raise ValueError(f"{source!r} is not of the form hub:NAME, hub:NAME:SPLIT or hub:NAME:CONFIG:SPLIT.")
    name, config, split = parts[0], parts[1] if len(parts) == 3 else None, parts[-1] if len(parts) > 1 else "train"
    datasets = _optional("datasets", source)
    try:
        return datasets.load_dataset(name, config, split=split)
    except Exception as error:  # no network, no such name, a config that must be chosen
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ValueError(
            f"{source} cannot be read from the hub ({reason}); mend the name or the connection, or give a file."
        ) from error


def _dataset_table(source: str, dataset: Any) -> Table:
    rows = _numbered(dataset, source)
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(row.columns, sort_keys=True, default=str).encode())
    return Table(source, rows, digest.hexdigest())


def _optional(module: str, name: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{name} needs {module.partition('.')[0]} to be read; run: {INSTALL}") from error
