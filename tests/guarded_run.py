# SPDX-License-Identifier: Apache-2.0
"""A run of three short steps, and what can happen to it on the way."""

from __future__ import annotations

import os
import signal

import small_run
import torch
from commands import strict_json
from small_run import small_trainer

from sparse_rl.evaluate import EvalConfig
from sparse_rl.rollout import Sampling
from sparse_rl.train import Observer, UpdateConfig, checkpoint

ONE, SEVERAL = UpdateConfig(max_tokens=60), UpdateConfig(max_tokens=60, updates_per_rollout=2)
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


def names(folder):
    return [path.name for path in checkpoint.checkpoints(folder)]


def state_of(folder):
    return strict_json(checkpoint.checkpoints(folder)[-1] / checkpoint.STATE)


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
