# SPDX-License-Identifier: Apache-2.0
"""Find the cheapest budget by context length that keeps a sparse sampler near its dense model.

    the dense cache (the floor); if it meets the target, each budget of a grid: sample -> dense pass -> runs/00512.npz
    statistics by context length -> per bin the cheapest budget whose tail meets the target -> schedule.json
    the schedule itself, as one more run: what it holds in fact; where that is too little, the cheapest that holds

A run is a function of the weights, the prompts and the settings, and is on disk whole or not at all. So a calibration
that was killed goes on where it was, and another target, tail or bin is found from the same runs.

What is known of a token is in `tokens.py`, what all of them come to in `analysis.py`, the search in `search.py`.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparse_rl.calibrate.analysis import analyse, doubts, measure_dense
from sparse_rl.calibrate.config import CalibrationConfig
from sparse_rl.calibrate.floor import judge_dense
from sparse_rl.calibrate.search import as_schedule, with_budget
from sparse_rl.calibrate.tokens import Tokens, probe
from sparse_rl.calibrate.verify import verified
from sparse_rl.kv import EvictPolicy, Full, KVPolicy, policy_record
from sparse_rl.kv.schedule import Schedule, save
from sparse_rl.model.load import LoadedModel
from sparse_rl.rollout import EngineConfig, Progress, Sampling
from sparse_rl.rollout.memory import Memory, free
from sparse_rl.runfolder import (
    as_settings,
    check_folder,
    command,
    differences,
    lock,
    provenance,
    refuse_changes,
    write_json,
)
from sparse_rl.types import Prompt

RECORD = "calibration.json"


class CalibrationObserver:
    """Sees nothing; subclasses do."""

    def on_begin(self, budgets: list[int], done: int) -> None:
        """The dense cache is measured; `done` of the budgets are on disk from before."""

    def on_step(self, run: str, finished: int, rollouts: int, progress: Progress) -> None:
        """After a decode step of a run."""

    def on_run(self, run: str, seconds: float, left_s: float) -> None:
        """A run is on disk; all others take about `left_s`."""

    def on_note(self, note: str) -> None:
        """Something the user should know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """One calibration: what is sampled, and with which settings."""

    loaded: LoadedModel
    policy: KVPolicy
    prompts: list[Prompt]
    sampling: Sampling
    engine: EngineConfig
    config: CalibrationConfig

    def budgets(self, longest: int | None = None) -> list[int]:
        """To be tried, for contexts of at most `longest` tokens, or what a sample can reach."""
        longest = longest or longest_context(self.prompts, self.sampling, self.loaded.context)
        return self.config.grid(self.policy, longest, self.engine.page_size or self.policy.page_size)

    def sampled(self) -> dict[str, Any]:
        """Everything that decides the runs; what is made of them is free to change."""
        policy = {key: value for key, value in policy_record(self.policy).items() if key not in ("budget", "schedule")}
        ids = json.dumps([prompt.ids for prompt in self.prompts])
        return {
            "kv": policy,
            "prompts": len(self.prompts),
            "prompts_digest": hashlib.sha256(ids.encode()).hexdigest()[:16],
            "sampling": {name: getattr(self.sampling, name) for name in ("n", "max_tokens", "temperature", "seed")},
            "page_size": self.engine.page_size or self.policy.page_size,
            "dtype": str(self.loaded.model.dtype).removeprefix("torch."),
        }


def longest_context(prompts: list[Prompt], sampling: Sampling, context: int) -> int:
    return min(context, max(len(prompt.ids) for prompt in prompts) + sampling.max_tokens)


def check_tokens(prompts: list[Prompt], sampling: Sampling, config: CalibrationConfig) -> None:
    """Raise if not even samples of full length have the tokens that a bin needs."""
    most = len(prompts) * sampling.n * sampling.max_tokens
    if most < config.min_tokens:
        raise ValueError(
            f"{len(prompts)} prompts x {sampling.n} samples of {sampling.max_tokens} tokens are {most:,} tokens, fewer "
            f"than --min-tokens ({config.min_tokens:,}); give more prompts, more samples (--n), or lower --min-tokens."
        )


def calibrate(
    calibration: Calibration,
    output: str | Path,
    *,
    named: dict[str, Any] | None = None,
    resume: bool = False,
    observer: CalibrationObserver | None = None,
) -> dict[str, Any]:
    """Run what is not on disk yet; the contents of results.json, which lies in the folder with schedule.json.

    named: what else says which model and prompts these are; on a resume it must be the same
    """
    folder, observer = Path(output), observer or CalibrationObserver()
    calibration.budgets()  # what is wrong with them is said before the work
    check_tokens(calibration.prompts, calibration.sampling, calibration.config)
    check_folder(folder, RECORD, "a calibration", resume=resume)
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder, "calibrating"):
        record = _record(folder, calibration, named or {})
        (folder / "runs").mkdir(exist_ok=True)
        runs = _Runs(folder, calibration, observer)
        floor = runs.floor()
        dense = measure_dense(floor, calibration.config)
        said = judge_dense(dense, calibration.config)
        for note in said:  # before the work, and with the others after it
            observer.on_note(note)
        budgets = calibration.budgets(int(floor.contexts.max()) + 1)
        runs.begin(budgets)
        results = record | analyse(dense, budgets, runs.at, calibration.config)
        results["notes"] = said + results["notes"]
        results["settings"] = as_settings(asdict(calibration.config) | {"target": calibration.config.goal})
        if calibration.config.verify:
            results |= verified(results, runs, calibration.config, evicts=isinstance(calibration.policy, EvictPolicy))
        results["notes"] += doubts(results, calibration.config)
        results["finished"] = datetime.now(UTC).isoformat(timespec="seconds")
        for note in results["notes"]:
            observer.on_note(note)
        write_json(folder / "results.json", results)
        told = {key: results[key] for key in ("model", "kv", "hardware", "commit", "finished") if key in results}
        names = ("target", "relative", "overlap", "tail", "sure", "tokens", "bin")
        asked = {name: results["settings"][name] for name in names}
        asked["longest"] = longest_context(calibration.prompts, calibration.sampling, calibration.loaded.context)
        save(as_schedule(results["schedule"]), folder / "schedule.json", **told, **asked)
    return results


def _record(folder: Path, calibration: Calibration, named: dict[str, Any]) -> dict[str, Any]:
    """What calibration.json says, the first start's; refuses to go on with other weights, prompts or sampling."""
    path = folder / RECORD
    sampled = as_settings({**named, **calibration.sampled()})
    if path.is_file():
        try:
            before: dict[str, Any] = json.loads(path.read_text())
            changed = differences(before["sampled"], sampled)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is damaged; give another --output.") from error
        refuse_changes(str(folder), "calibrated", changed)
        found = before
    else:
        found = {
            "command": command(),
            "sampled": sampled,
            **provenance(calibration.loaded.shape.device),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        write_json(path, found)
    return {**found, **sampled}


class _Runs:
    """The runs of a calibration, from disk where they are there."""

    def __init__(self, folder: Path, calibration: Calibration, observer: CalibrationObserver) -> None:
        self.folder, self.calibration, self.observer = folder / "runs", calibration, observer
        self.memory, self.spent, self.made = Memory(), 0.0, 0
        self.left = 1 + len(calibration.budgets()) + (calibration.config.verify > 0)

    def begin(self, budgets: list[int]) -> None:
        """Now that the dense cache's run says which budgets there are to try."""
        done = sum((self.folder / f"{budget:05}.npz").is_file() for budget in budgets)
        self.left = len(budgets) - done + (self.calibration.config.verify > 0)
        self.observer.on_begin(budgets, done)

    def floor(self) -> Tokens:
        return self._run("full", Full())

    def at(self, budget: int) -> Tokens:
        return self._run(f"{budget:05}", with_budget(self.calibration.policy, budget))

    def of_schedule(self, schedule: Schedule) -> Tokens:
        """A constant one is a run of the grid."""
        if len(schedule.budgets) == 1:
            return self.at(schedule.most)
        name = f"schedule-{hashlib.sha256(json.dumps(asdict(schedule)).encode()).hexdigest()[:8]}"
        return self._run(name, with_budget(self.calibration.policy, schedule.text), shown=schedule.text)

    def _run(self, name: str, policy: KVPolicy, shown: str = "") -> Tokens:
        path, asked, shown = self.folder / f"{name}.npz", self.calibration, shown or name
        found = Tokens.load(path)
        if found is not None:
            return found
        began, rollouts = time.perf_counter(), len(asked.prompts) * asked.sampling.n
        device = asked.loaded.shape.device

        def step(before: int, progress: Progress) -> None:
            self.observer.on_step(shown, before + progress.num_finished, rollouts, progress)

        found = probe(asked.loaded, policy, asked.prompts, asked.sampling, asked.engine, self.memory, on_step=step)
        found.save(path)
        if device.type == "cuda":
            free(device)
        seconds = time.perf_counter() - began
        self.spent, self.made, self.left = self.spent + seconds, self.made + 1, max(0, self.left - 1)
        self.observer.on_run(shown, seconds, self.left * self.spent / self.made)
        return found
