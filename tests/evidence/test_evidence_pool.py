# SPDX-License-Identifier: Apache-2.0
"""The pool that runs the cells of benchmarks/evidence: what begins when, what is kept, what is said of mistakes."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "evidence"


def test_what_begins_when(evidence):
    cells, pool = evidence
    first, second = (cells.Cell(name=name, part="a", work="train") for name in ("first", "second"))
    needy = cells.Cell(name="needy", part="c", work="matrix", needs=("first",))
    alone = cells.Cell(name="alone", part="e", work="step", alone=True)
    later = time.monotonic() + 1000
    everything = [needy, alone, first, second]
    missing = {cell.name for cell in everything}
    begin = pool._next
    assert begin(everything, missing, [], {}, later) is alone
    assert begin(everything, missing, [second], {}, later) is None  # which alone waits for
    assert begin([needy, first], missing, [second], {}, later) is first
    assert begin(everything, missing, [alone], {}, later) is None
    assert begin([first], {"first"}, [alone], {}, later) is None  # nothing beside it
    assert begin([needy], {"needy"}, [second], {}, later) is needy
    assert begin([needy], {"needy", "first"}, [], {}, later) is None
    assert begin([first], {"first"}, [], {pool._kind(first): 1001.0}, later) is None  # it would not end by then
    assert begin([first], {"first"}, [], {}, time.monotonic() + 100) is None  # nor would one of an unknown kind
    assert begin([first], {"first"}, [], {pool._kind(first): 50.0}, time.monotonic() + 100) is first
    lengths = [cells.Cell(name="x", part="e", work="step", settings={"response": n}) for n in (1, 2)]
    assert len({pool._kind(cell) for cell in lengths}) == 2


def test_what_is_no_record_is_named_and_left_out(evidence, tmp_path, capsys):
    cells, _ = evidence
    (tmp_path / "a.jsonl").write_bytes(b'{"cell": "x"}\n{"cell": "y\n{}\n[]\n\xff\n')
    assert cells.read_results(tmp_path, ("a",)) == {"x": {"cell": "x"}}
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 4 and all(f"line {number}," in line for number, line in enumerate(said, 2))


def test_results_are_lines_and_the_last_counts(evidence, tmp_path):
    cells, _ = evidence
    for value in (1, 2):
        cells.write_result(tmp_path, {"cell": "x", "part": "a", "results": value})
    cells.write_result(tmp_path, {"cell": "y", "part": "b", "results": 3})
    found = cells.read_results(tmp_path, ("a", "b", "c"))
    assert {name: record["results"] for name, record in found.items()} == {"x": 2, "y": 3}


@pytest.mark.slow
def test_a_cell_from_the_command_line(tmp_path):
    """A run and the matrix on it, in a process of the pool; done cells are not done again."""
    import subprocess

    flags = ["--testbed", "trial", "--device", "cpu", "--jobs", "1"]
    flags += ["--results", str(tmp_path / "results"), "--models", str(tmp_path / "models")]
    command = [sys.executable, str(FOLDER / "part_c.py"), *flags]
    done = subprocess.run([*command, "--only", "trial-under-dense-s0"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    (run,) = (tmp_path / "results" / "a.jsonl").read_text().splitlines()
    record = json.loads(run)
    assert (record["cell"], record["settings"]["arm"], len(record["results"]["curves"]["kl"])) == (
        "trial-dense-s0",
        "dense",
        2,
    )
    (matrix,) = (tmp_path / "results" / "c.jsonl").read_text().splitlines()
    assert set(json.loads(matrix)["results"]["matrix"]) > {"full", "rkv:45", "snapkv:32"}
    listed = subprocess.run([*command, "--list"], capture_output=True, text=True).stdout
    assert "done  trial-under-dense-s0" in listed
    assert "      trial-under-start" in listed


def test_a_failing_process_is_replaced_and_its_cell_tried_once_more(evidence, tmp_path, capfd, monkeypatch):
    """The first of two cells always fails; the second is done by another process."""
    cells, pool = evidence
    monkeypatch.setattr(pool, "_worker", failing_worker)
    args = argparse.Namespace(minutes=60.0, jobs=1, device="cpu", models=tmp_path, results=tmp_path / "results")
    made = [cells.Cell(name=name, part="a", work="train") for name in ("bad", "good")]
    assert pool.run(made, args, {}) == ["bad"]
    assert list(cells.read_results(args.results, ("a",))) == ["good"]
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("bad")]
    assert [line.split(":")[0] for line in said] == ["bad failed; once more later", "bad failed"]


def failing_worker(connection, device, models):
    """A process whose every cell fails after the first that did, as after a CUDA error."""
    poisoned = False
    while True:
        cell = connection.recv()
        poisoned |= cell.name == "bad"
        connection.send({"error": "x"} if poisoned else {"cell": cell.name, "part": cell.part, "seconds": 1.0})


def test_done_with_other_settings_is_not_done(evidence):
    cells, pool = evidence
    cell = cells.Cell(name="x", part="c", work="matrix", settings={"budgets": (1, 2)})
    result = {"settings": {"budgets": [1, 2]}, "commit": "old"}
    assert pool._done(cell, {"x": result}, None) and pool._done(cell, {"x": result}, "old")
    assert not pool._done(cell, {"x": result}, "new")
    assert not pool._done(cell, {"x": result | {"settings": {"budgets": [1, 3]}}}, None)
    assert not pool._done(cell, {}, None)


def test_a_start_model_is_never_made_anew_unasked(evidence, tmp_path, monkeypatch):
    """Its cell is done, its model gone: a run would begin with other weights than those before it."""
    cells, pool = evidence
    (warm,) = cells.warm_cells(cells.LONG)
    record = {"cell": warm.name, "part": "warm", "settings": warm.settings, "results": {}, "seconds": 300.0}
    cells.write_result(tmp_path, record)
    begun = []
    monkeypatch.setattr(pool, "run", lambda cells, args, longest: begun.append(([c.name for c in cells], longest)))
    monkeypatch.setattr(pool, "STARTS", tmp_path / "none")
    (tmp_path / "none").mkdir()
    flags = ["--results", str(tmp_path), "--models", str(tmp_path / "models"), "--device", "cpu", "--only"]
    for only in ("long-dense-s0", "long-warm"):
        monkeypatch.setattr(sys, "argv", ["part_a.py", *flags, only])
        with pytest.raises(SystemExit) as end:
            pool.main({}, None)
        assert ("carry it there" in str(end.value)) == (only == "long-dense-s0")
    assert begun == [(["long-warm"], {pool._kind(warm): 300.0})]


def test_the_models_that_results_began_with_come_with_the_repository(evidence, tmp_path):
    cells, pool = evidence
    import work

    pool.lay_out_starts(tmp_path)
    for name, record in cells.read_results(cells.RESULTS, ("warm",)).items():
        assert work.began_with(tmp_path / name) == record["results"]["start"]
        (tmp_path / name / "model.safetensors").write_bytes(b"made anew")
    pool.lay_out_starts(tmp_path)  # what is there stays
    assert (tmp_path / "long-warm" / "model.safetensors").read_bytes() == b"made anew"
    assert [path.name for path in tmp_path.iterdir()] == ["long-warm"]


def test_a_device_that_is_not_there_is_said_before_any_cell(evidence, tmp_path, monkeypatch):
    _, pool = evidence
    monkeypatch.setattr(pool, "run", lambda *_: pytest.fail("a cell was begun"))
    folders = ["--results", str(tmp_path), "--models", str(tmp_path / "models")]
    monkeypatch.setattr(sys, "argv", ["part_a.py", *folders, "--device", "cuda:99", "--only", "long-warm"])
    with pytest.raises(SystemExit, match=r"^--device 'cuda:99' cannot be used here \(.*\); use cpu\.$"):
        pool.main({}, None)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--only", "trial-naiv-45-s0"], "there is no cell 'trial-naiv-45-s0'; --list names them."),
        (["--only", "trial-naive-45-s0"], ""),  # whatever --testbed says
        (["--jobs", "0"], "2"),
        (["--only", "smollm2-dense-s0"], "there is no data/words/warm.jsonl"),
    ],
)
def test_what_a_command_line_has_wrong_is_said_before_any_cell(evidence, tmp_path, monkeypatch, flags, said):
    _, pool = evidence
    begun = []
    monkeypatch.setattr(pool, "run", lambda cells, *_: begun.extend(cell.name for cell in cells))
    monkeypatch.chdir(tmp_path)
    folders = ["--results", str(tmp_path), "--models", str(tmp_path / "models"), "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["part_a.py", *folders, *flags])
    with pytest.raises(SystemExit) as end:
        pool.main({}, None)
    assert str(end.value).startswith(said)
    assert begun == ([] if said else ["trial-naive-45-s0"])


def test_ctrl_c_says_how_to_go_on(evidence, tmp_path, monkeypatch):
    _, pool = evidence

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(pool, "run", interrupted)
    folders = ["--results", str(tmp_path), "--models", str(tmp_path / "models"), "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", ["part_a.py", *folders, "--only", "trial-naive-45-s0"])
    with pytest.raises(SystemExit, match="goes on with what is left"):
        pool.main({}, None)
