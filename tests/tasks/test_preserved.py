# SPDX-License-Identifier: Apache-2.0
"""Rewards, their files and observers leave torch and the process as they were, whatever they do to them."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import random
import signal
import sys
import threading

import pytest
import torch
from small_run import TASK, completions_of, digits, graded_by, small_trainer, without_times

from sparse_rl.tasks import Rewards
from sparse_rl.tasks.chain import chain_tokenizer
from sparse_rl.tasks.preserved import GLOBAL, preserved
from sparse_rl.tasks.rewards import import_function
from sparse_rl.train import Observer
from sparse_rl.types import KVStats, Prompt, Rollout

ROLLOUT = Rollout(
    prompt=Prompt(text="a", ids=(1,)),
    sample=0,
    token_ids=torch.tensor([1, 2]),
    sampler_logprobs=torch.zeros(2),
    completion_mask=torch.ones(2, dtype=torch.bool),
    finish_reason="stop",
    kv=KVStats(held=(), full=0, hybrid=0.0, peak=0, peak_bytes=0, num_compressions=0),
)
KEPT = []  # modes that nobody leaves


def grade(function):
    return Rewards((function,)).grade([ROLLOUT] * 4, chain_tokenizer())


def left_open(mode):
    KEPT.append(mode)
    mode.__enter__()


CHANGES = {
    "grad mode": lambda: torch.set_grad_enabled(False),
    "no_grad left open": lambda: left_open(torch.no_grad()),
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "default device": lambda: torch.set_default_device("meta"),
    "deterministic": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads() + 1),
    "precision": lambda: torch.set_float32_matmul_precision("medium"),
    "autocast": lambda: left_open(torch.autocast("cpu", torch.bfloat16)),
    "inference mode": lambda: left_open(torch.inference_mode()),
    "folder": lambda: os.chdir("/"),
    "handlers": lambda: [signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)],
    "alarm": lambda: signal.alarm(1000),
    "stderr closed": lambda: sys.stderr.close(),
    "stdout closed": lambda: sys.stdout.close(),
    "streams wrapped anew": lambda: setattr(sys, "stderr", io.TextIOWrapper(sys.stderr.buffer)),
    "streams replaced": lambda: [setattr(sys, name, io.StringIO()) for name in ("stdout", "stderr")],
    "descriptor closed": lambda: os.close(2),
}


def state():
    return {name: read() for name, (read, _) in GLOBAL.items()} | {
        "inference": torch.is_inference_mode_enabled(),
        "streams": (sys.stdout, sys.stderr, sys.stdout.closed, sys.stderr.closed),
        "descriptors": [(os.fstat(n).st_dev, os.fstat(n).st_ino) for n in (1, 2)],
    }


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("where", ["function", "async function", "file", "function that raises"])
@pytest.mark.some(24)
def test_what_a_reward_changes_is_put_back(tmp_path, change, where, monkeypatch):
    def reward(**_):
        CHANGES[change]()
        if where == "function that raises":
            raise BaseException("after all")
        return [1.0] * 4

    async def away(**_):
        return reward()

    before = state()
    if where == "file":
        (tmp_path / "rewards.py").write_text("import sys\nsys.modules['_changes']()\ndef reward(**_): pass\n")
        monkeypatch.setitem(sys.modules, "_changes", CHANGES[change])
        import_function(f"{tmp_path / 'rewards.py'}:reward")
    elif where == "function that raises":
        with pytest.raises(ValueError, match=r"reward function 'reward' raised BaseException: after all .*mend it"):
            grade(reward)
    elif where == "async function" and change != "handlers":  # which only the main thread may set
        assert grade(away).rewards.tolist() == [1.0] * 4
    else:
        assert grade(reward).rewards.tolist() == [1.0] * 4
    gc.collect()  # a stream that wraps another closes it in the end
    assert state() == before
    print("still heard", file=sys.stderr)


def test_a_copy_that_a_reward_makes_of_the_process_takes_no_steps(tmp_path):
    """It would write into the same logs and checkpoints."""
    copies = []

    def forks(completions, **_):
        if copy := os.fork():
            copies.append(copy)
        return digits(completions)

    process = os.getpid()
    try:
        small_trainer(tmp_path, steps=1, task=graded_by(forks)).train()
    finally:
        if os.getpid() != process:
            os._exit(0)
    assert [os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) for copy in copies] == [1] * len(copies)


class Unreadable:
    def __getattr__(self, name):
        raise SystemExit(7)

    def __repr__(self):
        raise SystemExit(7)


class Textless(BaseException):
    def __str__(self):
        raise SystemExit(7)


def test_what_a_reward_returns_or_raises_ends_nothing_by_itself():
    """Whatever its text, its type or its numbers do when they are read."""
    given = {"whole": Unreadable(), "parts": [Unreadable()] * 4, "long": [10**5000] * 4, "deep": [[]] * 4}
    for _ in range(100_000):
        given["deep"][0] = [given["deep"][0]]
    for value in given.values():
        with pytest.raises(ValueError, match=r"reward function '<lambda>' returned .*must (return|be)"):
            grade(lambda value=value, **_: value)

    def raises(**_):
        raise Textless

    with pytest.raises(ValueError, match="'raises' raised Textless: Textless without a text"):
        grade(raises)


def test_what_an_async_reward_leaves_in_its_loop_stops_no_later_one():
    async def leaves(**_):
        async def ends():
            raise SystemExit(3)

        task = asyncio.get_running_loop().create_task(ends())
        await asyncio.sleep(0.01)
        assert isinstance(task.exception(), SystemExit)
        asyncio.get_running_loop().stop()
        return [1.0] * 4

    for _ in range(2):
        assert grade(leaves).rewards.tolist() == [1.0] * 4


def test_what_cannot_be_put_back_is_an_error():
    mode = torch.device("meta")

    def reward(**_):
        mode.__enter__()
        return [1.0] * 4

    try:
        with pytest.raises(ValueError, match=r"changed torch's default device, which cannot be put back"):
            grade(reward)
    finally:
        mode.__exit__(None, None, None)


@pytest.mark.parametrize("error", [BaseException("x"), GeneratorExit(), SystemExit(3), KeyboardInterrupt("its own")])
def test_a_reward_or_its_file_that_raises_anything_is_named(tmp_path, error):
    """Where the run hears Ctrl-C itself, a KeyboardInterrupt is the function's own."""

    def raises(**_):
        raise error

    async def away(**_):
        raise error

    kind = type(error).__name__
    for function in (raises, away):
        trainer = small_trainer(tmp_path / function.__name__, steps=1, task=graded_by(function))
        with pytest.raises(ValueError, match=rf"'{function.__name__}' raised {kind}: .*preserved.py, line \d+\); mend"):
            trainer.train()
    if not isinstance(error, KeyboardInterrupt):
        (tmp_path / "rewards.py").write_text(f"raise {kind}('x')\n")
        with pytest.raises(ValueError, match=f"cannot be imported: {kind}: x"):
            import_function(f"{tmp_path / 'rewards.py'}:reward")


def test_ctrl_c_outside_a_run_ends_a_reward():
    def hangs(**_):
        signal.raise_signal(signal.SIGINT)
        return [1.0] * 4

    assert threading.current_thread() is threading.main_thread()
    with pytest.raises(KeyboardInterrupt):
        grade(hangs)


def test_a_run_with_a_reward_and_an_observer_that_change_everything_is_the_same_run(tmp_path, caplog):
    torch_changes = ["grad mode", "default dtype", "default device", "autocast", "inference mode", "folder"]

    def changes_all(completions, **_):
        for change in torch_changes:
            CHANGES[change]()
        torch.manual_seed(0)
        random.seed(0)
        return digits(completions)

    class Changing(Observer):
        def on_stage(self, stage):
            torch.set_grad_enabled(False)

        def on_progress(self, stage, progress):
            torch.set_default_dtype(torch.float64)

        on_log = on_save = on_begin = on_stage

    changes_all.__name__ = "digits"
    small_trainer(tmp_path / "plain", steps=2, task=graded_by(digits)).train()
    small_trainer(tmp_path / "changed", steps=2, task=graded_by(changes_all), observers=(Changing(),)).train()
    assert without_times(tmp_path / "changed") == without_times(tmp_path / "plain")
    assert completions_of(tmp_path / "changed") == completions_of(tmp_path / "plain")
    said = "a reward function (digits) changed torch's gradient mode, torch's default dtype, torch's default device"
    assert caplog.text.count(said) == caplog.text.count("the observer Changing changed torch's default dtype") == 1


def test_a_state_that_was_set_before_is_the_one_that_is_put_back():
    torch.set_default_dtype(torch.float64)
    try:
        with torch.no_grad(), torch.inference_mode(), preserved("this"):
            torch.set_default_dtype(torch.float32)
            torch.set_grad_enabled(True)
            assert torch.is_inference_mode_enabled()
        assert torch.get_default_dtype() == torch.float64 and torch.is_grad_enabled()
        assert TASK.rewards.names == ("digits", "declines")
    finally:
        torch.set_default_dtype(torch.float32)
