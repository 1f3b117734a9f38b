# SPDX-License-Identifier: Apache-2.0
"""The tail by context length, and how sure a share of bad tokens is."""

from __future__ import annotations

import math

import pytest
import torch

from sparse_rl.kv import RKV
from sparse_rl.objective.tail import Evidence, tails
from sparse_rl.train.control import tail_metrics


def test_tails_by_hand():
    """Contexts 0-9 and 10-19; of 20 tokens each, the lowest is the 5th percentile."""
    overlap = torch.cat([torch.linspace(0.5, 1.0, 20), torch.full((20,), 0.9)])
    log_xi = torch.zeros(40)
    log_xi[0] = log_xi[1] = math.log(9e-5)
    log_xi[2] = math.log(1.1e-4)
    contexts = torch.arange(10).repeat(4).sort().values.repeat(1) % 10 + torch.tensor([0] * 20 + [10] * 20)
    rows = torch.tensor([7] * 15 + [9] * 5 + [9] * 20)
    one, two = tails(overlap, log_xi, contexts, rows, torch.ones(40), width=10, target=0.86, quantile=0.05)
    assert (one.start, two.start, one.tokens, two.tokens) == (0, 10, (15.0, 5.0), (20.0,))
    assert one.quantile == pytest.approx(0.5) and two.quantile == pytest.approx(0.9)
    assert one.under == (14.0, 0.0) and two.under == (0.0,)  # 0.5 + 0.5 i / 19 < 0.86 for i <= 13
    assert one.far == (12.0, 0.0) and two.far == (0.0,)  # < 0.8 for i <= 11
    assert one.hazard == (2.0, 0.0) and two.hazard == (0.0,)
    assert one.share(one.under) == pytest.approx(14 / 20)


@pytest.mark.parametrize(("tokens", "quantile"), [(19, 0.05), (99, 0.01), (1, 0.5)])
def test_a_bin_with_few_tokens_is_there_without_a_quantile(tokens, quantile):
    for count in (tokens, tokens + 1):
        zeros, where = torch.zeros(count), torch.full((count,), 25)
        (found,) = tails(zeros, zeros, where, where, zeros + 2, width=10, target=0.5, quantile=quantile)
        assert found.start == 20 and found.under == pytest.approx((count,))
        metrics = tail_metrics([found], RKV())
        assert (found.quantile is None) == ("tail/20/overlap" not in metrics) == (count == tokens)
        assert ("tail/overlap_lowest" in metrics) == (count > tokens) and metrics["tail/20/tokens"] == count


def test_evidence_by_hand():
    """Of 100 tokens in four rollouts 25 are bad, 20 are allowed: 5 above it, by 10 - 5 = 5 and -5, -5, 10 each."""
    evidence = Evidence()
    evidence.add((25.0, 25.0), (10.0, 0.0), 0.2)
    evidence.add((25.0, 25.0), (0.0, 15.0), 0.2)
    assert (evidence.tokens, evidence.bad, evidence.squares) == (100.0, 25.0, 25.0 + 25.0 + 25.0 + 100.0)
    assert evidence.above(0.2) == pytest.approx(5 / math.sqrt(175))
    alike = Evidence()
    alike.add((50.0, 50.0), (10.0, 10.0), 0.2)  # no better known than 100 independent tokens
    assert alike.error(0.2) == pytest.approx(math.sqrt(100 * 0.2 * 0.8))


def test_the_share_under_the_target_says_whether_the_quantile_meets_it():
    for _ in range(50):
        overlap, weights = torch.rand(200), torch.randint(1, 5, (200,)).double()
        contexts, rows = torch.zeros(200, dtype=torch.long), torch.randint(0, 9, (200,))
        (found,) = tails(overlap, torch.zeros(200), contexts, rows, weights, width=10, target=0.1, quantile=0.1)
        under = found.share(found.under)
        assert (under < 0.1) == (found.quantile >= 0.1) or under == pytest.approx(0.1)
        assert sum(found.tokens) < 200
