# SPDX-License-Identifier: Apache-2.0
"""Measure the figures of README and docs again, the old value beside the new one.

    python scripts/bench.py cpu|gpu [--list] [--only rollout learner] [--minutes 8]

Every file of benchmarks/results says which commands made it. They run again here and write into the same files: those
that measure speed one after the other, then the others side by side, their words in runs/bench/COMMIT; last the cells
of benchmarks/evidence, an hour of them. What was measured at this commit is not measured again, so a run may be cut
anywhere. Every figure that moved stands beside its old value in benchmarks/results/compared.md; the files as they were
when a commit was first measured stay in runs/bench/COMMIT/before, and what other commits left half done moves to
runs/bench/COMMIT. Then `python scripts/docs_tables.py` writes the tables of README and docs, and
`sparse-rl report --evidence benchmarks/evidence/results --output docs/evidence.md` the evidence.
Word problems, the last evaluation and the evidence's part of SmolLM2 need the folder data/ (scripts/word_problems.py).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

from sparse_rl.kv.schedule import Schedule
from sparse_rl.runfolder import package_commit, write_json

RESULTS = Path("benchmarks/results")
SPEED = ("rollout_h200", "mixtures_h200", "learner_h200", "full_step_h200", "policies_speed", "cost_h200")
CALIBRATED = ("calibrate_smollm2/snapkv", "calibrate_smollm2/pages_mean")
QUALITY = ("smollm2_words", "eval_smollm2", "smollm2_lookup", "policies_quality", *CALIBRATED)
FILES = {"cpu": ("rollout_cpu", "calibrate_embedded"), "gpu": (*SPEED, *QUALITY, "evidence")}
EVIDENCE = Path("benchmarks/evidence/results")
PARTS = {  # of the evidence, and what measures each again
    **dict.fromkeys("cadbfg", "python benchmarks/evidence/several.py c a d b f g --again"),
    "e": "python benchmarks/evidence/part_e.py --jobs 1 --again",
    "smollm2": "python benchmarks/evidence/part_smollm2.py --jobs 5 --again",
}
TIMES = {"rollout_cpu": 5}  # timings on a shared CPU are noisier than what changes: the middle run counts
WARM = Path("runs/smollm2/warm/done")  # what smollm2_words leaves on its way, and eval_smollm2 begins with
COPIED = {  # from the folder of the command's --output
    "eval_smollm2": {"results.json": "json", "table.md": "md"},
    **{name: {"results.json": "json", "report.png": "png"} for name in CALIBRATED},
    "calibrate_embedded": {"results.json": "json"},
}
WORK = ("runs/smollm2", "runs/evidence", "evals/smollm2", "runs/cal-snapkv", "runs/cal-pages_mean", "runs/cal-embedded")
FIGURES = (  # of a record's results, those that README and docs show
    *(
        "tokens_per_s",
        "step_ms",
        "roofline.share",
        "mfu",
        "peak_bytes",
        "kv.peak_bytes",
        "kv.read_frac",
        "kv_peak_bytes",
    ),
    *(
        "rollout_s",
        "rollout_tokens_per_s",
        "update_s",
        "update_tokens_per_s",
        "split_ms.selection",
        "split_ms.compaction",
    ),
    *("planned_bytes.rollout", "measured_bytes.rollout", "planned_bytes.update", "measured_bytes.update"),
    *(f"against.{rival}.{what}" for rival in ("generate", "trl", "full") for what in ("tokens_per_s", "ratio")),
    *("overlap_mean", "overlap_p05", "overlap_p01", "lookup", "reached.bandwidth", "reached.flops", "worst_error"),
)
COMPARED = """# Every benchmark beside the one before it

Written by scripts/bench.py; docs/benchmarks.md says what fell, and why.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("machine", choices=list(FILES))
    parser.add_argument("--list", action="store_true", help="show what would run, and stop")
    parser.add_argument("--only", nargs="+", default=[""], help="files whose name has one of these in it")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin nothing after so long")
    args = parser.parse_args()
    commit = os.environ.get("COMMIT") or package_commit()
    if commit is None:
        parser.error("there is no repository; set the variable COMMIT to say what is measured")
    asked = [name for name in FILES[args.machine] if any(part in name for part in args.only)]
    names = [name for name in asked if read(RESULTS, name)]
    if not names:
        parser.error(f"no file has {' or '.join(args.only)} in its name; there are {', '.join(FILES[args.machine])}")
    todo = {name: outdated(read(RESULTS, name), commit) for name in names}
    if args.list:
        for name, command in ((name, command) for name, commands in todo.items() for command in commands):
            print(command + (f"  # {TIMES[name]} times" if name in TIMES else ""))
        return
    before = Path("runs/bench") / commit / "before"
    if not before.exists():
        begin(before)
    end = time.monotonic() + 60 * args.minutes
    together = {name: todo[name] for name in names if name in QUALITY}
    alone = [(name, command) for name in names if name not in (*QUALITY, "evidence") for command in todo[name]]
    failed = [command for name, command in alone if time.monotonic() < end and not measure_middle(name, command)]
    if time.monotonic() < end:
        failed += side_by_side(together, before.parent)
    for command in todo.get("evidence", []):
        minutes = (end - time.monotonic()) / 60  # it begins no cell that would not end by then
        failed += [command] if minutes > 0 and not measure("evidence", f"{command} --minutes {minutes:.1f}") else []
    write_compared(names, before)
    left = [command for name in names for command in outdated(read(RESULTS, name), commit)]
    for command in left:
        print(f"{'failed' if command in failed else 'not begun'}: {command}", file=sys.stderr)
    sys.exit(1 if left else 0)


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    """The records of a file, none where there is none; one that is a single record is its only one."""
    if name == "evidence":
        return evidence(EVIDENCE if folder == RESULTS else folder / name)
    path = folder / f"{name}.json"
    found = json.loads(path.read_text()) if path.exists() else []
    return found if isinstance(found, list) else [found]


def evidence(folder: Path) -> list[dict[str, Any]]:
    """The newest record of every cell but `warm`, whose model is kept; SmolLM2's ten, made anew, belong together."""
    newest = {}
    for part, command in PARTS.items():
        path = folder / f"{part}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            cell = json.loads(line)
            newest[cell["cell"]] = cell | {"label": cell["cell"], "command": command}
    return list(newest.values())


def outdated(records: list[dict[str, Any]], commit: str) -> list[str]:
    """The commands of what was measured at other commits or not to its end, each once."""
    due = [record["command"] for record in records if record["commit"] != commit or not whole(record)]
    return list(dict.fromkeys(due))


def whole(record: dict[str, Any]) -> bool:
    """Whether it ran to its end, and every rival that was asked for with it."""
    rivals = str(record.get("settings", {}).get("against") or "")
    found = (record.get("results") or {}).get("against") or {}
    return not record.get("unfinished") and all("ratio" in found.get(name, {}) for name in rivals.split(",") if name)


def begin(before: Path) -> None:
    """Put the old results, and what older commits left unfinished, where nothing goes on with them."""
    for folder in WORK:  # what commands go on with
        if Path(folder).exists():
            (before.parent / folder).parent.mkdir(parents=True, exist_ok=True)
            shutil.move(folder, before.parent / folder)
    shutil.copytree(RESULTS, before)
    if EVIDENCE.exists():
        shutil.copytree(EVIDENCE, before / "evidence")


def side_by_side(todo: dict[str, list[str]], logs: Path) -> list[str]:
    """Run the commands of several files, a thread a file; those that failed."""
    running: dict[str, Future[list[str]]] = {}

    def work(name: str) -> list[str]:
        while name == "eval_smollm2" and todo.get("smollm2_words") and not WARM.exists():
            if "smollm2_words" in running and running["smollm2_words"].done():
                break
            time.sleep(0.1)
        with open(logs / f"{Path(name).name}.log", "a") as log:
            return [command for command in todo[name] if not measure(name, command, log)]

    with ThreadPoolExecutor(max(1, len(todo))) as pool:
        for name in todo:
            running[name] = pool.submit(work, name)
    return [command for name in todo for command in running[name].result()]


def measure_middle(name: str, command: str) -> bool:
    """Run a command, or as often as its file asks for; the record whose ratio to a rival is the middle one counts."""
    if name not in TIMES:
        return measure(name, command)
    found: list[dict[str, Any]] = []
    for left in range(TIMES[name] - 1, -1, -1):
        if not measure(name, command):
            return False
        found += [record for record in read(RESULTS, name) if record["command"] == command]
        kept = sorted(found, key=ratio)[len(found) // 2] | {"ratios": [ratio(record) for record in found]}
        kept |= {"unfinished": True} if left else {}
        records = [kept if record["command"] == command else record for record in read(RESULTS, name)]
        write_json(RESULTS / f"{name}.json", records)
    return True


def ratio(record: dict[str, Any]) -> float:
    """To the first rival of the same run."""
    return float(next(iter(record["results"]["against"].values()))["ratio"])


def measure(name: str, command: str, log: IO[str] | None = None) -> bool:
    """Run a command; whether it went well."""
    program, *arguments = (word for word in shlex.split(command) if word != "--resume")
    folder = Path(arguments[arguments.index("--output") + 1]) if name in COPIED else None
    if folder and any((folder / begun).exists() for begun in ("eval.json", "calibration.json")):
        arguments.append("--resume")
    print(f"\n$ {command}", flush=True)
    start = [sys.executable] if program == "python" else [sys.executable, "-m", "sparse_rl"]
    if subprocess.run([*start, *arguments], stdout=log, stderr=log and subprocess.STDOUT).returncode:
        return False
    for made, suffix in COPIED.get(name, {}).items():
        shutil.copy(folder / made, RESULTS / f"{name}.{suffix}")
    return True


def write_compared(names: list[str], before: Path) -> None:
    """Put each file's old and new figures into compared.md; those of other files stay as they are."""
    path = RESULTS / "compared.md"
    head, *rest = (path.read_text() if path.exists() else COMPARED).split("\n## ")
    sections = {section.partition("\n")[0]: section for section in rest}
    for name in names:
        sections[name] = compared(name, read(before, name), read(RESULTS, name))
        print(f"\n{sections[name]}")
    known = [name for group in FILES.values() for name in group if name in sections]
    path.write_text("\n## ".join([head.rstrip("\n") + "\n", *(sections[name].rstrip("\n") + "\n" for name in known)]))


def compared(name: str, before: list[dict[str, Any]], after: list[dict[str, Any]]) -> str:
    """A line a figure that moved: before, now, and the change; what was not measured again is left out."""
    after = [record for record in after if record not in before]
    labels = {record.get("label") for record in after}
    before = [record for record in before if record.get("label") in labels]
    commits = [", ".join(dict.fromkeys(record["commit"] for record in records)) for records in (before, after)]
    rows, same, old = [], 0, figures(before)
    for (label, figure), value in figures(after).items():
        known = old.get((label, figure))
        shown = ["" if number is None else f"{number:,.5g}" for number in (known, value)]
        same += shown[0] == shown[1]
        change = f"{value / known - 1:+.1%}" if known else ""
        rows += [f"| {label} | {figure} | {shown[0]} | {shown[1]} | {change} |"] if shown[0] != shown[1] else []
    lines = [name, "", f"Before: {commits[0]}. Now: {commits[1]}. {same} of {same + len(rows)} figures are the same."]
    head = ["", "| what | figure | before | now | change |", "|---|---|---:|---:|---:|"]
    return "\n".join([*lines, *(head if rows else []), *rows]) + "\n"


def figures(records: list[dict[str, Any]]) -> dict[tuple[str, str], float]:
    """The numbers that README and docs show, by what was measured and by name."""
    found: dict[tuple[str, str], float] = {}
    for record in records:
        for name in FIGURES:
            value: Any = record.get("results")
            for key in name.split("."):
                value = value.get(key) if isinstance(value, dict) else None
            if value is not None:
                found[record["label"], name] = value
        if "cell" in record:
            found |= one_cell(record)
        elif "runs" in record and "arm" in record["runs"][0]:
            found |= arms(record)
        elif "cells" in record:
            found |= cells(record["cells"])
        elif "verified" in record:
            found |= calibration(record)
        elif "steps" in record["results"]:
            found |= steps(record)
    return found


def one_cell(record: dict[str, Any]) -> dict[tuple[str, str], float]:
    """Of a cell of the evidence: accuracies, alone or by cache, its tail, its times."""
    results = record["results"]
    accuracies = {cache: results[cache] for cache in ("dense", "sparse") if cache in results}
    accuracies |= results.get("matrix", {})
    found = {f"{cache} accuracy": value for cache, (value, _) in accuracies.items()}
    found |= {name: value for name, value in results.items() if name.endswith("_s") or name == "overlap_p05"}
    for target, schedule in results.get("schedules", {}).items():
        found |= {f"tail for {target} in bin {i}": tail for i, tail in enumerate(schedule["tails"])}
    return {(record["label"], name): value for name, value in found.items()}


def arms(record: dict[str, Any]) -> dict[tuple[str, str], float]:
    found = {}
    for run in ([{"arm": "before", "final": record["before"]}] if "before" in record else []) + record["runs"]:
        for cache in ("dense", "sparse"):
            found[run["arm"], f"{cache} accuracy"] = run["final"][cache]["reward"]
            if "gain" in run:
                found[run["arm"], f"{cache} gain"] = run["gain"][cache][0]
    return found


def cells(evaluated: list[dict[str, Any]]) -> dict[tuple[str, str], float]:
    found = {}
    for cell in evaluated:
        where = f"{cell['model']}, {cell['cache']}"
        found[where, cell["benchmark"]] = next(iter(cell["metrics"].values()))["mean"]
        for name in ("kv_saved_frac", "kv_read_frac", "tokens_per_answer"):
            found[where, f"{cell['benchmark']} {name}"] = cell[name]
    return found


def calibration(record: dict[str, Any]) -> dict[tuple[str, str], float]:
    found, schedule = {}, Schedule(*(tuple(record["schedule"][key]) for key in ("starts", "budgets")))
    for (low, high), run in zip(record["bins"], record["verified"]["bins"], strict=True):
        found[f"contexts {low} to {high}", "budget"] = schedule.at(low)
        found[f"contexts {low} to {high}", "P05 as run"] = run["top20"]["all"]["p05"]
    return found


def steps(record: dict[str, Any]) -> dict[tuple[str, str], float]:
    names = ("dense_ms", "sparse_ms", "ratio", "predicted_ratio")
    return {
        (record["label"], f"{name} at {step['context']:,}"): step[name]
        for step in record["results"]["steps"]
        for name in names
    }


if __name__ == "__main__":
    main()
