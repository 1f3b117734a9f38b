# SPDX-License-Identifier: Apache-2.0
"""SIGTERM and Ctrl-C at any moment: what was learnt is saved, and resumes as the run that was never stopped."""

from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import small_run
from guarded_run import (
    ONE,
    SEVERAL,
    at_call,
    names,
    observer,
    resume,
    send,
    state_of,
    trainer_of,
)
from small_run import assert_same_run, small_trainer

from sparse_rl.metrics import read_log
from sparse_rl.model.load import load
from sparse_rl.tasks import Rewards, Rows
from sparse_rl.train import Stopped, guards
from sparse_rl.train.checkpoint import checkpoints
from sparse_rl.train.guards import Guards


@pytest.mark.parametrize(
    ("point", "number", "update"),
    [
        ("rollout", signal.SIGTERM, ONE),
        ("rollout", signal.SIGINT, SEVERAL),
        ("update", signal.SIGTERM, SEVERAL),
        ("update", signal.SIGINT, ONE),
    ],
    ids=["rollout", "rollout, Ctrl-C", "update", "update, Ctrl-C"],
)
@pytest.mark.some(2)
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


def test_what_was_not_finite_in_the_last_step_is_so_in_a_resumed_run(tmp_path):
    def declines(completions, **_):
        return [None] * len(completions)

    def last_step(metrics, began):
        raise EOFError

    run, shown, task = tmp_path / "run", [], small_run.graded_by(declines)
    trainer = trainer_of(run, task=task, steps=1)
    trainer.run.pending, trainer._finish_step = None, last_step
    with pytest.raises(EOFError):
        trainer.train()
    assert state_of(run)["pending"]["reward"] is None
    resumed = trainer_of(run, task=task, steps=2, resume_from_checkpoint=True)
    resumed.observers = (observer(on_log=shown.append),)
    resumed.train()
    assert [math.isnan(line["reward"]) for line in shown] == [True, True]
    assert [line["reward"] for line in read_log(run / "metrics.jsonl")] == [None, None]


def test_a_signal_anywhere_resumes_bit_for_bit(whole, tmp_path, monkeypatch):
    """At a place drawn anew each time; the message of a failure names it."""
    point, count = random.choice(list(small_run.POINTS)), random.randint(1, 30)
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


def test_a_signal_does_not_wait_for_a_reward_that_hangs(capfd):
    """A short one ends first; a long one is left, where nothing is lost."""
    guards = Guards()
    with guards.grading():
        guards.on_signal(signal.SIGTERM, None)
    assert guards.stop == signal.SIGTERM and "a second signal ends the run" in capfd.readouterr().err
    guards = Guards()
    with guards.grading():
        guards.grading_s -= 75
        with pytest.raises(Stopped):
            guards.on_signal(signal.SIGINT, None)
    assert "SIGINT: stopping in the middle of grading, which has taken 75 s." in capfd.readouterr().err
    assert guards.grading_s is None


def test_a_run_whose_reward_hangs_stops_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr("sparse_rl.train.guards.GRADING_S", 0.05)
    steps = []

    def hangs(completions, **_):
        steps.append(1)
        if len(steps) == 2:
            time.sleep(0.1)
            signal.raise_signal(signal.SIGTERM)
            raise AssertionError("the signal was not heard")
        return [float(len(text)) for text in completions]

    loaded = load("embedded")
    task = Rows([{"prompt": "a=b1;b=a2;a|"}] * 4, Rewards((hangs,)), loaded.tokenizer)
    with pytest.raises(Stopped):
        small_trainer(tmp_path / "run", task=task, loaded=loaded).train()
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["checkpoint-1"]


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
    main(["train", "--model", "embedded", "--task.name", "rows", "--task.train_file", {rows!r}, "--task.rewards",
          "grader:reward", "--trainer.output_dir", {run!r}, "--trainer.steps", "3", "--trainer.prompts_per_step", "2",
          "--sampling.n", "2", "--sampling.max_tokens", "4"])
"""


@pytest.mark.slow  # it imports torch anew
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
        try:
            asked = Guards()
            asked.listen()
            os.kill(os.getpid(), signal.SIGTERM)
            asked.stop_s -= 2
            os.kill(os.getpid(), signal.SIGINT)
        finally:
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
