# SPDX-License-Identifier: Apache-2.0
"""Rollout throughput on a CPU: the engine's continuous batching against `generate` in fixed batches.

    python benchmarks/rollout.py

Both sample at temperature 1 from the same tiny Llama; ends are forced by length. `generate` pads each batch of `rows`
prompts and runs until its longest response is done; the engine refills a row as soon as it ends. Prints tokens per
second, only wanted tokens counted, and the ratio; writes a line of JSON with `--output`.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import statistics
import subprocess
import sys
import time

import torch
import transformers

from sparse_rl.kv import RKV, Full, KVPolicy
from sparse_rl.model.load import LoadedModel, load
from sparse_rl.model.tiny import tiny_model
from sparse_rl.rollout import Engine, EngineConfig, Sampling
from sparse_rl.types import Prompt

SEED = 0


def time_engine(
    loaded: LoadedModel, policy: KVPolicy, prompts: list[list[int]], lengths: list[int], rows: int
) -> tuple[float, float]:
    """Seconds, and the fraction of KV saved."""
    engine = Engine(loaded, policy, EngineConfig(rows=rows))
    began = time.perf_counter()
    rollouts = engine.generate(
        [Prompt(ids=tuple(p), max_tokens=n) for p, n in zip(prompts, lengths, strict=True)],
        Sampling(max_tokens=max(lengths), stop_ids=()),
    )
    seconds = time.perf_counter() - began
    assert [len(r.token_ids) for r in rollouts] == lengths
    held, full = sum(sum(r.kv.held) for r in rollouts), sum(r.kv.full for r in rollouts)
    return seconds, 1.0 - held / full


@torch.no_grad()
def time_generate(
    model: transformers.PreTrainedModel, prompts: list[list[int]], lengths: list[int], rows: int
) -> float:
    began = time.perf_counter()
    for start in range(0, len(prompts), rows):
        batch = prompts[start : start + rows]
        width = max(map(len, batch))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in batch])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in batch])
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max(lengths[start : start + rows]),
            do_sample=True,
            top_k=0,
            eos_token_id=None,
            pad_token_id=0,
        )
    return time.perf_counter() - began


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--longest", type=int, default=256, help="tokens of the longest response")
    parser.add_argument("--repeats", type=int, default=3, help="the median counts")
    parser.add_argument("--budget", type=int, default=64, help="of R-KV, with an interval of half of it")
    parser.add_argument("--output", help="JSON file for the results")
    args = parser.parse_args()

    loaded = load("tiny")
    baseline = tiny_model("llama", attn_implementation="sdpa")
    generator = torch.Generator().manual_seed(SEED)
    prompts = [
        torch.randint(0, 256, (int(n),), generator=generator).tolist()
        for n in torch.randint(16, 65, (args.prompts,), generator=generator)
    ]
    works = {
        "spread 4x": torch.randint(args.longest // 4, args.longest + 1, (args.prompts,), generator=generator).tolist(),
        "equal": [args.longest] * args.prompts,
    }
    policies = {"dense": Full(), "rkv": RKV(budget=args.budget, interval=args.budget // 2)}
    results = []
    for work, lengths in works.items():
        seconds: dict[str, list[float]] = {"generate": [], **{name: [] for name in policies}}
        saved = {"generate": 0.0}
        for _ in range(args.repeats):  # interleaved, so that a slow moment of the machine meets all of them
            seconds["generate"].append(time_generate(baseline, prompts, lengths, args.rows))
            for name, policy in policies.items():
                elapsed, saved[name] = time_engine(loaded, policy, prompts, lengths, args.rows)
                seconds[name].append(elapsed)
        median = {name: statistics.median(times) for name, times in seconds.items()}
        for name, elapsed in median.items():
            results.append(
                {
                    "work": work,
                    "engine": name,
                    "tokens_per_s": round(sum(lengths) / elapsed),
                    "ratio": round(median["generate"] / elapsed, 2),
                    "kv_saved": round(saved[name], 3),
                    "seconds": [round(s, 2) for s in seconds[name]],
                }
            )
    for row in results:
        print(
            f"{row['work']:10} {row['engine']:9} {row['tokens_per_s']:7,} tok/s  {row['ratio']:.2f}x generate  "
            f"KV saved {100 * row['kv_saved']:.0f} %"
        )
    if args.output:
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "commit": commit,
            "hardware": f"{cpu_name()}, {torch.get_num_threads()} threads",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "parameters": sum(p.numel() for p in baseline.parameters()),
            "settings": {**vars(args), "seed": SEED},
            "results": results,
        }
        with open(args.output, "w") as file:
            json.dump(record, file, indent=1)


if __name__ == "__main__":
    main()
