# SPDX-License-Identifier: Apache-2.0
"""One step of training on a published shape, rollout and update, with its memory held against the plan.

    python benchmarks/full_step.py --shape qwen2.5-7b --sequences 64 --response 16384 --activations offload \
        --output benchmarks/results/full_step_h200.json

Weights are random, nothing is downloaded, every completion has the full length, and rewards are drawn, so that all of
them have something to teach. An update on a few of them comes first and compiles the layers. `--dense` takes a dense
cache; with `--pool` it asks for the memory of all rows at once, as a run that may not preempt would. `--lora R` trains
adapters. `--drawn` learns from random tokens and takes no rollout.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
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
from sparse_rl.plan import Plan, RunSize, choose_device, make_plan, model_size, summary
from sparse_rl.rollout import EngineConfig, Sampling
from sparse_rl.rollout.memory import GuardedEngine, out_of_memory
from sparse_rl.runfolder import provenance
from sparse_rl.score.head import Head
from sparse_rl.score.score import score
from sparse_rl.train.guards import Guards
from sparse_rl.train.learner import Learner, OptimizerConfig
from sparse_rl.train.peaks import MemoryPeaks
from sparse_rl.train.update import UpdateConfig, update
from sparse_rl.types import KVStats, Prompt, Rollout

GROUP = 8


def main() -> None:
    args = parsed()
    device, kv = torch.device(args.device), Full() if args.dense else RKV(budget=args.budget, interval=args.interval)
    loaded = random_model(args.shape, device, torch.bfloat16)
    plan = planned(args, loaded, kv)
    print(f"plan: {summary(plan)}", flush=True)
    guards, record = Guards(), Record(args, plan, MemoryPeaks(device))
    learner = make_learner(args, loaded)
    if args.drawn:
        rollouts = draw(args, loaded)
    else:
        pages = plan.pages_wanted if args.pool else None
        engine = GuardedEngine(loaded, kv, EngineConfig(rows=args.sequences, pool_pages=pages), guards, "rollout")
        guards.give_pool = engine.release
        try:
            rollouts = timed_rollout(args, engine, record)
        except (ValueError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            record.fail(str(error))
            sys.exit(f"failed: {error}")
        if not engine.bounded:
            engine.release()
    preset = "none" if args.dense else "reweight_only"  # random weights: a veto would reject nearly all
    for stage, part in (("first_update", rollouts[:GROUP]), ("update", rollouts)):  # the first compiles
        began = time.perf_counter()
        with record.peaks(stage):
            grad_norm = learn(args, learner, part, guards, preset)
        seconds = time.perf_counter() - began
        rate = sum(len(rollout.prompt.ids) + len(rollout.token_ids) for rollout in part) / seconds
        found = {f"{stage}_s": seconds, f"{stage}_tokens_per_s": rate, "grad_norm": grad_norm}
        record.add(stage, plan.learning, found | {"halved": guards.state()})


class Record:
    """What is measured, said and written as soon as it is known: a run that is cut keeps what it has."""

    def __init__(self, args: argparse.Namespace, plan: Plan, peaks: MemoryPeaks) -> None:
        self.args, self.plan, self.peaks = args, plan, peaks
        self.results: dict[str, Any] = {"plan": summary(plan), "planned_bytes": {}, "measured_bytes": {}}

    def add(self, stage: str, planned_stage: str, found: dict[str, Any]) -> None:
        """The figures of a stage, and its memory beside what the plan expects of `planned_stage`."""
        expected = self.plan.held(planned_stage, driver=False)
        most = int(self.peaks.bytes.get(f"memory/{stage}_peak_bytes", 0))
        self.results |= found
        self.results["planned_bytes"][stage], self.results["measured_bytes"][stage] = expected, most
        ratio = f" ({expected / most:.3f} of it planned)" if most else ""
        figures = ", ".join(f"{name} {value:,.4g}" for name, value in found.items() if isinstance(value, int | float))
        print(f"{stage}: {figures}; planned {expected / 1e9:.1f} GB, measured {most / 1e9:.1f} GB{ratio}", flush=True)
        self._write(whole=stage == "update")  # what is not, scripts/bench.py runs again

    def fail(self, why: str) -> None:
        """That it ended so is its result."""
        self.results["failed"] = why
        self._write(whole=True)

    def _write(self, *, whole: bool) -> None:
        if self.args.output:
            about = {"label": label(self.args), "command": command(self.args), **provenance(self.peaks.device)}
            settings = {name: value for name, value in vars(self.args).items() if name != "output"}
            state = {} if whole else {"unfinished": True}
            merge(self.args.output, {**about, **state, "settings": settings, "results": self.results})


def planned(args: argparse.Namespace, loaded: LoadedModel, kv: KVPolicy) -> Plan:
    size = model_size(loaded.model.config, args.shape, torch.bfloat16)
    run = RunSize(
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


def timed_rollout(args: argparse.Namespace, engine: GuardedEngine, record: Record) -> list[Rollout]:
    began = time.perf_counter()
    with record.peaks("rollout"):
        rollouts = roll_out(args, engine)
    seconds, stats = time.perf_counter() - began, engine.stats
    assert stats is not None
    rate = sum(len(rollout.token_ids) for rollout in rollouts) / (seconds - stats.capture_s)
    found = {"rollout_s": seconds, "capture_s": stats.capture_s, "rollout_tokens_per_s": rate}
    record.add("rollout", "rollout", found | {"preemptions": stats.num_preemptions})
    return rollouts


def draw(args: argparse.Namespace, loaded: LoadedModel) -> list[Rollout]:
    """Random tokens in the place of a rollout, with log-probs close to the model's own."""
    vocabulary, shape = loaded.vocab_size, (args.response, overlap_ids(loaded.vocab_size))
    unknown = KVStats(held=(), full=0, hybrid=0.0, peak=0, peak_bytes=0, num_compressions=0)
    rollouts = [
        Rollout(
            prompt=Prompt(ids=tuple(torch.randint(0, vocabulary, (args.prompt,)).tolist())),
            sample=i % GROUP,
            token_ids=torch.randint(0, vocabulary, (args.response,)),
            sampler_logprobs=torch.zeros(args.response),
            completion_mask=torch.ones(args.response, dtype=torch.bool),
            finish_reason="length",
            kv=unknown,
            top_ids=torch.randint(0, vocabulary, shape),
            top_logprobs=torch.zeros(shape),
        )
        for i in range(args.sequences)
    ]
    scores = score(loaded.model, rollouts, max_tokens=args.max_tokens)
    noise = 0.02 * torch.randn(args.sequences, args.response)
    return [
        replace(rollout, sampler_logprobs=found.dense_logprobs + off, top_logprobs=found.at_top_ids)
        for rollout, found, off in zip(rollouts, scores, noise, strict=True)
    ]


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
    parser.add_argument("--drawn", action="store_true", help="no rollout: learn from random tokens")
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def label(args: argparse.Namespace) -> str:
    cache = "dense" if args.dense else f"rkv {args.budget}+{args.interval}"
    parts = [args.shape, cache, f"{args.sequences} x {args.prompt}+{args.response}", args.activations, args.optimizer]
    options = [(args.pool, "pool"), (args.offload, "offload"), (args.lora, f"lora {args.lora}"), (args.drawn, "drawn")]
    return ", ".join(parts + [name for given, name in options if given])


def command(args: argparse.Namespace) -> str:
    flags = []
    for name, value in vars(args).items():
        flag = f"--{name.replace('_', '-')}"
        flags += [flag] if value is True else [] if value in (False, None) else [flag, str(value)]
    return " ".join(["python benchmarks/full_step.py", *flags])


if __name__ == "__main__":
    main()
