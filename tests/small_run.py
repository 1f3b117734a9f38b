# SPDX-License-Identifier: Apache-2.0
"""A training run of seconds on half the embedded model, and the points of it at which it can be killed."""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import tempfile
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from sparse_rl.evaluate import EvalConfig
from sparse_rl.kv import RKV
from sparse_rl.metrics import read_log
from sparse_rl.model.dry_run import dry_run
from sparse_rl.model.load import LoadedModel, load
from sparse_rl.objective.correction import Correction
from sparse_rl.rollout import EngineConfig, Sampling
from sparse_rl.tasks import Chain, Rewards
from sparse_rl.train import OptimizerConfig, Trainer, TrainerConfig, UpdateConfig, checkpoint
from sparse_rl.train.log import RunLog


def digits(completions, **_):
    """The sum of the digits: samples differ in it, so there is something to learn."""
    return [sum(int(symbol) for symbol in text if symbol.isdigit()) / 10 for text in completions]


def declines(completion_ids, **_):
    """Grades only some completions."""
    return [None if ids[0] % 2 else 0.1 for ids in completion_ids]


class Small:
    """Short chains, two rewards."""

    rewards = Rewards((digits, declines), (1.0, 0.5))

    def stream(self, start, count, seed):
        return CHAIN.stream(start, count, seed)

    def held_out(self, count):
        return CHAIN.held_out(count)


TEMPERATURE = 2.5  # samples of a prompt differ
# Metrics that differ between two equal runs.
TIMES = ("time/", "step_time", "rollout/tokens_per_s", "train/tokens_per_s", "memory/")
CHAIN, TASK = Chain(letters=2, steps=2, filler=0), Small()
POINTS = {  # where a run can be killed: something it calls there
    "rollout": "sparse_rl.rollout.loop.Loop.decode",
    "update": "sparse_rl.train.update.policy_loss",
    "publish": "sparse_rl.train.master.MasterWeights.publish",
    "log": "sparse_rl.train.log.RunLog.write",
    "save": "sparse_rl.runfolder._to_disk",
    "prune": "sparse_rl.runfolder.remove",
}


def small_model(dtype: torch.dtype = torch.float32) -> LoadedModel:
    """The first half of the embedded model's layers, that nobody else trains."""
    loaded = _loaded(dtype)
    return replace(loaded, model=copy.deepcopy(loaded.model))


@lru_cache
def _loaded(dtype: torch.dtype) -> LoadedModel:
    loaded = load("embedded", dtype=dtype)
    del loaded.model.model.layers[2:]
    loaded.model.config.num_hidden_layers = 2
    return replace(loaded, shape=dry_run(loaded.model))


def graded_by(function):
    """The small task with another reward and nothing to evaluate on."""
    return SimpleNamespace(rewards=Rewards((function,)), stream=TASK.stream, held_out=lambda count: [])


def small_trainer(folder, *, task=TASK, loaded=None, parts=None, observers=(), processes=None, **config) -> Trainer:
    settings = {"steps": 4, "prompts_per_step": 2, "save_every": 1, "log_completions": 1, "output_dir": str(folder)}
    defaults = {
        "kv": RKV(budget=12, interval=4, window=4),
        "sampling": Sampling(n=4, max_tokens=16, temperature=TEMPERATURE),
        "engine": EngineConfig(rows=8, page_size=16),
        "correction": Correction(veto=0.6),  # rejects some
        "update": UpdateConfig(updates_per_rollout=2, max_tokens=100),
        "optimizer": OptimizerConfig(learning_rate=1e-3, schedule="linear"),
        "eval": EvalConfig(every=2, prompts=4),
    }
    return Trainer(
        loaded or small_model(),
        task,
        config=TrainerConfig(**(settings | config)),
        observers=observers,
        processes=processes,
        **(defaults | (parts or {})),
    )


def kept(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint's state by its name: masters.NAME, optimizer.NAME.exp_avg, ..."""
    with tempfile.TemporaryDirectory() as folder:
        dcp_to_torch_save(checkpoint / "state", f"{folder}/state.pt")
        state = torch.load(f"{folder}/state.pt", weights_only=True)
    flat = {f"masters.{name}": value for name, value in state["masters"].items()}
    for name, values in state.get("optimizer", {}).items():
        for key, value in values.items():  # a moment of 8 bits is several tensors
            parts = {f".{part}": tensor for part, tensor in value.items()} if isinstance(value, dict) else {"": value}
            flat |= {f"optimizer.{name}.{key}{part}": tensor for part, tensor in parts.items()}
    return flat


def watch(point: str, set_to=setattr, on_call=lambda count: None) -> list[int]:
    """Count the calls of what stands at the point; the list grows by one a call."""
    path, _, name = POINTS[point].rpartition(".")
    owner_path, _, owner_name = path.rpartition(".")
    owner = sys.modules[path] if path in sys.modules else getattr(sys.modules[owner_path], owner_name)
    original, calls = getattr(owner, name), []

    def watched(*args, **kwargs):
        calls.append(len(calls) + 1)
        on_call(len(calls))
        return original(*args, **kwargs)

    set_to(owner, name, watched)
    return calls


def without_times(folder: Path, tolerated: tuple[str, ...] = ()) -> list[dict]:
    """What a run logged, but for what two equal runs differ in."""
    lines = read_log(folder / "metrics.jsonl")
    return [{k: v for k, v in line.items() if not k.startswith((*TIMES, *tolerated))} for line in lines]


def completions_of(run: Path) -> dict[str, bytes]:
    """The logs that have no times in them."""
    return {path.name: path.read_bytes() for path in run.glob("*.jsonl") if path.name != "metrics.jsonl"}


def assert_same_run(got: Path, expected: Path, *, same_checkpoints: bool = True) -> None:
    """Equal logs, and equal last checkpoints; the others may differ in which steps they are of."""
    assert without_times(got) == without_times(expected)
    learns_from_rewards = "task" in json.loads((expected / "run.json").read_text())["config"]
    logs = RunLog.FILES if learns_from_rewards else RunLog.FILES[:1]
    assert {path.name for path in expected.glob("*.jsonl")} == set(logs)
    assert completions_of(got) == completions_of(expected)
    ours, theirs = ([path.name for path in checkpoint.checkpoints(folder)] for folder in (got, expected))
    assert ours == theirs if same_checkpoints else ours[-1] == theirs[-1]
    assert not list(got.glob("*.tmp"))
    last = checkpoint.checkpoints(expected)[-1].name
    weights = [load_file(folder / last / "model.safetensors") for folder in (got, expected)]
    for ours, theirs in (weights, [kept(folder / last) for folder in (got, expected)]):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def kill(count: int, at: int) -> None:
    if count == at:
        os.kill(os.getpid(), signal.SIGKILL)
