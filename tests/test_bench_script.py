# SPDX-License-Identifier: Apache-2.0
"""scripts/bench.py: what it runs again, and what it puts beside what."""

from __future__ import annotations

import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("bench_script", ROOT / "scripts" / "bench.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def repository(script, tmp_path, monkeypatch):
    """An empty one, at the commit `new`, whose commands write 2 x what stood there before, or fail on request."""
    monkeypatch.chdir(tmp_path)
    script.RESULTS.mkdir(parents=True)
    monkeypatch.setenv("COMMIT", "new")
    ran = []

    def run(command, **_):
        ran.append(shlex.join(command[1:]))
        if "broken" in command:
            return SimpleNamespace(returncode=1)
        path = script.RESULTS / "rollout_cpu.json"
        records = json.loads(path.read_text())
        for record in records:
            if command[-1] == shlex.split(record["command"])[-1]:
                record |= {"commit": "new", "results": {"tokens_per_s": 2 * record["results"]["tokens_per_s"]}}
        path.write_text(json.dumps(records))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(script.subprocess, "run", run)
    monkeypatch.setattr(script, "TIMES", {})
    return ran


def speed(label: str, command: str, value: float, commit: str = "old") -> dict:
    return {"label": label, "command": command, "commit": commit, "results": {"tokens_per_s": value, "seed": 3}}


def test_only_what_is_of_another_commit_runs_and_stands_beside_its_old_value(script, repository, monkeypatch, capsys):
    records = [
        speed("a", "sparse-rl bench a", 50.0),
        speed("b", "python benchmarks/b.py broken", 7.0),
        speed("c", "sparse-rl bench c", 9.0, "new"),
    ]
    (script.RESULTS / "rollout_cpu.json").write_text(json.dumps(records))
    Path("runs/smollm2").mkdir(parents=True)
    monkeypatch.setattr(sys, "argv", ["bench.py", "cpu"])
    with pytest.raises(SystemExit) as end:
        script.main()
    assert end.value.code == 1
    assert repository == ["-m sparse_rl bench a", "benchmarks/b.py broken"]
    assert not Path("runs/smollm2").exists() and Path("runs/bench/new/runs/smollm2").is_dir()
    captured = capsys.readouterr()
    row = next(line for line in captured.out.splitlines() if "50" in line)
    assert "100" in row and "+100.0%" in row
    assert "failed: python benchmarks/b.py broken" in captured.err
    repository.clear()
    with pytest.raises(SystemExit):
        script.main()
    assert repository == ["benchmarks/b.py broken"]  # the other one is measured
    assert "+100.0%" in capsys.readouterr().out  # against what stood there before the first start


def test_nothing_begins_when_the_time_is_up(script, repository, monkeypatch, capsys):
    commands = {"rollout_cpu": "sparse-rl bench a", "calibrate_embedded": "sparse-rl calibrate"}
    for name, command in commands.items():
        (script.RESULTS / f"{name}.json").write_text(json.dumps([speed("a", command, 50.0)]))
    monkeypatch.setattr(sys, "argv", ["bench.py", "cpu", "--minutes", "0"])
    with pytest.raises(SystemExit) as end:
        script.main()
    assert end.value.code == 1 and repository == []
    assert capsys.readouterr().err.splitlines() == [f"not begun: {command}" for command in commands.values()]


@pytest.fixture
def several(script, repository, monkeypatch):
    """Commands whose runs come to these speeds and ratios, beside a record of another command; None fails."""
    runs = [(90.0, 1.1), (40.0, 0.7), (60.0, 0.9)]
    other = speed("b", "sparse-rl bench b", 9.0, "new")
    (script.RESULTS / "rollout_cpu.json").write_text(json.dumps([other, speed("a", "sparse-rl bench a", 1.0)]))

    def run(command, **_):
        if (found := runs[len(repository)]) is None:
            return SimpleNamespace(returncode=1)
        repository.append(command)
        record = {"label": "a", "command": "sparse-rl bench a", "commit": "new"}
        record["results"] = {"tokens_per_s": found[0], "against": {"generate": {"ratio": found[1]}}}
        (script.RESULTS / "rollout_cpu.json").write_text(json.dumps([other, record]))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(script.subprocess, "run", run)
    monkeypatch.setattr(script, "TIMES", {"rollout_cpu": 3})
    monkeypatch.setattr(sys, "argv", ["bench.py", "cpu"])
    return runs


def test_of_several_runs_the_one_with_the_middle_ratio_counts(script, several, repository):
    with pytest.raises(SystemExit) as end:
        script.main()
    assert end.value.code == 0 and len(repository) == 3
    first, kept = script.read(script.RESULTS, "rollout_cpu")
    assert first["label"] == "b" and kept["results"]["tokens_per_s"] == 60.0 and kept["ratios"] == [1.1, 0.7, 0.9]


def test_a_series_that_was_cut_is_due_again(script, several, repository, capsys):
    several[1] = None
    with pytest.raises(SystemExit) as end:
        script.main()
    assert end.value.code == 1 and "failed: sparse-rl bench a" in capsys.readouterr().err
    records = script.read(script.RESULTS, "rollout_cpu")
    assert script.outdated(records, "new") == ["sparse-rl bench a"]


def test_a_command_that_makes_several_records_keeps_them_all(script, several, repository, monkeypatch):
    monkeypatch.setattr(script, "TIMES", {})
    records = [speed(label, "sparse-rl bench a", 1.0) for label in "xy"]
    monkeypatch.setattr(script.subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))
    (script.RESULTS / "rollout_cpu.json").write_text(json.dumps(records))
    assert script.measure_middle("rollout_cpu", "sparse-rl bench a")
    assert script.read(script.RESULTS, "rollout_cpu") == records


def test_figures_are_the_pages(script):
    """The first rollout's speed, and one of look-up, wherever they are shown."""
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))

    def read(name):
        return script.figures(script.read(ROOT / script.RESULTS, name))

    assert f"{next(iter(read('rollout_h200').values())):,.0f} | " in pages
    assert f"{read('smollm2_lookup')['sparse_rl', 'sparse accuracy']:.3f} ± " in pages


@pytest.mark.parametrize("machine", ["cpu", "gpu"])
def test_every_command_of_the_results_is_one_that_exists(script, machine, monkeypatch):
    from sparse_rl.cli import COMMANDS

    monkeypatch.chdir(ROOT)
    for name in script.FILES[machine]:
        for command in script.outdated(script.read(script.RESULTS, name), "another"):
            program, first, *_ = shlex.split(command)
            assert (program == "sparse-rl" and first in COMMANDS) or (ROOT / first).is_file(), command


def test_what_was_cut_is_due_again(script):
    records = [{"command": name, "commit": "new"} for name in "ab"] + [{"command": "c", "commit": "old"}]
    assert script.outdated([records[0], records[1] | {"unfinished": True}, records[2]], "new") == ["b", "c"]


def test_a_cut_evaluation_goes_on_and_is_copied(script, repository, monkeypatch):
    folder = Path("evals/smollm2")
    started = []

    def run(command, **_):
        started.append(command)
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("eval.json", "results.json", "table.md"):
            (folder / name).write_text(name)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(script.subprocess, "run", run)
    command = "sparse-rl eval --models smollm2 --resume --output evals/smollm2"  # as one that went on recorded it
    assert script.measure("eval_smollm2", command) and script.measure("eval_smollm2", command)
    first = ["eval", "--models", "smollm2", "--output", "evals/smollm2"]
    assert [one[3:] for one in started] == [first, [*first, "--resume"]]
    assert (script.RESULTS / "eval_smollm2.md").read_text() == "table.md"
    assert (script.RESULTS / "eval_smollm2.json").read_text() == "results.json"


def test_a_rival_that_failed_is_due_again(script):
    made = {"command": "a", "commit": "new", "settings": {"against": "trl,full"}}
    both = {"trl": {"ratio": 2.0}, "full": {"ratio": 1.5}}
    assert script.outdated([made | {"results": {"against": both}}], "new") == []
    for against in ({}, both | {"full": {"error": "out of memory"}}):
        assert script.outdated([made | {"results": {"against": against}}], "new") == ["a"]


def test_what_has_no_clock_runs_side_by_side_and_the_evaluation_after_the_warm_start(script, repository, monkeypatch):
    order, together = [], threading.Barrier(2, timeout=20)

    def run(command, **_):
        name = command[-1]
        order.append(f"{name} begins")
        if name in ("smollm2_words", "smollm2_lookup"):
            together.wait()
        if name == "smollm2_words":
            assert "eval_smollm2 begins" not in order
            script.WARM.parent.mkdir(parents=True)
            script.WARM.touch()
            while "eval_smollm2 begins" not in order:
                time.sleep(0.01)
        return SimpleNamespace(returncode=int(name == "smollm2_lookup"))

    monkeypatch.setattr(script.subprocess, "run", run)
    monkeypatch.setattr(script, "COPIED", {})
    todo = {name: [f"python work {name}"] for name in ("eval_smollm2", "smollm2_words", "smollm2_lookup")}
    assert script.side_by_side(todo, Path()) == ["python work smollm2_lookup"]
    assert len(order) == 3


def test_a_file_s_figures_replace_its_own_in_the_comparison_and_no_other_s(script, repository):
    for name, value in (("rollout_cpu", 10.0), ("rollout_h200", 4.0)):
        (script.RESULTS / f"{name}.json").write_text(json.dumps([speed("a", "x", value)]))
    before = Path("before")
    shutil.copytree(script.RESULTS, before)
    records = [speed("a", "x", 6.0, "new"), speed("b", "y", 7.0)]
    (script.RESULTS / "rollout_h200.json").write_text(json.dumps(records))
    (before / "rollout_h200.json").write_text(json.dumps([speed("a", "x", 4.0), records[1]]))
    script.write_compared(["rollout_h200"], before)
    (script.RESULTS / "rollout_cpu.json").write_text(json.dumps([speed("a", "x", 5.0, "new")]))
    script.write_compared(["rollout_cpu"], before)
    page = (script.RESULTS / "compared.md").read_text()
    assert page.index("## rollout_cpu\n\nBefore: old. Now: new.") < page.index(
        "## rollout_h200\n\nBefore: old. Now: new."
    )
    assert "| a | tokens_per_s | 10 | 5 | -50.0% |" in page and "| a | tokens_per_s | 4 | 6 | +50.0% |" in page
    assert "| b |" not in page, "it was not measured again"


@pytest.mark.parametrize("machine", ["cpu", "gpu"])
def test_every_record_has_figures(script, machine, monkeypatch):
    monkeypatch.chdir(ROOT)
    for name in script.FILES[machine]:
        records = script.read(script.RESULTS, name)
        assert script.figures(records), name
        for record in records if name == "evidence" else ():
            assert script.figures([record]) or record["label"] == "smollm2-start", record["label"]


def test_a_name_that_no_file_has_is_an_error(script, repository, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench.py", "cpu", "--only", "rolout"])
    with pytest.raises(SystemExit) as end:
        script.main()
    assert end.value.code == 2 and "no file has rolout in its name" in capsys.readouterr().err


def cell(name: str, commit: str, accuracy: float) -> dict:
    return {"cell": name, "part": "a", "commit": commit, "results": {"dense": [accuracy, 0.01], "start": "x"}}


def test_cells_of_the_evidence_are_due_by_their_part_and_compared_by_name(script, repository, monkeypatch, capsys):
    """A line is added for what is measured again; the newest counts."""
    script.EVIDENCE.mkdir(parents=True)
    path = script.EVIDENCE / "a.jsonl"
    path.write_text("".join(json.dumps(cell(name, "old", 0.5)) + "\n" for name in ("short-a", "short-b", "short-c")))

    def run(command, **_):
        repository.append(shlex.join(command[1:]))
        with open(path, "a") as file:
            for name, accuracy in (("short-a", 0.6), ("short-b", 0.5)):  # then the time is up
                file.write(json.dumps(cell(name, "new", accuracy)) + "\n")
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(script.subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["bench.py", "gpu", "--only", "evidence", "--minutes", "3"])
    with pytest.raises(SystemExit) as end:
        script.main()
    assert end.value.code == 1, "one cell is left"
    assert repository == ["benchmarks/evidence/several.py c a d b f g --again --minutes 3.0"]
    assert capsys.readouterr().err == "not begun: python benchmarks/evidence/several.py c a d b f g --again\n"
    page = (script.RESULTS / "compared.md").read_text()
    assert "Before: old. Now: new. 1 of 2 figures are the same." in page
    assert "| short-a | dense accuracy | 0.5 | 0.6 | +20.0% |" in page and "short-c" not in page
