# SPDX-License-Identifier: Apache-2.0
"""Supervised runs that something happens to: signals, memory that runs out, numbers that are not finite."""

from __future__ import annotations

import math
import random
import signal
from dataclasses import replace

import pytest
import small_run
import torch
from guarded_run import CPU_MEMORY, ERRORS, fail_with, names, send, state_of
from small_run import assert_same_run, kept, without_times
from small_sft import OPTIMIZER, small_sft

from sparse_rl.metrics import read_log
from sparse_rl.train import Stopped
from sparse_rl.train.guards import STREAK
from sparse_rl.train.sft import nll

TOKENS = 40  # of a forward: an update has two or three
NLL = "sparse_rl.train.sft.nll"


def sft_of(folder, **config):
    """Six steps that nothing but the end, or a guard, saves; evaluated at the start and the end."""
    return small_sft(folder, **({"max_tokens": TOKENS, "save_every": 0, "eval_every": 0} | config))


def resume(folder, **config):
    resumed = sft_of(folder, resume_from_checkpoint=True, **config)
    resumed.train()
    return resumed


def at_forward(monkeypatch, action, when):
    """Do something in the first forward for which `when` holds."""
    done = []

    def watched(*args):
        if not done and when():
            done.append(1)
            action()
        return nll(*args)

    monkeypatch.setattr(NLL, watched)
    return done


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("sft") / "run"
    sft_of(folder).train()
    return folder


@pytest.mark.parametrize(("number", "later"), [(signal.SIGTERM, 0), (signal.SIGINT, 1)])
def test_a_signal_in_an_update_saves_the_last_step_and_resumes_bit_for_bit(
    whole, tmp_path, monkeypatch, caplog, number, later
):
    """In a step drawn anew each time; it is thrown away unless that was its last forward."""
    run, step = tmp_path / "run", random.randint(1, 5)
    print(f"{number.name} in step {step + 1}, forward {later + 1}")
    trainer, passed = sft_of(run), []

    def when():
        passed.extend([1] if trainer.step == step else [])
        return len(passed) == later + 1

    with monkeypatch.context() as patch:
        sent = at_forward(patch, send(number), when)
        with pytest.raises(Stopped) as stopped:
            trainer.train()
    assert stopped.value.code == 128 + number and sent
    assert names(run) in ([[f"checkpoint-{step}"], [f"checkpoint-{step + 1}"]] if later else [[f"checkpoint-{step}"]])
    assert f"stopped by {number.name} after {run / names(run)[0]}; --trainer.resume_from_checkpoint" in caplog.text
    assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)
    resume(run)
    assert_same_run(run, whole, same_checkpoints=False)


def test_weights_that_have_moved_and_a_step_to_be_evaluated_are_kept(whole, tmp_path, monkeypatch):
    """The step's evaluation and its line are made up for."""
    for name, point in (("moved", "publish"), ("evaluated", "eval")):
        run = tmp_path / name
        trainer = sft_of(run)
        with monkeypatch.context() as patch:
            if point == "publish":
                small_run.watch("publish", patch.setattr, lambda count: send()() if count == 3 else None)
            else:
                at_forward(patch, send(), lambda trainer=trainer: trainer.step == 6)
            with pytest.raises(Stopped):
                trainer.train()
        step = 3 if point == "publish" else 6
        assert names(run) == [f"checkpoint-{step}"] and state_of(run)["pending"]["grad_norm"] > 0
        assert len(read_log(run / "metrics.jsonl")) == step
        assert resume(run).learner.num_updates == 6
        assert_same_run(run, whole, same_checkpoints=False)


def test_a_run_stopped_before_its_first_step_starts_over(whole, tmp_path, monkeypatch, caplog):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        at_forward(patch, send(), lambda: True)
        with pytest.raises(Stopped):
            sft_of(run).train()
    assert names(run) == [] and "stopped by SIGTERM before the first step was learnt" in caplog.text
    resume(run)
    assert_same_run(run, whole)


def test_memory_that_runs_out_halves_the_tokens_and_the_rest_is_the_run_that_had_half(
    whole, tmp_path, monkeypatch, caplog
):
    """In the first evaluation; in a backward, when some gradients are there already."""
    with monkeypatch.context() as patch:
        at_forward(patch, fail_with(random.choice(ERRORS)), lambda: True)
        sft_of(tmp_path / "evaluated", max_tokens=2 * TOKENS).train()
    said = f"it is done again, and trainer.max_tokens is {TOKENS} from here on"
    assert caplog.text.count(f"out of memory in an evaluation: {said}") == 1
    assert_same_run(tmp_path / "evaluated", whole)
    trainer, failed = sft_of(tmp_path / "updated", max_tokens=2 * TOKENS), []

    def fail(gradient):
        if not failed:
            failed.append(sum(holder.grad is not None for holder in trainer.learner.masters.holders))
            raise RuntimeError(CPU_MEMORY)

    trainer.learner.masters.parameters[3].register_hook(fail)
    trainer.train()
    assert failed[0] > 0 and caplog.text.count(f"out of memory in an update: {said}") == 1
    got, expected = (without_times(folder) for folder in (tmp_path / "updated", whole))
    assert got[1:] == expected[1:] and got[1]["update/max_tokens"] == TOKENS


def test_half_the_tokens_outlive_a_resume_and_other_settings_do_not(tmp_path, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        at_forward(patch, fail_with(ERRORS[0]), lambda: True)
        sft_of(run, steps=1).train()
    assert state_of(run)["halved"] == {"update": 1}
    resume(run, steps=2)
    resume(run, steps=3, max_tokens=50)
    found = [line.get("update/max_tokens") for line in read_log(run / "metrics.jsonl")]
    assert found == [None, TOKENS // 2, TOKENS // 2, 50]


def test_a_row_that_does_not_fit_ends_the_run_with_advice_and_loses_nothing(whole, tmp_path, monkeypatch):
    run = tmp_path / "run"
    trainer = sft_of(run)

    def full(*args):
        return fail_with(ERRORS[0])() if trainer.step == 2 else nll(*args)

    with monkeypatch.context() as patch:
        patch.setattr(NLL, full)
        with pytest.raises(ValueError, match=r"in an update, whose longest row has \d+ tokens; lower data.max_length"):
            trainer.train()
    assert names(run) == ["checkpoint-2"]
    resume(run)
    assert_same_run(run, whole, same_checkpoints=False)


def poisoned(folder, when, **config):
    """Its gradient is not finite in the updates (counted from 0) that are named."""
    trainer = sft_of(folder, **config)
    spoil = lambda gradient: gradient * math.nan if trainer.learner.num_updates in when else gradient  # noqa: E731
    trainer.learner.masters.parameters[3].register_hook(spoil)
    return trainer


def test_an_update_that_is_not_finite_is_counted_and_its_rows_are_kept(tmp_path, caplog):
    run = tmp_path / "run"
    trainer = poisoned(run, {1})
    trainer.train()
    assert [line.get("update/nonfinite") for line in read_log(run / "metrics.jsonl")] == [None, 0, 1, 0, 0, 0, 0]
    path = run / "bad_batches" / "step-2-update-1.pt"
    assert caplog.text.count("is not finite: it changes nothing") == 1 and str(path) in caplog.text
    found = torch.load(path, weights_only=True)
    rows = trainer.data.stream(3, 3, 0)
    assert found["prompts"] == [row.prompt.text for row in rows] and math.isnan(found["grad_norm"])
    assert all(torch.equal(ids, row.token_ids) for ids, row in zip(found["token_ids"], rows, strict=True))


def test_a_streak_ends_the_run_with_its_weights_saved(tmp_path):
    run = tmp_path / "run"
    with pytest.raises(FloatingPointError, match="the last 5 updates had a loss or a gradient that is not finite"):
        poisoned(run, range(1, 100), steps=9).train()
    assert names(run) == [f"checkpoint-{1 + STREAK}"]
    resume(run, steps=7)
    assert [line.get("update/nonfinite") for line in read_log(run / "metrics.jsonl")] == [None, 0, *[1] * STREAK, 0]


@pytest.mark.some(0)
def test_an_8_bit_run_learns_and_resumes_bit_for_bit(whole, tmp_path, monkeypatch):
    pytest.importorskip("torchao")
    optimizer = replace(OPTIMIZER, kind="adamw_8bit")
    with torch.compiler.set_stance("force_eager"):  # the compiled step takes seconds to compile
        sft_of(tmp_path / "whole", optimizer=optimizer).train()
        trainer = sft_of(tmp_path / "run", optimizer=optimizer)
        with monkeypatch.context() as patch:
            at_forward(patch, send(), lambda: trainer.step == 3)
            with pytest.raises(Stopped):
                trainer.train()
        with pytest.raises(ValueError, match=r"optimizer.kind is 'adamw', but checkpoint-3 was written with 'adamw_8b"):
            resume(tmp_path / "run")
        resume(tmp_path / "run", optimizer=optimizer)
    assert_same_run(tmp_path / "run", tmp_path / "whole", same_checkpoints=False)
    ours, theirs = (read_log(folder / "metrics.jsonl") for folder in (tmp_path / "run", whole))
    assert ours[-1]["eval/loss"] < ours[0]["eval/loss"] - 0.1
    assert ours[-1]["eval/loss"] == pytest.approx(theirs[-1]["eval/loss"], abs=0.1)
    moments = {name: value for name, value in kept(tmp_path / "run" / "checkpoint-6").items() if ".exp_avg" in name}
    assert any(value.dtype == torch.uint8 for value in moments.values())


def test_an_offloaded_optimizer_needs_a_gpu(tmp_path):
    with pytest.raises(ValueError, match=r"optimizer.offload needs a GPU to take memory from, and the model is on cpu"):
        sft_of(tmp_path / "run", optimizer=replace(OPTIMIZER, offload=True))


def test_recomputed_activations_are_the_same_run_with_more_work(whole, tmp_path):
    calls = {}
    for activations in ("keep", "recompute"):
        trainer = sft_of(tmp_path / activations, activations=activations)
        seen = calls.setdefault(activations, [])
        trainer.loaded.model.model.layers[0].mlp.register_forward_pre_hook(
            lambda *_, seen=seen: seen.append(torch.is_grad_enabled())
        )
        trainer.train()
    assert calls["recompute"].count(True) == 2 * calls["keep"].count(True) > 0
    assert_same_run(tmp_path / "recompute", whole)
    with pytest.raises(ValueError, match=r"trainer.activations is 'forget'"):
        sft_of(tmp_path / "other", activations="forget")
