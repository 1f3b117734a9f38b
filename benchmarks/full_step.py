# SPDX-License-Identifier: Apache-2.0
"""One step of training on a published shape, rollout and update, with its memory held against the plan.

    python benchmarks/full_step.py --shape qwen2.5-7b --sequences 64 --response 16384 --activations offload \
        --output benchmarks/results/full_step_h200.json

Weights are random, nothing is downloaded, every completion has the full length, and rewards are drawn, so that all of
them have something to teach. `--dense` takes a dense cache; with `--pool` it asks for the memory of all rows at once,
as a run that may not preempt would. `--lora R` trains adapters.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import torch

from sparse_rl.bench.record import merge, provenance
from sparse_rl.bench.roofline import device_limits
from sparse_rl.kv import RKV, Full
from sparse_rl.model.lora import LoraConfig, add_adapters
from sparse_rl.model.shapes import random_model
from sparse_rl.objective.advantage import advantages
from sparse_rl.objective.correction import PRESETS
from sparse_rl.objective.loss import LossConfig
from sparse_rl.objective.mismatch import overlap_ids
from sparse_rl.plan import Run, choose_device, make_plan, model_size, summary
from sparse_rl.rollout import EngineConfig, Sampling
from sparse_rl.score.head import Head
from sparse_rl.train.guards import GuardedEngine, Guards
from sparse_rl.train.learner import Learner, OptimizerConfig
from sparse_rl.train.peaks import MemoryPeaks
from sparse_rl.train.update import UpdateConfig, update
from sparse_rl.types import Prompt

GROUP = 8


def main() -> None:
    args = parsed()
    device = torch.device(args.device)
    dtype = torch.bfloat16
    kv = Full() if args.dense else RKV(budget=args.budget, interval=args.interval)
    lora = LoraConfig(r=args.lora) if args.lora else None
    optimizer = OptimizerConfig(kind=args.optimizer, offload=args.offload)
    config = UpdateConfig(max_tokens=args.max_tokens, activations=args.activations, compile=device.type == "cuda")
    began = time.perf_counter()
    loaded = random_model(args.shape, device, dtype)
    size = model_size(loaded.model.config, args.shape, dtype)
    plan = make_plan(
        size,
        Run(
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
        ),
        choose_device(args.device),
    )
    print(f"plan: {summary(plan)}", flush=True)
    if lora is not None:
        add_adapters(loaded.model, lora, seed=0)
    masters = optimizer.masters(loaded.model)
    learner = Learner(Head(loaded.model), optimizer.build(masters), masters)
    for group in learner.optimizer.param_groups:  # moments exist from the first step on; here they are made before it
        for parameter in group["params"] if not args.offload else ():
            parameter.grad = torch.zeros_like(parameter)
            learner.optimizer.step()
            parameter.grad = None
    guards, peaks = Guards(), MemoryPeaks(device)
    pages = plan.pages_wanted if args.pool else None
    engine = GuardedEngine(loaded, kv, EngineConfig(rows=args.sequences, pool_pages=pages), guards, "rollout")
    guards.give_pool = engine.release
    prompts = [
        Prompt(ids=tuple(row))
        for row in torch.randint(0, loaded.vocab_size, (args.sequences // GROUP, args.prompt)).tolist()
    ]
    sampling = Sampling(
        n=GROUP, max_tokens=args.response, stop_ids=(), top_logprobs=overlap_ids(loaded.vocab_size), seed=1
    )
    print(f"ready after {time.perf_counter() - began:.0f} s", flush=True)

    began = time.perf_counter()
    with peaks("rollout"):
        rollouts = engine.generate(prompts, sampling)
    rollout_s = time.perf_counter() - began
    capture_s = engine.stats.capture_s if engine.stats else 0.0
    print(f"rollout {rollout_s:.1f} s, {capture_s:.1f} s of it capturing", flush=True)
    if not engine.bounded:
        engine.release()
    groups = [i // GROUP for i in range(len(rollouts))]
    rewards = torch.randn(len(rollouts), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    began = time.perf_counter()
    with peaks("update"):
        updated = update(
            learner,
            rollouts,
            advantages(rewards, torch.tensor(groups), "grpo", None),
            groups,
            PRESETS["none"]
            if args.dense
            else PRESETS["reweight_only"],  # random weights: a veto would reject nearly all
            LossConfig(),
            config,
            temperature=1.0,
            max_length=args.response,
            generator=torch.Generator().manual_seed(0),
            guards=guards,
        )
    update_s = time.perf_counter() - began
    tokens = sum(len(rollout.prompt.ids) + len(rollout.token_ids) for rollout in rollouts)
    planned = {
        "rollout": plan.held("rollout", driver=False),
        "update": plan.held(plan.learning, driver=False),
    }
    measured = {stage: int(peaks.bytes.get(f"memory/{stage}_peak_bytes", 0)) for stage in planned}
    record = {
        "label": label(args),
        "command": command(args),
        **provenance(device),
        "settings": {**{k: v for k, v in vars(args).items() if k != "output"}, "kv": {"policy": kv.name, **asdict(kv)}},
        "results": {
            "rollout_s": rollout_s,
            "capture_s": capture_s,
            "rollout_tokens_per_s": sum(len(r.token_ids) for r in rollouts) / (rollout_s - capture_s),
            "preemptions": engine.stats.num_preemptions if engine.stats else 0,
            "update_s": update_s,
            "update_tokens_per_s": tokens / update_s,
            "flops": device_limits(torch.cuda.get_device_name(), dtype)[1] if device.type == "cuda" else None,
            "grad_norm": updated.metrics["grad_norm"],
            "halved": guards.state(),
            "planned_bytes": planned,
            "measured_bytes": measured,
            "plan": summary(plan),
        },
    }
    for stage in planned:
        ratio = planned[stage] / measured[stage] if measured[stage] else float("nan")
        print(f"{stage}: planned {planned[stage] / 1e9:.1f} GB, measured {measured[stage] / 1e9:.1f} GB ({ratio:.3f})")
    print(f"update {update_s:.1f} s, {tokens / update_s:,.0f} tok/s, grad norm {record['results']['grad_norm']:.3g}")
    print(json.dumps(guards.state()))
    if args.output:
        merge(args.output, record)


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
