# SPDX-License-Identifier: Apache-2.0
"""A run folder read back: its settings, its metrics, what it wrote down of its completions.

A run in progress reads like a finished one: what it has written so far, without a line that is only half there.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparse_rl.metrics import read_log

Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run, named by its folder.

    Run(name="rkv-64", settings={"kv.policy": "rkv", "kv.budget": "64", "hardware": "..."}, metrics=[{"step": 0, ...}])
    """

    name: str
    settings: dict[str, str]  # flat, as they are shown
    metrics: list[Record]
    completions: list[Record]
    rejected: list[Record]

    @property
    def num_steps(self) -> int:
        """Steps learnt from so far."""
        return max((int(step) for step, _ in self.series("step")), default=0)

    def series(self, metric: str) -> list[tuple[float, float]]:
        """(step, value) wherever the metric has a finite value."""
        return [(line["step"], line[metric]) for line in self.metrics if _finite(line, "step") and _finite(line, metric)]

    def with_error(self, metric: str) -> list[tuple[float, float, float]]:
        """(step, value, standard error), the error NaN where there is none."""
        errors = dict(self.series(f"{metric}_se"))
        return [(step, value, errors.get(step, math.nan)) for step, value in self.series(metric)]

    def mean(self, metric: str, last: int = 0) -> float | None:
        """Mean over the metric's last values, by default over all; None where it has none."""
        values = [value for _, value in self.series(metric)][-last:]
        return sum(values) / len(values) if values else None


def load_runs(folders: list[Path]) -> list[Run]:
    """The runs in the order given, under names that tell them apart; a folder given twice is read once."""
    if not folders:
        raise ValueError("there is no run to report on; give at least one run folder.")
    distinct = {folder.resolve(): folder for folder in reversed(folders)}
    names = _names(list(reversed(distinct)))
    return [_load(folder, name) for folder, name in zip(reversed(distinct.values()), names, strict=True)]


def differing(runs: list[Run]) -> list[str]:
    """Settings whose value is not the same in all runs, in the order they are first met."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    return [name for name in names if len({run.settings.get(name) for run in runs}) > 1]


def _load(folder: Path, name: str) -> Run:
    for needed in ("run.json", "metrics.jsonl"):
        if not (folder / needed).is_file():
            raise ValueError(f"{folder} is no run folder, it has no {needed}; give a folder that a training run wrote.")
    about = _read(folder / "run.json")[0]
    config = about.get("config")
    settings = _flat(config if isinstance(config, dict) else {}) | _flat({k: v for k, v in about.items() if k != "config"})
    logs = {log: _read(folder / f"{log}.jsonl") for log in ("metrics", "completions", "rejected")}
    return Run(name=name, settings=settings, **logs)


def _read(path: Path) -> list[Record]:
    """The records of a file; none of a log that was never begun."""
    if path.suffix == ".jsonl" and not path.exists():
        return []
    try:
        records = read_log(path) if path.suffix == ".jsonl" else [json.loads(path.read_bytes())]
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read ({error}); repair it or leave its run out.") from error
    if not all(isinstance(record, dict) for record in records):
        raise ValueError(f"{path} holds something other than JSON objects; repair it or leave its run out.")
    return records


def _names(folders: list[Path]) -> list[str]:
    """The end of each path, as many parts of it as no other path ends with."""
    names = []
    for folder in folders:
        for length in range(1, len(folder.parts) + 1):
            end = folder.parts[-length:]
            if sum(other.parts[-length:] == end for other in folders) == 1:
                break
        names.append("/".join(end).encode(errors="replace").decode())
    return names


def _flat(settings: Record, prefix: str = "") -> dict[str, str]:
    """{"kv": {"budget": 64}} as {"kv.budget": "64"}."""
    flat: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return flat


def _finite(line: Record, name: str) -> bool:
    value = line.get(name)
    return isinstance(value, int | float) and math.isfinite(value)
