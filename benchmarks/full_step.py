# SPDX-License-Identifier: Apache-2.0
"""One step of training on a published shape, rollout and update, with its memory held against the plan.

    python benchmarks/full_step.py --shape qwen2.5-7b --sequences 64 --response 16384 --activations offload \
        --output benchmarks/results/full_step_h200.json

Weights are random, nothing is downloaded, every completion has the full length, and rewards are drawn, so that all of
them have something to teach. An update on a few of them comes first and compiles the layers. `--dense` takes a dense
cache; with `--pool` it asks for the memory of all rows at once, as a run that may not preempt would. `--lora R` trains
adapters.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch

from sparse_rl.bench.record import merge
from sparse_rl.kv import RKV, Full, KVPolicy
from sparse_rl.model.load import LoadedModel
from sparse_rl.model.lora import LoraConfig, add_adapters
from sparse_rl.model.shapes import random_model
from sparse_rl.objective.advantage import advantages
from sparse_rl.objective.correction import PRESETS
from sparse_rl.objective.loss import LossConfig
from sparse_rl.objective.mismatch import overlap_ids
from sparse_rl.plan import Plan, Run, choose_device, make_plan, model_size, summary
from sparse_rl.rollout import EngineConfig, Sampling
from sparse_rl.rollout.memory import GuardedEngine
from sparse_rl.runfolder import provenance
from sparse_rl.score.head import Head
from sparse_rl.train.guards import Guards
from sparse_rl.train.learner import Learner, OptimizerConfig
from sparse_rl.train.peaks import MemoryPeaks
from sparse_rl.train.update import UpdateConfig, update
from sparse_rl.types import Prompt, Rollout

GROUP = 8


def main() -> None:
    args = parsed()
    device, kv = torch.device(args.device), Full() if args.dense else RKV(budget=args.budget, interval=args.interval)
    loaded = random_model(args.shape, device, torch.bfloat16)
    plan = planned(args, loaded, kv)
    print(f"plan: {summary(plan)}", flush=True)
    guards, peaks = Guards(), MemoryPeaks(device)
    learner = make_learner(args, loaded)
    pages = plan.pages_wanted if args.pool else None
    engine = GuardedEngine(loaded, kv, EngineConfig(rows=args.sequences, pool_pages=pages), guards, "rollout")
    guards.give_pool = engine.release
    began = time.perf_counter()
    with peaks("rollout"):
        rollouts = roll_out(args, engine)
    rollout_s = time.perf_counter() - began
    assert engine.stats is not None
    print(f"rollout {rollout_s:.1f} s, {engine.stats.capture_s:.1f} s of it capturing", flush=True)
    if not engine.bounded:
        engine.release()
    began = time.perf_counter()
    preset = "none" if args.dense else "reweight_only"  # random weights: a veto would reject nearly all
    learn(args, learner, rollouts[:GROUP], guards, preset)  # compiles
    first_s = time.perf_counter() - began
    began = time.perf_counter()
    with peaks("update"):
        grad_norm = learn(args, learner, rollouts, guards, preset)
    update_s = time.perf_counter() - began
    tokens = sum(len(rollout.prompt.ids) + len(rollout.token_ids) for rollout in rollouts)
    stages = {"rollout": "rollout", "update": plan.learning}
    results: dict[str, Any] = {
        "rollout_s": rollout_s,
        "capture_s": engine.stats.capture_s,
        "rollout_tokens_per_s": sum(len(r.token_ids) for r in rollouts) / (rollout_s - engine.stats.capture_s),
        "preemptions": engine.stats.num_preemptions,
        "first_update_s": first_s,
        "update_s": update_s,
        "update_tokens_per_s": tokens / update_s,
        "grad_norm": grad_norm,
        "halved": guards.state(),
        "plan": summary(plan),
        "planned_bytes": {name: plan.held(stage, driver=False) for name, stage in stages.items()},
        "measured_bytes": {name: int(peaks.bytes.get(f"memory/{name}_peak_bytes", 0)) for name in stages},
    }
    for name, most in results["measured_bytes"].items():
        expected = results["planned_bytes"][name]
        ratio = f" ({expected / most:.3f} of it planned)" if most else ""
        print(f"{name}: planned {expected / 1e9:.1f} GB, measured {most / 1e9:.1f} GB{ratio}")
    print(
        f"update {update_s:.1f} s, {tokens / update_s:,.0f} tok/s, grad norm {grad_norm:.3g}, halved {guards.state()}; "
        f"{first_s:.1f} s for {GROUP} of the {len(rollouts)} before, which compiles"
    )
    if args.output:
        settings = {k: v for k, v in vars(args).items() if k != "output"}
        merge(
            args.output,
            {
                "label": label(args),
                "command": command(args),
                **provenance(device),
                "settings": settings,
                "results": results,
            },
        )


def planned(args: argparse.Namespace, loaded: LoadedModel, kv: KVPolicy) -> Plan:
    size = model_size(loaded.model.config, args.shape, torch.bfloat16)
    run = Run(
        kv=kv,
        rows=args.sequences,
        requests=args.sequences,
        prompt=args.prompt,
        completion=args.response,
        max_tokens=args.max_tokens,
        top_logprobs=overlap_ids(loaded.vocab_size),
        activations=args.activations,
        moments="8bit" if args.optimizer == "adamw_8bit" else "fp32",
        on_host=args.offload,
        lora=size.adapters(args.lora) if args.lora else 0,
    )
    return make_plan(size, run, choose_device(args.device))


def make_learner(args: argparse.Namespace, loaded: LoadedModel) -> Learner:
    """The learner as it is from the second step on: with the optimiser's moments, if they are on the GPU."""
    if args.lora:
        add_adapters(loaded.model, LoraConfig(r=args.lora), seed=0)
    optimizer = OptimizerConfig(kind=args.optimizer, offload=args.offload)
    masters = optimizer.masters(loaded.model)
    learner = Learner(Head(loaded.model), optimizer.build(masters), masters)
    for master in masters.masters if not args.offload else ():  # one by one: all gradients at once would not fit
        master.grad = torch.zeros_like(master)
        learner.optimizer.step()
        master.grad = None
    return learner


def roll_out(args: argparse.Namespace, engine: GuardedEngine) -> list[Rollout]:
    vocabulary = engine.loaded.vocab_size
    ids = torch.randint(0, vocabulary, (args.sequences // GROUP, args.prompt)).tolist()
    sampling = Sampling(n=GROUP, max_tokens=args.response, stop_ids=(), top_logprobs=overlap_ids(vocabulary), seed=1)
    return engine.generate([Prompt(ids=tuple(row)) for row in ids], sampling)


def learn(args: argparse.Namespace, learner: Learner, rollouts: list[Rollout], guards: Guards, preset: str) -> float:
    """One update with drawn rewards; the norm of its gradient."""
    groups = [i // GROUP for i in range(len(rollouts))]
    rewards = torch.randn(len(rollouts), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    updated = update(
        learner,
        rollouts,
        advantages(rewards, torch.tensor(groups), "grpo", None),
        groups,
        PRESETS[preset],
        LossConfig(),
        UpdateConfig(max_tokens=args.max_tokens, activations=args.activations),
        temperature=1.0,
        max_length=args.response,
        generator=torch.Generator().manual_seed(0),
        guards=guards,
    )
    return updated.metrics["grad_norm"]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen2.5-7b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sequences", type=int, default=64, help=f"completions of a step, {GROUP} a prompt")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--response", type=int, default=16384)
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--pool", action="store_true", help="memory for all rows at their longest, or nothing")
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--interval", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=16512)
    parser.add_argument("--activations", default="recompute", choices=["keep", "recompute", "offload"])
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "adamw_8bit"])
    parser.add_argument("--offload", action="store_true", help="masters and moments in host memory")
    parser.add_argument("--lora", type=int, default=0)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def label(args: argparse.Namespace) -> str:
    cache = "dense" if args.dense else f"rkv {args.budget}+{args.interval}"
    parts = [args.shape, cache, f"{args.sequences} x {args.prompt}+{args.response}", args.activations, args.optimizer]
    return ", ".join([*parts, *(["offload"] if args.offload else []), *([f"lora {args.lora}"] if args.lora else [])])


def command(args: argparse.Namespace) -> str:
    flags = []
    for name, value in vars(args).items():
        flag = f"--{name.replace('_', '-')}"
        flags += [flag] if value is True else [] if value in (False, None) else [flag, str(value)]
    return " ".join(["python benchmarks/full_step.py", *flags])


if __name__ == "__main__":
    main()
