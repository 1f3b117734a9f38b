# SPDX-License-Identifier: Apache-2.0
"""A learner's fp32 weights and optimiser state on disk, in the form of torch.distributed.checkpoint.

Every process writes and reads its own part, and any number of processes can read what another number wrote. Names are
masters.PARAMETER and optimizer.PARAMETER.KEY. The library is imported where it is used: it takes most of a second.

The rest of a checkpoint is `checkpoint.py`'s.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sparse_rl.train.learner import Learner, set_rate


def write_shards(folder: Path, learner: Learner) -> None:
    from torch.distributed.checkpoint import state_dict_saver
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with _no_warning():
            state_dict_saver.save(_shards(learner), checkpoint_id=folder, no_dist=not learner.processes.grouped)
    except CheckpointException as error:  # of which the library makes no Exception
        reason, _ = next(iter(error.failures.values()))
        raise OSError(str(reason)) from error


def read_shards(folder: Path, learner: Learner) -> list[str]:
    """Read them into the learner; if they are of other parameters, return which ones and change nothing."""
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    ours = {f"masters.{name}": master.shape for name, master in learner.masters.state_dict().items()}
    theirs = {key: getattr(entry, "size", None) for key, entry in saved.items() if key.startswith("masters.")}
    wrong = sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key))
    if wrong:
        return [key.removeprefix("masters.") for key in wrong]
    _make_optimizer_state(learner, list(saved))
    state = _shards(learner)
    with _no_warning():  # in place
        state_dict_loader.load(state, checkpoint_id=folder, no_dist=not learner.processes.grouped)
    learner.masters.load_state_dict(state["masters"])
    learner.masters.to_sampler()
    return []


def whole_masters(folder: Path) -> dict[str, torch.Tensor]:
    """The fp32 weights alone, each as a whole."""
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    saved: dict[str, Any] = FileSystemReader(folder).read_metadata().state_dict_metadata
    masters = {
        key.removeprefix("masters."): torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in saved.items()
        if key.startswith("masters.")
    }
    with _no_warning():
        state_dict_loader.load({"masters": masters}, checkpoint_id=folder, no_dist=True)
    return masters


def _shards(learner: Learner) -> dict[str, Any]:
    """The learner's own tensors by name; those of a sharded one are this process's part."""
    masters, states = learner.masters, learner.optimizer.state
    by_name = zip(masters.names, masters.masters, strict=True)
    optimizer = {
        name: {key: _plain(value) for key, value in states[master].items()}
        for name, master in by_name
        if master in states
    }
    return {"masters": masters.state_dict(), "optimizer": optimizer}


def _plain(value: Any) -> Any:
    """A tensor made of others, like torchao's of 8 bits, as those."""
    if is_traceable_wrapper_subclass(value) and not hasattr(value, "full_tensor"):
        return {name: _plain(getattr(value, name)) for name in value.__tensor_flatten__()[0]}
    assert isinstance(value, torch.Tensor), f"{type(value).__name__} cannot be read in place"
    return value


def _make_optimizer_state(learner: Learner, saved: list[str]) -> None:
    """State to read a checkpoint's into, for the parameters it has any for: a step that moves nothing makes it."""
    optimizer, masters = learner.optimizer, learner.masters
    optimizer.state.clear()
    for name, master in zip(masters.names, masters.masters, strict=True):
        known = any(key.startswith(f"optimizer.{name}.") for key in saved)
        master.grad = torch.zeros_like(master) if known else None
    rates = [float(group["lr"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        set_rate(group, 0.0)
    optimizer.step()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        set_rate(group, rate)
    for master in masters.masters:
        master.grad = None


@contextmanager
def _no_warning() -> Iterator[None]:
    """The library warns of everything that is not distributed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
