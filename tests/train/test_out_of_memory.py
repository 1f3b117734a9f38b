# SPDX-License-Identifier: Apache-2.0
"""Memory that runs out: half the tokens or the rows, and the run is the one that had so much from there on."""

from __future__ import annotations

import random
import signal
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from guarded_run import (
    CPU_MEMORY,
    ERRORS,
    ONE,
    SEVERAL,
    at_call,
    fail_with,
    names,
    resume,
    send,
    state_of,
    trainer_of,
)
from small_run import assert_same_run, small_model, without_times

from sparse_rl.evaluate import EvalConfig
from sparse_rl.metrics import read_log
from sparse_rl.rollout import EngineConfig
from sparse_rl.rollout.memory import out_of_memory
from sparse_rl.train import Stopped, guards
from sparse_rl.train.guards import Guards


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_what_out_of_memory_looks_like(error):
    assert out_of_memory(error)
    wrapped = ValueError("a pool cannot be allocated")
    wrapped.__cause__ = error
    assert out_of_memory(wrapped)
    assert not out_of_memory(RuntimeError("shape mismatch")) and not out_of_memory(ValueError("out of memory"))


def test_an_update_out_of_memory_is_done_again_with_half_the_tokens(tmp_path, monkeypatch, caplog):
    """At any microbatch of the first step: the run is then the one that had half from the start."""
    half = tmp_path / "half"
    with monkeypatch.context() as patch:
        passed = at_call("update", patch, lambda: None)
        trainer_of(half, replace(ONE, max_tokens=30), steps=2).train()
    assert len(passed) > 4
    with monkeypatch.context() as patch:
        trainer = trainer_of(tmp_path / "counted", steps=1)
        passed = at_call("update", patch, lambda: None)
        trainer.train()
    count, error = random.randint(1, len(passed)), random.choice(ERRORS)
    print(f"{type(error).__name__} at microbatch {count} of {len(passed)}")
    with monkeypatch.context() as patch:
        at_call("update", patch, fail_with(error), count=count)
        trainer_of(tmp_path / "run", steps=2).train()
    assert caplog.text.count("it is done again, and update.max_tokens is 30 from here on") == 1
    assert_same_run(tmp_path / "run", half)
    assert {line.get("update/max_tokens") for line in read_log(half / "metrics.jsonl")} == {None, 30}


def test_a_backward_out_of_memory_leaves_no_gradient_behind(tmp_path, monkeypatch):
    """The module is bf16 and its gradients are moved to masters: some have been, and one is on the way."""

    def trained(folder, error):
        loaded = small_model(torch.bfloat16)
        trainer = trainer_of(folder, SEVERAL, loaded=loaded, steps=2)
        parameter, calls = trainer.learner.masters.parameters[5], []

        def fail(gradient):
            calls.append(1)
            if trainer.step == 1 and trainer.learner.num_updates == 3:  # the second update of step 2
                if error and trainer.guards.halved == {}:
                    parameter.grad = torch.ones_like(parameter)
                    raise error
                trainer.guards.halved["update"] = 1

        with monkeypatch.context() as patch:
            if error is None:
                step = trainer.learner.step

                def halves_after(*args, **more):
                    metrics = step(*args, **more)
                    if trainer.learner.num_updates == 3:
                        trainer.guards.halved["update"] = 1
                    return metrics

                patch.setattr(trainer.learner, "step", halves_after)
            else:
                parameter.register_hook(fail)
            trainer.train()
        return without_times(folder)

    expected = trained(tmp_path / "half", None)
    assert trained(tmp_path / "run", ERRORS[0]) == expected and expected[2]["update/max_tokens"] == 30
    assert_same_run(tmp_path / "run", tmp_path / "half")


def test_a_smaller_budget_outlives_a_resume_and_other_settings_do_not(tmp_path, monkeypatch):
    def disturbed(folder, stop):
        trainer = trainer_of(folder)
        with monkeypatch.context() as patch:
            at_call("update", patch, fail_with(ERRORS[0]), trainer=trainer, step=1)
            if stop:
                at_call("rollout", patch, send(), trainer=trainer, step=2)
            trainer.train()

    disturbed(tmp_path / "whole", stop=False)
    with pytest.raises(Stopped):
        disturbed(tmp_path / "run", stop=True)
    assert state_of(tmp_path / "run")["halved"] == {"update": 1}
    resume(tmp_path / "run")
    assert_same_run(tmp_path / "run", tmp_path / "whole", same_checkpoints=False)
    again = resume(tmp_path / "run", replace(ONE, max_tokens=70), steps=4)
    assert again.guards.halved == {} and read_log(tmp_path / "run" / "metrics.jsonl")[-1]["update/max_tokens"] == 70


def test_a_rollout_that_does_not_fit_ends_the_run_with_advice_and_loses_nothing(whole, tmp_path, monkeypatch):
    from sparse_rl.train import update as module

    run = tmp_path / "run"
    trainer = trainer_of(run)
    original = module.policy_loss

    def full(*args):
        if trainer.step == 2:
            raise ERRORS[0]
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(module, "policy_loss", full)
        with pytest.raises(ValueError, match=r"in an update, whose longest rollout has \d+ tokens; lower sampling"):
            trainer.train()
    assert names(run) == ["checkpoint-2"] and state_of(run)["halved"] == {}, "of the step before"
    resume(run)
    assert_same_run(run, whole(ONE), same_checkpoints=False)


def test_an_optimizer_out_of_memory_is_not_tried_again(tmp_path, monkeypatch):
    trainer = trainer_of(tmp_path / "run", save_every=1)
    step, calls = trainer.learner.optimizer.step, []

    def full():
        calls.append(1)
        return step() if len(calls) < 3 else fail_with(ERRORS[0])()

    monkeypatch.setattr(trainer.learner.optimizer, "step", full)
    with pytest.raises(ValueError, match="out of memory in the optimizer's step; choose an 8-bit"):
        trainer.train()
    assert len(calls) == 3 and names(tmp_path / "run") == ["checkpoint-1", "checkpoint-2"]


NO_EVAL = {"eval": EvalConfig(prompts=0)}


def test_a_rollout_out_of_memory_is_done_again_with_half_the_rows(tmp_path, monkeypatch, caplog):
    error, count = random.choice(ERRORS), random.randint(1, 6)
    print(f"{type(error).__name__} at decode step {count}")
    engine = EngineConfig(rows=4, page_size=16, max_prefill_tokens=4096)
    trainer_of(tmp_path / "half", steps=2, parts=NO_EVAL | {"engine": engine}).train()
    with monkeypatch.context() as patch:
        at_call("rollout", patch, fail_with(error), count=count)
        trainer_of(tmp_path / "run", steps=2, parts=NO_EVAL).train()
    said = "it starts over, and engine.rows is 4, engine.max_prefill_tokens 4096 from here on"
    assert caplog.text.count(said) == 1
    assert_same_run(tmp_path / "run", tmp_path / "half")
    assert [line.get("rollout/rows") for line in read_log(tmp_path / "run" / "metrics.jsonl")] == [None, 4, 4]


def test_rows_in_use_are_what_is_halved_and_a_pool_counts_too(tmp_path, monkeypatch, caplog):
    """8 samples in 100 rows: to 3 at once, since 6 is the first below 8 and does not fit either."""
    from sparse_rl.kv.cache import PagedCache

    original, tried = PagedCache.__init__, []

    def small(self, *args, num_rows, **more):
        tried.append(num_rows)
        if num_rows > 4:
            raise RuntimeError(CPU_MEMORY)
        original(self, *args, num_rows=num_rows, **more)

    monkeypatch.setattr(PagedCache, "__init__", small)
    trainer_of(tmp_path / "run", steps=1, parts=NO_EVAL | {"engine": EngineConfig(rows=100, page_size=16)}).train()
    assert tried == [100, 6, 3] and caplog.text.count("out of memory while sampling (rollout)") == 2
    given = {"engine": EngineConfig(rows=100, page_size=16, pool_pages=64)}
    with pytest.raises(ValueError, match="cannot be allocated on cpu; give a smaller"):
        trainer_of(tmp_path / "given", steps=1, parts=NO_EVAL | given).train()
    assert tried == [100, 6, 3, 100], "a pool whose size is given gets no smaller with the rows"


def test_an_evaluation_out_of_memory_halves_its_own_rows(tmp_path, monkeypatch):
    """And what does not fit with one row ends the run, with what was learnt saved."""
    from sparse_rl.rollout.loop import Loop

    run, original = tmp_path / "run", Loop.decode
    trainer = trainer_of(run, parts={"eval": EvalConfig(every=0, prompts=8)})

    def full(self):
        dense = type(self.policy).__name__ == "Full"
        if dense and (trainer.step == 3 or len(self.scheduler.running) > 4):
            raise ERRORS[0]
        return original(self)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "decode", full)
        with pytest.raises(ValueError, match=r"out of memory while sampling \(eval/dense\); give a smaller engine"):
            trainer.train()
    assert trainer.guards.halved == {"eval/dense": 3} and trainer.engine.config.rows == 8
    assert names(run) == ["checkpoint-3"] and state_of(run)["halved"] == {"eval/dense": 1}
    resume(run, parts={"eval": EvalConfig(every=0, prompts=8)})
    assert [line["step"] for line in read_log(run / "metrics.jsonl")] == [0, 1, 2, 3]


def test_several_processes_do_not_go_their_own_way(monkeypatch):
    """One that tried an update again, or stopped in it, by itself would leave the others waiting."""
    monkeypatch.setattr(guards, "alone", lambda: False)
    learner = SimpleNamespace(device=torch.device("cpu"))
    rollout = SimpleNamespace(prompt=SimpleNamespace(ids=(1, 2)), token_ids=torch.zeros(3))
    with pytest.raises(ValueError, match=r"longest rollout has 5 tokens; lower update.max_tokens, which is 60"):
        Guards().fit(lambda tokens: fail_with(ERRORS[0])(), 60, [rollout], learner)
    asked = Guards()
    asked.stop = signal.SIGTERM
    heard = []
    monkeypatch.setattr(guards.dist, "all_reduce", lambda number, op: heard.append(int(number)) or number.fill_(15))
    with pytest.raises(Stopped):
        asked.check_together()
    with pytest.raises(Stopped):
        Guards().check_together()
    assert heard == [15, 0]


def test_where_one_rollout_does_not_fit_the_pools_memory_is_given_up(whole, tmp_path, monkeypatch, caplog):
    """The pool of a bounded cache stays while the learner works, until the learner needs the room."""
    from sparse_rl.train import update as module

    trainer = trainer_of(tmp_path / "run")
    original, held = module.policy_loss, []

    def full(*args):
        held.append(trainer.engine.cache.num_pages)
        if trainer.step == 1 and held[-1]:
            raise ERRORS[0]
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(module, "policy_loss", full)
        patch.setattr(guards.Guards, "part", lambda self, stage, number: 1 if stage == "update" else number)
        trainer.train()
    assert caplog.text.count("the KV pool is given back before every update from here on") == 1
    assert trainer.guards.halved == {"pool": 1}
    pools = [bool(pages) for pages in held]
    assert pools == sorted(pools, reverse=True) and pools[0] and not pools[-1], "kept, until it was given up"
