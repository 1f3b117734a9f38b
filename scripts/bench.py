# SPDX-License-Identifier: Apache-2.0
"""Measure the README's numbers again, the old value beside the new one.

    python scripts/bench.py cpu|gpu [--list] [--only learner]

Every file of benchmarks/results says which commands made it. They run again here, one after the other, and write into
the same files; what was measured at this commit is not measured again, so a run may be cut anywhere. The files as they
were when a commit was first measured stay in runs/bench/COMMIT/before, and what other commits left half done moves to
runs/bench/COMMIT. Word problems and the last evaluation need the folder data/ (scripts/word_problems.py).
Not here: benchmarks/evidence, which has a script a part, and takes hours.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from sparse_rl.runfolder import package_commit

RESULTS = Path("benchmarks/results")
SPEED = ("rollout_h200", "learner_h200", "full_step_h200", "policies_speed", "cost_h200")
QUALITY = ("policies_quality", "smollm2_lookup", "smollm2_words", "eval_smollm2")  # the last needs that before
FILES = {"cpu": ("rollout_cpu",), "gpu": (*SPEED, *QUALITY)}
COPIED = {"eval_smollm2": {"results.json": "json", "table.md": "md"}}  # from the folder of the command's --output
WORK = ("runs/smollm2", "evals/smollm2")  # what commands go on with
FIGURES = ("tokens_per_s", "step_ms", "roofline.share", "mfu", "peak_bytes", "kv.peak_bytes", "kv_peak_bytes")
FIGURES += ("rollout_tokens_per_s", "update_tokens_per_s", "measured_bytes.rollout", "measured_bytes.update")
FIGURES += ("against.generate.ratio", "against.trl.ratio", "overlap_p05", "accuracy", "worst_error")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine", choices=list(FILES))
    parser.add_argument("--list", action="store_true", help="show what would run, and stop")
    parser.add_argument("--only", default="", help="files whose name has this in it")
    args = parser.parse_args()
    commit = os.environ.get("COMMIT") or package_commit()
    if commit is None:
        parser.error("there is no repository; set the variable COMMIT to say what is measured")
    names = [name for name in FILES[args.machine] if args.only in name and (RESULTS / f"{name}.json").exists()]
    todo = [(name, command) for name in names for command in outdated(read(RESULTS / f"{name}.json"), commit)]
    if args.list:
        for _, command in todo:
            print(command)
        return
    before = Path("runs/bench") / commit / "before"
    if not before.exists():
        begin(before)
    failed = [command for name, command in todo if not measure(name, command)]
    for name in names:
        Console(width=140).print(compared(name, read(before / f"{name}.json"), read(RESULTS / f"{name}.json")))
    for command in failed:
        print(f"failed: {command}", file=sys.stderr)
    sys.exit(1 if failed else 0)


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file; one that is a single record is its only one."""
    found = json.loads(path.read_text())
    return found if isinstance(found, list) else [found]


def outdated(records: list[dict[str, Any]], commit: str) -> list[str]:
    """The commands of what was measured at other commits or not to its end, each once."""
    due = [record["command"] for record in records if record["commit"] != commit or record.get("unfinished")]
    return list(dict.fromkeys(due))


def begin(before: Path) -> None:
    """Put the old results, and what older commits left unfinished, where nothing goes on with them."""
    for folder in WORK:
        if Path(folder).exists():
            (before.parent / folder).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(folder, before.parent / folder)
    shutil.copytree(RESULTS, before)


def measure(name: str, command: str) -> bool:
    """Run a command; whether it went well."""
    program, *arguments = shlex.split(command)
    folder = Path(arguments[arguments.index("--output") + 1]) if name in COPIED else None
    if folder and (folder / "eval.json").exists():
        arguments.append("--resume")
    print(f"\n$ {command}", flush=True)
    start = [sys.executable] if program == "python" else [sys.executable, "-m", "sparse_rl"]
    if subprocess.run([*start, *arguments]).returncode:
        return False
    for made, suffix in COPIED.get(name, {}).items():
        shutil.copy(folder / made, RESULTS / f"{name}.{suffix}")
    return True


def compared(name: str, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> Table:
    """A line a figure: before, now, and the change."""
    table = Table("", "figure", "before", "now", "change", title=name)
    old, new = figures(before), figures(after)
    for (label, figure), value in new.items():
        known = old.get((label, figure))
        change = f"{value / known - 1:+.1%}" if known else ""
        table.add_row(label, figure, "" if known is None else f"{known:,.4g}", f"{value:,.4g}", change)
    return table


def figures(records: list[dict[str, Any]]) -> dict[tuple[str, str], float]:
    """The numbers that the README shows, by what was measured and by name."""
    found: dict[tuple[str, str], float] = {}
    for record in records:
        for name in FIGURES:
            value: Any = record.get("results")
            for key in name.split("."):
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                found[record["label"], name] = value
        for run in record.get("runs", []):  # one an arm
            for cache in ("dense", "sparse"):
                found[run["arm"], f"{cache} accuracy"] = run["final"][cache]["reward"]
        for cell in record.get("cells", []):
            where = f"{cell['model']}, {cell['cache']}"
            found[where, cell["benchmark"]] = next(iter(cell["metrics"].values()))["mean"]
    return found


if __name__ == "__main__":
    main()
