# SPDX-License-Identifier: Apache-2.0
"""Every KV policy beside the others: what it costs, and what it leaves of a real model.

    python benchmarks/policies.py speed --device cuda       # tok/s and KV bytes, Qwen2.5-1.5B's shape, outputs of 4,096
    python benchmarks/policies.py quality --device cuda     # SmolLM2: overlap with the dense model, look-up accuracy

speed     256 rows; a window of steps at full caches, as `sparse-rl bench rollout --max-steps` takes it; of policies
          that evict nothing the last three quarters of 1,024 steps, where contexts are still short
quality   overlap on answers to GSM8K problems that the cache itself sampled (temperature 1, at most 256 tokens), a
          lower bound from the sampler's top 20 ids; greedy look-up among 15 pairs; contexts are about 200 tokens

Settings that were measured at this commit are not measured again, so a run may be cut anywhere. Results go to
benchmarks/results/policies_{speed,quality}.json, the plot beside them.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sparse_rl.bench import BenchConfig, measure
from sparse_rl.bench.record import merge, read
from sparse_rl.bench.work import steps_to_fill
from sparse_rl.kv import POLICIES, EvictPolicy, KVPolicy, build_policy, policy_record
from sparse_rl.model.load import LoadedModel, load
from sparse_rl.model.shapes import random_model
from sparse_rl.objective.mismatch import overlap_bounds, overlap_ids
from sparse_rl.report.plots import plot_style
from sparse_rl.rollout import Engine, EngineConfig, Sampling
from sparse_rl.runfolder import provenance
from sparse_rl.score import score
from sparse_rl.tasks import Lookup
from sparse_rl.tasks.benchmarks import read_problems
from sparse_rl.tasks.prompts import as_turn, make_prompt
from sparse_rl.types import Prompt, Rollout, kv_saved_frac

BUDGETS = {"speed": (256, 512, 1024), "quality": (64, 96, 128)}
INTERVAL = {"speed": 128, "quality": 16}
QUANTILES = {"overlap_p05": 0.05, "overlap_p01": 0.01}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(BUDGETS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--budgets", nargs="+", type=int)
    parser.add_argument("--shape", default="qwen2.5-1.5b", help="of speed")
    parser.add_argument("--rows", type=int, default=256, help="of speed")
    parser.add_argument("--output-tokens", type=int, default=4096, help="of speed")
    parser.add_argument("--cuts", type=int, default=3, help="of speed: compressions of full caches that are timed")
    parser.add_argument("--max-steps", type=int, default=1024, help="of speed: where a run without compressions ends")
    parser.add_argument("--problems", type=int, default=256, help="of quality, of each kind")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin nothing after so long")
    parser.add_argument("--result", type=Path)
    args = parser.parse_args()
    path = args.result or Path(f"benchmarks/results/policies_{args.what}.json")
    began, made = time.monotonic(), provenance(torch.device(args.device))
    done = [(record["label"], record["commit"], record["settings"]) for record in read(path)]
    chooses = ("policies", "budgets", "minutes", "result")  # what is measured and where it goes, not how
    shared = {name: value for name, value in vars(args).items() if name not in chooses}
    loaded: LoadedModel | None = None  # once there is something to do
    for policy in chosen(args):
        label = " ".join([policy.name, *([str(policy.budget)] if hasattr(policy, "budget") else [])])
        settings = {**shared, "kv": policy_record(policy)}
        if (label, made["commit"], settings) in done:
            continue
        if time.monotonic() - began > 60 * args.minutes:
            break
        if loaded is None:
            loaded = random_model(args.shape, args.device, dtype_of(args)) if args.what == "speed" else smollm2(args)
        results = speed(args, policy, loaded) if args.what == "speed" else quality(args, policy, loaded)
        record = {
            "label": label,
            "command": " ".join(["python benchmarks/policies.py", *sys.argv[1:]]),
            **made,
            "settings": settings,
            "results": results,
        }
        merge(path, record)
        print(f"[{time.monotonic() - began:.0f} s] {label}: {results}", flush=True)
    records = read(path)
    print(speed_table(records) if args.what == "speed" else quality_table(records))
    if args.what == "quality":
        plot(records, path.with_suffix(".png"))


def chosen(args: argparse.Namespace) -> list[KVPolicy]:
    """Each policy at each budget, those with one setting once."""
    found = []
    for name in args.policies:
        if name == "full":
            found.append(build_policy(name))
            continue
        interval = {"interval": INTERVAL[args.what]} if issubclass(POLICIES[name], EvictPolicy) else {}
        found += [build_policy(name, budget=budget, **interval) for budget in args.budgets or BUDGETS[args.what]]
    return found


def dtype_of(args: argparse.Namespace) -> torch.dtype:
    return torch.float32 if args.device == "cpu" else torch.bfloat16


def smollm2(args: argparse.Namespace) -> LoadedModel:
    return load("smollm2", dtype=dtype_of(args), device=args.device)


def speed(args: argparse.Namespace, policy: KVPolicy, loaded: LoadedModel) -> dict[str, Any]:
    config = BenchConfig(
        shape=args.shape,
        device=args.device,
        rows=args.rows,
        output=args.output_tokens,
        profile=False,
    )
    evicts = isinstance(policy, EvictPolicy)
    last = steps_to_fill(policy, config.prompt) + args.cuts * policy.interval if evicts else args.max_steps
    config = replace(config, max_steps=last)
    quiet = {"say": lambda text: None, "show": lambda progress: None}
    found = measure(config, policy, EngineConfig(), dtype_of(args), **quiet, loaded=loaded)
    return {
        "tokens_per_s": found["tokens_per_s"],
        "step_ms": found["step_ms"],
        "kv_peak_bytes": found["kv"]["peak_bytes"],
        "kv_dense_bytes": found["kv"]["dense_bytes"],
        "capture_s": found["capture_s"],
    }


@torch.no_grad()
def quality(args: argparse.Namespace, policy: KVPolicy, loaded: LoadedModel) -> dict[str, Any]:
    tokenizer, config = loaded.tokenizer, EngineConfig(rows=args.problems, graphs=False)
    problems = read_problems("gsm8k")[0][: args.problems]
    prompts = [
        replace(
            make_prompt({"prompt": as_turn(problem["problem"], tokenizer)}, problem["id"], tokenizer), max_tokens=256
        )
        for problem in problems
    ]
    rollouts = sampled(loaded, policy, config, prompts, Sampling(top_logprobs=overlap_ids(loaded.vocab_size), seed=1))
    dense = score(loaded.model, rollouts)
    overlap = torch.cat(
        [overlap_bounds(r.top_logprobs, d.at_top_ids)[0] for r, d in zip(rollouts, dense, strict=True)]
    ).double()
    log_xi = torch.cat([d.dense_logprobs - r.sampler_logprobs for d, r in zip(dense, rollouts, strict=True)])
    task = Lookup(pairs=15).build(tokenizer)
    answers = sampled(loaded, policy, config, task.held_out(args.problems), Sampling(temperature=0.0, max_tokens=24))
    right = task.rewards.grade(answers, tokenizer).rewards.double()
    return {
        "overlap_mean": float(overlap.mean()),
        **{name: float(overlap.quantile(at)) for name, at in QUANTILES.items()},
        "kl": float(-log_xi.double().mean()),
        "tokens": len(overlap),
        "kv_saved": kv_saved_frac(rollouts),
        "kv_read": sum(r.kv.num_read for r in rollouts) / sum(r.kv.full for r in rollouts),
        "lookup": float(right.mean()),
        "lookup_se": float(right.std() / len(right) ** 0.5),
    }


def sampled(
    loaded: LoadedModel, policy: KVPolicy, config: EngineConfig, prompts: list[Prompt], sampling: Sampling
) -> list[Rollout]:
    engine = Engine(loaded, policy, config)
    rollouts = engine.generate(prompts, sampling)
    engine.release()
    return rollouts


def speed_table(records: list[dict[str, Any]]) -> str:
    """With each policy's speed beside that of `streaming` at its budget."""
    by_label = {record["label"]: record["results"] for record in records}
    lines = ["policy             tok/s   ms a step  of streaming  KV at the peak"]
    for label, found in by_label.items():
        rival = by_label.get(f"streaming {label.rpartition(' ')[2]}")
        share = f"{found['tokens_per_s'] / rival['tokens_per_s']:.2f}" if rival else ""
        lines.append(
            f"{label:16} {found['tokens_per_s']:8,.0f}  {found['step_ms']:9.2f}  {share:>12}  "
            f"{found['kv_peak_bytes'] / 1e9:11.1f} GB"
        )
    return "\n".join(lines)


def quality_table(records: list[dict[str, Any]]) -> str:
    lines = ["policy            overlap    P05    P01      KL  KV saved  KV read  look-up"]
    for record in records:
        found = record["results"]
        lines.append(
            f"{record['label']:16}   {found['overlap_mean']:.3f}  {found['overlap_p05']:.3f}  "
            f"{found['overlap_p01']:.3f}  {found['kl']:.4f}  {found['kv_saved']:8.2f}  {found['kv_read']:7.2f}  "
            f"{found['lookup']:.3f} ± {found['lookup_se']:.3f}"
        )
    return "\n".join(lines)


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """Tail of the overlap and look-up accuracy by budget, a line a policy."""
    from matplotlib.figure import Figure

    lines: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for record in records:
        name, _, budget = record["label"].partition(" ")
        if budget:
            lines.setdefault(name, []).append((int(budget), record["results"]))
    dense = next((record["results"] for record in records if record["label"] == "full"), None)
    with plot_style():
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        panels = {"overlap_p05": "overlap with the dense model, P05", "lookup": "look-up accuracy, greedy"}
        for place, (key, title) in enumerate(panels.items()):
            axes = figure.add_subplot(1, 2, place + 1, title=title, xlabel="budget")
            for number, (name, found) in enumerate(lines.items()):
                budgets, values = zip(*sorted((budget, each[key]) for budget, each in found), strict=True)
                style = {"color": f"C{number % 10}", "linestyle": "-" if number < 6 else "--"}
                axes.plot(budgets, values, marker="o", label=name, **style)
            if dense is not None:
                axes.axhline(dense[key], color="black", linewidth=1, linestyle=":", label="full")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False)
        figure.savefig(path, dpi=150, metadata={"Software": None})


if __name__ == "__main__":
    main()
