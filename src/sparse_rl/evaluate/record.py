# SPDX-License-Identifier: Apache-2.0
"""eval.json: what an evaluation is, so that it can be gone on with and never be mixed with another.

The samples are kept by `store.py`; results.json is written by `benchmarks.py`.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import sparse_rl
from sparse_rl.evaluate.plan import Cell, Evaluation, parse_cache
from sparse_rl.evaluate.suite import Prompts, Suite
from sparse_rl.kv import policy_record
from sparse_rl.model.load import LoadedModel, weights_digest
from sparse_rl.rollout import EngineConfig
from sparse_rl.runfolder import as_settings, command, differences, provenance, refuse_changes, write_json

NAME = "eval.json"
KINDS = {
    "command": str,
    "settings": dict,
    "hardware": str,
    "versions": dict,
    "started": str,
    "wall_s": float,
    "resumes": list,
    "models": dict,
}
OF_MODEL = {"digest": str, "parameters": int, "context": int, "dtype": str, "benchmarks": dict}
OF_PROMPTS = {"problems": int, "overlong": int, "clipped": int, "plain": bool, "prompts_digest": str}
SPEED = ("graphs", "compile", "pool_pages", "pool_bytes")  # of the engine's settings
# To the table: where the data lies, what computes, and how fast.
NO_DIFFERENCE = ("data_dir", "device", "grading.workers", *(f"engine.{name}" for name in SPEED))


class Record:
    """eval.json in memory; `save` after every change."""

    def __init__(
        self,
        folder: Path,
        evaluation: Evaluation,
        suites: dict[str, Suite],
        *,
        resume: bool,
        began: float,  # on time.perf_counter
    ) -> None:
        self.path = folder / NAME
        self.began = began
        self.contents: dict[str, Any] = {
            "command": command(),
            "settings": as_settings(_settings(evaluation, suites)),
            **provenance(torch.device(evaluation.device)),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "wall_s": 0.0,  # from the start to the end or the last block, resumes included
            "resumes": [],  # those whose commit, hardware or versions are not the above
            "models": {},
        }
        if resume:
            self._go_on()
        self.earlier_s: float = self.contents["wall_s"]
        self.save()

    @property
    def models(self) -> dict[str, Any]:
        found: dict[str, Any] = self.contents["models"]
        return found

    def problems(self, cell: Cell) -> int | None:
        """How many problems the cell has, if its model has been loaded before."""
        known = self.models.get(cell.model, {}).get("benchmarks", {}).get(cell.benchmark)
        return known["problems"] if known else None

    def add_model(self, name: str, loaded: LoadedModel, prompts: dict[str, Prompts]) -> None:
        """Note the model and what it is asked, or raise if that has changed since the evaluation was started."""
        found = {
            "digest": weights_digest(loaded.model),
            "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
            "context": loaded.context,
            "dtype": str(loaded.model.dtype).removeprefix("torch."),
            "benchmarks": {
                benchmark: {
                    "problems": len(of.prompts),
                    "overlong": of.overlong,
                    "clipped": of.clipped,
                    "plain": of.plain,
                    "prompts_digest": of.digest,
                }
                for benchmark, of in prompts.items()
            },
        }
        before = self.models.setdefault(name, found)
        refuse_changes(f"{self.path.parent}: {name}", "evaluated", differences(before, found))
        self.save()

    def save(self) -> None:
        self.contents["wall_s"] = round(self.earlier_s + time.perf_counter() - self.began, 1)
        write_json(self.path, self.contents)

    def _go_on(self) -> None:
        """The record is the first start's; who goes on elsewhere, or with other code, is added to it."""
        try:
            before = json.loads(self.path.read_text())
            _check_kinds(before, KINDS)
            _check_kinds(before["settings"], {"benchmarks": dict})
            for model in before["models"].values():
                _check_kinds(model, OF_MODEL)
                for known in model["benchmarks"].values():
                    _check_kinds(known, OF_PROMPTS)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{self.path} is damaged; give another --output.") from error
        now = self.contents
        refuse_changes(str(self.path.parent), "evaluated", _changes(before["settings"], now["settings"]))
        other = {key: now[key] for key in ("commit", "hardware", "versions") if now[key] != before.get(key)}
        if other:
            before["resumes"].append({"command": now["command"], "resumed": now["started"], **other})
        self.contents = before


def _changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What was asked for in another way, or if nothing was, what its files and templates have become since."""
    then, own = before["benchmarks"], now["benchmarks"]
    asked = differences(before | {"benchmarks": 0}, now | {"benchmarks": 0}, NO_DIFFERENCE)
    if then.keys() != own.keys():
        asked.append(f"benchmarks {' '.join(then)} is now {' '.join(own)}")
    return asked or differences(then, own, prefix="benchmarks.")


def recorded_engine(folder: Path) -> dict[str, Any]:
    """The engine's settings of the evaluation in the folder; none if it cannot be read, which is said when it is."""
    try:
        engine = json.loads((folder / NAME).read_text())["settings"]["engine"]
        return {field.name: engine[field.name] for field in fields(EngineConfig)}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def cell_folders(cells: Iterable[Cell]) -> dict[Cell, str]:
    """A folder for each cell, readable and unlike all others whatever the names hold."""
    found: dict[Cell, str] = {}
    for cell in cells:
        parts = (
            re.sub(r"[^\w.=,-]+", "-", part).strip("-.") or "-" for part in (cell.model, cell.benchmark, cell.cache)
        )
        base = name = "/".join(part[-80:] for part in parts)
        number = 2
        while name.lower() in {taken.lower() for taken in found.values()}:
            name, number = f"{base}-{number}", number + 1
        found[cell] = name
    return found


def _settings(evaluation: Evaluation, suites: dict[str, Suite]) -> dict[str, Any]:
    """Everything that decides the table, and some that does not (NO_DIFFERENCE)."""
    found = asdict(evaluation)
    caches = {spec: policy_record(parse_cache(spec)) for spec in evaluation.kv}
    for key in ("schedule", "select_schedule"):
        schedules = {spec: cache[key] for spec, cache in caches.items() if key in cache}
        found |= {f"{key}s": schedules} if schedules else {}
    found["benchmarks"] = {
        name: {
            "digest": suite.digest,
            "problems": len(suite.rows),
            **asdict(suite.settings),
            "departures": suite.departures,
        }
        for name, suite in suites.items()
    }
    return {**found, "version": sparse_rl.__version__}


def _check_kinds(found: Any, kinds: Mapping[str, type]) -> None:
    """TypeError unless it is a table with values of these kinds."""
    if not isinstance(found, dict) or not all(isinstance(found.get(key), kind) for key, kind in kinds.items()):
        raise TypeError(f"not a table with {', '.join(kinds)}")
