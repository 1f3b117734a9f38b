# SPDX-License-Identifier: Apache-2.0
"""Overlap from the top of a distribution: bounds that hold, and the exact value when the top is everything."""

from __future__ import annotations

import math

import pytest
import torch

from sparse_rl.objective.mismatch import diagnose, overlap_bounds, overlap_top, weighted_quantiles


@pytest.mark.parametrize("k", [1, 3, 7, 20])
def test_bounds_enclose_the_exact_overlap(k):
    generator = torch.Generator().manual_seed(k)
    q = torch.softmax(2 * torch.randn(500, 20, generator=generator, dtype=torch.float64), -1)
    p = torch.softmax(q.log() + torch.randn(500, 20, generator=generator, dtype=torch.float64), -1)
    exact = torch.minimum(p, q).sum(-1)
    ids = q.topk(k, dim=-1).indices
    lower, upper = overlap_bounds(q.gather(-1, ids).log(), p.gather(-1, ids).log())
    assert (lower <= exact + 1e-12).all() and (exact <= upper + 1e-12).all()
    if k == 20:
        torch.testing.assert_close(lower, exact)
        torch.testing.assert_close(upper, exact)


def test_overlap_of_two_top_lists_by_hand():
    """Tokens 7 and 8 are in both lists: min(0.5, 0.3) + min(0.3, 0.4)."""
    sampler = torch.tensor([[0.5, 0.3, 0.1]]).log()
    dense = torch.tensor([[0.4, 0.3, 0.2]]).log()
    got = overlap_top(torch.tensor([[7, 8, 9]]), sampler, torch.tensor([[8, 7, 5]]), dense)
    assert got.tolist() == pytest.approx([0.3 + 0.3])


def test_overlap_by_hand():
    q, p = torch.tensor([[0.5, 0.3]]), torch.tensor([[0.2, 0.4]])
    # min: 0.2 + 0.3 = 0.5; left over: q 0.2, p 0.4, so at most 0.2 more.
    lower, upper = overlap_bounds(q.log(), p.log())
    assert (lower.item(), upper.item()) == (pytest.approx(0.5), pytest.approx(0.7))


def test_diagnostics_by_hand():
    """Two rollouts, the second standing for three; its last token was not the sampler's choice."""
    xi = torch.tensor([0.5, 2.0, 1.0, 1e-5, 7.0])
    mask, rows = torch.tensor([True, True, True, True, False]), torch.tensor([0, 0, 1, 1, 1])
    overlap = torch.tensor([0.9, 0.8, 0.7, 0.1, 0.0])
    got = diagnose(xi.log(), mask, rows, torch.tensor([1.0, 3.0]), {"overlap": overlap})
    weights, kept = [1, 1, 3, 3], [0.5, 2.0, 1.0, 1e-5]
    mean_xi = sum(w * x for w, x in zip(weights, kept, strict=True)) / 8
    mean_log = sum(w * math.log(x) for w, x in zip(weights, kept, strict=True)) / 8
    mean_square = sum(w * x * x for w, x in zip(weights, kept, strict=True)) / 8
    assert got["rollout_corr/kl"] == pytest.approx(-mean_log, rel=1e-5)
    assert got["rollout_corr/k3_kl"] == pytest.approx(mean_xi - mean_log - 1, rel=1e-5)
    assert got["mismatch/ess_frac"] == pytest.approx(mean_xi**2 / mean_square, rel=1e-5)
    assert got["mismatch/catastrophic_frac"] == pytest.approx(3 / 8)
    assert got["mismatch/lowest_log_xi_mean"] == pytest.approx((math.log(0.5) + 3 * math.log(1e-5)) / 4, rel=1e-5)
    assert got["mismatch/xi_p50"] == pytest.approx(0.5)  # 1e-5 has 3/8 of the weight, 0.5 reaches 4/8
    assert got["mismatch/xi_p99"] == pytest.approx(2.0)
    assert got["mismatch/overlap_mean"] == pytest.approx((0.9 + 0.8 + 3 * 0.7 + 3 * 0.1) / 8)
    assert got["mismatch/overlap_p05"] == pytest.approx(0.1)


def test_shares_of_rollouts_by_hand():
    """The third rollout has no token of the sampler's and counts nowhere; only the mean is clamped."""
    log_xi = torch.tensor([-30.0, 0.0, 0.0, 0.0])
    mask, rows = torch.tensor([True, True, True, False]), torch.tensor([0, 0, 1, 2])
    got = diagnose(log_xi, mask, rows, torch.tensor([3.0, 1.0, 2.0]))
    assert got["mismatch/catastrophic_rollout_frac"] == pytest.approx(3 / 4)
    assert got["mismatch/lowest_log_xi_mean"] == pytest.approx(-30.0 * 3 / 4)
    assert got["rollout_corr/kl"] == pytest.approx(20.0 * 3 / 7)


def test_weighted_quantiles_equal_those_of_repeated_values():
    values, counts = torch.tensor([3.0, 1.0, 2.0]), torch.tensor([1.0, 5.0, 4.0])
    assert weighted_quantiles(values, counts, [0.01, 0.5, 0.51, 0.9, 0.91, 1.0]) == [1.0, 1.0, 2.0, 2.0, 3.0, 3.0]
