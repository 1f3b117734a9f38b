# SPDX-License-Identifier: Apache-2.0
"""Runs cells in a few long-lived processes that share one GPU.

Models this small leave a GPU idle, so many run at once; a process runs one cell after the other, since imports and the
CUDA context cost as much as a cell. What is done is in the results and is not done again.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from cells import RESULTS, STARTS, TESTBEDS, Cell, Testbed, read_results, warm_cells, write_result

PARTS = ("warm", "a", "b", "c", "d", "e", "f", "g", "smollm2")
MODELS = Path("runs/evidence/models")
# Seconds of a cell, where none of its kind is done.
GUESS = {"warm": 480, "train": 240, "matrix": 90, "measure": 45, "calibrate": 90, "step": 150, "begin": 240, "arm": 180}


def main(parts: dict[str, Callable[[Testbed], list[Cell]]], description: str | None) -> None:
    """The command line of one or several parts."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--testbed", nargs="+", default=["short", "long"], choices=list(TESTBEDS))
    parser.add_argument("--only", nargs="+", metavar="CELL", help="run these again, done or not")
    parser.add_argument("--match", default="", help="only cells whose name has this in it")
    parser.add_argument("--again", action="store_true", help="what was measured at another commit is not done")
    parser.add_argument("--list", action="store_true", help="name the cells and whether they are done")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) - 2), help="processes")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin nothing that would not end by then")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--models", type=Path, default=MODELS, help="folder of the models that cells leave to others")
    args = parser.parse_args()
    if args.jobs < 1:
        parser.error(f"--jobs is {args.jobs}; it takes one process at least.")
    beds = [TESTBEDS[name] for name in args.testbed]
    listed = {cell.name: cell for make in parts.values() for bed in beds for cell in make(bed)}
    known = {c.name: c for bed in TESTBEDS.values() for make in (warm_cells, *_makers()) for c in make(bed)}
    results = read_results(args.results, PARTS)
    commit = _commit() if args.again else None
    done = {name for name, cell in known.items() if _done(cell, results, commit)}
    if args.list:
        for name in listed:
            print(f"{'done' if name in done else '    '}  {name}")
        return
    chosen = args.only or [name for name in listed if name not in done and args.match in name]
    for name in chosen:
        if name not in known:
            sys.exit(f"there is no cell {name!r}; --list names them.")
    lay_out_starts(args.models)
    ordered = with_needs(chosen, known, args.models)
    for name in ordered:
        if name in done and name not in chosen and known[name].start:
            sys.exit(
                f"{name} is done, but its model is not in {args.models}: carry it there, so that all runs begin with "
                f"the same weights, or make it anew with --only {name}, and then every result that began with it."
            )
    _check_data([known[name] for name in ordered])
    _check_device(args.device)
    longest: dict[str, float] = {}  # seconds of the slowest cell of each kind so far
    for name in done:  # with --again this commit's alone: others' may have been slower
        _note(longest, known[name], results[name]["seconds"])
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the processes end too
    try:
        failed = run([known[name] for name in ordered], args, longest)
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on with what is left.")
    finally:
        signal.signal(signal.SIGTERM, before)
    sys.exit(1 if failed else 0)


def lay_out_starts(models: Path) -> None:
    """Put the models that came with the repository where cells look for them, unless there is one already."""
    for start in STARTS.iterdir():
        if not (models / start.name).exists():
            part = models / f"{start.name}.{os.getpid()}"
            shutil.copytree(start, part)
            os.replace(part, models / start.name)


def _check_data(cells: list[Cell]) -> None:
    """That what a warm start learns from is there, before a model is loaded for it."""
    for folder in {cell.settings["data"] for cell in cells if cell.work == "begin"}:
        if not (Path(folder) / "warm.jsonl").exists():
            sys.exit(
                f"there is no {folder}/warm.jsonl; `python scripts/word_problems.py DATA {folder} --warm-only gsm8k` "
                "makes it, from a folder of benchmarks."
            )


def _commit() -> str:
    from sparse_rl.runfolder import package_commit

    return os.environ.get("COMMIT") or package_commit() or sys.exit("--again needs a repository, or COMMIT set.")


def _check_device(name: str) -> None:
    from sparse_rl.model.load import check_device

    try:
        check_device(name)
    except ValueError as error:
        sys.exit(f"--{error}")


def with_needs(names: list[str], known: dict[str, Cell], models: Path) -> list[str]:
    """The cells in order, each behind those whose model it lacks."""
    ordered: dict[str, None] = {}

    def add(name: str) -> None:
        for need in known[name].needs:
            if need not in ordered and not (models / need / "config.json").exists():
                add(need)
        ordered[name] = None

    for name in names:
        add(name)
    return list(ordered)


def run(cells: list[Cell], args: argparse.Namespace, longest: dict[str, float]) -> list[str]:
    """Run all there is time for; the names of those that failed."""
    began, waiting = time.monotonic(), list(cells)
    failed: list[Cell] = []
    tried: set[str] = set()  # failed once, and tried again behind the others
    deadline = began + 60 * args.minutes
    missing = {cell.name for cell in cells}
    context = multiprocessing.get_context("spawn")
    workers: dict[Connection, tuple[Any, Cell | None]] = {}
    finished = 0
    while True:
        for connection, (_, at_hand) in list(workers.items()):
            busy = [cell for _, cell in workers.values() if cell is not None]
            if at_hand is None and (cell := _next(waiting, missing, busy, longest, deadline)) is not None:
                waiting.remove(cell)
                workers[connection] = (workers[connection][0], cell)
                connection.send(cell)
        busy = [cell for _, cell in workers.values() if cell is not None]
        startable = _next(waiting, missing, busy, longest, deadline) is not None
        if startable and len(workers) < args.jobs:
            ours, theirs = context.Pipe()
            process = context.Process(target=_worker, args=(theirs, args.device, args.models), daemon=True)
            process.start()
            theirs.close()
            workers[ours] = (process, None)
            continue
        if not busy:
            break
        for ready in wait([c for c, (_, cell) in workers.items() if cell is not None]):
            assert isinstance(ready, Connection)
            process, cell = workers[ready]
            assert cell is not None
            try:
                record = ready.recv()
            except (EOFError, OSError):  # the process is gone, with its cell
                record = {"error": "the process died; was it out of memory?"}
            workers[ready] = (process, None)
            if "error" in record:
                del workers[ready]
                process.kill()  # a CUDA error stays with its process
                ready.close()
                again = cell.name not in tried
                then = "; once more later" if again else ""
                print(f"{cell.name} failed{then}: {record['error']}", file=sys.stderr, flush=True)
                tried.add(cell.name)
                (waiting if again else failed).append(cell)
                continue
            missing.discard(cell.name)
            finished += 1
            _note(longest, cell, record["seconds"])
            write_result(args.results, record)
            clock = time.monotonic() - began
            print(f"[{finished}/{len(cells)}, {clock:.0f} s] {cell.name} {record['seconds']:.0f} s", flush=True)
    for connection, (process, _) in workers.items():
        connection.close()
        process.join(timeout=20)
    print(
        f"{finished} cells in {time.monotonic() - began:.0f} s, {len(failed)} failed, {len(waiting)} left", flush=True
    )
    return [cell.name for cell in failed]


def _next(
    waiting: list[Cell],
    missing: set[str],
    busy: list[Cell],
    longest: dict[str, float],
    deadline: float,
) -> Cell | None:
    """The next cell that may begin now, if there is one; none while one that must be alone waits for the others."""
    left = deadline - time.monotonic()
    ready = [
        cell
        for cell in waiting
        if longest.get(_kind(cell), GUESS.get(cell.work, 0.0)) <= left and missing.isdisjoint(cell.needs)
    ]
    ready.sort(key=lambda cell: not cell.alone)
    if not ready or any(cell.alone for cell in busy) or (ready[0].alone and busy):
        return None
    return ready[0]


def _kind(cell: Cell) -> str:
    """Cells that take about as long."""
    own = cell.settings
    name = f"{cell.work} {own.get('testbed', {}).get('name')} {own.get('updates_per_rollout')} {own.get('response')}"
    return f"{name} distilled" if own.get("distill") else name


def _note(longest: dict[str, float], cell: Cell, seconds: float) -> None:
    longest[_kind(cell)] = max(longest.get(_kind(cell), 0.0), seconds)


def _done(cell: Cell, results: dict[str, dict[str, Any]], commit: str | None) -> bool:
    """Whether there is a result with these very settings, of this commit if it has to be of one."""
    result = results.get(cell.name, {})
    same = result.get("settings") == json.loads(json.dumps(cell.settings))
    return same and commit in (None, result.get("commit"))


def _worker(connection: Connection, device: str, models: Path) -> None:
    """Run what is sent, until the other end is closed."""
    os.environ["OMP_NUM_THREADS"] = "1"
    signal.signal(signal.SIGINT, lambda *_: None)  # the pool's to hear; a trainer would save and go on
    signal.signal(signal.SIGTERM, lambda *_: os._exit(143))
    import torch
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(1)
    disable_progress_bar()
    from sparse_rl.runfolder import provenance

    about = provenance(torch.device(device))
    gc.freeze()  # what was imported is not looked through again and again
    while True:
        try:
            cell: Cell = connection.recv()
        except EOFError:
            return
        began = time.monotonic()
        try:
            module = importlib.import_module({"e": "timing", "smollm2": "real"}.get(cell.part, "work"))
            results = getattr(module, cell.work)(cell, device, models)
            record = {"cell": cell.name, "part": cell.part, **about, "settings": cell.settings, "results": results}
            record["seconds"] = round(time.monotonic() - began, 1)
        except (Exception, SystemExit):  # the next cell may fare better
            record = {"error": traceback.format_exc()[-2000:]}
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()  # others need it
        connection.send(record)


def _makers() -> list[Callable[[Testbed], list[Cell]]]:
    """Every part's cells, for --only and for what a cell needs."""
    return [importlib.import_module(f"part_{part}").cells for part in PARTS[1:]]
