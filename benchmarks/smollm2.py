# SPDX-License-Identifier: Apache-2.0
"""A real model on a cache that forgets: SmolLM2-135M-Instruct with dense rollouts, naive sparse ones, and `sparse_rl`.

    python scripts/word_problems.py DATA data/words --warm-only gsm8k      # for --task words
    python benchmarks/smollm2.py --task lookup --device cuda
    python benchmarks/smollm2.py --task words --data data/words --lr 4e-5 --device cuda

lookup   ten keys and values, one is asked for: the reward hangs on the cache; from the instruct model, or with --warm
         from the warm start of word problems
words    word problems, held-out ones for evaluation; from a supervised warm start, which is made first

The KV budget is found by a sweep before anything is trained: the smallest that earns at least REWARD of what the dense
cache earns, with at most REJECTION of the rollouts having a token that the dense model would hardly write (xi < 1e-4).
Arms run side by side, a process each, and are evaluated on the same held-out prompts with the dense and with the sparse
cache; so is the model before, and what an arm gains is the mean over prompts of what each gained. What has been done is
not done again: the folder --runs keeps it. Results go to benchmarks/results/smollm2_TASK.json,
the report's plots of both caches beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import mean, stdev
from typing import Any

ARMS = {  # KV policy of the rollouts, correction preset
    "dense": ("full", "none"),
    "naive": ("rkv", "none"),
    "sparse_rl": ("rkv", "sparse_rl"),
}
BUDGETS = {"lookup": (48, 64, 80, 96, 112, 128), "words": (32, 48, 64, 80, 96, 128)}
REWARD, REJECTION = 0.5, 0.3
INTERVAL = 16
CACHES = ("dense", "sparse")
SWEEP_N = 4  # completions of a prompt
BEFORE, FINAL_N = "before", 4  # the model that arms begin with, evaluated as they are: completions of a held-out prompt
CURVES = {
    "reward": "reward",
    "rejection": "correction/rejection_rate",
    "catastrophic": "mismatch/catastrophic_rollout_frac",
    "kl": "rollout_corr/kl",
    "overlap_p05": "mismatch/overlap_top20_p05",
    "grad_norm": "grad_norm",
    "length": "completions/mean_length",
    "kv_saved": "kv/saved_frac",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(BUDGETS), required=True)
    parser.add_argument("--warm", action="store_true", help="begin with the warm start, as words always does")
    parser.add_argument("--data", type=Path, help="folder with train.jsonl, held_out.jsonl and warm.jsonl, for words")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--prompts", type=int, default=64, help="a step, 8 completions each")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--epochs", type=float, default=4.0, help="of the warm start")
    parser.add_argument("--problems", type=int, default=512, help="held out, for evaluation")
    parser.add_argument("--sweep", type=int, default=64, help=f"prompts of the sweep, {SWEEP_N} completions each")
    parser.add_argument("--budget", type=int, help="instead of the sweep's choice")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("--results", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--worker", nargs=2, metavar=("WORK", "BUDGET"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.warm |= args.task == "words"
    if args.warm and args.data is None:
        parser.error("word problems and their warm start need --data; scripts/word_problems.py makes it.")
    if args.worker:
        work, budget = args.worker
        sweep(args) if work == "sweep" else evaluate_arm(args, work, int(budget))
        return

    began, folder = time.time(), args.runs / args.task
    folder.mkdir(parents=True, exist_ok=True)
    if args.warm:
        warm_up(args)
    call(args, "sweep", worker("sweep", 0), done=folder / "sweep.json")
    rows = json.loads((folder / "sweep.json").read_text())
    print(sweep_table(rows), flush=True)
    least = REWARD * rows[0]["reward"]
    fitting = [row["budget"] for row in rows[1:] if row["reward"] >= least and row["rejection"] <= REJECTION]
    budget = args.budget or min(fitting, default=max(BUDGETS[args.task]))
    print(f"budget {budget} ({time.time() - began:.0f} s)", flush=True)
    together(
        [(arm, train_command(args, arm, budget), folder / arm / f"checkpoint-{args.steps}") for arm in args.arms], args
    )
    print(f"trained ({time.time() - began:.0f} s)", flush=True)
    evaluated = [BEFORE, *args.arms]
    together([(f"{arm} end", worker(arm, budget), folder / arm / "final.json") for arm in evaluated], args)
    before, *_ = finals = [json.loads((folder / arm / "final.json").read_text()) for arm in evaluated]
    results = [result(folder / arm, before, final) for arm, final in zip(args.arms, finals[1:], strict=True)]
    args.results.mkdir(parents=True, exist_ok=True)
    name = f"smollm2_{args.task}"
    settings = {
        k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items() if k not in ("worker", "results")
    }
    record = {
        "command": " ".join(["python", *sys.argv]),
        **before["provenance"],
        "settings": settings | sampling(args) | {"budget": budget, "interval": INTERVAL},
        "seconds": round(time.time() - began),  # of this start; what was there before is not in it
        "sweep": rows,
        "before": {cache: numbers(before[cache]) for cache in CACHES},
        "runs": results,
    }
    (args.results / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    plots = ["--output", str(folder / "report.html"), "--png", str(folder / "plots")]
    subprocess.run(
        [sys.executable, "-m", "sparse_rl", "report", *(str(folder / arm) for arm in args.arms), *plots], check=True
    )
    (args.results / name).mkdir(exist_ok=True)
    for cache in CACHES:
        shutil.copy(folder / "plots" / f"{cache}.png", args.results / name)
    print(table(record))
    print(f"{time.time() - began:.0f} s")


def warm_up(args: argparse.Namespace) -> None:
    """Teach the model to write short worked answers, once."""
    target = args.runs / "warm"
    command = [sys.executable, "-m", "sparse_rl", "sft", "--config", "smollm2-warm.yaml"]
    command += ["--data.train_file", str(args.data / "warm.jsonl"), "--trainer.output_dir", str(target)]
    command += ["--trainer.epochs", str(args.epochs), "--device", args.device]
    if args.device == "cpu":
        command += ["--dtype", "float32"]
    call(args, "warm start", command, done=target / "done", log=args.runs / "warm.log")
    (target / "done").touch()


def start_model(args: argparse.Namespace) -> str:
    if not args.warm:
        return "smollm2"
    from sparse_rl.train.checkpoint import checkpoints

    return str(checkpoints(args.runs / "warm")[-1])


def dtype(args: argparse.Namespace) -> str:
    return "float32" if args.device == "cpu" else "bfloat16"


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    return {"max_tokens": 24 if args.task == "lookup" else 256, "temperature": 0.7}


def task_flags(args: argparse.Namespace) -> list[str]:
    if args.task == "lookup":
        return ["--task.name", "lookup", "--task.pairs", "10"]
    return [word for name, value in word_problems(args).items() for word in (f"--task.{name}", value)]


def word_problems(args: argparse.Namespace) -> dict[str, str]:
    files = {"train_file": "train.jsonl", "eval_file": "held_out.jsonl"}
    return {key: str(args.data / file) for key, file in files.items()} | {"rewards": "last_number"}


def train_command(args: argparse.Namespace, arm: str, budget: int) -> list[str]:
    policy, preset = ARMS[arm]
    target = args.runs / args.task / arm
    flags = {
        "model": start_model(args),
        "device": args.device,
        "dtype": dtype(args),
        "correction.preset": preset,
        "kv.policy": policy,
        "sampling.n": 8,
        "sampling.max_tokens": sampling(args)["max_tokens"],
        "sampling.temperature": sampling(args)["temperature"],
        "optimizer.learning_rate": args.lr,
        "optimizer.warmup": 5,
        "update.max_tokens": 32768,
        "eval.every": max(1, args.steps // 3),
        "eval.prompts": args.problems,
        "eval.temperature": sampling(args)["temperature"],
        "engine.rows": 512,
        "trainer.output_dir": target,
        "trainer.steps": args.steps,
        "trainer.prompts_per_step": args.prompts,
        "trainer.seed": args.seed,
        "trainer.save_every": 0,
        "trainer.save_total_limit": 1,
        "trainer.resume_from_checkpoint": str((target / "run.json").exists()).lower(),
    }
    if policy != "full":
        flags |= {"kv.budget": budget, "kv.interval": INTERVAL}
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "sparse_rl", "train", *words, *task_flags(args)]


def worker(work: str, budget: int) -> list[str]:
    return [sys.executable, *sys.argv, "--worker", work, str(budget)]


def call(args: argparse.Namespace, name: str, command: list[str], *, done: Path, log: Path | None = None) -> None:
    """Run a command unless what it makes is there."""
    together([(name, command, done)], args, log)


def together(jobs: list[tuple[str, list[str], Path]], args: argparse.Namespace, log: Path | None = None) -> None:
    """Run commands side by side, each unless what it makes is there; their words go to files."""
    running = []
    for name, command, done in jobs:
        if done.exists():
            continue
        path = log or args.runs / args.task / f"{name.replace(' ', '_')}.log"
        file = open(path, "w")  # noqa: SIM115 - closed with the process
        environment = os.environ | {"OMP_NUM_THREADS": "2"}
        running.append((name, path, subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)))
    failed = [(name, path, process.returncode) for name, path, process in running if process.wait()]
    for name, path, status in failed:  # -9: killed from outside, mostly for lack of memory
        print(f"{name} failed (exit {status}); the end of {path}:\n{path.read_text()[-1500:]}", file=sys.stderr)
    if failed:
        sys.exit(1)


def built(args: argparse.Namespace, model: str) -> tuple[Any, Any]:
    """The model and the task."""
    from sparse_rl.cli.parsing import model_dtype
    from sparse_rl.model.load import load
    from sparse_rl.tasks import Lookup, RowsConfig

    loaded = load(model, dtype=model_dtype(dtype(args)), device=args.device)
    if args.task == "lookup":
        return loaded, Lookup(pairs=10).build(loaded.tokenizer)
    settings = word_problems(args)
    rows = RowsConfig(**(settings | {"rewards": (settings["rewards"],)}))
    return loaded, rows.build(loaded.tokenizer, context=loaded.context)


def sweep(args: argparse.Namespace) -> None:
    """Reward, KV saved and would-be rejection of the model as it is, by budget; 0 is the dense cache."""
    import torch

    from sparse_rl.kv import RKV, Full
    from sparse_rl.objective.correction import PRESETS, correct
    from sparse_rl.rollout import Engine, EngineConfig, Sampling
    from sparse_rl.score import score
    from sparse_rl.types import kv_saved_frac

    loaded, task = built(args, start_model(args))
    prompts = task.stream(0, args.sweep, args.seed)
    settings = Sampling(n=SWEEP_N, seed=1, **sampling(args))
    rows = []
    for budget in (0, *BUDGETS[args.task]):
        policy = RKV(budget=budget, interval=INTERVAL) if budget else Full()
        engine = Engine(loaded, policy, EngineConfig(rows=args.sweep * SWEEP_N, graphs=False))
        rollouts = engine.generate(prompts, settings)
        engine.release()
        rewards = task.rewards.grade(rollouts, loaded.tokenizer).rewards.view(args.sweep, SWEEP_N)
        dense = score(loaded.model, rollouts, temperature=settings.temperature)
        log_xi = torch.cat([d.dense_logprobs - r.sampler_logprobs for d, r in zip(dense, rollouts, strict=True)])
        lengths = torch.tensor([len(r.token_ids) for r in rollouts])
        of = torch.arange(len(rollouts)).repeat_interleave(lengths)
        accepted = correct(
            log_xi, torch.ones_like(of, dtype=torch.bool), of, len(rollouts), PRESETS["sparse_rl"]
        ).accepted
        spread = rewards.std(dim=1)
        rows.append(
            {
                "budget": budget,
                "reward": float(rewards.mean()),
                "reward_se": float(rewards.mean(dim=1).std() / args.sweep**0.5),
                "mixed": float((spread > 0).double().mean()),
                "rejection": float((~accepted).double().mean()),
                "kl": float(-log_xi.mean()),
                "kv_saved": kv_saved_frac(rollouts),
                "length": float(lengths.double().mean()),
            }
        )
        print(rows[-1], flush=True)
    (args.runs / args.task / "sweep.json").write_text(json.dumps(rows))


def evaluate_arm(args: argparse.Namespace, arm: str, budget: int) -> None:
    """A trained model, or the one before, on held-out prompts with both caches."""
    import torch

    from sparse_rl.evaluate import EvalConfig, summary
    from sparse_rl.kv import RKV, Full
    from sparse_rl.rollout import Engine, EngineConfig
    from sparse_rl.runfolder import provenance

    folder = args.runs / args.task / arm
    folder.mkdir(exist_ok=True)
    model = start_model(args) if arm == BEFORE else str(folder / f"checkpoint-{args.steps}")
    loaded, task = built(args, model)
    own = sampling(args)
    settings = EvalConfig(n=FINAL_N, temperature=own["temperature"], seed=7).sampling(own["max_tokens"])
    final: dict[str, Any] = {"provenance": provenance(torch.device(args.device))}
    for cache, policy in zip(CACHES, (Full(), RKV(budget=budget, interval=INTERVAL)), strict=True):
        engine = Engine(loaded, policy, EngineConfig(rows=512, graphs=False))
        rollouts = engine.generate(task.held_out(args.problems), settings)
        engine.release()
        graded = task.rewards.grade(rollouts, loaded.tokenizer)
        by_prompt = graded.rewards.view(-1, FINAL_N).mean(dim=1).tolist()
        final[cache] = summary(rollouts, graded, FINAL_N) | {"by_prompt": by_prompt}
    (folder / "final.json").write_text(json.dumps(final))


def result(folder: Path, before: dict[str, Any], final: dict[str, Any]) -> dict[str, Any]:
    """An arm's curves, and its end beside the model before, prompt by prompt."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evaluations = [line for line in lines if "eval/dense/reward" in line]
    return {
        "arm": folder.name,
        "eval_steps": [line["step"] for line in evaluations],
        "dense": [[line["eval/dense/reward"], line["eval/dense/reward_se"]] for line in evaluations],
        "sparse": [[line.get("eval/sparse/reward"), line.get("eval/sparse/reward_se")] for line in evaluations],
        "final": {cache: numbers(final[cache]) for cache in CACHES},
        "gain": {cache: gain(before[cache]["by_prompt"], final[cache]["by_prompt"]) for cache in CACHES},
        "curves": {short: [_round(line.get(name)) for line in lines if line["step"]] for short, name in CURVES.items()},
    }


def numbers(final: dict[str, Any]) -> dict[str, float | None]:
    return {name: _round(value) for name, value in final.items() if name != "by_prompt"}


def gain(before: list[float], after: list[float]) -> list[float | None]:
    """The mean difference and its standard error; the same prompts, so what makes one hard cancels out."""
    differences = [b - a for a, b in zip(before, after, strict=True)]
    return [_round(mean(differences)), _round(stdev(differences) / len(differences) ** 0.5)]


def sweep_table(rows: list[dict[str, float]]) -> str:
    head = "budget  reward         mixed  rejection  KL      KV saved  length"
    return "\n".join(
        [head]
        + [
            f"{row['budget'] or 'dense':>6}  {row['reward']:.3f} ± {row['reward_se']:.3f}  {row['mixed']:.2f}   "
            f"{row['rejection']:.2f}       {row['kl']:.4f}  {row['kv_saved']:.2f}      {row['length']:.0f}"
            for row in rows
        ]
    )


def table(record: dict[str, Any]) -> str:
    head = (
        "           dense            gain             sparse           gain             KV saved  xi < 1e-4 (last 10)"
    )
    shown = [f"{record['before'][c]['reward']:.3f} ± {record['before'][c]['reward_se']:.3f}" for c in CACHES]
    rows = [head, f"{BEFORE:9}  {shown[0]}    {'':13}    {shown[1]}"]
    for r in record["runs"]:
        pairs = [pair for c in CACHES for pair in ((r["final"][c]["reward"], r["final"][c]["reward_se"]), r["gain"][c])]
        words = "    ".join(f"{value:5.3f} ± {error:.3f}" for value, error in pairs)
        saved, caught = ([x for x in r["curves"][name] if x is not None] for name in ("kv_saved", "catastrophic"))
        rows.append(f"{r['arm']:9}  {words}    {mean(saved or [0]):.2f}      {mean(caught[-10:] or [0]):.2f}")
    return "\n".join(rows)


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


if __name__ == "__main__":
    main()
