# SPDX-License-Identifier: Apache-2.0
"""What sparse rollouts do to training, live and recorded: the naive arm and sparse_rl on the embedded model.

    python scripts/demo.py [--steps 20] [--runs FOLDER]

Trains both arms for a few steps on this machine, evaluates each with the dense and with the sparse cache on held-out
problems, prints that beside the recorded runs of benchmarks/evidence, and writes a report. Whatever happened is shown.
With the --runs of a demo that was stopped it goes on where that one ended.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from statistics import mean

from rich.console import Console
from rich.table import Table

from sparse_rl.cli import main as sparse_rl
from sparse_rl.metrics import read_log
from sparse_rl.report.evidence import Evidence, read_evidence
from sparse_rl.report.evidence_claims import number

ARMS = {"naive": "none", "sparse_rl": "sparse_rl"}  # correction presets
BUDGET = 67  # entries of R-KV
RECORDED = Path(__file__).parents[1] / "benchmarks" / "evidence" / "results"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--problems", type=int, default=512)
    parser.add_argument("--runs", type=Path, default=Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S"))
    args = parser.parse_args()
    if args.steps < 1 or args.problems < 2:
        parser.error("--steps must be at least 1 and --problems at least 2")
    began = time.time()
    again = f"--runs {args.runs} --steps {args.steps} --problems {args.problems}"
    if "OMP_NUM_THREADS" not in os.environ and os.getloadavg()[0] > 1:
        print("others use this machine's cores, and threads that wait for one another are slow then: if this takes")
        print("more than ten minutes, stop it, and go on with OMP_NUM_THREADS=1 set")
    print(f'if this is stopped, make demo DEMO="{again}" goes on with it')
    for arm, preset in ARMS.items():
        settings = {
            "trainer.output_dir": args.runs / arm,
            "trainer.steps": args.steps,
            "trainer.resume_from_checkpoint": (args.runs / arm / "run.json").exists(),
            "correction.preset": preset,
            "kv.budget": BUDGET,
            "eval.every": 0,
            "eval.prompts": args.problems,
        }
        arguments = ["train", *(f"--{name}={value}" for name, value in settings.items())]
        print("\n$ sparse-rl " + " ".join(arguments), flush=True)
        try:
            sparse_rl(arguments)
        except SystemExit as end:
            print(f'make demo DEMO="{again}" goes on with it')
            raise end
    console = Console(width=max(Console().width, 110))
    console.print(live_table(args.runs, args.problems))
    if RECORDED.exists():
        console.print(recorded_table(read_evidence(RECORDED)))
        print("Live runs are short and of one seed: they differ by little more than their errors.")
        print("xi < 1e-4: rollouts with a token that the dense model would all but never have written.")
    sparse_rl(["report", *(str(args.runs / arm) for arm in ARMS), f"--output={args.runs / 'report.html'}"])
    print(f"{time.time() - began:.0f} s in all")


def live_table(runs: Path, problems: int) -> Table:
    table = empty_table(f"live: accuracy on {problems} held-out problems ± standard error")
    for arm in ARMS:
        lines = read_log(runs / arm / "metrics.jsonl")
        shares = ("kv/saved_frac", "mismatch/catastrophic_rollout_frac")
        cells = [f"{mean(line[name] for line in lines[1:]):.0%}" for name in shares]
        for cache in ("dense", "sparse"):
            for line in (lines[0], lines[-1]):
                cells.append(f"{line[f'eval/{cache}/reward']:.3f} ± {line[f'eval/{cache}/reward_se']:.3f}")
        table.add_row(arm, *cells)
    return table


def recorded_table(evidence: Evidence) -> Table:
    bed = evidence.bed("short")
    table = empty_table(
        f"recorded on a GPU: {bed['updates']} steps of {bed['prompts'] * bed['n']} rollouts, three seeds"
    )
    before = mean(record["results"]["reward"] for record in evidence.before("short", "rkv", BUDGET))
    for arm in evidence.arms("short"):
        if not (runs := evidence.runs("short", arm, BUDGET)) or arm == "dense":  # it has another sparse cache
            continue
        cells = [
            f"{mean(mean(run['results']['curves'][name]) for run in runs):.0%}" for name in ("kv_saved", "catastrophic")
        ]
        for cache, start in (("dense", evidence.start("short").mean), ("sparse", before)):
            cells += [f"{start:.3f}", number(evidence.end("short", arm, BUDGET, cache))]
        table.add_row(arm, *cells)
    return table


def empty_table(title: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("arm", "KV saved", "xi < 1e-4", "dense start", "dense end", "sparse start", "sparse end"):
        table.add_column(heading, justify="left" if heading == "arm" else "right", no_wrap=True)
    return table


if __name__ == "__main__":
    main()
