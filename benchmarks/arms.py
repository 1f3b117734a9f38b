# SPDX-License-Identifier: Apache-2.0
"""Which correction learns? The embedded model and task, trained with dense and with sparse rollouts under each preset.

    python benchmarks/arms.py --device cuda --output benchmarks/results/arms.json

Every (arm, budget, seed) is one run of the trainer in a process of its own; models this small leave a GPU idle, so all
run at once. Accuracy is measured on the same held-out problems with the dense and with the sparse cache. A run that was
finished before is not run again: the folder --runs keeps them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

ARMS = {  # KV policy of the rollouts, correction preset
    "dense": ("full", "none"),
    "naive": ("rkv", "none"),
    "reject_only": ("rkv", "reject_only"),
    "reweight_only": ("rkv", "reweight_only"),
    "sparse_rl": ("rkv", "sparse_rl"),
    "sparse_rl_release": ("rkv", "sparse_rl_release"),
    "tis": ("rkv", "tis"),
    "icepop": ("rkv", "icepop"),
}
SIX = ["dense", "naive", "reject_only", "reweight_only", "sparse_rl", "sparse_rl_release"]
CURVES = {  # of metrics.jsonl, by short name
    "reward": "reward",
    "rejection": "correction/rejection_rate",
    "catastrophic": "mismatch/catastrophic_rollout_frac",  # what the veto rejects, or would
    "kl": "rollout_corr/kl",
    "grad_norm": "grad_norm",
    "length": "completions/mean_length",
    "kv_saved": "kv/saved_frac",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arms", nargs="+", default=SIX, choices=list(ARMS))
    parser.add_argument("--budgets", nargs="+", type=int, default=[56])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--prompts", type=int, default=32, help="a step, 16 completions each")
    parser.add_argument("--lr", type=float, default=2e-4, help="falls to 0 over the steps")
    parser.add_argument("--problems", type=int, default=1024, help="held out, for evaluation")
    parser.add_argument("--eval-every", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=Path, default=Path("runs/arms"))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", nargs=3, metavar=("ARM", "BUDGET", "SEED"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        train(args, args.worker[0], int(args.worker[1]), int(args.worker[2]))
        return

    began = time.time()
    runs = [(arm, budget, seed) for budget in args.budgets for arm in args.arms for seed in args.seeds]
    args.runs.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(args.jobs) as pool:
        failed = [run for run, code in zip(runs, pool.map(lambda run: start(args, *run), runs), strict=True) if code]
    for run in failed:
        log = folder(args, *run).with_suffix(".log")
        print(f"{run} failed; the end of {log}:\n{log.read_text()[-800:]}", file=sys.stderr)
    results = [result(args, *run) for run in runs if run not in failed]
    if args.output:
        settings = {k: v for k, v in vars(args).items() if k not in ("worker", "runs", "output", "jobs")}
        made = {key: ", ".join(sorted({r.pop(key) for r in results})) for key in ("commit", "hardware")}
        record = {"command": " ".join(["python", *sys.argv]), **made, "settings": settings, "runs": results}
        args.output.write_text(json.dumps(record, indent=1) + "\n")
        plot(results, args.output.with_suffix(".png"))
    print(table(results))
    print(f"{len(results)} runs in {time.time() - began:.0f} s")
    sys.exit(1 if failed else 0)


def start(args: argparse.Namespace, arm: str, budget: int, seed: int) -> int:
    """One run in a process of its own, its output in a file beside its folder."""
    target = folder(args, arm, budget, seed)
    if (target / "result.json").exists():
        known = json.loads((target / "result.json").read_text())["settings"]
        if known != settings_of(args):
            sys.exit(f"{target} was run with {known}; give another --runs, or remove it.")
        return 0
    with open(target.with_suffix(".log"), "w") as log:
        command = [sys.executable, *sys.argv, "--worker", arm, str(budget), str(seed)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment).returncode


def train(args: argparse.Namespace, arm: str, budget: int, seed: int) -> None:
    import torch

    from sparse_rl.evaluate import EvalConfig, evaluate
    from sparse_rl.kv import RKV, Full
    from sparse_rl.model.load import load
    from sparse_rl.objective.correction import PRESETS
    from sparse_rl.rollout import Engine, EngineConfig, Sampling
    from sparse_rl.tasks import Chain
    from sparse_rl.train import OptimizerConfig, Trainer, TrainerConfig, UpdateConfig

    policy, preset = ARMS[arm]
    task, sparse = Chain(), RKV(budget=budget, interval=8)
    loaded = load(args.model, dtype=torch.float32, device=args.device)
    target = folder(args, arm, budget, seed)
    trainer = Trainer(
        loaded,
        task,
        kv=Full() if policy == "full" else sparse,
        sampling=Sampling(n=16, max_tokens=task.chain_len + 16),
        engine=EngineConfig(rows=1024),
        correction=PRESETS[preset],
        update=UpdateConfig(max_tokens=65536),
        optimizer=OptimizerConfig(learning_rate=args.lr, schedule="linear", beta2=0.98),
        eval=EvalConfig(every=args.eval_every, prompts=args.problems),
        config=TrainerConfig(
            output_dir=str(target),
            steps=args.steps,
            prompts_per_step=args.prompts,
            seed=seed,
            save_every=20,
            save_total_limit=1,
            resume_from_checkpoint=target.exists(),
        ),
    )
    trainer.train()
    final = {"commit": commit(), "hardware": hardware(args.device), "settings": settings_of(args)}
    if policy == "full":  # the trainer evaluated with its own cache only, which is the dense one
        engine = Engine(loaded, sparse, EngineConfig(rows=1024))
        sampling = trainer.eval_config.sampling(task.chain_len + 16)
        final |= evaluate(engine, task.held_out(args.problems), sampling, task.rewards)
    (target / "result.json").write_text(json.dumps(final))


def settings_of(args: argparse.Namespace) -> dict[str, object]:
    """What a run depends on, beside its arm, budget and seed."""
    return {key: getattr(args, key) for key in ("model", "steps", "prompts", "lr", "problems", "eval_every")}


def folder(args: argparse.Namespace, arm: str, budget: int, seed: int) -> Path:
    return args.runs / f"{arm}-{budget}-seed{seed}"


def result(args: argparse.Namespace, arm: str, budget: int, seed: int) -> dict[str, object]:
    """A finished run as one compact record."""
    target = folder(args, arm, budget, seed)
    lines = [json.loads(line) for line in (target / "metrics.jsonl").read_text().splitlines()]
    final = json.loads((target / "result.json").read_text())
    evaluations = [line for line in lines if "eval/dense/reward" in line]

    def at(line: dict[str, float], cache: str) -> list[float] | None:
        if f"eval/{cache}/reward" not in line:
            return None
        return [round(line[f"eval/{cache}/{name}"], 4) for name in ("reward", "reward_se")]

    sparse = [at(line, "sparse") for line in evaluations]
    if "reward" in final:
        sparse[-1] = [round(final["reward"], 4), round(final["reward_se"], 4)]
    steps = [line for line in lines if line["step"]]
    return {
        "arm": arm,
        "budget": budget,
        "seed": seed,
        "commit": final["commit"],
        "hardware": final["hardware"],
        "eval_steps": [line["step"] for line in evaluations],
        "dense": [at(line, "dense") for line in evaluations],  # accuracy and its standard error
        "sparse": sparse,
        "curves": {short: [_round(line.get(name)) for line in steps] for short, name in CURVES.items()},
    }


def table(results: list[dict]) -> str:
    """Mean over seeds of each arm and budget, and each seed's dense accuracy at the end."""
    rows = ["budget  arm                KV saved  xi < 1e-4  dense start  dense end  sparse end  dense end by seed"]
    for budget in dict.fromkeys(r["budget"] for r in results):
        for arm in dict.fromkeys(r["arm"] for r in results):
            runs = [r for r in results if r["arm"] == arm and r["budget"] == budget]
            if not runs:
                continue
            saved, rejection = (mean(mean(r["curves"][name]) for r in runs) for name in ("kv_saved", "catastrophic"))
            first, last = (mean(r["dense"][i][0] for r in runs) for i in (0, -1))
            sparse = mean(r["sparse"][-1][0] for r in runs)
            row = f"{budget:6}  {arm:17}  {saved:8.2f}  {rejection:9.2f}  {first:11.3f}  {last:9.3f}  {sparse:10.3f}  "
            rows.append(row + " ".join(f"{r['dense'][-1][0]:.3f}" for r in runs))
    return "\n".join(rows)


def plot(results: list[dict], path: Path) -> None:
    """Accuracy with both caches and the rejection rate over the steps: a line a seed, a colour an arm."""
    from matplotlib.figure import Figure

    palette = ("#000000", "#d55e00", "#56b4e9", "#cc79a7", "#009e73", "#0072b2", "#e69f00", "#999999")
    colours = dict(zip(ARMS, palette, strict=True))
    titles = ("accuracy, dense cache", "accuracy, sparse cache", "rollouts with a token xi < 1e-4")
    budgets = list(dict.fromkeys(r["budget"] for r in results))
    figure = Figure(figsize=(12, 3.4 * len(budgets)), layout="constrained")
    for row, budget in enumerate(budgets):
        panels = [figure.add_subplot(len(budgets), 3, 3 * row + i + 1) for i in range(3)]
        for result in (r for r in results if r["budget"] == budget):
            arm, style = result["arm"], {"color": colours[result["arm"]], "linewidth": 1.3, "alpha": 0.85}
            label = arm if result["seed"] == min(r["seed"] for r in results) else None
            for panel, cache in zip(panels, ("dense", "sparse"), strict=False):
                known = [(s, v[0]) for s, v in zip(result["eval_steps"], result[cache], strict=True) if v is not None]
                marker = "o" if len(known) < 3 else "."
                panel.plot(*zip(*known, strict=True), marker=marker, label=label, **style)
            if arm != "dense":
                curve = result["curves"]["catastrophic"]
                panels[2].plot(range(1, len(curve) + 1), curve, **style)
        for panel, title in zip(panels, titles, strict=True):
            panel.set_title(f"{title} (budget {budget})", fontsize=10)
            panel.set_xlabel("step")
            panel.set_ylim(-0.02, 1.0)
            panel.grid(alpha=0.3)
        panels[0].legend(fontsize=8, loc="lower left")
    figure.savefig(path, dpi=110)


def _round(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def commit() -> str:
    """As COMMIT says, for a machine that has a copy of the files only; else the repository's."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return os.environ.get("COMMIT") or found.stdout.strip() or "unknown"


def hardware(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device.startswith("cuda") else f"{platform.machine()} CPU"


if __name__ == "__main__":
    main()
