# SPDX-License-Identifier: Apache-2.0
"""Numbers that are not finite, a full disk: the run ends or goes on as designed, and resumes as if undisturbed."""

from __future__ import annotations

import logging
import math
import resource
from dataclasses import replace

import pytest
import torch
from guarded_run import (
    ONE,
    SEVERAL,
    at_call,
    names,
    observer,
    resume,
    send,
    trainer_of,
)
from small_run import assert_same_run, digits, graded_by

from sparse_rl.metrics import read_log
from sparse_rl.tasks.supervised import Example
from sparse_rl.train import Stopped, guards
from sparse_rl.train.guards import STREAK, BadUpdate, Guards
from sparse_rl.types import Prompt

UPDATES = pytest.mark.parametrize("update", [ONE, SEVERAL], ids=["one update", "several"])


def test_a_reward_that_is_not_a_number_ends_the_run_and_loses_nothing(whole, tmp_path):
    run, calls = tmp_path / "run", []

    def broken(completions, **_):
        calls.append(1)
        return [*digits(completions)[:-1], math.nan if len(calls) == 3 else 0.5]

    def mended(completions, **_):
        return [*digits(completions)[:-1], 0.5]

    def train(folder, reward, **config):
        trainer_of(folder, task=graded_by(reward), **config).train()

    broken.__name__ = mended.__name__ = "graded"
    train(tmp_path / "whole", mended)
    with pytest.raises(ValueError, match="returned nan for completion 7"):
        train(run, broken)
    assert names(run) == ["checkpoint-2"]
    train(run, mended, resume_from_checkpoint=True)
    assert_same_run(run, tmp_path / "whole", same_checkpoints=False)


def poison(trainer, when):
    """Make the gradient not finite in the optimiser steps (counted from 0) that are named."""
    spoil = lambda gradient: gradient * math.nan if trainer.learner.num_updates in when else gradient  # noqa: E731
    trainer.learner.masters.parameters[3].register_hook(spoil)
    return trainer


@UPDATES
@pytest.mark.some(1)
def test_a_gradient_that_is_not_finite_skips_its_update_alone(tmp_path, caplog, monkeypatch, update):
    run, when = tmp_path / "run", {update.num_updates}  # the first of step 2
    trainer = poison(trainer_of(run, update), when)
    weights = []
    step = trainer.learner.step

    def watched(*args, **more):
        before = [p.detach().clone() for p in trainer.learner.masters.masters]
        metrics = step(*args, **more)
        weights.append(any(not torch.equal(a, b) for a, b in zip(before, trainer.learner.masters.masters, strict=True)))
        return metrics

    monkeypatch.setattr(trainer.learner, "step", watched)
    trainer.train()
    assert weights == [i not in when for i in range(3 * update.num_updates)]
    assert [line.get("update/nonfinite") for line in read_log(run / "metrics.jsonl")] == [None, 0, 1, 0]
    path = run / "bad_batches" / "step-2-update-1.pt"
    assert caplog.text.count("is not finite: it changes nothing") == 1 and str(path) in caplog.text
    found = torch.load(path, weights_only=True)
    assert found["step"] == 2 and math.isfinite(found["loss"]) and math.isnan(found["grad_norm"])
    count = 8 // update.num_updates
    assert {len(found[name]) for name in ("token_ids", "advantages", "rewards", "prompts", "prompt_ids")} == {count}
    assert all(len(a) == len(b) for a, b in zip(found["dense_logprobs"], found["token_ids"], strict=True))
    with pytest.MonkeyPatch.context() as patch:
        other = poison(trainer_of(tmp_path / "other", update), when)
        at_call("rollout", patch, send(), trainer=other, step=2)
        with pytest.raises(Stopped):
            other.train()
    poison(trainer_of(tmp_path / "other", update, resume_from_checkpoint=True), when).train()
    assert_same_run(tmp_path / "other", run, same_checkpoints=False)


def test_a_loss_that_is_not_finite_names_its_microbatch(tmp_path, monkeypatch):
    """The gradient of loss + inf is finite all the same."""
    from sparse_rl.train import update as module

    original, calls = module.policy_loss, []

    def spoiled(*args):
        calls.append(1)
        output = original(*args)
        return replace(output, loss=output.loss + math.inf) if len(calls) == 2 else output

    monkeypatch.setattr(module, "policy_loss", spoiled)
    trainer = trainer_of(tmp_path / "run", steps=1)
    before = [p.detach().clone() for p in trainer.learner.masters.masters]
    trainer.train()
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.learner.masters.masters, strict=True))
    found = torch.load(tmp_path / "run" / "bad_batches" / "step-1-update-1.pt", weights_only=True)
    assert [math.isfinite(loss) for _, loss in found["microbatches"]] == [i != 1 for i in range(len(calls))]
    rows = sorted(row for rows, _ in found["microbatches"] for row in rows)
    assert rows == found["advantages"].nonzero()[:, 0].tolist()


def test_a_bad_batch_has_the_losses_of_its_own_pass(tmp_path, monkeypatch):
    """Later passes go over the same rollouts."""
    from sparse_rl.train import update as module

    original, calls = module.policy_loss, []

    def spoiled(*args):
        calls.append(1)
        output = original(*args)
        return replace(output, loss=output.loss * math.nan) if len(calls) == 1 else output

    monkeypatch.setattr(module, "policy_loss", spoiled)
    trainer_of(tmp_path / "run", replace(ONE, num_iterations=2), steps=1).train()
    (path,) = (tmp_path / "run" / "bad_batches").iterdir()
    assert path.name == "step-1-update-1.pt"
    losses = [loss for _, loss in torch.load(path, weights_only=True)["microbatches"]]
    assert [math.isnan(loss) for loss in losses] == [i == 0 for i in range(len(calls) // 2)]


def test_a_bad_batch_has_the_rewards_of_its_own_rollouts(tmp_path):
    row = Example(prompt=Prompt(text="a", ids=(1,)), token_ids=torch.tensor([2]))
    bad = BadUpdate(loss=math.nan, grad_norm=0.0, rows=[row, row], update=1, members=[1, 3])
    Guards().note([bad], 2, torch.tensor([0.0, 0.1, 0.2, 0.3]), 4, tmp_path)
    saved = torch.load(tmp_path / "bad_batches" / "step-4-update-2.pt")
    assert saved["rewards"].tolist() == pytest.approx([0.1, 0.3])


def test_a_streak_ends_the_run_with_its_weights_saved(tmp_path):
    run = tmp_path / "run"
    trainer = poison(trainer_of(run, SEVERAL, steps=9), range(1, 100))
    with pytest.raises(FloatingPointError, match=r"the last 5 updates had a loss or a gradient that is not finite"):
        trainer.train()
    assert trainer.step == math.ceil((1 + STREAK) / 2) == 3
    assert sorted(path.name for path in (run / "bad_batches").iterdir()) == [
        "step-1-update-2.pt", "step-2-update-1.pt", "step-2-update-2.pt",
    ]  # fmt: skip
    assert names(run) == ["checkpoint-3"]
    again = trainer_of(run, SEVERAL, steps=4, resume_from_checkpoint=True)
    with again.run.opened():
        assert again.guards.streak == STREAK  # one more ends it at once
    resume(run, SEVERAL, steps=4)
    lines = read_log(run / "metrics.jsonl")
    assert [line.get("update/nonfinite") for line in lines] == [None, 1, 2, 2, 0]


def test_batches_of_steps_that_are_taken_again_make_room(tmp_path, caplog):
    bad = BadUpdate(loss=math.nan, grad_norm=1.0, rows=[])
    for step in range(1, 5):
        Guards().note([bad], 1, None, step, tmp_path)
    assert caplog.text.count("is not finite: it changes nothing") == 4, "each of these was a run's first"
    assert "there are 3 batches in" in caplog.text
    Guards().forget_after(2, tmp_path)
    Guards().note([bad], 1, None, 4, tmp_path)
    names = [f"step-{step}-update-1.pt" for step in (1, 2, 4)]
    assert sorted(path.name for path in (tmp_path / "bad_batches").iterdir()) == names


def test_updates_that_are_fine_in_between_end_a_streak(tmp_path):
    watched, run = Guards(), tmp_path
    bad = BadUpdate(loss=math.nan, grad_norm=1.0, rows=[])
    for step in range(3 * STREAK):
        watched.note([bad], 2, None, step, run)
        watched.check_finite()
    assert len(list((run / "bad_batches").iterdir())) == guards.MAX_BAD_BATCHES


@pytest.fixture
def limit():
    """limit(bytes): no file may grow beyond that, as on a disk without room."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_checkpoint_without_room_ends_the_run_with_the_one_before(whole, tmp_path, limit):
    run = tmp_path / "run"
    trainer = trainer_of(run, save_every=1)
    on_log = lambda metrics: limit(50_000) if metrics["step"] == 2 else None  # noqa: E731
    trainer.observers = (observer(on_log=on_log),)
    with pytest.raises(OSError, match=r"checkpoint-2 could not be written \(.*; make room on the disk, then resume"):
        trainer.train()
    assert names(run) == ["checkpoint-1"] and not list(run.glob("*.tmp"))
    limit(-1)
    resume(run)
    assert_same_run(run, whole(ONE), same_checkpoints=False)


def test_a_log_without_room_ends_the_run_and_is_cut_back(whole, tmp_path, limit, caplog):
    """There is room for half a line."""
    run = tmp_path / "run"
    trainer = trainer_of(run, save_every=1)
    trainer.observers = (observer(on_save=lambda folder: limit((run / "metrics.jsonl").stat().st_size + 100)),)
    with pytest.raises(OSError, match=r"metrics.jsonl could not be written \(.*; make room on the disk, then resume"):
        trainer.train()
    assert names(run) == ["checkpoint-1"] and not list(run.glob("*.tmp"))
    assert "the last step could not be saved" in caplog.text
    assert not (run / "metrics.jsonl").read_bytes().endswith(b"\n")
    limit(-1)
    resume(run)
    assert_same_run(run, whole(ONE), same_checkpoints=False)


def test_a_bad_batch_without_room_is_only_said(tmp_path, caplog, limit):
    bad = BadUpdate(loss=math.nan, grad_norm=1.0, rows=[], contents={"x": torch.zeros(10_000)})
    limit(1000)
    with caplog.at_level(logging.WARNING):
        Guards().note([bad], 1, None, 7, tmp_path)
    limit(-1)  # pytest has something to write too
    assert "in step 7 is not finite" in caplog.text and "its batch could not be saved" in caplog.text
