# SPDX-License-Identifier: Apache-2.0
"""Made-up raw results of benchmarks/evidence, in which a claim can be made true, false or undecided."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ARMS = ("dense", "naive", "reject_only", "reweight_only", "sparse_rl")
BUDGETS, SWEEP = (60, 40, 30), (20, 40, 60, 90)
LENGTH = 180
SPREAD = (-0.01, 0.0, 0.01)  # of three seeds: a standard error of 0.0058


def testbed(name: str) -> dict[str, Any]:
    return {"name": name, "budgets": list(BUDGETS), "sweep": list(SWEEP), "updates": 10, "prompts": 4, "n": 8} | {
        "interval": 8,
        "whole": name == "short",
    }


def record(cell: str, part: str, settings: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    about = {"commit": "abc1234", "hardware": "a machine", "seconds": 36.0}
    return {"cell": cell, "part": part, **about, "settings": settings, "results": results}


def run(
    bed: str,
    arm: str,
    budget: int,
    seed: int,
    dense: float,
    *,
    policy: str | None = None,
    saved: float = 0.5,
    **more: Any,
) -> dict[str, Any]:
    """A training run that ends at this dense accuracy."""
    kv = policy or ("full" if arm == "dense" else "rkv")
    settings = {"testbed": testbed(bed), "arm": arm, "policy": kv, "budget": 0 if arm == "dense" else budget}
    settings |= {"eps": None, "updates_per_rollout": 1, "seed": seed} | more
    names = ("reward", "rejection", "catastrophic", "kl", "grad_norm", "overlap_p05")
    curves = {name: [0.1] * 10 for name in names} | {"length": [LENGTH] * 10}
    curves["kv_saved"] = [0.0 if arm == "dense" else saved] * 10
    results = {"dense": [dense, 0.01], "sparse": [dense - 0.1, 0.01], "checks": [[4, dense, 0.02]], "curves": curves}
    name = "-".join(map(str, (bed, arm, budget, kv, seed, *more.values())))
    return record(name, "a", settings, results)


def seeds(bed: str, arm: str, budget: int, mean: float, **more: Any) -> list[dict[str, Any]]:
    """Three of them around a mean."""
    spread = more.pop("spread", SPREAD)
    return [run(bed, arm, budget, seed, mean + spread[seed], **more) for seed in range(3)]


def before(bed: str, policy: str, budget: int, accuracy: float = 0.8, **statistics: Any) -> dict[str, Any]:
    """A measurement before training."""
    results: dict[str, Any] = dict.fromkeys(("overlap_mean", "overlap_p05", "overlap_p01", "overlap_min"), 0.9)
    results |= {"kl": 0.1, "rejection": 0.2, "first_veto": [10, 100], "rollouts": 10, "length": LENGTH}
    results |= {"prompt_len": 18, "reward": 0.6, "reward_se": 0.01}
    results |= {"accuracy": {"dense": [accuracy, 0.005], "sparse": [0.5, 0.01]}} | statistics
    settings = {"testbed": testbed(bed), "policy": policy, "budget": budget, "seed": 0}
    return record(f"{bed}-before-{policy}-{budget}", "d", settings, results)


def under(bed: str, arm: str, trained_at: int, accuracy: float) -> list[dict[str, Any]]:
    """Three seeds of a trained model, as good under every cache."""
    caches = ["full", *(f"{policy}:{budget}" for policy in ("rkv", "snapkv", "streaming") for budget in BUDGETS[1:])]
    found = []
    for seed, spread in enumerate(SPREAD):
        settings = {"testbed": testbed(bed), "arm": arm, "trained_at": trained_at, "seed": seed}
        matrix = {cache: [accuracy + spread, 0.01] for cache in caches}
        found.append(record(f"{bed}-under-{arm}-{trained_at}-{seed}", "c", settings, {"matrix": matrix}))
    return found


def held(bed: str, ends: dict[float, float], short: float = 0.0) -> list[dict[str, Any]]:
    """Part g: a calibration and three seeds a target; a schedule holds its target, or less by `short`."""
    schedules, runs = {}, []
    for target, end in ends.items():
        steps = f"{BUDGETS[2]}@0+{BUDGETS[1]}@60"
        schedules[f"{target:g}"] = {
            "budgets": steps,
            "tails": [1.0, target - short],
            "kv_read": 0.4,
            "sparse": [0.5, 0.01],
        }
        runs += seeds(bed, "schedule", 0, end, target=target)
        for run_of_it in runs[-3:]:
            run_of_it["results"] |= {"bins": {"tail/overlap_lowest": [target] * 9 + [None]}, "budgets": steps}
    at = {"p05": [0.9, 0.3], "p01": [0.1, 0.05], "mean": [0.99, None], "kv_read": 0.4, "rejected": 0.2}
    results = {"bins": [[0, 60], [60, 200]], "curve": {"40": at}, "schedules": schedules}
    settings = {"testbed": testbed(bed), "targets": list(ends)}
    return [record(f"{bed}-calibrate", "g", settings, results), *runs]


def whole(bed: str = "short", *, dense: float = 0.95, trained: float = 0.8, **ends: float) -> list[dict[str, Any]]:
    """Every cell that the verdicts read but the predictors'; `ends` are arms' accuracies, 0.9 if not given.

    The start is 0.8; `trained` is sparse_rl's accuracy under sparse caches, where dense-trained has 0.7.
    """
    found = [before(bed, "full", 0), *seeds(bed, "dense", 0, dense)]
    for budget in BUDGETS:
        for arm in ARMS[1:]:
            found += seeds(bed, arm, budget, ends.get(arm, 0.9))
    found += seeds(bed, "sparse_rl", SWEEP[0], ends.get("extreme", 0.5))
    found += under(bed, "dense", 0, 0.7)
    for budget in BUDGETS[1:]:
        found += under(bed, "sparse_rl", budget, trained) + under(bed, "naive", budget, 0.6)
    return found


def write(folder: Path, records: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for part in {each["part"] for each in records}:
        lines = [json.dumps(each) for each in records if each["part"] == part]
        (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    return folder
