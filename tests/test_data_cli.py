# SPDX-License-Identifier: Apache-2.0
"""`sparse-rl data check`: what is there, what is missing, what is damaged, and the exit status."""

from __future__ import annotations

import json

import pytest
from commands import run

from sparse_rl.tasks.benchmarks import BENCHMARKS

COLUMNS = {
    "test": "def check(candidate): assert candidate(1) == 1",
    "entry_point": "f",
    "base_input": [[1]],
    "plus_input": [],
    "atol": 0,
    "test_list": ["assert f(1) == 1"],
    "public_tests": [{"input": "1", "output": "1", "testtype": "stdin"}],
    "nums": [1, 2],
    "target": 3,
}


def write(path, count, **more):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"id": f"row-{i}", "problem": "?", "answer": str(i)} | more for i in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def cells(out: str) -> dict[str, list[str]]:
    """The first table's rows by benchmark: where, rows, /, known rows, ..."""
    return {line.split()[0]: line.split()[1:] for line in out.split("\n\n")[0].splitlines()[1:]}


def test_without_a_folder():
    code, out, err = run("data", "check")
    assert (code, err) == (0, "")
    table = cells(out)
    assert list(table) == list(BENCHMARKS)
    assert table["gsm8k"] == ["package", "1319", "/", "1319", "MIT"]
    assert table["lookup"][:2] == ["generated", "512"]
    assert table["aime24"][:4] == ["missing", "-", "/", "30"] and "problems (c) MAA" in out
    for name in ("asdiv", "minerva_math", "hmmt25_feb"):
        assert " ".join(table[name]).endswith("research only")
    missing = out.partition("\nmissing; ")[2]
    assert "HuggingFaceH4/aime_2024" in missing and "\nmbpp_plus" in missing and "\ngsm8k" not in missing
    assert "--data-dir DIR" in missing and "pip install 'sparse-rl[data]'" in missing


def test_a_folder_that_is_well(tmp_path):
    for name, benchmark in BENCHMARKS.items():
        if name != "lookup":
            write(tmp_path / name / "test.jsonl", benchmark.rows, **{key: COLUMNS[key] for key in benchmark.columns})
    write(tmp_path / "simplerl_hard/train.jsonl", 4)
    write(tmp_path / "math/test.jsonl", 6)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/train.jsonl").write_text('{"prompt": "a layout of my own"}\n')
    code, out, err = run("data", "check", "--data-dir", str(tmp_path))
    assert (code, err) == (0, "") and "missing" not in out and "damaged" not in out
    assert {row[0] for row in cells(out).values()} == {"folder", "generated"}
    for line in (f"{tmp_path}/simplerl_hard/train.jsonl 4", f"{tmp_path}/mine/train.jsonl 1"):
        assert line.split() in [found.split() for found in out.splitlines()]
    cautions = out.partition("\ncautions:\n")[2]
    assert "evaluate on math500, never on math/test" in cautions and "math500: a part of math/test" in cautions
    assert "livecodebench_v1: public sample tests only" in cautions
    assert len(cautions.splitlines()) == 2


def test_cautions_of_rows(tmp_path):
    write(tmp_path / "gsm8k/test.jsonl", 12)
    write(tmp_path / "gaokao2023en/test.jsonl", 384)
    with (tmp_path / "gaokao2023en/test.jsonl").open("a") as file:
        file.write('{"id": "last", "problem": "?", "answer": ""}\n')
    code, out, _ = run("data", "check", "--data-dir", str(tmp_path))
    assert code == 0 and cells(out)["gsm8k"][:4] == ["folder", "12", "/", "1319"]
    assert "gsm8k has 12 rows here and 1319 as published." in out
    assert "gaokao2023en: 1 rows have no answer and are left out." in out
    assert "simplerl" not in out.partition("cautions")[2].partition("missing")[0]


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("aime24/test.jsonl", '{"id": 1,', "line 31 is not JSON"),
        ("aime24/test.jsonl", '{"id": "row-3", "problem": "?", "answer": "3"}', "line 31 has the id 'row-3' of line 4"),
        ("countdown/test.jsonl", '{"id": 1, "problem": "?", "answer": "3"}', "line 31 has no nums, target"),
        (
            "countdown/test.jsonl",
            '{"id": 1, "problem": "?", "answer": "", "nums": [1], "target": "x"}',
            "line 31 has nums",
        ),
        (
            "livecodebench_v1/test.jsonl",
            '{"id": 1, "problem": "?", "answer": "3", "public_tests": "x"}',
            "line 31 has no tests that can be read",
        ),
        ("gsm8k/train.jsonl", '{"id": 1, "problem": "?"}', "line 31 has no answer"),
        ("mine/anything.jsonl", "{", "line 31 is not JSON"),
    ],
)
def test_damage(tmp_path, file, line, complaint):
    write(tmp_path / file, 30, nums=[1], target=1, public_tests=COLUMNS["public_tests"])
    with (tmp_path / file).open("a") as opened:
        opened.write(line + "\n")
    code, out, _ = run("data", "check", "--data-dir", str(tmp_path))
    damaged = out.partition("\ndamaged; ")[2].splitlines()[1:]
    assert code == 1 and len(damaged) == 1
    assert damaged[0].strip().startswith(f"{tmp_path / file}: {complaint}")
    name = file.split("/")[0]
    if name in BENCHMARKS and file.endswith("test.jsonl"):
        assert cells(out)[name][0] == "damaged"


def test_a_folder_in_place_of_a_file_is_damage(tmp_path):
    for name in ("addsub/test.jsonl", "mine/train.jsonl"):
        (tmp_path / name).mkdir(parents=True)
    write(tmp_path / "singleop/test.jsonl", 112)
    code, out, _ = run("data", "check", "--data-dir", str(tmp_path))
    assert code == 1 and out.count("it cannot be read (Is a directory)") == 2
    assert cells(out)["addsub"][0] == "damaged" and cells(out)["singleop"][0] == "folder"


def test_much_damage_is_cut_short(tmp_path):
    (tmp_path / "aime24").mkdir()
    (tmp_path / "aime24/test.jsonl").write_text("{\n" * 1000)
    code, out, _ = run("data", "check", "--data-dir", str(tmp_path))
    assert code == 1 and "and 997 more" in out and len(out.partition("\ndamaged")[2].splitlines()) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "write `sparse-rl data check`"),
        (("chekc",), "data knows no 'chekc'"),
        (("check", "--data-dir", "nowhere"), "the data folder 'nowhere' is not there"),
        (("check", "--datadir", "x"), "datadir"),
    ],
)
def test_wrong_arguments(arguments, message):
    code, out, err = run("data", *arguments)
    assert code == 2 and out == "" and message in err and err.count("\n") == 1


def test_help():
    assert run("data", "--help")[1].startswith("usage: sparse-rl data check")
    code, out, _ = run("data", "check", "--help")
    assert code == 0 and "DIR/NAME/test.jsonl" in out and "Exit status 0" in out
