# SPDX-License-Identifier: Apache-2.0
"""pass@k against every subset, standard errors against a bootstrap, and what happens to samples nobody could grade."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparse_rl.evaluate.statistics import (
    Estimate,
    average,
    by_problem,
    estimate,
    failed,
    grouped,
    paired,
    parse_metric,
    pass_at_k,
)

SCORES = st.lists(st.sampled_from([0.0, 1.0, None]), min_size=4, max_size=4)


@pytest.mark.parametrize("n", range(1, 9))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(n):
    for c in range(n + 1):
        for k in range(1, n + 1):
            subsets = list(combinations([True] * c + [False] * (n - c), k))
            assert pass_at_k(n, c, k) == float(Fraction(sum(map(any, subsets)), len(subsets))), (n, c, k)


def test_pass_at_k_by_hand():
    assert pass_at_k(4, 1, 2) == 0.5  # 3 of the 6 pairs hold the right one
    assert pass_at_k(5, 2, 3) == 0.9  # one of 10 triples misses both
    assert pass_at_k(16, 0, 16) == 0.0 and pass_at_k(16, 1, 16) == 1.0


def test_pass_at_k_of_many_samples_is_exact():
    n, c, k = 100_000, 1, 50_000
    assert pass_at_k(n, c, k) == 0.5  # the one right sample is in half of the halves; C(n, k) has 30,000 digits
    assert pass_at_k(10_000, 1, 1) == 1e-4
    assert pass_at_k(10_000, 5_000, 10) == pytest.approx(1 - 0.5**10, abs=1e-5)


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_grows_with_k_and_with_right_samples(case):
    n, c, k = case
    value = pass_at_k(n, c, k)
    assert 0 <= value <= 1 and pass_at_k(n, c, 1) == c / n
    assert (value == 1) == (n - c < k) or math.comb(n - c, k) / math.comb(n, k) < 1e-15
    if k < n:
        assert pass_at_k(n, c, k + 1) >= value
    if c < n:
        assert pass_at_k(n, c + 1, k) >= value


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0), (0, 0, 1)])
def test_pass_at_k_of_nonsense_is_refused(n, c, k):
    with pytest.raises(ValueError, match=f"pass@{k} of {c} right samples among {n}"):
        pass_at_k(n, c, k)


def test_the_estimator_is_unbiased():
    """Its mean over draws of 6 samples is the true chance that 3 samples hold a right one."""
    draw = random.Random(seed := random.randrange(1 << 30))
    p = draw.uniform(0.1, 0.6)
    values = [pass_at_k(6, sum(draw.random() < p for _ in range(6)), 3) for _ in range(20_000)]
    found = estimate(values)
    assert abs(found.mean - (1 - (1 - p) ** 3)) < 5 * found.se, (seed, p)


def test_estimates_by_hand():
    # deviations of 1, 0, 0, 1 from 1/2 are 1/4 squared each: variance 1/3, standard error sqrt(1/12)
    assert estimate([1.0, 0.0, 0.0, 1.0]) == Estimate(0.5, pytest.approx(math.sqrt(1 / 12)), 4)
    assert estimate([1.0, None, 0.0, None]) == Estimate(0.5, pytest.approx(0.5), 2, left_out=2)
    one, none = estimate([0.25]), estimate([None])
    assert (one.mean, one.count) == (0.25, 1) and math.isnan(one.se)
    assert (none.count, none.left_out) == (0, 1) and math.isnan(none.mean)


def test_standard_errors_match_a_bootstrap():
    generator = np.random.default_rng(seed := random.randrange(1 << 30))
    solved = generator.binomial(8, generator.beta(1, 2, 200), 200) / 8
    other = np.clip(solved + generator.choice([-0.125, 0, 0.125], 200), 0, 1)
    chosen = generator.integers(0, 200, (4000, 200))
    assert estimate(solved).se == pytest.approx(solved[chosen].mean(axis=1).std(), rel=0.06), seed
    difference = (other - solved)[chosen].mean(axis=1).std()
    assert paired(list(other), list(solved)).se == pytest.approx(difference, rel=0.06), seed


def test_a_paired_difference_knows_more_than_two_means():
    draw = random.Random(seed := random.randrange(1 << 30))
    dense = [float(draw.random() < 0.5) for _ in range(300)]
    sparse = [value if draw.random() < 0.95 else 1 - value for value in dense]
    found = paired(sparse, dense)
    assert found.mean == pytest.approx(estimate(sparse).mean - estimate(dense).mean), seed
    assert found.se < 0.6 * math.hypot(estimate(sparse).se, estimate(dense).se), seed
    assert paired([1.0, None, 0.5, 1.0], [0.0, 1.0, None, 1.0]) == Estimate(0.5, pytest.approx(0.5), 2, left_out=2)
    with pytest.raises(ValueError, match="runs of 1 and 2 problems"):
        paired([1.0], [1.0, 0.0])


def test_samples_that_could_not_be_graded():
    scores = [[1.0, None, 0.0, 0.0], [0.0, 1.0, 0.0, 1.0], [None] * 4, [None, None, 1.0, 1.0]]
    assert failed(scores) == 7
    assert by_problem("avg@4", scores) == [pytest.approx(1 / 3), 0.5, None, 1.0]
    assert by_problem("mean@4", scores) == by_problem("avg@4", scores)
    # three samples with one right: 1 of 3 pairs misses it; four with two: 1 of 6
    assert by_problem("pass@2", scores) == [pytest.approx(2 / 3), pytest.approx(5 / 6), None, 1.0]
    assert by_problem("pass@4", scores) == [None, 1.0, None, None]
    assert estimate(by_problem("avg@4", scores)).left_out == 1


@given(st.lists(SCORES, min_size=1, max_size=6))
def test_a_failed_sample_is_as_if_it_had_not_been_drawn(scores):
    for metric in ("pass@1", "pass@2", "pass@4", "avg@4"):
        values = by_problem(metric, scores)
        for value, samples in zip(values, scores, strict=True):
            graded = [score for score in samples if score is not None]
            k = int(metric[-1])
            draws = [max(draw) for draw in combinations(graded, k)] if metric.startswith("pass") else graded
            assert value == (pytest.approx(sum(draws) / len(draws)) if draws else None)


def test_a_part_of_a_point_is_not_right():
    assert by_problem("avg@3", [[0.1, 0.99, 1.0]]) == [pytest.approx(1 / 3)]


def test_metrics_that_the_samples_do_not_give():
    with pytest.raises(ValueError, match="pass@4 of problems with 2 or 4 samples; draw 4"):
        by_problem("pass@4", [[1.0] * 4, [1.0] * 2])
    with pytest.raises(ValueError, match="avg@2 of problems with 4 samples"):
        by_problem("avg@2", [[1.0] * 4])
    for name in ("pass", "best@3", "pass@0", "pass@1.5", "avg@"):
        with pytest.raises(ValueError, match="is unknown; write pass@K"):
            parse_metric(name)
    assert parse_metric("pass@16") == ("pass", 16) and by_problem("pass@3", []) == []


def test_groups_in_their_order():
    values = [1.0, 0.0, 1.0, None, 0.0, 1.0, 1.0]
    found = grouped(values, [10, "2", 2, "2", "geometry", None, "algebra"])
    assert list(found) == ["2", "10", "algebra", "geometry"]
    assert found["2"] == Estimate(0.5, pytest.approx(0.5), 2, left_out=1)
    assert list(grouped([1.0] * 3, ["hard", "easy", "medium"])) == ["easy", "medium", "hard"]
    assert grouped([1.0], [None]) == {}


def test_the_average_of_benchmarks_is_plain():
    found = average([Estimate(0.2, 0.03, 1000, 1), Estimate(0.6, 0.04, 30)])
    assert found == Estimate(pytest.approx(0.4), pytest.approx(0.025), 1030, 1)  # hypot(3, 4) / 2
