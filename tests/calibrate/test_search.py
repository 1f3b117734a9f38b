# SPDX-License-Identifier: Apache-2.0
"""Budgets to try, bins to pool, and the cheapest schedule against every other one."""

from __future__ import annotations

from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest

from sparse_rl.calibrate.search import budget_grid, cheapest, pool_bins, raise_budgets, with_budget
from sparse_rl.kv import RKV, Full, Streaming
from sparse_rl.kv.schedule import Schedule


def grid(policy=None, longest=37_000, count=18, page=16, **more):
    return budget_grid(policy or RKV(), longest, count=count, page=page, page_size=64, **more)


def test_the_grid_is_geometric_and_of_whole_pages():
    budgets = grid()
    assert len(budgets) == 18 and all(budget % 16 == 0 for budget in budgets)
    assert budgets[0] == pytest.approx(37_000 / 64, abs=16) and 37_000 <= budgets[-1] < 37_016
    factors = [after / before for before, after in pairwise(budgets)]
    assert max(factors) < 1.05 * min(factors)
    assert grid(lowest=512, highest=16_384)[0] == 512 and grid(lowest=512, highest=16_384)[-1] == 16_384
    assert grid(highest=50_000)[-1] < 37_016, "a budget above the longest context is the dense cache again"


def test_the_grid_begins_where_the_policy_can():
    assert grid(RKV(window=40, sinks=4), longest=400, page=8)[0] == 48
    assert grid(Streaming(sinks=5), longest=200, page=1, count=40)[0] == 5
    with pytest.raises(ValueError, match="no budget up to 32 is possible with rkv"):
        grid(RKV(window=100), longest=32)
    with pytest.raises(ValueError, match="'full' has no budget"):
        with_budget(Full(), 8)


def test_coarse_pages_leave_fewer_budgets():
    budgets = grid(longest=64, page=16)
    assert budgets == [16, 32, 48, 64]


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


def test_bins_without_an_answer():
    nan = float("nan")
    tails = np.array([[0.9, nan, 0.5, 0.5], [0.95, nan, 0.9, 0.7]])
    found = cheapest(tails, [16, 32], [0, 10, 20, 30], [0.86] * 4)
    assert [found.schedule.at(start) for start in (0, 10, 20, 30)] == [16, 16, 32, 32]
    assert found.met == (True, False, True, False) and found.measured == (True, False, True, True)


def test_raising():
    schedule, starts, budgets = Schedule((0, 20), (16, 64)), [0, 10, 20], [16, 32, 64, 128]
    before = raise_budgets(schedule, starts, budgets, 2, before=True)
    assert [before.at(start) for start in starts] == [32, 32, 64]
    itself = raise_budgets(schedule, starts, budgets, 2, before=False)
    assert [itself.at(start) for start in starts] == [16, 16, 128]
    first = raise_budgets(schedule, starts, budgets, 0, before=True)
    assert [first.at(start) for start in starts] == [32, 32, 64], "what follows is never smaller"
    most = Schedule((0,), (128,))
    assert raise_budgets(most, starts, budgets, 1, before=True) == most
