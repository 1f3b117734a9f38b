# SPDX-License-Identifier: Apache-2.0
"""A killed run resumes as if nothing happened; a damaged or foreign checkpoint is refused in one sentence."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from pathlib import Path

import pytest
import small_run
import torch
from safetensors import SafetensorError
from small_eval import in_child
from small_run import assert_same_run, kept, small_trainer, without_times

from sparse_rl.evaluate import EvalConfig
from sparse_rl.metrics import read_log
from sparse_rl.model.load import load
from sparse_rl.model.tiny import tiny_model, tiny_tokenizer
from sparse_rl.objective.loss import LossConfig
from sparse_rl.runfolder import lock, publish, recover
from sparse_rl.train import OptimizerConfig, UpdateConfig, checkpoint

POINTS = list(small_run.POINTS)


@pytest.fixture(scope="module")
def calls():
    """How often the whole run passed each point."""
    return {}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, calls):
    """The run that was never stopped."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        counted = {point: small_run.watch(point, patch.setattr) for point in POINTS}
        small_trainer(folder).train()
    calls.update({point: len(passed) for point, passed in counted.items()})
    assert calls["publish"] > 2 and (folder / "rejected.jsonl").read_bytes()  # it learnt, and rejected
    return folder


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.some(2)
def test_a_run_killed_anywhere_resumes_bit_for_bit(whole, calls, tmp_path, point):
    """At a point drawn anew each time; the message of a failure names it."""
    count = random.randint(1, calls[point])

    def killed():
        small_run.watch(point, on_call=lambda passed: small_run.kill(passed, count))
        small_trainer(tmp_path / "run").train()

    print(f"killed at {point} {count} of {calls[point]}")
    assert in_child(killed) == -signal.SIGKILL
    small_trainer(tmp_path / "run", resume_from_checkpoint=True).train()
    assert_same_run(tmp_path / "run", whole)


def test_a_checkpoint_that_is_written_again_is_there_at_every_moment(tmp_path, monkeypatch):
    """Killed between its two names, and before the older one is gone."""
    folder, temporary = tmp_path / "checkpoint-2", tmp_path / "checkpoint-2.tmp"
    for path, text in ((folder, "older"), (temporary, "newer")):
        path.mkdir()
        (path / "file").write_text(text)
    rename = Path.rename

    def killed(path, target):
        if path == temporary:
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            publish(temporary, folder)
    recover(tmp_path, "checkpoint-*")
    assert (folder / "file").read_text() == "older"
    with monkeypatch.context() as patch:
        patch.setattr("sparse_rl.runfolder.remove", lambda _: None)
        publish(temporary, folder)
    recover(tmp_path, "checkpoint-*")
    assert (folder / "file").read_text() == "newer" and list(tmp_path.iterdir()) == [folder]


def test_resuming_from_an_older_checkpoint_takes_its_future_again(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    found = checkpoint.checkpoints(run)
    small_trainer(run, resume_from_checkpoint=str(found[0])).train()
    assert_same_run(run, whole)


def test_a_finished_run_resumes_to_nothing_more_and_more_steps_go_on(whole, tmp_path, caplog):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    small_trainer(run, resume_from_checkpoint=True).train()
    assert_same_run(run, whole)
    caplog.clear()
    small_trainer(run, resume_from_checkpoint=True, steps=5).train()
    assert read_log(run / "metrics.jsonl")[-1]["step"] == 5
    assert "trainer.steps 4 is now 5" in caplog.text and "seed" not in caplog.text


def test_a_run_folder_is_not_overwritten(whole):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    with pytest.raises(ValueError, match=r"has a run in it \(run.json\); resume it with"):
        small_trainer(whole).train()
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before


def test_a_folder_with_somebody_elses_files_is_not_touched(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("mine\n")
    with pytest.raises(ValueError, match=r"has a run in it \(metrics.jsonl\)"):
        small_trainer(tmp_path).train()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("metrics.jsonl", "mine\n")]


def test_there_must_be_a_run_to_resume(tmp_path):
    with pytest.raises(ValueError, match="there is no run to resume"):
        small_trainer(tmp_path / "nothing", resume_from_checkpoint=True).train()
    assert not (tmp_path / "nothing").exists()


@pytest.mark.parametrize("name", ["model.safetensors", "state/__0_0.distcp", "state/.metadata", "config.json"])
@pytest.mark.parametrize("damage", ["truncate", "change", "delete"])
@pytest.mark.some(6)
def test_a_damaged_checkpoint_is_refused(whole, tmp_path, name, damage):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    last = checkpoint.checkpoints(run)[-1]
    if damage == "truncate":
        (last / name).write_bytes((last / name).read_bytes()[:-5])
    elif damage == "change":
        content = bytearray((last / name).read_bytes())
        content[len(content) // 2] ^= 1
        (last / name).write_bytes(bytes(content))
    else:
        (last / name).unlink()
    logs = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(ValueError, match=rf"checkpoint .*{last.name} is damaged: {name} is .*; resume from an earlier"):
        small_trainer(run, resume_from_checkpoint=True).train()
    assert (run / "metrics.jsonl").read_bytes() == logs and len(checkpoint.checkpoints(run)) == 2
    (last / checkpoint.STATE).write_text("{")
    with pytest.raises(ValueError, match="is not a checkpoint of a run"):
        small_trainer(run, resume_from_checkpoint=True).train()


@pytest.mark.parametrize("key", checkpoint.KEYS)
def test_a_checkpoint_that_does_not_say_all_is_refused(whole, tmp_path, key):
    folder = tmp_path / "checkpoint-1"
    state = json.loads((checkpoint.checkpoints(whole)[-1] / checkpoint.STATE).read_text())
    assert state.keys() == {*checkpoint.KEYS}
    del state[key]
    folder.mkdir()
    (folder / checkpoint.STATE).write_text(json.dumps(state))
    with pytest.raises(ValueError, match=rf"checkpoint-1/{checkpoint.STATE} has no '{key}': .* \(--model {folder}\)"):
        checkpoint.read_state(folder)


@pytest.mark.parametrize(
    "damage",
    [{"logs": None}, {"step": "two"}, {"best": {}}, {"files": {}}, {"settings": []}, {"digest": None}],
    ids=str,
)
def test_a_record_that_is_not_what_was_written_is_refused_and_no_log_is_cut(whole, tmp_path, damage):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    last = checkpoint.checkpoints(run)[-1]
    state = json.loads((last / checkpoint.STATE).read_text())
    (last / checkpoint.STATE).write_text(json.dumps(state))  # the same, written otherwise
    assert checkpoint.read_state(last) == state
    (last / checkpoint.STATE).write_text(json.dumps(state | damage))
    logs = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(
        ValueError, match=rf"{last.name} is damaged: {checkpoint.STATE} is not what was written; resume"
    ):
        small_trainer(run, resume_from_checkpoint=True).train()
    assert (run / "metrics.jsonl").read_bytes() == logs


def test_going_back_says_what_it_removes_and_checks_first(whole, tmp_path, caplog):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    first, last = checkpoint.checkpoints(run)
    with pytest.raises(ValueError, match=rf"the run has 1 steps, but {first.name} is beyond them"):
        small_trainer(run, steps=1, resume_from_checkpoint=str(first)).train()
    assert checkpoint.checkpoints(run) == [first, last]
    assert (run / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    (run / "run.json").write_text("")
    small_trainer(run, resume_from_checkpoint=str(first)).train()
    assert f"{last.name} removed: the run goes on from step" in caplog.text
    assert "run.json was damaged" in caplog.text
    assert_same_run(run, whole)


@pytest.mark.parametrize("count", [1, 2])
def test_a_run_killed_while_it_goes_back_resumes(whole, tmp_path, count):
    """Between the removal of one later checkpoint and the next, or before the logs are cut: none knows longer logs."""
    run, first = tmp_path / "run", checkpoint.checkpoints(whole)[0]
    shutil.copytree(whole, run)
    (tmp_path / "more").mkdir()
    small_trainer(run, steps=5, resume_from_checkpoint=True, save_total_limit=None).train()
    assert len(checkpoint.checkpoints(run)) == 3

    def killed():
        discarded = []
        original = checkpoint.discard

        def discard(path):
            discarded.append(path)
            small_run.kill(len(discarded), count)
            original(path)

        sys.modules["sparse_rl.train.run"].discard = discard
        small_trainer(run, resume_from_checkpoint=str(run / first.name)).train()

    assert in_child(killed) == -signal.SIGKILL
    assert len(checkpoint.checkpoints(run)) == 4 - count
    small_trainer(run, steps=5, resume_from_checkpoint=True).train()
    assert [line["step"] for line in read_log(run / "metrics.jsonl")] == list(range(6))


def test_a_full_disk_at_the_start_asks_for_a_new_start(tmp_path, monkeypatch):
    """There is no run to resume as long as run.json is missing, and no checkpoint is there."""

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"run.json could not be written \(.*make room on the disk, then start again"):
            small_trainer(tmp_path / "run").train()
    small_trainer(tmp_path / "run", steps=1).train()
    (tmp_path / "run" / "run.json").unlink()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"run.json could not be written \(.*make room on the disk, then resume"):
            small_trainer(tmp_path / "run", steps=2, resume_from_checkpoint=True).train()
    small_trainer(tmp_path / "run", steps=2, resume_from_checkpoint=True).train()
    assert (tmp_path / "run" / "run.json").exists()


def test_a_run_whose_checkpoints_are_gone_keeps_its_logs(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for folder in checkpoint.checkpoints(run):
        shutil.rmtree(folder)
    with pytest.raises(ValueError, match="has taken 4 steps, but its checkpoints are gone"):
        small_trainer(run, resume_from_checkpoint=True).train()
    assert (run / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_a_run_that_was_to_save_later_starts_over(whole, tmp_path, caplog):
    """Whether checkpoints are gone is a question of how often the run saved, not of how often it is to save now."""
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    for folder in checkpoint.checkpoints(run):
        shutil.rmtree(folder)
    record = json.loads((run / "run.json").read_text())
    record["config"]["trainer"]["save_every"] = 50
    del record["digest"]
    (run / "run.json").write_text(json.dumps(record))
    small_trainer(run, resume_from_checkpoint=True).train()
    assert "has no checkpoint yet; the run starts over" in caplog.text
    assert_same_run(run, whole)


def test_two_processes_do_not_share_a_run(tmp_path):
    (tmp_path / "run").mkdir()
    with lock(tmp_path / "run"), pytest.raises(ValueError, match="another process is training in"):
        small_trainer(tmp_path / "run").train()
    small_trainer(tmp_path / "run", steps=1).train()


def test_a_checkpoint_of_another_model_is_refused(whole, tmp_path):
    tokenizer = tiny_tokenizer()
    other = tiny_model(vocab_size=len(tokenizer))
    other.save_pretrained(tmp_path / "model")
    load("embedded").tokenizer.save_pretrained(tmp_path / "model")
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    with pytest.raises(ValueError, match="is of another model"):
        small_trainer(run, loaded=load(str(tmp_path / "model")), resume_from_checkpoint=True).train()
    with pytest.raises(ValueError, match="is not a checkpoint of"):
        small_trainer(run, resume_from_checkpoint=str(tmp_path / "model")).train()
    assert (run / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


@pytest.mark.parametrize(
    ("writer", "error"),
    [
        ("sparse_rl.runfolder._files", SafetensorError("I/O error: No space left on device (os error 28)")),
        ("sparse_rl.runfolder._to_disk", OSError(28, "No space left on device")),
        ("torch.save", RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos\nframe #0")),
        ("torch.distributed.checkpoint.filesystem._write_item", OSError(28, "No space left on device")),
        ("sparse_rl.runfolder._to_disk", RuntimeError()),
    ],
)
@pytest.mark.some(2)
def test_a_full_disk_keeps_the_last_checkpoint(whole, tmp_path, monkeypatch, writer, error):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    before = [path.name for path in checkpoint.checkpoints(run)]

    def full(*what, **__):
        if what != (run,):  # which the run's own record is brought to disk with
            raise error

    monkeypatch.setattr(writer, full)
    with pytest.raises(OSError, match=r"checkpoint-5 could not be written \(.*; make room on the disk, then resume"):
        small_trainer(run, resume_from_checkpoint=True, steps=5).train()
    assert [path.name for path in checkpoint.checkpoints(run)] == before
    assert not list(run.glob("*.tmp"))
    monkeypatch.undo()
    small_trainer(run, resume_from_checkpoint=True).train()
    assert_same_run(run, whole)


def test_a_checkpoint_loads_as_a_hugging_face_model(whole):
    last = checkpoint.checkpoints(whole)[-1]
    weights, state = load(str(last)).model.state_dict(), kept(last)
    masters = {name.removeprefix("masters."): value for name, value in state.items() if name.startswith("masters.")}
    assert masters and all(torch.equal(weights[name], masters[name]) for name in masters)


def test_a_bf16_run_with_a_reference_and_several_passes_resumes_from_its_fp32_masters(tmp_path):
    """What a checkpoint gives back is the master, not the rounded module."""
    parts = {"loss": LossConfig(beta=0.1), "update": UpdateConfig(updates_per_rollout=2, num_iterations=2)}

    def trainer(name, **config):
        loaded = load("embedded", dtype=torch.bfloat16)
        return small_trainer(tmp_path / name, loaded=loaded, parts=parts, steps=2, advantage="remax", **config)

    trainer("whole").train()
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    for later in checkpoint.checkpoints(tmp_path / "parts")[1:]:
        shutil.rmtree(later)
    trainer("parts", resume_from_checkpoint=True).train()
    first, second = (kept(tmp_path / name / "checkpoint-2") for name in ("whole", "parts"))
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(not torch.equal(value, value.bfloat16().float()) for value in first.values())
    assert without_times(tmp_path / "whole") == without_times(tmp_path / "parts")


def test_a_run_resumed_with_another_optimizer_uses_it(whole, tmp_path, caplog):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    optimizer = OptimizerConfig(learning_rate=1e-3, schedule="linear", beta2=0.5, weight_decay=0.25)
    trainer = small_trainer(run, steps=5, resume_from_checkpoint=True, parts={"optimizer": optimizer})
    trainer.train()
    matrices, vectors = trainer.learner.optimizer.param_groups
    assert matrices["betas"] == vectors["betas"] == (0.9, 0.5)
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.25, 0.0)
    assert "optimizer.beta2 0.999 is now 0.5" in caplog.text


def test_the_best_checkpoint_is_kept_over_a_resume_too(tmp_path):
    def best_after(steps, *values):
        trainer = small_trainer(tmp_path / "run", save_total_limit=1, steps=steps, resume_from_checkpoint=steps > 3)
        trainer.eval_config = EvalConfig(every=1, prompts=4)
        left = iter(values)
        trainer._evaluate = lambda: {"eval/dense/reward": next(left)}
        trainer.train()
        names = [path.name for path in checkpoint.checkpoints(tmp_path / "run")]
        assert names == ["checkpoint-1", f"checkpoint-{steps}"]
        return json.loads((tmp_path / "run" / f"checkpoint-{steps}" / checkpoint.STATE).read_text())["best"]

    assert best_after(3, 0.0, 0.9, 0.1, 0.2) == {"checkpoint": "checkpoint-1", "value": 0.9}
    assert best_after(4, 0.5) == {"checkpoint": "checkpoint-1", "value": 0.9}


def test_a_best_checkpoint_that_was_pruned_for_a_better_one_is_forgotten(tmp_path):
    """With the better one taken back, what is left of the run has a best of its own."""

    def trained(steps, values, **config):
        trainer = small_trainer(tmp_path / "run", save_total_limit=2, steps=steps, **config)
        trainer.eval_config, left = EvalConfig(every=1, prompts=4), iter(values)
        trainer._evaluate = lambda: {"eval/dense/reward": next(left)}
        trainer.train()
        return [path.name for path in checkpoint.checkpoints(tmp_path / "run")]

    assert trained(3, (0.0, 0.9, 0.1, 0.95)) == ["checkpoint-2", "checkpoint-3"]
    again = str(tmp_path / "run" / "checkpoint-2")
    assert trained(5, (0.3, 0.2, 0.1), resume_from_checkpoint=again) == ["checkpoint-3", "checkpoint-5"]
