# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: `checkpoint-N` in Hugging Face layout, and beside the model what resuming needs.

    config.json, model.safetensors, tokenizer ...   loads with from_pretrained
    state/                                          fp32 weights and the optimiser's state by parameter, as shards that
                                                    any number of processes can read (torch.distributed.checkpoint)
    trainer_state.json                              step, settings, best evaluation, sizes of the run's logs, and
                                                    the hash of every file of the checkpoint

A checkpoint is written into `checkpoint-N.tmp`, brought to disk and renamed, so one without that suffix is whole. There
is no random state to keep: every random number is a function of the seed and the step.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

from sparse_rl.model.load import LoadedModel
from sparse_rl.train.learner import Learner
from sparse_rl.train.processes import is_lost

STATE, SHARDS = "trainer_state.json", "state"


def save(folder: Path, loaded: LoadedModel, learner: Learner, state: dict[str, Any]) -> None:
    """Write a checkpoint; a crash at any moment leaves either nothing or all of it. All processes call it."""
    temporary, processes = folder.with_name(folder.name + ".tmp"), learner.processes

    def begin() -> None:
        remove(temporary)
        temporary.mkdir(parents=True)

    def finish() -> None:
        loaded.model.save_pretrained(temporary)
        loaded.tokenizer.save_pretrained(temporary)
        files = {str(path.relative_to(temporary)): _digest(path) for path in _files(temporary)}
        record = state | {"num_updates": learner.num_updates, "files": files}
        (temporary / STATE).write_text(json.dumps(record, indent=1) + "\n")
        for path in [*_files(temporary), *_folders(temporary)]:
            _to_disk(path)
        remove(folder)
        temporary.rename(folder)
        _to_disk(folder.parent)

    try:
        processes.by_first(begin)
        processes.together(lambda: _write_shards(temporary / SHARDS, learner))
        processes.by_first(finish)
    except (OSError, RuntimeError, SafetensorError) as error:  # each library has its own word for a full disk
        if processes.first:
            remove(temporary)
        if is_lost(error):
            raise
        first_line = str(error).strip().splitlines()[0]
        raise OSError(f"{folder} could not be written ({first_line}); make room on the disk, then resume.") from error
    except BaseException:
        if processes.first:
            remove(temporary)
        raise


def read_state(folder: Path) -> dict[str, Any]:
    """A checkpoint's record, if all its files are there in full."""
    try:
        state: dict[str, Any] = json.loads((folder / STATE).read_text())
        files = dict(state["files"])
        [state[key] for key in ("step", "num_tokens", "num_updates", "best", "logs", "warned", "settings")]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{folder} is not a checkpoint of a run: its {STATE} is missing or damaged; choose another."
        ) from error
    for name, digest in files.items():
        path = folder / name
        if not path.is_file() or _digest(path) != digest:
            what = "not what was written" if path.is_file() else "missing"
            raise ValueError(f"checkpoint {folder} is damaged: {name} is {what}; resume from an earlier one.")
    return state


def restore(folder: Path, learner: Learner, num_updates: int) -> None:
    """Put the weights and the optimiser state of a checkpoint that `read_state` found whole into the learner."""
    reader = FileSystemReader(folder / SHARDS)
    saved = reader.read_metadata().state_dict_metadata
    ours = {f"masters.{name}": master.shape for name, master in learner.masters.state_dict().items()}
    theirs = {key: getattr(entry, "size", None) for key, entry in saved.items() if key.startswith("masters.")}
    wrong = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if wrong:
        raise ValueError(
            f"checkpoint {folder} is of another model ({wrong[0].partition('.')[2]} differs); give the model it was "
            "trained from."
        )
    _make_optimizer_state(learner, [key for key in saved if key.startswith("optimizer.")])
    state = _shards(learner)
    with _no_warning():
        state_dict_loader.load(state, storage_reader=reader, no_dist=not learner.processes.grouped)
    for name, master in zip(learner.masters.names, learner.masters.masters, strict=True):
        if name in state["optimizer"]:
            learner.optimizer.state[master] = state["optimizer"][name]
    learner.masters.load_state_dict(state["masters"])
    learner.masters.to_sampler()
    learner.num_updates = num_updates


def _shards(learner: Learner) -> dict[str, Any]:
    """The tensors a checkpoint keeps; those of a sharded learner are this process's part."""
    masters, states = learner.masters, learner.optimizer.state
    by_name = zip(masters.names, masters.masters, strict=True)
    return {
        "masters": masters.state_dict(),
        "optimizer": {name: dict(states[master]) for name, master in by_name if master in states},
    }


def _write_shards(folder: Path, learner: Learner) -> None:
    try:
        with _no_warning():
            state_dict_saver.save(_shards(learner), checkpoint_id=folder, no_dist=not learner.processes.grouped)
    except CheckpointException as error:  # of which the library makes no Exception
        reason, _ = next(iter(error.failures.values()))
        raise OSError(str(reason)) from error


def _make_optimizer_state(learner: Learner, keys: list[str]) -> None:
    """State to read a checkpoint's into, for the parameters it has any for: a step that moves nothing makes it."""
    optimizer, masters = learner.optimizer, learner.masters
    optimizer.state.clear()
    rates = [group["lr"] for group in optimizer.param_groups]
    for name, master in zip(masters.names, masters.masters, strict=True):
        known = any(key.startswith(f"optimizer.{name}.") for key in keys)
        master.grad = torch.zeros_like(master) if known else None
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    masters.zero_grad()


@contextmanager
def _no_warning() -> Iterator[None]:
    """The library warns of every save that is not distributed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def checkpoints(run: Path) -> list[Path]:
    """The whole checkpoints of a run folder, oldest first."""
    found = [path for path in run.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    return int(folder.name.partition("-")[2])


def prune(run: Path, keep: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints beyond `keep`, never the best one; and what a crash left half-written."""
    for leftover in run.glob("checkpoint-*.tmp"):
        remove(leftover)
    others = [path for path in checkpoints(run) if path.name != best]
    num_best = len(checkpoints(run)) - len(others)
    if keep is not None:
        for path in others[: max(0, len(others) - max(1, keep - num_best))]:
            discard(path)


def discard(folder: Path) -> None:
    """Delete a checkpoint, never leaving a part of it under its name."""
    temporary = folder.with_name(folder.name + ".tmp")
    remove(temporary)
    remove(folder.rename(temporary))


def remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _folders(folder: Path) -> list[Path]:
    return [*sorted(path for path in folder.rglob("*") if path.is_dir()), folder]


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
