# SPDX-License-Identifier: Apache-2.0
"""Signals, memory that runs out, numbers that are not finite, a full disk: the run ends or goes on as designed, and
what resumes is the run that was never disturbed."""

from __future__ import annotations

import json
import logging
import math
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import small_run
import torch
from small_run import TASK, assert_same_run, digits, small_trainer, without_times

from sparse_rl.evaluate import EvalConfig
from sparse_rl.metrics import read_log
from sparse_rl.model.load import load
from sparse_rl.rollout import EngineConfig, Sampling
from sparse_rl.tasks import Rewards
from sparse_rl.train import Observer, UpdateConfig, checkpoint, guards
from sparse_rl.train.guards import STREAK, Guards, Stopped, out_of_memory

ONE, SEVERAL = UpdateConfig(max_tokens=60), UpdateConfig(max_tokens=60, updates_per_rollout=2)
UPDATES = pytest.mark.parametrize("update", [ONE, SEVERAL], ids=["one update", "several"])
CPU_MEMORY = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"
ERRORS = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), RuntimeError(CPU_MEMORY), MemoryError()]


def trainer_of(folder, update=ONE, *, parts=None, **config):
    """Three short steps that nothing but the end, or a guard, saves; evaluated at the start and the end."""
    parts = {
        "update": update,
        "sampling": Sampling(n=4, max_tokens=9, temperature=small_run.TEMPERATURE),
        "eval": EvalConfig(every=0, prompts=2),
    } | (parts or {})
    return small_trainer(folder, parts=parts, **({"steps": 3, "save_every": 0} | config))


def resume(folder, update=ONE, **more):
    resumed = trainer_of(folder, update, resume_from_checkpoint=True, **more)
    resumed.train()
    return resumed


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """whole(update): the run that nothing disturbed."""
    folders = {}

    def run(update):
        if update not in folders:
            folders[update] = tmp_path_factory.mktemp("whole") / "run"
            trainer_of(folders[update], update).train()
        return folders[update]

    return run


def names(folder):
    return [path.name for path in checkpoint.checkpoints(folder)]


def state_of(folder):
    return json.loads((checkpoint.checkpoints(folder)[-1] / checkpoint.STATE).read_text())


def at_call(point, monkeypatch, action, *, trainer=None, step=None, count=1):
    """Do something at the count-th time the run, or one of its steps, passes the point."""
    passed = []

    def on_call(_):
        if step is None or trainer.step == step:
            passed.append(1)
            if len(passed) == count:
                action()

    small_run.watch(point, monkeypatch.setattr, on_call)
    return passed


def send(number=signal.SIGTERM):
    return lambda: os.kill(os.getpid(), number)


def fail_with(error):
    def fail():
        raise error

    return fail


def observer(**methods):
    """An observer that does this and nothing else."""
    return type("Watching", (Observer,), {name: staticmethod(method) for name, method in methods.items()})()


# signals


@pytest.mark.parametrize(
    ("point", "number", "update"),
    [
        ("rollout", signal.SIGTERM, ONE),
        ("rollout", signal.SIGINT, SEVERAL),
        ("update", signal.SIGTERM, SEVERAL),
        ("update", signal.SIGINT, ONE),
    ],
    ids=["rollout", "rollout, Ctrl-C", "scoring", "update, Ctrl-C"],
)
def test_a_signal_throws_the_step_away_and_saves_the_last(whole, tmp_path, monkeypatch, caplog, update, number, point):
    run = tmp_path / "run"
    trainer = trainer_of(run, update)
    with monkeypatch.context() as patch:
        passed = at_call(point, patch, send(number), trainer=trainer, step=2)
        with pytest.raises(Stopped) as stopped:
            trainer.train()
    assert stopped.value.code == 128 + number and len(passed) == 1, "at once"
    assert names(run) == ["checkpoint-2"] and state_of(run)["pending"] is None
    assert f"stopped by {number.name} after {run / 'checkpoint-2'}; --trainer.resume_from_checkpoint" in caplog.text
    resume(run, update)
    assert_same_run(run, whole(update), same_checkpoints=False)


@pytest.mark.parametrize(("update", "step"), [(ONE, 1), (SEVERAL, 2)], ids=["one update", "the first of several"])
def test_weights_that_have_moved_are_taken_to_the_end_of_the_step(whole, tmp_path, monkeypatch, update, step):
    """The step is saved before its evaluation and its line, which a resumed run makes up for."""
    run = tmp_path / "run"
    trainer = trainer_of(run, update)
    with monkeypatch.context() as patch:
        passed = at_call("publish", patch, send(), trainer=trainer, step=step)
        with pytest.raises(Stopped):
            trainer.train()
    assert len(passed) == update.num_updates
    assert names(run) == [f"checkpoint-{step + 1}"] and state_of(run)["pending"]["grad_norm"] > 0
    assert [line["step"] for line in read_log(run / "metrics.jsonl")] == list(range(step + 1))
    resume(run, update)
    assert_same_run(run, whole(update), same_checkpoints=False)


def test_a_signal_in_an_evaluation_keeps_what_was_learnt(whole, tmp_path):
    def on_progress(stage, progress):
        if stage == "eval/sparse" and trainer.step == 3:
            send()()

    run = tmp_path / "run"
    trainer = trainer_of(run)
    trainer.observers = (observer(on_progress=on_progress),)
    with pytest.raises(Stopped):
        trainer.train()
    assert names(run) == ["checkpoint-3"] and state_of(run)["pending"]
    resumed = resume(run)
    assert resumed.learner.num_updates == 3
    assert_same_run(run, whole(ONE))


def test_a_signal_anywhere_resumes_bit_for_bit(whole, tmp_path, monkeypatch):
    """At a place drawn anew each time; the message of a failure names it."""
    point, count = random.SystemRandom().choice(list(small_run.POINTS)), random.SystemRandom().randint(1, 30)
    print(f"signal at {point} {count}")
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        at_call(point, patch, send(), count=count)
        try:
            trainer_of(run, SEVERAL).train()
        except Stopped:
            resume(run, SEVERAL)
    assert_same_run(run, whole(SEVERAL), same_checkpoints=False)


def test_a_run_stopped_before_its_first_step_starts_over(whole, tmp_path, monkeypatch, caplog):
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        at_call("rollout", patch, send())
        with pytest.raises(Stopped):
            trainer_of(run).train()
    assert names(run) == [] and "stopped by SIGTERM before the first step was learnt" in caplog.text
    resume(run)
    assert_same_run(run, whole(ONE))


def test_handlers_are_given_back_and_those_of_others_are_left(tmp_path):
    heard = []
    look = lambda trainer: heard.append((signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)))  # noqa: E731
    before = signal.getsignal(signal.SIGINT)
    trainer = trainer_of(tmp_path / "run", steps=0)
    trainer.observers = (observer(on_begin=look),)
    trainer.train()
    assert heard == [(trainer.guards.on_signal, trainer.guards.on_signal)]
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == (signal.SIG_DFL, before)

    def own(number, frame):
        pass

    listening = Guards()
    signal.signal(signal.SIGTERM, own)
    try:
        listening.listen()
        assert signal.getsignal(signal.SIGTERM) is own and signal.getsignal(signal.SIGINT) == listening.on_signal
    finally:
        listening.stop_listening()
        assert signal.getsignal(signal.SIGTERM) is own
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    thread = threading.Thread(target=lambda: listening.listen())
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL and not listening.unheard


PROGRAM = """
    import os, signal, sys
    import torch
    torch.set_num_threads(1)
    from sparse_rl.cli import main

    def reward(completions, **_):
        if STEPS.append(1) or len(STEPS) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return [float(len(text)) for text in completions]

    STEPS = []
    sys.modules["grader"] = sys.modules["__main__"]
    main(["train", "--model", "embedded", "--task.name", "jsonl", "--task.train_file", {rows!r}, "--task.rewards",
          "grader:reward", "--trainer.output_dir", {run!r}, "--trainer.steps", "3", "--trainer.prompts_per_step", "2",
          "--sampling.n", "2", "--sampling.max_tokens", "4"])
"""


def test_the_command_leaves_with_the_signals_exit_code(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a=b1;b=a2;a|"}\n')
    program = PROGRAM.format(rows=str(tmp_path / "rows.jsonl"), run=str(tmp_path / "run"))
    command = [sys.executable, "-c", textwrap.dedent(program)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (143, ""), ended.stderr
    assert "SIGTERM: stopping; a second signal ends the run at once" in ended.stderr and "Traceback" not in ended.stderr
    assert f"stopped by SIGTERM after {tmp_path / 'run' / 'checkpoint-1'}" in ended.stderr.splitlines()[-1]


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # that forks, with threads
def test_a_second_signal_ends_the_process_at_once():
    child = os.fork()
    if not child:
        asked = Guards()
        asked.listen()
        os.kill(os.getpid(), signal.SIGTERM)
        asked.stop_s -= 2
        os.kill(os.getpid(), signal.SIGINT)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGINT


def test_a_signal_that_a_launcher_forwards_is_not_a_second_one(monkeypatch):
    ended = []
    monkeypatch.setattr(guards.signal, "signal", lambda *_: None)
    monkeypatch.setattr(guards.signal, "raise_signal", ended.append)
    asked = Guards()
    asked.on_signal(signal.SIGINT, None)
    asked.on_signal(signal.SIGTERM, None)
    assert asked.stop == signal.SIGINT and not ended
    asked.stop_s = time.monotonic() - 2
    asked.on_signal(signal.SIGTERM, None)
    assert ended == [signal.SIGTERM]


# numbers that are not finite


def test_a_reward_that_is_not_a_number_ends_the_run_and_loses_nothing(whole, tmp_path):
    run, calls = tmp_path / "run", []

    def broken(completions, **_):
        calls.append(1)
        return [*digits(completions)[:-1], math.nan if len(calls) == 3 else 0.5]

    def mended(completions, **_):
        return [*digits(completions)[:-1], 0.5]

    def train(folder, reward, **config):
        task = SimpleNamespace(rewards=Rewards((reward,)), stream=TASK.stream, held_out=lambda count: [])
        trainer_of(folder, task=task, **config).train()

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
    resume(run, SEVERAL, steps=4)
    lines = read_log(run / "metrics.jsonl")
    assert [line.get("update/nonfinite") for line in lines] == [None, 1, 2, 2, 0]


def test_updates_that_are_fine_in_between_end_a_streak(tmp_path):
    watched, run = Guards(), tmp_path
    bad = SimpleNamespace(update=0, loss=math.nan, grad_norm=1.0, contents=lambda rewards: {})
    for step in range(3 * STREAK):
        watched.note([bad], 2, torch.zeros(1), step, run)
        watched.check_finite()
    assert len(list((run / "bad_batches").iterdir())) == guards.MAX_BAD_BATCHES


# memory


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
    count, error = random.SystemRandom().randint(1, len(passed)), random.SystemRandom().choice(ERRORS)
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
        loaded = load("embedded", dtype=torch.bfloat16)
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
        return without_times(folder / "metrics.jsonl")

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
    error, count = random.SystemRandom().choice(ERRORS), random.SystemRandom().randint(1, 6)
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


def test_several_processes_do_not_go_their_own_way(monkeypatch, tmp_path):
    """One that tried again, or stopped, by itself would leave the others waiting."""
    monkeypatch.setattr(guards, "alone", lambda: False)
    learner = SimpleNamespace(device=torch.device("cpu"))
    rollout = SimpleNamespace(prompt=SimpleNamespace(ids=(1, 2)), token_ids=torch.zeros(3))
    with pytest.raises(ValueError, match=r"longest rollout has 5 tokens; lower update.max_tokens, which is 60"):
        Guards().fit(lambda tokens: fail_with(ERRORS[0])(), 60, [rollout], learner)
    trainer = trainer_of(tmp_path / "run", steps=1)
    monkeypatch.setattr("sparse_rl.rollout.loop.Loop.decode", lambda self: fail_with(ERRORS[0])())
    with pytest.raises(ValueError, match=r"out of memory while sampling \(eval/dense\); lower engine.rows, which is 8"):
        trainer.train()
    asked = Guards()
    asked.stop = signal.SIGTERM
    asked.check()
    heard = []
    monkeypatch.setattr(guards.dist, "all_reduce", lambda number, op: heard.append(int(number)) or number.fill_(15))
    with pytest.raises(Stopped):
        asked.check_together(torch.device("cpu"))
    with pytest.raises(Stopped):
        Guards().check_together(torch.device("cpu"))
    assert heard == [15, 0]


# a full disk


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
    bad = SimpleNamespace(update=0, loss=math.nan, grad_norm=1.0, contents=lambda rewards: {"x": torch.zeros(10_000)})
    limit(1000)
    with caplog.at_level(logging.WARNING):
        Guards().note([bad], 1, torch.zeros(1), 7, tmp_path)
    assert "in step 7 is not finite" in caplog.text and "its batch could not be saved" in caplog.text
