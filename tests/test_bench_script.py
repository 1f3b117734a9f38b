# SPDX-License-Identifier: Apache-2.0
"""scripts/bench.py: what it runs again, and what it puts beside what."""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparse_rl.report.evidence import read_evidence
from sparse_rl.report.evidence_claims import number

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


def test_figures_are_the_readmes(script):
    """Its table of arms, the first rollout's speed, and one of look-up, wherever they are shown."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    readme = "".join(page.read_text(encoding="utf-8") for page in pages)

    def read(name):
        return script.figures(script.read(ROOT / "benchmarks" / "results" / f"{name}.json"))

    evidence = read_evidence(ROOT / "benchmarks" / "evidence" / "results")
    first = (ROOT / "README.md").read_text(encoding="utf-8")
    for arm in [arm for arm in evidence.arms("short") if evidence.runs("short", arm, 67)]:
        row = " | ".join(
            number(evidence.end("short", arm, budget)) for budget in ((67, 45, 32) if arm != "dense" else (0,))
        )
        assert f"| {row} |" in first, arm
    assert f"{next(iter(read('rollout_h200').values())):,.0f} | " in readme
    assert f"{read('smollm2_lookup')['sparse_rl', 'sparse accuracy']:.3f} ± " in readme


@pytest.mark.parametrize("machine", ["cpu", "gpu"])
def test_every_command_of_the_results_is_one_that_exists(script, machine):
    from sparse_rl.cli import COMMANDS

    for name in script.FILES[machine]:
        if (path := ROOT / script.RESULTS / f"{name}.json").exists():
            for command in script.outdated(script.read(path), "another"):
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
    command = "sparse-rl eval --models smollm2 --output evals/smollm2"
    assert script.measure("eval_smollm2", command) and script.measure("eval_smollm2", command)
    assert [one[-1] for one in started] == ["evals/smollm2", "--resume"]
    assert (script.RESULTS / "eval_smollm2.md").read_text() == "table.md"
    assert (script.RESULTS / "eval_smollm2.json").read_text() == "results.json"
