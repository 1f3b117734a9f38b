# SPDX-License-Identifier: Apache-2.0
"""The run folder: whose it is, which checkpoint to go on from, and run.json.

Only read here, but for run.json; `run.py` opens it and saves into it.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparse_rl.metrics import read_log
from sparse_rl.model import rope
from sparse_rl.model.load import LoadedModel
from sparse_rl.model.load import recorded as trained_for
from sparse_rl.runfolder import command, provenance, record_digest, sealed, write_json
from sparse_rl.train import checkpoint
from sparse_rl.train.config import RunConfig
from sparse_rl.train.log import RunLog

logger = logging.getLogger(__name__)


def check_folder(config: RunConfig, section: str = "task") -> None:
    """Refuse to mix two runs in a folder, or to resume nothing; `section` is one that only this kind of run has."""
    run, resume = Path(config.output_dir), config.resume_from_checkpoint
    file = next((path for path in (run, *run.parents) if path.exists() and not path.is_dir()), None)
    if file is not None:
        where = f", and {str(file)!r} is a file" if file != run else ", which is a file"
        raise ValueError(f"trainer.output_dir is {str(run)!r}{where}; name a folder.")
    names = ("run.json", *RunLog.FILES)
    taken = [name for name in names if (run / name).exists()] + [path.name for path in checkpoint.checkpoints(run)]
    if taken and not resume:
        by_flag = "--trainer.resume_from_checkpoint true"
        in_python = f"{type(config).__name__}(resume_from_checkpoint=True)"
        remedy = f"resume it with {by_flag}, {in_python} in Python, or " if taken[0] == "run.json" else ""
        raise ValueError(f"{run} has a run in it ({taken[0]}); {remedy}give another --trainer.output_dir.")
    if resume and not (run / "run.json").exists() and not checkpoint.checkpoints(run):
        named = [Path(resume), Path(resume).parent] if isinstance(resume, str) else []  # a run, or its checkpoint
        other = next((path for path in named if (path / "run.json").exists() or checkpoint.checkpoints(path)), None)
        remedy = f"give --trainer.output_dir {other}" if other else "leave out resume_from_checkpoint"
        raise ValueError(f"there is no run to resume in {run}; {remedy}.")
    config_then = recorded(run).get("config") if resume else None
    if config_then and section not in config_then:
        raise ValueError(
            f"{run} has a run of another kind in it, without {section} settings; give another --trainer.output_dir."
        )


def chosen_checkpoint(config: RunConfig) -> Path | None:
    """The checkpoint to resume from; None for a new run, or one that was stopped before its first checkpoint."""
    run, given = Path(config.output_dir), config.resume_from_checkpoint
    found = checkpoint.checkpoints(run)
    if not given:
        return None
    if found and given is True:
        return found[-1]
    if given is True:
        taken = steps_taken(run / "metrics.jsonl")
        saved_every = recorded(run).get("config", {}).get("trainer", {}).get("save_every", config.save_every)
        if saved_every and taken > saved_every:
            raise ValueError(
                f"{run} has taken {taken} steps, but its checkpoints are gone; give another --trainer.output_dir."
            )
        logger.warning("%s has no checkpoint yet; the run starts over.", run)
        return None
    if Path(given).resolve() not in [path.resolve() for path in found]:
        names = ", ".join(path.name for path in found) or "none"
        raise ValueError(f"{given} is not a checkpoint of {run}, which has {names}.")
    return Path(given)


def steps_taken(log: Path) -> int:
    """The last step in a run's log, 0 if there is none."""
    try:
        return int(read_log(log)[-1]["step"])
    except (FileNotFoundError, IndexError):
        return 0
    except (ValueError, TypeError, KeyError):
        raise ValueError(f"{log} has lines that are no run's; mend it, or give another --trainer.output_dir.") from None


def chosen_state(config: RunConfig, optimizer_kind: str) -> tuple[Path | None, dict[str, Any]]:
    """The checkpoint to resume from and what it says, if there is one that this run can go on from."""
    folder = chosen_checkpoint(config)
    if folder is None:
        return None, {"logs": {}}
    state = checkpoint.read_state(folder)
    if state["step"] > config.steps:
        raise ValueError(
            f"the run has {config.steps} steps, but {folder.name} is beyond them; raise trainer.steps, or resume from "
            "an earlier checkpoint."
        )
    kind = state["settings"]["optimizer"]["kind"]
    if kind != optimizer_kind:
        raise ValueError(
            f"optimizer.kind is {optimizer_kind!r}, but {folder.name} was written with {kind!r}, whose "
            "state the other cannot read; resume with that."
        )
    return folder, state


def fit_rotation(loaded: LoadedModel, config: RunConfig, longest: int) -> None:
    """Fix the model's rotation for sequences of up to `longest` tokens, or as it is in the run that is resumed."""
    settings = recorded(Path(config.output_dir)).get("config", {}) if config.resume_from_checkpoint else {}
    # A checkpoint that was trained with the long factor keeps it for shorter sequences too.
    trained = trained_for(loaded.model.config.name_or_path or "") or 0
    rope.fix(loaded.model, settings.get("longest") or max(longest, trained))
    if longest > loaded.context and "longest" in settings:
        logger.warning(
            "sequences may have %d tokens, but the run was started for %d, and they end there; start another run from "
            "its checkpoint for longer ones.",
            longest,
            loaded.context,
        )


def start_record(run: Path, settings: dict[str, Any], loaded: LoadedModel, num_processes: int = 1) -> dict[str, Any]:
    """Write run.json: the settings and the machine of the last start, and when the run was first started."""
    path = run / "run.json"
    started = recorded(run).get("started")
    if path.exists() and started is None:
        logger.warning("%s was damaged; it is written anew.", path)
    record = sealed(
        {
            "command": command(),
            "folder": os.getcwd(),  # that relative paths lead from
            "config": settings,
            **provenance(loaded.model.device),
            "processes": num_processes,
            "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
            "trainable_parameters": sum(p.numel() for p in loaded.model.parameters() if p.requires_grad),
            "started": started or datetime.now(UTC).isoformat(timespec="seconds"),
        }
    )
    write_json(
        path,
        record,
        *([] if path.exists() or checkpoint.checkpoints(run) else ["make room on the disk, then start again"]),
    )
    return record


def recorded(run: Path) -> dict[str, Any]:
    """What run.json says, nothing if there is no run; if it is lost or damaged, the settings that a checkpoint has."""
    path = run / "run.json"
    with suppress(ValueError, AttributeError, FileNotFoundError, NotADirectoryError):  # the second: no table
        record = json.loads(path.read_bytes())
        whole = record.get("digest") in (None, record_digest(record))  # None where somebody has mended it
        if whole and isinstance(record.get("config"), dict):
            return dict(record)
    for folder in reversed(checkpoint.checkpoints(run)):
        with suppress(ValueError):
            return {"config": checkpoint.read_record(folder)["settings"]}
    if not path.exists():
        return {}
    raise ValueError(
        f"{path} is damaged, and no checkpoint has the run's settings; mend it and remove its digest, or give another "
        "--trainer.output_dir."
    )


def task_settings(task: Any) -> dict[str, Any]:
    """A task's `settings`, or else its name and those of a dataclass's fields that JSON can hold."""
    if hasattr(task, "settings"):
        settings: dict[str, Any] = task.settings
        return settings
    found: dict[str, Any] = {"name": getattr(task, "name", type(task).__name__)}
    for field in fields(task) if is_dataclass(task) else ():
        with suppress(TypeError, ValueError):
            found[field.name] = json.loads(json.dumps(getattr(task, field.name)))
    return found
