# SPDX-License-Identifier: Apache-2.0
"""An evaluation of a second on tiny models and problems of its own, and one that is killed on the way."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import warnings
import zlib
from pathlib import Path

import torch

from sparse_rl.evaluate import Evaluation, evaluate_benchmarks
from sparse_rl.grading import Failed
from sparse_rl.rollout import EngineConfig
from sparse_rl.runfolder import to_json
from sparse_rl.tasks.benchmarks import BENCHMARKS, Benchmark

NUM_ROWS = 10


def grade(completions, **columns):
    """Right, wrong, failed or declined, as the text has it."""
    found = [zlib.crc32(str(completion).encode()) % 16 for completion in completions]
    return [Failed("it hung") if place == 14 else None if place == 15 else float(place < 6) for place in found]


def toy(folder: Path, seed: int) -> None:
    """Write and register the benchmark `toy`."""
    draw = random.Random(seed)
    BENCHMARKS["toy"] = Benchmark("toy", "words", NUM_ROWS, "small_eval:grade", "Apache-2.0", "made here")
    (folder / "toy").mkdir(parents=True, exist_ok=True)
    lines = [
        {"id": f"toy-{i}", "problem": f"{draw.random()} + <b>?", "answer": str(i), "level": str(i % 2)}
        for i in range(NUM_ROWS)
    ]
    (folder / "toy" / "test.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def small(folder: Path, **changes) -> Evaluation:
    settings = {
        "models": ("tiny",),
        "benchmarks": ("toy",),
        "kv": ("full", "rkv:budget=16,interval=8"),
        "data_dir": str(folder),
        "n": 2,
        "temperature": 1.0,
        "max_tokens": 6,
        "engine": EngineConfig(rows=4),
    }
    return Evaluation(**settings | changes)


def timeless(value):
    """Results without what may differ between two equal evaluations."""
    if isinstance(value, dict):
        skipped = ("generate_s", "capture_s", "tokens_per_s", "started", "wall_s", "command")
        return {key: timeless(item) for key, item in value.items() if key not in skipped}
    return [timeless(item) for item in value] if isinstance(value, list) else value


def results_of(folder: Path):
    return timeless(json.loads((folder / "results.json").read_text()))


def samples_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("samples.jsonl")}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(point: str, count: int, draw: random.Random) -> None:
    """Kill this process at the count-th time it comes to the point; a write is killed in its middle."""
    from sparse_rl.evaluate import benchmarks, grader, record, store
    from sparse_rl.rollout.loop import Loop

    place, name = {
        "decode": (Loop, "decode"),
        "grade": (grader.Block, "grade"),
        "write": (store, "_write"),
        "eval.json": (record, "write_json"),
        "results.json": (benchmarks, "write_json"),
    }[point]
    real, passed = getattr(place, name), 0

    def wrapper(*args, **kwargs):
        nonlocal passed
        passed += 1
        if passed == count and point == "write":
            path, content, _ = args
            with open(path, "ab") as file:
                file.write(content[: draw.randrange(len(content))])
        if passed == count and point.endswith("json"):
            path, contents = args
            path.with_name(f".{path.name}.part").write_text(to_json(contents)[:40])
        if passed == count:
            die()
        return real(*args, **kwargs)

    setattr(place, name, wrapper)


def in_child(work) -> int:
    """Run it in a process of its own; the exit code, negative for a signal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
        child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # makes the thread pool anew, before several threads at once would
            work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_and_resume(data: Path, folder: Path, draw: random.Random, num_points: int) -> None:
    """Kill it at some of the points, resume, and compare with one that was left alone."""
    evaluation = small(data)  # two cells of two blocks, two writes each
    assert in_child(lambda: evaluate_benchmarks(evaluation, folder / "whole")) == 0
    expected = results_of(folder / "whole"), samples_of(folder / "whole")
    points = [("decode", draw.randrange(1, 50)), ("grade", draw.randrange(1, 5)), ("results.json", 1)]
    points += [("write", draw.randrange(1, 9)), ("eval.json", draw.randrange(1, 3))]
    for point, count in draw.sample(points, num_points):
        output = folder / "killed"

        def killed(output=output, point=point, count=count):
            arm(point, count, draw)
            evaluate_benchmarks(evaluation, output)

        assert in_child(killed) == -signal.SIGKILL, f"{point} {count}: it was not killed"
        assert in_child(lambda output=output: evaluate_benchmarks(evaluation, output, resume=True)) == 0, point
        assert (results_of(output), samples_of(output)) == expected, f"{point} {count}: another table"
        shutil.rmtree(output)
        print(f"{point} {count}", flush=True)
