# SPDX-License-Identifier: Apache-2.0
"""Budgets to try, bins to pool, and the cheapest schedule against every other one."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest

from sparse_rl.calibrate import CalibrationConfig
from sparse_rl.calibrate.search import budget_grid, cheapest, lowered, pool_bins, raised, with_budget
from sparse_rl.kv import RKV, Full, PagesMean, Streaming


def grid(policy=None, longest=37_000, count=18, page=16, **more):
    return budget_grid(policy or RKV(), longest, count=count, page=page, page_size=64, **more)


def test_the_grid_is_geometric_and_of_whole_pages():
    budgets = grid()
    assert len(budgets) == 18 and all(budget % 16 == 0 for budget in budgets)
    assert budgets[0] == pytest.approx(37_000 / 64, abs=16) and 37_000 <= budgets[-1] < 37_016
    factors = [after / before for before, after in pairwise(budgets)]
    assert max(factors) < 1.05 * min(factors)
    assert grid(lowest=512, highest=16_384)[0] == 512 and grid(lowest=512, highest=16_384)[-1] == 16_384
    assert grid(highest=1000)[-1] == 992, "whole pages within what was asked for"
    assert grid(highest=50_000)[-1] < 37_016, "a budget above the longest context is the dense cache again"


def test_the_grid_begins_where_the_policy_can():
    assert grid(RKV(window=40, sinks=4), longest=400, page=8)[0] == 48
    assert grid(Streaming(sinks=5), longest=200, page=1, count=40)[0] == 5
    with pytest.raises(ValueError, match="no budget up to 32 is possible with rkv"):
        grid(RKV(window=100), longest=32)
    with pytest.raises(ValueError, match="lowest is 512, above the longest context, 200; give a smaller --lowest"):
        grid(lowest=512, longest=200)
    with pytest.raises(ValueError, match="no multiple of 16 from 17 to 31; give a smaller --page"):
        grid(lowest=17, highest=31, longest=200)
    with pytest.raises(ValueError, match="no multiple of 16 from 1 to 15"):
        grid(highest=15, longest=200)
    assert grid(highest=64) == [64], "below a 64th of the longest context there is nothing but the largest"
    with pytest.raises(ValueError, match="'full' has no budget"):
        with_budget(Full(), 8)


def test_coarse_pages_leave_fewer_budgets():
    budgets = grid(longest=64, page=16)
    assert budgets == [16, 32, 48, 64]


def test_a_policy_that_reads_pages_has_budgets_of_the_engines_pages():
    budgets = CalibrationConfig(page=8).grid(PagesMean(), 4096, page_size=32)
    assert len(budgets) > 10 and all(budget % 32 == 0 for budget in budgets)
    assert any(budget % 32 for budget in CalibrationConfig(page=8).grid(RKV(), 4096, page_size=32))


def test_bins_are_pooled_until_they_have_enough(seed):
    assert pool_bins([100, 30, 80, 0, 90, 20], 10, 90) == [(0, 10), (10, 30), (30, 60)]
    assert pool_bins([0, 0, 200, 0], 10, 100) == [(0, 30)]
    assert pool_bins([10, 10], 10, 100) == [(0, 20)]
    draw = np.random.default_rng(seed)
    counts = draw.integers(0, 50, 30).tolist()
    bins = pool_bins(counts, 7, 60)
    assert bins[0][0] == 0 and all(before[1] == after[0] for before, after in pairwise(bins))
    assert all(sum(counts[start // 7 : end // 7]) >= 60 for start, end in bins)


@pytest.mark.parametrize("trial", range(20))
def test_no_schedule_that_holds_the_targets_is_cheaper(trial, seed):
    draw = np.random.default_rng(seed)
    budgets, starts = [16, 32, 64, 128, 256], [0, 10, 20, 30]
    tails = np.sort(draw.random((5, 4)), axis=0) + draw.normal(0, 0.1, (5, 4))  # rising with the budget, and noise
    targets = (tails.max(axis=0) - draw.random(4) * 0.5).tolist()
    found = cheapest(tails, budgets, starts, targets)
    own = [found.schedule.at(start) for start in starts]
    holding = [
        [budgets[i] for i in chosen]
        for chosen in combinations_with_replacement(range(5), 4)  # never falling
        if all(tails[i, place] >= targets[place] for place, i in enumerate(chosen))
    ]
    if holding:
        assert all(found.met)
        assert own in holding
        assert all(mine <= other for schedule in holding for mine, other in zip(own, schedule, strict=True))
    else:
        assert not all(found.met)


def test_a_tail_at_the_target_meets_it():
    found = cheapest(np.array([[0.85], [0.86], [0.9]]), [16, 32, 64], [0], [0.86])
    assert found.schedule.budgets == (32,) and found.met == (True,)


def test_bins_without_an_answer():
    nan = float("nan")
    tails = np.array([[0.9, nan, 0.5, 0.5], [0.95, nan, 0.9, 0.7]])
    found = cheapest(tails, [16, 32], [0, 10, 20, 30], [0.86] * 4)
    assert [found.schedule.at(start) for start in (0, 10, 20, 30)] == [16, 16, 32, 32]
    assert found.met == (True, False, True, False) and found.measured == (True, False, True, True)


def test_raising():
    budgets = [16, 32, 64, 128]
    assert raised([16, 16, 64], [2], budgets) == [16, 16, 128]
    assert raised([16, 16, 64], [0, 1], budgets) == [32, 32, 64]
    assert raised([16, 16, 16], [0], budgets) == [32, 32, 32], "what follows is never smaller"
    assert raised([128, 128, 128], [1], budgets) == [128, 128, 128]


@pytest.mark.parametrize("trial", range(20))
def test_no_bin_of_what_was_lowered_can_go_lower(trial, seed):
    """Against every schedule there is; no bin falls below its least, and few schedules are run."""
    draw = np.random.default_rng(seed)
    budgets, target = sorted(draw.choice(np.arange(10, 100), 6, replace=False).tolist()), 0.5 + 0.4 * draw.random()
    scale = np.sort(draw.uniform(5, 60, 4))
    needs = np.triu(draw.random((4, 4)), 1).T  # of what bin j keeps, how much hangs on bin i < j

    def tails(own):
        kept = [min([own[j], *(own[i] + (1 - needs[j, i]) * 40 for i in range(j))]) for j in range(4)]
        return 1 - np.exp(-np.array(kept) / scale)

    runs = []

    def holds(own):
        assert list(own) == sorted(own)
        runs.append(tuple(own))
        return bool((tails(own) >= target).all())

    alone = np.array([[1 - np.exp(-budget / each) for each in scale] for budget in budgets])
    found = cheapest(alone, budgets, range(4), [target] * 4)
    least = [found.schedule.at(i) for i in range(4)]
    top = [budgets[-1]] * 4
    if not holds(top):
        return
    own = lowered(top, least, budgets, holds)
    assert len(set(runs)) <= 1 + 4 * 5, "a bin: one step, half of the rest three times, one step again at the end"
    assert (tails(own) >= target).all() and all(a >= b for a, b in zip(own, least, strict=True))
    every = [each for each in combinations_with_replacement(budgets, 4) if (tails(each) >= target).all()]
    assert not [each for each in every if each != tuple(own) and all(a <= b for a, b in zip(each, own, strict=True))]
    assert tuple(own) == min(every), "the first bin's is the smallest there is, then the second's"


def test_where_one_step_down_fails_one_run_says_so():
    runs = []
    assert lowered([64] * 4, [16] * 4, [16, 32, 48, 64], lambda own: runs.append(own) is not None) == [64] * 4
    assert runs == [[48, 64, 64, 64]], "the others cannot be smaller than the first"
