# SPDX-License-Identifier: Apache-2.0
"""A training run of seconds on the embedded model; as a program, one that is killed on the way.

    python small_run.py FOLDER POINT COUNT      SIGKILL at the COUNT-th time the run passes POINT
"""

from __future__ import annotations

import os
import signal
import sys

import torch

from sparse_rl.evaluate import EvalConfig
from sparse_rl.kv import RKV
from sparse_rl.model.load import load
from sparse_rl.objective.correction import PRESETS
from sparse_rl.rollout import EngineConfig, Sampling
from sparse_rl.tasks import Chain
from sparse_rl.train import OptimizerConfig, Trainer, TrainerConfig, UpdateConfig

TASK = Chain(letters=2, steps=2, filler=0)
POINTS = {  # where a run can be killed: something it calls there
    "rollout": "sparse_rl.rollout.loop.Loop.decode",
    "update": "sparse_rl.train.update.policy_loss",
    "publish": "sparse_rl.train.master.MasterWeights.publish",
    "log": "sparse_rl.metrics.RunLog.write",
    "save": "sparse_rl.train.checkpoint._to_disk",
    "prune": "sparse_rl.train.checkpoint.remove",
}


def small_trainer(folder, *, task=TASK, loaded=None, parts=None, observers=(), **config) -> Trainer:
    settings = {"steps": 4, "prompts_per_step": 2, "save_every": 1, "log_completions": 1, "output_dir": str(folder)}
    defaults = {
        "kv": RKV(budget=12, interval=4, window=4),
        "sampling": Sampling(n=4, max_tokens=24),
        "engine": EngineConfig(rows=8, page_size=16),
        "correction": PRESETS["sparse_rl"],
        "update": UpdateConfig(updates_per_rollout=2, max_tokens=100),
        "optimizer": OptimizerConfig(learning_rate=1e-3, schedule="linear"),
        "eval": EvalConfig(every=2, prompts=4),
    }
    return Trainer(
        loaded or load("embedded"),
        task,
        config=TrainerConfig(**(settings | config)),
        observers=observers,
        **(defaults | (parts or {})),
    )


def kill_at(point: str, count: int) -> None:
    """Make the count-th call of what stands at the point a SIGKILL."""
    path, _, name = POINTS[point].rpartition(".")
    owner_path, _, owner_name = path.rpartition(".")
    owner = sys.modules[path] if path in sys.modules else getattr(sys.modules[owner_path], owner_name)
    original, calls = getattr(owner, name), []

    def killing(*args, **kwargs):
        calls.append(1)
        if len(calls) == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, killing)


if __name__ == "__main__":
    torch.set_num_threads(1)
    kill_at(sys.argv[2], int(sys.argv[3]))
    small_trainer(sys.argv[1]).train()
