# SPDX-License-Identifier: Apache-2.0
"""A run's logs and its folder, which somebody may delete, replace or change while it runs, or before it goes on."""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import shutil

import pytest
from commands import run as command
from small_run import assert_same_run, small_trainer
from small_sft import small_sft

from sparse_rl.evaluate import EvalConfig
from sparse_rl.metrics import read_log
from sparse_rl.runfolder import lock
from sparse_rl.train import Observer, checkpoint
from sparse_rl.train.folder import recorded
from sparse_rl.train.log import RunLog

GARBAGE = (b"\0" * 40, b"\xff\xfe{", b"[1]", b'"text"', b'{"step": ', b"[" * 100_000)


class At(Observer):
    """Does something once a step is logged, before its checkpoint."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_log(self, metrics):
        if metrics["step"] == self.step:
            self.act()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("log") / "run"
    small_trainer(folder, steps=2).train()
    return folder


def test_lines_are_on_disk_at_once_and_what_json_does_not_know_is_null(tmp_path):
    log = RunLog(tmp_path)
    log.write(
        "metrics.jsonl", {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 1.5, "e": "nan", "f": [None, math.nan]}
    )
    text = (tmp_path / "metrics.jsonl").read_text()
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert read_log(tmp_path / "metrics.jsonl") == [
        {"a": None, "b": None, "c": None, "d": 1.5, "e": "nan", "f": [None, None]}
    ]
    log.write("metrics.jsonl", {"text": "two\nlines\u2028"})
    assert read_log(tmp_path / "metrics.jsonl")[1] == {"text": "two\nlines\u2028"}
    log.close()


def test_logs_are_cut_back_to_the_sizes_of_a_checkpoint(tmp_path):
    log = RunLog(tmp_path)
    for name in RunLog.FILES:
        log.write(name, {"step": 1})
    known = json.loads(json.dumps(log.written()))
    line = b'{"step": 1}\n'
    assert known == {name: [len(line), hashlib.sha256(line).hexdigest()] for name in RunLog.FILES}
    log.write("metrics.jsonl", {"step": 2})
    log.write("rejected.jsonl", {"step": 2})
    log.close()
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"half a li')
    log = RunLog(tmp_path, known)
    assert all((tmp_path / name).read_bytes() == b'{"step": 1}\n' for name in RunLog.FILES)
    log.write("metrics.jsonl", {"step": 3})
    log.close()
    assert [line["step"] for line in read_log(tmp_path / "metrics.jsonl")] == [1, 3]


def test_without_sizes_a_log_starts_anew(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    RunLog(tmp_path).close()
    assert all((tmp_path / name).read_bytes() == b"" for name in RunLog.FILES)


def test_a_log_that_has_lost_lines_goes_on_after_its_last_whole_one(tmp_path, caplog):
    """Somebody cut or removed it; what is left of it stays, and so do the weights."""
    (tmp_path / "metrics.jsonl").write_text("0123456789")
    (tmp_path / "completions.jsonl").write_text('{"a": 1}\n{"b"')
    known = (5, hashlib.sha256(b"01234").hexdigest())
    log = RunLog(tmp_path, {"metrics.jsonl": known, "completions.jsonl": (99, "x"), "rejected.jsonl": (7, "x")})
    log.write("completions.jsonl", {"c": 2})
    log.close()
    assert (tmp_path / "metrics.jsonl").read_text() == "01234"
    assert read_log(tmp_path / "completions.jsonl") == [{"a": 1}, {"c": 2}]
    assert (tmp_path / "rejected.jsonl").read_bytes() == b""
    lost = [record.args[0].name for record in caplog.records if "has lost or changed lines" in record.message]
    assert lost == ["completions.jsonl", "rejected.jsonl"]


def log_of(tmp_path, lines):
    log = RunLog(tmp_path)
    for step in range(lines):
        log.write("metrics.jsonl", {"step": step, "reward": random.random()})
    return log


@pytest.mark.parametrize("garbage", GARBAGE, ids=repr)
def test_garbage_inside_a_log_is_left_out_and_kept_beside_it(tmp_path, caplog, garbage):
    log = log_of(tmp_path, 9)
    known, path = log.written(), tmp_path / "metrics.jsonl"
    log.close()
    lines = path.read_bytes().splitlines(keepends=True)
    at = random.randrange(8)
    damaged = b"".join([*lines[:at], garbage[: len(lines[at]) - 1].ljust(len(lines[at]) - 1) + b"\n", *lines[at + 1 :]])
    path.write_bytes(damaged)
    assert len(damaged) == known["metrics.jsonl"][0]  # so that its size says nothing
    RunLog(tmp_path, known).close()
    assert path.read_bytes() == b"".join([*lines[:at], *lines[at + 1 :]])
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == damaged
    assert f"{path} has 1 lines that are no JSON objects" in caplog.text


def test_a_line_that_was_changed_is_noticed(tmp_path, caplog):
    log = log_of(tmp_path, 3)
    known, path = log.written(), tmp_path / "metrics.jsonl"
    log.close()
    path.write_bytes(path.read_bytes().replace(b'"step": 1', b'"step": 7'))
    log = RunLog(tmp_path, known)
    assert "has lost or changed lines" in caplog.text and [line["step"] for line in read_log(path)] == [0, 7, 2]
    caplog.clear()
    RunLog(tmp_path, log.written()).close()  # what it is from here on
    assert not caplog.text


@pytest.mark.parametrize("how", ["deleted", "replaced", "rewritten in place", "cut", "appended to", "folder moved"])
def test_a_log_that_is_not_what_was_written_is_written_anew(tmp_path, caplog, how):
    folder = tmp_path / "run"
    folder.mkdir()
    log, path = log_of(folder, 5), folder / "metrics.jsonl"
    before = path.read_bytes()
    if how == "deleted":
        path.unlink()
    elif how == "replaced":
        (folder / "other").write_bytes(b"something else\n")
        (folder / "other").replace(path)
    elif how == "folder moved":
        folder.rename(tmp_path / "moved")
        folder.mkdir()
    elif how == "cut":
        os.truncate(path, len(before) - 3)
    else:
        with open(path, "ab" if how == "appended to" else "wb") as file:
            file.write(b"garbage\n" * 3)
    log.write("metrics.jsonl", {"step": 5})
    log.check()
    log.write("metrics.jsonl", {"step": 6})
    known = log.written()
    log.close()
    steps = [line["step"] for line in read_log(path)]
    assert steps == {"rewritten in place": [5, 6], "cut": [0, 1, 2, 3, 6]}.get(how, list(range(7)))
    assert "metrics.jsonl was" in caplog.text
    caplog.clear()
    RunLog(folder, known).close()
    assert not caplog.text and [line["step"] for line in read_log(path)] == steps


def delete_logs(run):
    for name in RunLog.FILES:
        (run / name).unlink()


HARM = {
    "the folder": lambda run: shutil.rmtree(run),
    "the folder moved": lambda run: run.rename(run.with_name("moved")),
    "all but the folder": lambda run: [shutil.rmtree(p) if p.is_dir() else p.unlink() for p in run.iterdir()],
    "the logs": delete_logs,
    "the lock": lambda run: (run / ".lock").unlink(),
    "run.json": lambda run: (run / "run.json").unlink(),
    "the checkpoints": lambda run: [shutil.rmtree(path) for path in checkpoint.checkpoints(run)],
}


@pytest.mark.parametrize("harm", HARM)
@pytest.mark.some(2)
def test_what_is_deleted_under_a_run_is_written_anew(whole, tmp_path, caplog, harm):
    """All of it, and a resumed run goes on from it."""
    run = tmp_path / "run"
    small_trainer(run, steps=2, observers=(At(random.choice([1, 2]), lambda: HARM[harm](run)),)).train()
    assert_same_run(run, whole, same_checkpoints=False)
    assert recorded(run)["config"] == recorded(whole)["config"] | {"trainer": recorded(run)["config"]["trainer"]}
    assert caplog.text or harm == "the checkpoints"
    caplog.clear()
    small_trainer(run, resume_from_checkpoint=True, steps=3).train()
    assert [line["step"] for line in read_log(run / "metrics.jsonl")] == list(range(4))
    assert "lost" not in caplog.text and "damaged" not in caplog.text


def test_a_run_in_a_linked_folder_goes_on_where_the_link_leads(tmp_path):
    """When it starts, and when that is deleted under it."""
    run = tmp_path / "link"
    run.symlink_to("target")
    small_trainer(run, steps=2, observers=(At(1, lambda: shutil.rmtree(tmp_path / "target")),)).train()
    assert run.is_symlink() and [line["step"] for line in read_log(tmp_path / "target" / "metrics.jsonl")] == [0, 1, 2]


def test_a_file_in_the_place_of_an_unfinished_checkpoint_is_removed(tmp_path):
    small_trainer(tmp_path, steps=1, observers=(At(1, (tmp_path / "checkpoint-1.tmp").touch),)).train()
    assert checkpoint.checkpoints(tmp_path)[-1].name == "checkpoint-1"


def test_a_folder_that_has_become_anothers_is_left_alone(whole, tmp_path):
    """Whether the other run goes on or has ended; nothing of this one is written there."""
    run, held = tmp_path / "run", []

    def taken():
        shutil.rmtree(run)
        shutil.copytree(whole, run)
        held.append(lock(run))

    trainer = small_trainer(run, steps=2, observers=(At(1, taken),))
    with pytest.raises(ValueError, match="another process is training in"):
        trainer.train()
    held.pop().close()
    assert_same_run(run, whole)
    shutil.rmtree(run)
    trainer = small_trainer(run, steps=2, seed=5, observers=(At(1, lambda: taken() or held.pop().close()),))
    with pytest.raises(ValueError, match="was deleted under the run, and has another run in it"):
        trainer.train()
    assert_same_run(run, whole)


def test_a_best_checkpoint_that_is_deleted_is_forgotten(tmp_path, caplog):
    run = tmp_path / "run"
    parts = {"eval": EvalConfig(every=1, prompts=4)}
    trainer = small_trainer(run, parts=parts, steps=2, observers=(At(2, lambda: shutil.rmtree(run / "checkpoint-1")),))
    values = iter((0.0, 0.9, 0.1))
    trainer._evaluate = lambda: {"eval/dense/reward": next(values)}
    trainer.train()
    assert "checkpoint-1, the best so far, is gone" in caplog.text
    assert checkpoint.read_record(run / "checkpoint-2")["best"] == {"checkpoint": "checkpoint-2", "value": 0.1}


def test_a_supervised_run_is_written_anew_too(tmp_path):
    run = tmp_path / "run"
    trainer = small_sft(run, observers=(At(1, lambda: shutil.rmtree(run)),))
    trainer.train()
    steps = [line["step"] for line in read_log(run / "metrics.jsonl")]
    assert steps == list(range(trainer.config.steps + 1)) and (run / "run.json").is_file()


def test_a_resumed_run_notices_garbage_and_its_report_is_made(whole, tmp_path, caplog):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    lines[1] = b"\0" * (len(lines[1]) - 1) + b"\n"
    (run / "metrics.jsonl").write_bytes(b"".join(lines))
    assert command("report", str(run), "--output", str(tmp_path / "page.html"))[0] == 2
    small_trainer(run, resume_from_checkpoint=True, steps=3).train()
    assert [line["step"] for line in read_log(run / "metrics.jsonl")] == [0, 2, 3]
    assert "has 1 lines that are no JSON objects" in caplog.text
    assert command("report", str(run), "--output", str(tmp_path / "page.html"))[0] == 0


def test_a_record_that_is_not_what_was_written_is_another_ones(whole, tmp_path, caplog):
    """A changed setting in it would change the resumed run; without its digest it is somebody's own."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    record = json.loads((run / "run.json").read_text())
    record["config"]["optimizer"]["learning_rate"] = 7.0
    (run / "run.json").write_text(json.dumps(record))
    assert recorded(run)["config"]["optimizer"]["learning_rate"] == 1e-3  # the checkpoint's
    command("report", str(run), "--output", str(tmp_path / "page.html"))
    assert "run.json is not what the run wrote" in caplog.text
    small_trainer(run, steps=2, resume_from_checkpoint=True).train()
    assert "run.json was damaged; it is written anew" in caplog.text
    record = json.loads((run / "run.json").read_text())
    assert record["config"]["optimizer"]["learning_rate"] == 1e-3
    (run / "run.json").write_text(json.dumps(record | {"digest": None, "command": "mine"}))
    assert recorded(run)["command"] == "mine"
    for folder in checkpoint.checkpoints(run):
        shutil.rmtree(folder)
    (run / "run.json").write_text(json.dumps(record | {"command": "mine"}))
    with pytest.raises(ValueError, match=r"run.json is damaged, .*; mend it and remove its digest"):
        recorded(run)
