# SPDX-License-Identifier: Apache-2.0
"""Accuracies with their standard errors over problems: pass@k, avg@k, groups, paired differences.

    scores = [[1.0, 0.0, None, 1.0], [0.0, 0.0, 0.0, 0.0]]   # a list a problem, a number a sample
    estimate(by_problem("avg@4", scores))                    # mean 1/3: 2 of 3 and 0 of 4

A sample is right if its score is at least 1. One whose grader failed (None) is left out: its problem has one sample
less, so avg@k is the right share of those graded. pass@k needs k graded samples: a problem with fewer is left out of
it, also where a right one would decide it, since to keep only those would favour problems that are solved. A problem
without a graded sample is left out of both. `Estimate.left_out` counts such problems, `failed` the samples.

Those of overlap, and its intervals, are in calibrate/statistics.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

Scores = Sequence[Sequence[float | None]]  # problems, then samples; None where the grader failed
METRIC = re.compile(r"(pass|avg|mean)@([1-9]\d*)")
DIFFICULTIES = ("easy", "medium", "hard")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over problems and its standard error (nan with less than two)."""

    mean: float
    se: float
    count: int  # problems it is the mean of
    left_out: int = 0  # problems without a value


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that of k samples, drawn without replacement from n of which c are right, at least one is right.

    1 - C(n-c, k) / C(n, k), the unbiased estimate of pass@k; exact up to the last rounding, for any n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {c} right samples among {n} means nothing; k must lie between 1 and n.")
    all_draws = math.comb(n, k)
    return (all_draws - math.comb(n - c, k)) / all_draws


def parse_metric(name: str) -> tuple[str, int]:
    """pass@16 as ("pass", 16); avg@k and mean@k are the same."""
    match = METRIC.fullmatch(name)
    if match is None:
        raise ValueError(f"metric {name!r} is unknown; write pass@K, avg@K or mean@K.")
    return match[1], int(match[2])


def by_problem(metric: str, scores: Scores) -> list[float | None]:
    """The metric of each problem, None where too few samples were graded (see above)."""
    kind, k = parse_metric(metric)
    drawn = {len(samples) for samples in scores}
    if drawn and (min(drawn) < k or (kind != "pass" and max(drawn) > k)):
        raise ValueError(f"{metric} of problems with {' or '.join(map(str, sorted(drawn)))} samples; draw {k} of each.")
    values: list[float | None] = []
    for samples in scores:
        graded = [score for score in samples if score is not None]
        n, c = len(graded), sum(score >= 1 for score in graded)
        if kind == "pass":
            values.append(pass_at_k(n, c, k) if n >= k else None)
        else:
            values.append(c / n if n else None)
    return values


def failed(scores: Scores) -> int:
    """Samples whose grader failed."""
    return sum(score is None for samples in scores for score in samples)


def estimate(values: Iterable[float | None]) -> Estimate:
    """Mean and standard error (standard deviation with n - 1, by the root of n) of those that are not None."""
    given = list(values)
    kept = [value for value in given if value is not None]
    count = len(kept)
    if not count:
        return Estimate(math.nan, math.nan, 0, len(given))
    mean = math.fsum(kept) / count
    squares = math.fsum((value - mean) ** 2 for value in kept)
    se = math.sqrt(squares / (count - 1) / count) if count > 1 else math.nan
    return Estimate(mean, se, count, len(given) - count)


def paired(a: Sequence[float | None], b: Sequence[float | None]) -> Estimate:
    """a - b of two runs on the same problems, in the same order; a problem that either lacks is left out.

    What makes a problem hard for both cancels, so the standard error is that of the differences.
    """
    if len(a) != len(b):
        raise ValueError(f"runs of {len(a)} and {len(b)} problems cannot be paired; take the same problems.")
    return estimate(x - y if x is not None and y is not None else None for x, y in zip(a, b, strict=True))


def grouped(values: Sequence[float | None], labels: Sequence[object]) -> dict[str, Estimate]:
    """An estimate for each label (a level, a subject), in their order; problems without a label are in none."""
    groups: dict[str, list[float | None]] = {}
    for value, label in zip(values, labels, strict=True):
        if label is not None:
            groups.setdefault(str(label), []).append(value)
    return {label: estimate(groups[label]) for label in sorted(groups, key=_rank)}


def average(estimates: Iterable[Estimate]) -> Estimate:
    """The plain average over benchmarks, each with the same weight however many problems it has."""
    given = list(estimates)
    if not given:
        return Estimate(math.nan, math.nan, 0)
    return Estimate(
        math.fsum(each.mean for each in given) / len(given),
        math.sqrt(math.fsum(each.se**2 for each in given)) / len(given),
        sum(each.count for each in given),
        sum(each.left_out for each in given),
    )


def _rank(label: str) -> tuple[int, float, str]:
    """Numbers by value, then difficulties, then names by alphabet."""
    if re.fullmatch(r"[0-9]{1,9}", label):
        return 0, float(label), label
    return (1, DIFFICULTIES.index(label), label) if label in DIFFICULTIES else (2, 0.0, label)
