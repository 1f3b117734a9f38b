# SPDX-License-Identifier: Apache-2.0
"""A run folder read back: its settings, its metrics, some of its completions, and what they come to.

A run in progress reads like a finished one: what it has written so far, without a line that is only half there.

Plots and tables of runs are made in `plots.py` and `page.py`.
"""

from __future__ import annotations

import json
import logging
import math
import os
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from sparse_rl.metrics import MANY_ANOMALOUS, REMEDIES, read_log
from sparse_rl.runfolder import record_digest

logger = logging.getLogger(__name__)

LAST = 10  # steps the summary's reward is a mean over
NOTHING_SAVED = 0.0005  # below this there is advice to give
NONE = "–"
OTHERS = {"eval.json": "an evaluation", "calibration.json": "a calibration"}  # whose record a folder may have
CHECKPOINT = "trainer_state.json"

Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedRun:
    """One run, named by its folder.

    LoggedRun(name="rkv-64", settings={"kv.policy": "rkv", "kv.budget": "64", ...}, metrics=[{"step": 0, ...}], ...)
    """

    name: str
    settings: dict[str, str]  # flat, as they are shown
    metrics: list[Record]
    completions: list[Record]
    rejected: list[Record]

    @property
    def supervised(self) -> bool:
        """Whether it learnt completions (`sparse-rl sft`), not rewards."""
        sections = {name.partition(".")[0] for name in self.settings}
        return "data" in sections and "task" not in sections

    @property
    def num_steps(self) -> int:
        """Steps learnt from so far."""
        return max((int(step) for step, _ in self.series("step")), default=0)

    def series(self, metric: str) -> list[tuple[float, float]]:
        """(step, value) wherever the metric has a finite value."""
        return [
            (line["step"], line[metric]) for line in self.metrics if _finite(line, "step") and _finite(line, metric)
        ]

    def with_error(self, metric: str) -> list[tuple[float, float, float]]:
        """(step, value, standard error), the error NaN where there is none."""
        errors = dict(self.series(f"{metric}_se"))
        return [(step, value, errors.get(step, math.nan)) for step, value in self.series(metric)]

    def mean(self, metric: str, last: int = 0) -> float | None:
        """Mean over the metric's last values, by default over all; None where it has none."""
        values = [value for _, value in self.series(metric)][-last:]
        return sum(values) / len(values) if values else None

    def median(self, metric: str) -> float | None:
        """Median over all of the metric's values; None where it has none."""
        values = [value for _, value in self.series(metric)]
        return median(values) if values else None


def load_runs(folders: list[Path]) -> list[LoggedRun]:
    """The runs in the order given, under names that tell them apart; a folder given twice is read once."""
    if not folders:
        raise ValueError("there is no run to report on; give at least one run folder.")
    distinct: dict[Path, Path] = {}
    for folder in folders:
        distinct.setdefault(folder.resolve(), folder)
    runs = [_load(folder, name) for folder, name in zip(distinct.values(), _names(list(distinct)), strict=True)]
    kinds = {run.supervised: folder for run, folder in zip(runs, distinct.values(), strict=True)}
    if len(kinds) > 1:
        raise ValueError(
            f"{kinds[True]} learnt completions (sft) and {kinds[False]} rewards (train), which have no number in "
            "common; report them separately."
        )
    return runs


def differing(runs: list[LoggedRun]) -> list[str]:
    """Settings whose value is not the same in all runs, in the order they are first met."""
    names = dict.fromkeys(name for run in runs for name in run.settings)
    return [name for name in names if len({run.settings.get(name) for run in runs}) > 1]


def summary(run: LoggedRun) -> dict[str, str]:
    """The run in a line: what it was, what it learnt, what it cost."""
    if run.supervised:
        return {
            "steps": _steps(run),
            f"loss, last {LAST}": _number(run.mean("loss", LAST), ".3f"),
            "held-out loss": _first_and_last(run.with_error("eval/loss")),
            "tokens/s": _number(run.median("train/tokens_per_s"), ",.0f"),
        }
    policy, budget = (run.settings.get(name, "null") for name in ("kv.policy", "kv.budget"))
    budget = "auto" if run.settings.get("control.auto") == "true" else budget
    return {
        "KV policy": policy if policy == "full" or budget == "null" else f"{policy}, budget\u00a0{budget}",
        "correction": run.settings.get("correction.preset", NONE),
        "steps": _steps(run),
        "held-out reward, dense cache": _first_and_last(run.with_error("eval/dense/reward")),
        "held-out reward, sparse cache": _first_and_last(run.with_error("eval/sparse/reward")),
        f"reward, last {LAST}": _number(run.mean("reward", LAST), ".3f"),
        "rejected": _number(run.mean("correction/rejection_rate"), ".1%"),
        "KV saved": _number(run.mean("kv/saved_frac"), ".1%"),
        "length": _number(run.mean("completions/mean_length"), ",.1f"),
        "tokens/s": _number(run.median("rollout/tokens_per_s"), ",.0f"),
    }


def advice(run: LoggedRun) -> list[str]:
    """What to change in the next run."""
    found = []
    anomalous, saved = run.mean("mismatch/catastrophic_rollout_frac"), run.mean("kv/saved_frac")
    if anomalous is not None and anomalous > MANY_ANOMALOUS:
        share = f"{100 * anomalous:.0f} %"
        found.append(
            f"{share} of the completions have a token that the dense model would all but never have written; raise "
            "kv.budget or choose another kv.policy (sparse-rl inspect compares them)."
        )
    for name, remedy in REMEDIES.items():
        flags = [value for _, value in run.series(name)]
        if any(flags) and not (found and name == "alarm/anomalies"):
            found.append(f"{name} was on at {sum(map(bool, flags))} of {len(flags)} steps; {remedy}")
    ungraded = [value for _, value in run.series("completions/ungraded_frac")]
    if nothing := sum(value == 1 for value in ungraded):
        found.append(
            f"no completion had a reward at {nothing} of {len(ungraded)} steps, so nothing was learnt there; what the "
            "reward function declines (None) or fails on has none."
        )
    unread = 1.0 - (run.mean("kv/read_frac") or 1.0)  # a policy that chooses pages holds them all
    if saved is not None and max(saved, unread) < NOTHING_SAVED and run.settings.get("kv.policy") != "full":
        found.append("no KV was saved, as the budget is above the lengths seen; lower kv.budget.")
    return found


def _steps(run: LoggedRun) -> str:
    steps, planned = str(run.num_steps), run.settings.get("trainer.steps", "null")
    return steps if planned in ("null", steps) else f"{steps}\u00a0of\u00a0{planned}"


def _first_and_last(points: list[tuple[float, float, float]]) -> str:
    shown = [
        f"{value:.3f}" if math.isnan(error) else f"{value:.3f}\u00a0±\u00a0{error:.3f}"
        for _, value, error in points[:1] + points[1:][-1:]
    ]
    return " → ".join(shown) or NONE


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form).replace("%", "\u00a0%")


def _load(folder: Path, name: str) -> LoggedRun:
    about, metrics = _read(folder / "run.json")[0], _read(folder / "metrics.jsonl")
    if about.get("digest") not in (None, record_digest(about)):
        logger.warning("%s is not what the run wrote; its settings may be others.", folder / "run.json")
    config, _ = about.pop("config", {}), about.pop("digest", None)
    return LoggedRun(
        name=name,
        settings=_flat(config if isinstance(config, dict) else {"config": config}) | _flat(about),
        metrics=metrics,
        completions=_read(folder / "completions.jsonl", needed=False),
        rejected=_read(folder / "rejected.jsonl", needed=False),
    )


def _read(path: Path, needed: bool = True) -> list[Record]:
    try:
        records = read_log(path) if path.suffix == ".jsonl" else [json.loads(path.read_bytes())]
    except (FileNotFoundError, NotADirectoryError):
        if not needed:
            return []
        what = _other(path.parent) or f"it has no {path.name}; give a training run's"
        raise ValueError(f"{path.parent} is no run folder, {what}.") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); mend it or leave its run out.") from error
    except ValueError as error:
        raise ValueError(f"{path} holds something other than JSON; mend it or leave its run out.") from error
    if not all(isinstance(record, dict) for record in records):
        raise ValueError(f"{path} holds something other than JSON objects; mend it or leave its run out.")
    return records


def _other(folder: Path) -> str | None:
    """What else a folder is, and where its report or its run is."""
    for record, what in OTHERS.items():
        if (folder / record).is_file():
            if (folder / "report.html").is_file():
                return f"but {what}, which has its own report.html in it; open that"
            return f"but {what}, which writes its own report.html into it; go on with it (--resume)"
    if (folder / CHECKPOINT).is_file():
        run = Path(os.path.normpath(folder / ".."))
        return "but a checkpoint; " + (f"its run is {run}" if (run / "run.json").is_file() else "give the run it is of")
    if (folder / "metrics.jsonl").is_file():
        return "as its run.json is lost; resuming it writes that anew"
    return None


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
