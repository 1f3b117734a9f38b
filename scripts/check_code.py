# SPDX-License-Identifier: Apache-2.0
"""Run the canonical solutions of code benchmarks through the code reward: each must pass.

    python scripts/check_code.py --data-dir DATA [--sets humaneval mbpp_plus ...]

DATA holds one folder a set with a test.jsonl. Prints a table and what does not pass; status 1 if there is any.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from sparse_rl.grading.code import CodeReward
from sparse_rl.sandbox.process import Limits, Verdict

SETS = ("humaneval", "humaneval_plus_mini", "humaneval_plus", "mbpp_plus", "mbpp")


def solution(row: dict[str, Any]) -> str:
    return f"```python\n{row['answer']}\n```"


def check(reward: CodeReward, rows: list[dict[str, Any]], advance: Any) -> list[Verdict]:
    def one(row: dict[str, Any]) -> Verdict:
        verdict = reward.judge(solution(row), row)
        advance()
        return verdict

    with ThreadPoolExecutor(reward.workers) as pool:
        return list(pool.map(one, rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", default=SETS, choices=SETS)
    parser.add_argument("--timeout-s", type=float, default=10.0)
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    reward = CodeReward.build(Limits(timeout_s=options.timeout_s), options.workers)
    table = Table("set", "programs", "passed", "seconds", "ms a program")
    exceptions = []
    console = Console()
    for name in options.sets:
        rows = [json.loads(line) for line in (options.data_dir / name / "test.jsonl").open(encoding="utf-8")]
        start = time.perf_counter()
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task(name, total=len(rows))
            verdicts = check(reward, rows, lambda task=task, progress=progress: progress.advance(task))
        seconds = time.perf_counter() - start
        bad = [(name, row["id"], v) for row, v in zip(rows, verdicts, strict=True) if v.word != "passed"]
        counts = (str(len(rows)), str(len(rows) - len(bad)))
        table.add_row(name, *counts, f"{seconds:.1f}", f"{1e3 * seconds / len(rows):.0f}")
        exceptions += bad
    console.print(table)
    for name, row, verdict in exceptions:
        print(f"{name} {row}: {verdict.word}: {verdict.detail}")
    return int(bool(exceptions))


if __name__ == "__main__":
    sys.exit(main())
