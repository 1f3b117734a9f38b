# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: `checkpoint-N` in Hugging Face layout, and beside the model what resuming needs.

    config.json, model.safetensors, tokenizer ...   loads with from_pretrained; under LoRA, instead of the model,
                                                    adapter_config.json and adapter_model.safetensors, as peft's
    distill/                                        the sampler's adapter, if it has one, as peft's, and its state/
    state/                                          fp32 weights and the optimiser's state by parameter, as shards that
                                                    any number of processes can read (torch.distributed.checkpoint)
    trainer_state.json                              step, settings, best evaluation, what the run's logs held, and
                                                    the hash of every file of the checkpoint, and of itself

A checkpoint is there whole or not at all (`runfolder.publish`). There is no random state to keep: every random number
is a function of the seed and the step.

When one is due, and which is the best, is for `run.py` to say.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from sparse_rl.model import rope
from sparse_rl.model.load import LoadedModel
from sparse_rl.model.lora import ADAPTER, save_model
from sparse_rl.runfolder import (
    UNFINISHED,
    damage,
    digests,
    discard,
    publish,
    record_digest,
    remove,
    sealed,
    to_json,
    unfinished,
)
from sparse_rl.specs import first_line
from sparse_rl.train.learner import Learner
from sparse_rl.train.processes import is_lost
from sparse_rl.train.shard_files import read_shards, whole_masters, write_shards

if TYPE_CHECKING:  # which imports the guards, which import this module
    from sparse_rl.train.distill import Distiller

STATE, SHARDS, DISTILL = "trainer_state.json", "state", "distill"
PLACE = ("step", "num_tokens", "num_updates", "best", "logs", "warned", "pending")  # where the run stood
KEYS = (*PLACE, "halved", "streak", "base", "trainer", "settings", "files", "digest")
FULL_DISK = (OSError, RuntimeError, SafetensorError)  # each library has its own word for it


def save(
    folder: Path, loaded: LoadedModel, learner: Learner, state: dict[str, Any], distiller: Distiller | None = None
) -> None:
    """Write a checkpoint; a crash at any moment leaves either nothing or all of it. All processes call it."""
    temporary, processes = unfinished(folder), learner.processes

    def begin() -> None:
        remove(temporary)
        temporary.mkdir(parents=True)
        if distiller is not None:
            distiller.adapter.save(temporary / DISTILL, folder)

    def finish() -> None:
        save_model(loaded.model, temporary)
        rope.save(rope.fixed_for(loaded.model), temporary)
        loaded.tokenizer.save_pretrained(temporary)
        record = state | {"num_updates": learner.num_updates, "files": digests(temporary)}
        (temporary / STATE).write_text(to_json(sealed(record)))
        publish(temporary, folder)

    try:
        processes.by_first(begin)
        processes.together(lambda: write_shards(temporary / SHARDS, learner))
        if distiller is not None:
            its_learner = distiller.learner
            processes.together(lambda: write_shards(temporary / DISTILL / SHARDS, its_learner))
        processes.by_first(finish)
    except BaseException as error:
        if processes.first:
            remove(temporary)
        if not isinstance(error, FULL_DISK) or is_lost(error):
            raise
        remedy = "make room on the disk, then resume" if folder.parent.is_dir() else f"{folder.parent} was deleted"
        raise OSError(f"{folder} could not be written ({first_line(error)}); {remedy}.") from error


def read_state(folder: Path) -> dict[str, Any]:
    """A checkpoint's record, if all its files are there in full."""
    state = read_record(folder)
    wrong = damage(folder, state["files"])
    if wrong:
        raise ValueError(f"checkpoint {folder} is damaged: {wrong}; resume from an earlier one.")
    return state


def read_record(folder: Path) -> dict[str, Any]:
    """A checkpoint's record, whatever became of its other files."""
    if not (folder / STATE).is_file() and (inside := checkpoints(folder)):
        raise ValueError(f"{folder} is a run; give one of its checkpoints, {inside[-1]} say.")
    try:
        state: dict[str, Any] = dict(json.loads((folder / STATE).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{folder} is not a checkpoint of a run: its {STATE} is missing or damaged; choose another."
        ) from error
    for key in KEYS:
        if key not in state:
            raise ValueError(
                f"{folder / STATE} has no {key!r}: it is damaged, or another version's; choose another checkpoint, or "
                f"start a run from its weights (--model {folder})."
            )
    if state["digest"] != record_digest(state):
        raise ValueError(
            f"checkpoint {folder} is damaged: {STATE} is not what was written; resume from an earlier one."
        )
    return state


def restore(folder: Path, learner: Learner, num_updates: int, distiller: Distiller | None = None) -> None:
    """Put the weights and the optimiser state of a checkpoint that `read_state` found whole into the learner.

    A sampler's adapter that the checkpoint does not have begins anew; one that it has is not left behind unasked.
    """
    adapter = folder / DISTILL
    rank = json.loads((adapter / ADAPTER).read_text())["r"] if adapter.is_dir() else 0
    if rank and distiller is None:
        raise ValueError(
            f"checkpoint {folder} has a sampler's adapter; go on with it (--distill.r {rank}), or start another run "
            f"without it from these weights (--model {folder} and another --trainer.output_dir)."
        )
    wrong = read_shards(folder / SHARDS, learner)
    if wrong:
        raise ValueError(
            f"checkpoint {folder} is of another model ({wrong[0]} differs); give the model it was trained from, and "
            "its lora settings."
        )
    if rank and distiller is not None and read_shards(adapter / SHARDS, distiller.learner):
        raise ValueError(f"checkpoint {folder} has a sampler's adapter of rank {rank}; give --distill.r {rank}.")
    learner.num_updates = num_updates


def read_masters(folder: Path) -> dict[str, torch.Tensor]:
    """The fp32 weights of a checkpoint, by the module's names."""
    return whole_masters(folder / SHARDS)


def checkpoints(run: Path) -> list[Path]:
    """The whole checkpoints of a run folder, oldest first."""
    found = [path for path in run.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(found, key=step_of)


def step_of(folder: Path) -> int:
    return int(folder.name.partition("-")[2])


def prune(run: Path, keep: int | None, best: str | None) -> None:
    """Delete the oldest checkpoints beyond `keep`, never the best one; and what a crash left half-written."""
    for leftover in run.glob(f"checkpoint-*{UNFINISHED}"):
        remove(leftover)
    others = [path for path in checkpoints(run) if path.name != best]
    num_best = len(checkpoints(run)) - len(others)
    if keep is not None:
        for path in others[: max(0, len(others) - max(1, keep - num_best))]:
            discard(path)
