# SPDX-License-Identifier: Apache-2.0
"""The same rows come out of every kind of file; whatever is wrong with one is said with its place."""

from __future__ import annotations

import csv
import json
import random
import sys

import pytest

from sparse_rl.tasks.files import read_table


def made(count: int) -> list[dict]:
    """Rows with a string, a number, a list of messages and a table in them."""
    draw = random.Random(random.random())
    return [
        {
            "prompt": [{"role": "user", "content": f"is it {draw.randrange(100)}? ü\u2028\n"}],
            "data_source": "made",
            "level": draw.randrange(5),
            "score": draw.random(),
            "reward_model": {"style": "rule", "ground_truth": str(draw.randrange(100))},
            "nums": [draw.randrange(9) for _ in range(3)],
            "answer": None if draw.random() < 0.3 else "x",
        }
        for _ in range(count)
    ]


def write_jsonl(rows, path):
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def write_json(rows, path):
    path.write_text(json.dumps(rows, indent=2))
    return path


def write_parquet(rows, path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def write_folder(rows, path):
    pytest.importorskip("datasets").Dataset.from_list(rows).save_to_disk(str(path))
    return path


KINDS = {
    "rows.jsonl": write_jsonl,
    "rows.json": write_json,
    "lines.json": write_jsonl,
    "rows.parquet": write_parquet,
    "folder": write_folder,
}


@pytest.mark.parametrize("name", KINDS)
def test_rows_survive_the_round_trip(name, tmp_path):
    rows = made(5)
    path = KINDS[name](rows, tmp_path / name)
    table = read_table(str(path))
    assert [row.columns for row in table.rows] == rows
    place = "line" if name in ("rows.jsonl", "lines.json") else "row"
    assert [row.where for row in table.rows] == [f"{place} {i} of {path}" for i in range(1, 6)]
    assert read_table(str(path)).sha256 == table.sha256


@pytest.mark.parametrize("name", KINDS)
def test_another_row_is_another_hash(name, tmp_path):
    rows = made(3)
    first = read_table(str(KINDS[name](rows, tmp_path / name))).sha256
    rows[1]["level"] += 1
    (tmp_path / "other").mkdir()
    assert read_table(str(KINDS[name](rows, tmp_path / "other" / name))).sha256 != first


def test_a_folder_of_several_splits_is_read_split_by_split(tmp_path):
    datasets = pytest.importorskip("datasets")
    splits = {"train": made(3), "test": made(2)}
    datasets.DatasetDict({name: datasets.Dataset.from_list(rows) for name, rows in splits.items()}).save_to_disk(
        str(tmp_path / "both")
    )
    with pytest.raises(ValueError, match=r"has several splits; name one of .*both/train, .*both/test"):
        read_table(str(tmp_path / "both"))
    assert [row.columns for row in read_table(str(tmp_path / "both" / "test")).rows] == splits["test"]


@pytest.mark.parametrize(
    ("source", "asked"),
    [
        ("hub:openai/gsm8k", ("openai/gsm8k", None, "train")),
        ("hub:openai/gsm8k:test", ("openai/gsm8k", None, "test")),
        ("hub:openai/gsm8k:main:test", ("openai/gsm8k", "main", "test")),
    ],
)
def test_the_hub_is_asked_for_name_config_and_split(source, asked, monkeypatch):
    datasets = pytest.importorskip("datasets")
    calls, rows = [], made(2)

    def load_dataset(name, config, split):
        calls.append((name, config, split))
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    table = read_table(source)
    assert calls == [asked] and [row.columns for row in table.rows] == rows
    assert table.rows[1].where == f"row 2 of {source}"


def test_a_hub_that_does_not_answer_is_one_sentence(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def away(*_, **__):
        raise ConnectionError("no way out\nat all")

    monkeypatch.setattr(datasets, "load_dataset", away)
    with pytest.raises(ValueError, match=r"hub:a/b cannot be read from the hub \(ConnectionError: no way out\); mend"):
        read_table("hub:a/b")
    for wrong in ("hub:", "hub:a::b", "hub:a:b:c:d"):
        with pytest.raises(ValueError, match="is not of the form hub:NAME"):
            read_table(wrong)


@pytest.mark.parametrize(("module", "name"), [("pyarrow", "rows.parquet"), ("datasets", "folder"), ("datasets", "hub")])
def test_a_missing_package_is_named_with_the_command(module, name, tmp_path, monkeypatch):
    source = "hub:a/b" if name == "hub" else str(KINDS[name](made(1), tmp_path / name))
    for known in [known for known in sys.modules if known.split(".")[0] == module]:
        monkeypatch.setitem(sys.modules, known, None)
    with pytest.raises(ValueError, match=rf"needs {module} to be read; run: pip install 'sparse-rl\[data\]'"):
        read_table(source)


@pytest.mark.parametrize(("name", "dialect"), [("rows.csv", "excel"), ("rows.TSV", "excel-tab")])
def test_tables_of_text_survive_the_round_trip(name, dialect, tmp_path):
    """Separators, quotes and line breaks in values, a byte-order mark, blank lines, a value above csv's own limit."""
    draw = random.Random(random.random())
    marks = ["a", ",", "\t", '"', "\n", " ", "ü", "\u2028"]
    rows = [{"prompt": "".join(draw.choices(marks, k=20)), "answer": str(draw.randrange(9))} for _ in range(9)]
    rows.append({"prompt": "p" * 200_000, "answer": ""})
    with (tmp_path / name).open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, ["prompt", "answer"], dialect=dialect)
        writer.writeheader()
        file.write("\r\n")
        writer.writerows(rows)
    table = read_table(str(tmp_path / name))
    assert [row.columns for row in table.rows] == rows
    starts = [3 + i + sum(row["prompt"].count("\n") for row in rows[:i]) for i in range(10)]
    assert [row.where for row in table.rows] == [f"line {start} of {tmp_path / name}" for start in starts]


HOSTILE = {
    "a key twice": ("a.jsonl", b'{"prompt": "a", "prompt": "b"}', "line 1 of .*the key 'prompt' stands there twice"),
    "a row of a list": ("a.json", b'[{"prompt": "a"}, ["b"]]', "row 2 of .* is \\['b'\\]; a row is an object"),
    "an empty list": ("a.json", b"[]", "has no rows"),
    "half a list": ("a.json", b'[{"prompt": "a"}', "a.json is not JSON"),
    "one object": ("a.json", b"3", "line 1 of .* is 3; a row is an object"),
    "a value too many": (
        "a.csv",
        b"prompt,answer\n2+2?,4\n3,3?,6\n",
        "line 3 of .* has 3 values, and the header 2; mend",
    ),
    "a value too few": ("a.tsv", b"question\tanswer\n2+2?\n", "line 2 of .* has 1 value, and the header 2; mend"),
    "an open quote": ("a.csv", b'question,answer\n\n"2+2?,4\n', "line 3 of .* cannot be read"),
    "a column without a name": ("a.csv", b",question\n0,2+2?\n", "line 1 of .*, the header, has no name for column 1"),
    "a column twice": ("a.csv", b"a,b,a\n1,2,3\n", "line 1 of .*, the header, has two columns 'a'"),
    "a header alone": ("a.csv", b"question,answer\n", "a.csv has no rows; write a header line"),
    "nothing": ("a.csv", b"", "a.csv has no rows; write a header line"),
    "not UTF-8": ("a.csv", b"question\n2+2?\n\xff\n", "line 3 of .* is not text in UTF-8"),
    "not parquet": ("a.parquet", b"PAR1 or so", "a.parquet is not a parquet file"),
    "empty parquet": ("a.parquet", b"", "a.parquet is not a parquet file"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_files(case, tmp_path):
    name, content, message = HOSTILE[case]
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_table(str(tmp_path / name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "separators"), [("a.csv", "commas"), ("a.tsv", "tabs")])
def test_columns_that_are_separated_by_something_else_are_named(name, separators, tmp_path):
    (tmp_path / name).write_text("prompt;answer\na;1\n")
    said = rf"line 1 of .*{name}, the header, is 'prompt;answer'; separate columns by {separators}\."
    with pytest.raises(ValueError, match=said):
        read_table(str(tmp_path / name))


def test_hostile_tables(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = [pyarrow.array(["a"]), pyarrow.array(["b"])]
    parquet.write_table(pyarrow.Table.from_arrays(columns, names=["prompt", "prompt"]), tmp_path / "twice.parquet")
    with pytest.raises(ValueError, match="has two columns 'prompt'"):
        read_table(str(tmp_path / "twice.parquet"))
    parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), tmp_path / "none.parquet")
    with pytest.raises(ValueError, match=r"none.parquet has no rows"):
        read_table(str(tmp_path / "none.parquet"))
    with pytest.raises(ValueError, match="is a folder without a dataset"):
        read_table(str(tmp_path))
