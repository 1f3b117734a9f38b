# SPDX-License-Identifier: Apache-2.0
"""What the cells of SmolLM2 do; the warm start, the sweep and the command line are benchmarks/smollm2.py's."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from cells import HERE, Cell
from work import CURVES, MEASURED, MEASURED_N, began_with, mismatch

sys.path.insert(0, str(HERE.parent))
import smollm2

from sparse_rl.bench.record import rounded
from sparse_rl.evaluate import EvalConfig, evaluate
from sparse_rl.kv import Full, KVPolicy, build_policy
from sparse_rl.metrics import read_log
from sparse_rl.objective.mismatch import overlap_ids
from sparse_rl.rollout import Engine, EngineConfig, Sampling
from sparse_rl.types import kv_saved_frac

POLICIES = ("rkv", "snapkv", "streaming")
UPDATE_TOKENS = "8192"  # of a forward: five runs share the GPU's memory
SECOND = 0.75  # the matrix's other budget, of the first


def begin(cell: Cell, device: str, models: Path) -> dict[str, Any]:
    """The warm start, the budget, and the warm model under every cache."""
    args = arguments(cell, device, models)
    (args.runs / args.task).mkdir(parents=True, exist_ok=True)
    smollm2.warm_up(args)
    smollm2.sweep(args)
    rows = json.loads((args.runs / args.task / "sweep.json").read_text())
    least = smollm2.REWARD * rows[0]["reward"]
    fitting = [r["budget"] for r in rows[1:] if r["reward"] >= least and r["rejection"] <= smollm2.REJECTION]
    budget = min(fitting, default=max(smollm2.BUDGETS[args.task]))
    loaded, task = smollm2.built(args, smollm2.start_model(args))
    found: dict[str, Any] = {"start": began_with(Path(smollm2.start_model(args))), "budget": budget}
    found["sweep"] = [{key: rounded(value) for key, value in row.items()} for row in rows]
    found["matrix"] = matrix(args, loaded, task, budget)
    found["before"] = before(args, loaded, task, budget)
    (models / cell.name).mkdir(parents=True, exist_ok=True)
    (models / cell.name / "config.json").write_text(json.dumps({"budget": budget}))  # where others look for it
    return found


def arm(cell: Cell, device: str, models: Path) -> dict[str, Any]:
    """One run from the warm model, then the matrix."""
    args, name = arguments(cell, device, models), cell.settings["arm"]
    budget = json.loads((models / "smollm2-start" / "config.json").read_text())["budget"]
    target = args.runs / args.task / cell.name
    command = smollm2.train_command(args, name, budget)
    command += ["--engine.compile", "false", "--update.compile", "false"]  # a run is too short to pay for it
    given = {"--trainer.output_dir": str(target), "--eval.prompts": "0", "--update.max_tokens": UPDATE_TOKENS}
    given["--trainer.resume_from_checkpoint"] = str((target / "run.json").exists()).lower()
    for flag, value in given.items():
        command[command.index(flag) + 1] = value
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    not_finite = "gradient that is not finite" in run.stdout or "logits that are not finite" in run.stdout
    if run.returncode and not not_finite:
        raise RuntimeError(run.stdout[-1500:])
    steps = [line for line in read_log(target / "metrics.jsonl") if line["step"]]
    found: dict[str, Any] = {"start": began_with(Path(smollm2.start_model(args))), "budget": budget}
    found["not_finite"] = bool(run.returncode)
    if run.returncode:  # a result: the run has collapsed, and left no model
        found["matrix"] = dict.fromkeys(caches(budget), (None, None))
    else:
        found["matrix"] = matrix(args, *smollm2.built(args, str(target / f"checkpoint-{args.steps}")), budget)
    found["curves"] = {short: [rounded(line.get(metric)) for line in steps] for short, metric in CURVES.items()}
    shutil.rmtree(target, ignore_errors=True)  # 2 GB
    return found


def matrix(args: Namespace, loaded: Any, task: Any, budget: int) -> dict[str, list[float | None]]:
    """Accuracy and its standard error under each cache."""
    own = smollm2.sampling(args)
    sampling = EvalConfig(n=2, temperature=own["temperature"], seed=7).sampling(own["max_tokens"])
    found = {}
    for name, policy in caches(budget).items():
        engine = Engine(loaded, policy, EngineConfig(rows=512, compile=False))
        result = evaluate(engine, task.held_out(args.problems), sampling, task.rewards)
        engine.release()
        found[name] = [rounded(result["reward"]), rounded(result["reward_se"])]
    return found


def caches(budget: int) -> dict[str, KVPolicy]:
    """The matrix's policies."""
    policies: dict[str, KVPolicy] = {"full": Full()}
    for name in POLICIES:
        for entries in (budget, round(SECOND * budget)):
            policies[f"{name}:{entries}"] = build_policy(name, budget=entries, interval=smollm2.INTERVAL)
    return policies


def before(args: Namespace, loaded: Any, task: Any, budget: int) -> dict[str, Any]:
    """The warm model's mismatch at the budget."""
    policy = build_policy("rkv", budget=budget, interval=smollm2.INTERVAL)
    engine = Engine(loaded, policy, EngineConfig(rows=512, compile=False))
    sampling = Sampling(n=MEASURED_N, seed=1, top_logprobs=overlap_ids(loaded.vocab_size), **smollm2.sampling(args))
    rollouts = engine.generate(task.stream(0, MEASURED, 1000), sampling)
    engine.release()
    with torch.no_grad():
        found = mismatch(loaded, rollouts, 16384, sampling.temperature)
    return found | {"kv_saved": rounded(kv_saved_frac(rollouts))}


def arguments(cell: Cell, device: str, models: Path) -> Namespace:
    """As benchmarks/smollm2.py has them."""
    settings = cell.settings | {"data": Path(cell.settings["data"])}
    return Namespace(**settings, device=device, runs=models.parent / "smollm2")
