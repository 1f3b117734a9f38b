# SPDX-License-Identifier: Apache-2.0
"""What those who watch a run are told: observers, and transformers' callbacks."""

from __future__ import annotations

import pytest
from small_run import graded_by, small_trainer

from sparse_rl.metrics import read_log
from sparse_rl.train import Observer
from sparse_rl.train.callbacks import Callbacks


def test_observers_are_told_and_the_run_ends_for_them_even_when_it_fails(tmp_path):
    events = []

    class Watching(Observer):
        def on_begin(self, trainer):
            events.append("begin")

        def on_progress(self, stage, progress):
            events.append(stage)

        def on_stage(self, stage):
            events.append(stage)

        def on_log(self, metrics):
            events.append(f"log {metrics['step']}")

        def on_save(self, folder):
            events.append(folder.name)

        def on_end(self):
            events.append("end")

    small_trainer(tmp_path / "run", steps=1, observers=(Watching(),)).train()
    kept = [event for event, after in zip(events, [*events[1:], ""], strict=True) if event != after]
    evaluated = ["eval/dense", "grading", "eval/sparse", "grading"]
    step = ["rollout", "grading", "learning"]
    assert kept == ["begin", *evaluated, "log 0", *step, *evaluated, "log 1", "checkpoint-1", "end"]
    events.clear()
    failing = small_trainer(tmp_path / "other", steps=1, observers=(Watching(),))
    failing.task = graded_by(lambda **_: None)
    with pytest.raises(ValueError, match="returned NoneType"):
        failing.train()
    assert events[-1] == "end"


def test_an_observer_that_cannot_begin_is_what_the_run_ends_with(tmp_path):
    """Those that had not begun by then are not told of an end."""
    events = []

    class Named(Observer):
        def __init__(self, name, error=None):
            self.name, self.error = name, error

        def on_begin(self, trainer):
            if self.error is not None:
                raise self.error

        def on_end(self):
            events.append(self.name)

    observers = (Named("first"), Named("broken", ConnectionError("no tracker there")), Named("later"))
    with pytest.raises(ConnectionError, match="no tracker there"):
        small_trainer(tmp_path / "run", steps=1, observers=observers).train()
    assert events == ["first"]


def test_transformers_callbacks_see_the_run(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    calls = []

    class Recorder(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            calls.append(("begin", args.output_dir, state.max_steps))

        def on_log(self, args, state, control, logs=None, **kwargs):
            calls.append(("log", state.global_step, logs.get("reward")))

        def on_evaluate(self, args, state, control, metrics=None, **kwargs):
            calls.append(("evaluate", state.global_step, sorted(metrics)[0]))

        def on_save(self, args, state, control, **kwargs):
            calls.append(("save", state.global_step))

        def on_train_end(self, args, state, control, **kwargs):
            calls.append(("end",))

    run = tmp_path / "run"
    small_trainer(run, steps=1, observers=(Callbacks(callbacks=(Recorder(),)),)).train()
    reward = read_log(run / "metrics.jsonl")[1]["reward"]
    assert calls == [
        ("begin", str(run), 1), ("log", 0, None), ("evaluate", 0, "eval/dense/clipped_ratio"),
        ("log", 1, reward), ("evaluate", 1, "eval/dense/clipped_ratio"), ("save", 1), ("end",),
    ]  # fmt: skip


def test_a_callback_that_raises_is_named_and_the_last_step_is_saved(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Tracker(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise ConnectionError("no server there")

    observers = (Callbacks(callbacks=(Tracker(),)),)
    with pytest.raises(
        ValueError, match=r"the callback Tracker raised ConnectionError in on_step_end: no server there;"
    ):
        small_trainer(tmp_path / "run", steps=2, observers=observers).train()
    assert (tmp_path / "run" / "checkpoint-1").is_dir()
