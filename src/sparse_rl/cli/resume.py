# SPDX-License-Identifier: Apache-2.0
"""Going on with a run: what the command line does not give comes from the run's own record.

Which checkpoint it goes on from is found in train/folder.py.
"""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace


FOLDERS = ("train_file", "eval_file")  # settings that may name one


def own_settings(parser: ArgumentParser, given: Namespace, section: str) -> dict[str, Any] | None:
    """Those of the run that is to be resumed, as a config file has them.

    None if no run is, or the folder has none with such a section: what is wrong there is said when it is opened.
    """
    folder, resume = (getattr(given["trainer"], name, None) for name in ("output_dir", "resume_from_checkpoint"))
    if not resume or not isinstance(folder, str):
        return None
    from sparse_rl.train.folder import recorded

    record = recorded(Path(folder)).get("config")
    if not isinstance(record, dict) or not isinstance(record.get(section), dict):
        return None
    record["grading"] = record[section].get("grading", {})
    _restore_schedules(record.get("kv", {}))
    record["trainer"] = record.get("trainer", {}) | {"output_dir": folder, "resume_from_checkpoint": resume}
    if record.get("correction", {}).get("preset") == "custom":
        fields = {name: value for name, value in record["correction"].items() if value is not None}
        record["correction"] = fields | {"preset": "reweight_only"}  # all fields of which are the defaults
    elif "correction" in record:
        record["correction"] = {"preset": record["correction"]["preset"]}
    known = {action.dest for action in parser._actions}
    settings: dict[str, Any] = {}
    for name, value in record.items():  # what is no setting here, such as a file's hash, is left out
        if name in known:
            settings[name] = value
        elif isinstance(value, dict) and (kept := {key: value[key] for key in value if f"{name}.{key}" in known}):
            settings[name] = kept
    return settings


def _restore_schedules(kv: dict[str, Any]) -> None:
    """Let steps stand for a schedule's file that is gone, as they were read."""
    from sparse_rl.kv import SCHEDULED
    from sparse_rl.kv.schedule import Schedule, is_path

    for budget, schedule in SCHEDULED:
        if schedule in kv and is_path(kv[budget]) and not os.path.isfile(kv[budget]):
            kv[budget] = Schedule(**{name: tuple(values) for name, values in kv[schedule].items()}).text


def check_paths(settings: Namespace, own: dict[str, Any]) -> None:
    """Raise if a file of the run is not here, but where the run was started, and nothing else was given."""
    from sparse_rl.train.folder import recorded

    folder = own["trainer"]["output_dir"]
    there = Path(recorded(Path(folder)).get("folder", "."))
    for now, then in [(settings, own), *((settings[key], own[key]) for key in own if isinstance(own[key], dict))]:
        same = [(key, text) for key in then for text in _texts(then[key]) if text in _texts(now.get(key))]
        for name, text in same:
            path = text.rpartition(":")[0] if ".py:" in text else text  # of a reward
            if path and not os.path.exists(path) and _is_there(there / path, name):
                raise ValueError(f"{folder} was started in {there}, where {path} is; resume it from there.")


def _is_there(path: Path, setting: str) -> bool:
    """Whether it is what the setting may name; a folder may just bear the name of a policy or a model."""
    if setting == "model":
        return any((path / name).is_file() for name in ("config.json", "adapter_config.json"))
    return path.is_file() or (setting in FOLDERS and path.is_dir())


def _texts(value: Any) -> list[str]:
    """The words of a setting."""
    return [text for text in (value if isinstance(value, list | tuple) else [value]) if isinstance(text, str)]


def named(section: str, key: str, flags: list[str], configs: list[dict[str, Any]]) -> Any:
    """The value that flags give a setting, or else the last config that has it; None if nobody gives it."""
    option = f"--{section}.{key}"
    by_flag = [flag.partition("=")[2] for flag in flags if flag.startswith(f"{option}=")]
    by_flag += [value for flag, value in pairwise(flags) if flag == option]
    if by_flag:
        return by_flag[-1]
    sections = [config[section] for config in configs if isinstance(config.get(section), dict)]
    return next((settings[key] for settings in reversed(sections) if key in settings), None)
