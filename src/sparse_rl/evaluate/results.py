# SPDX-License-Identifier: Apache-2.0
"""From the samples on disk to the numbers of the table.

A sample whose grader failed counts for nothing but `failed`. Standard errors are over problems. The difference to the
dense cache is paired: problem by problem, so that what makes a problem hard cancels.

How a metric and its error come of scores is in `statistics.py`, how they are shown in report/eval_table.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sparse_rl.evaluate.plan import Cell, Evaluation, parse_cache
from sparse_rl.evaluate.protocols import PROTOCOLS
from sparse_rl.evaluate.statistics import average, by_problem, estimate, failed, grouped, paired
from sparse_rl.evaluate.store import BlockLine, Sample
from sparse_rl.kv import Full
from sparse_rl.runfolder import as_settings

Values = list[float | None]  # of a metric, one a problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A cell's numbers, and the values by problem from which others are made."""

    cell: Cell
    numbers: dict[str, Any]
    values: dict[str, Values]  # by metric


def measure(cell: Cell, evaluation: Evaluation, samples: list[Sample], blocks: Sequence[BlockLine]) -> Measured:
    """The numbers of one cell."""
    settings = evaluation.settings(cell.benchmark)
    n = settings.n
    problems = [samples[i : i + n] for i in range(0, len(samples), n)]
    scores = [[sample["score"] for sample in of] for of in problems]
    values = {metric: by_problem(metric, scores) for metric in settings.metrics}
    main = values[settings.metrics[0]]
    tokens = sum(sample["tokens"] for sample in samples)
    full = sum(sample["kv_full"] for sample in samples)
    seconds, capture = sum(b.generate_s for b in blocks), sum(b.capture_s for b in blocks)
    numbers = {
        "model": cell.model,
        "benchmark": cell.benchmark,
        "cache": cell.cache,
        "metrics": {metric: asdict(estimate(found)) for metric, found in values.items()},
        "problems": len(problems),
        "n": n,
        "samples": len(samples),
        "failed": failed(scores),
        "failures": _reasons(samples),
        "truncated": sum(sample["finish_reason"] == "length" for sample in samples),
        "tokens": tokens,
        "tokens_per_answer": tokens / len(samples),
        "kv_saved_frac": 1 - sum(sample["kv_held"] for sample in samples) / full if full else 0.0,
        "kv_read_frac": sum(sample["kv_read"] for sample in samples) / full if full else 1.0,
        "peak_entries": sum(sample["kv_peak"] for sample in samples) / len(samples),
        "generate_s": seconds,
        "capture_s": capture,
        "tokens_per_s": tokens / (seconds - capture) if seconds > capture else None,
        "settings": as_settings(asdict(settings)),
    }
    for key in ("level", "subject"):
        groups = grouped(main, [of[0].get(key) for of in problems])
        if len(groups) > 1:
            numbers[f"by_{key}"] = {label: asdict(found) for label, found in groups.items()}
    return Measured(cell=cell, numbers=numbers, values=values)


def compare(measured: list[Measured]) -> list[dict[str, Any]]:
    """The cells' numbers, each with its paired difference to the dense cache where there is one.

    Cells that are not whole hold the first problems, in the same order: those that both have are compared.
    """
    dense = {(m.cell.model, m.cell.benchmark): m for m in measured if isinstance(parse_cache(m.cell.cache), Full)}
    found = []
    for each in measured:
        base = dense.get((each.cell.model, each.cell.benchmark))
        numbers = dict(each.numbers)
        if base is not None and base is not each:
            common = min(each.numbers["problems"], base.numbers["problems"])
            numbers["difference"] = {
                metric: asdict(paired(values[:common], base.values[metric][:common]))
                for metric, values in each.values.items()
            }
        found.append(numbers)
    return found


def headlines(evaluation: Evaluation, measured: list[Measured]) -> list[dict[str, Any]]:
    """The protocol's average over its benchmarks for every model and cache that has them all."""
    wanted = PROTOCOLS[evaluation.protocol].headline
    if not wanted or not set(wanted) <= set(evaluation.benchmarks):
        return []
    found = []
    for model in evaluation.models:
        for cache in evaluation.kv:
            cells = [m for m in measured if m.cell.model == model and m.cell.cache == cache]
            firsts = [estimate(next(iter(m.values.values()))) for m in cells if m.cell.benchmark in wanted]
            if len(firsts) == len(wanted):
                found.append({"model": model, "cache": cache, "benchmarks": list(wanted), **asdict(average(firsts))})
    return found


def _reasons(samples: list[Sample]) -> dict[str, int]:
    """Why graders failed, and how often."""
    counts: dict[str, int] = {}
    for sample in samples:
        if sample["score"] is None:
            counts[sample["failure"]] = counts.get(sample["failure"], 0) + 1
    return counts
