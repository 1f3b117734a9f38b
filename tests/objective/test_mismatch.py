# SPDX-License-Identifier: Apache-2.0
"""Overlap from the top of a distribution: bounds that hold, and the exact value when the top is everything."""

from __future__ import annotations

import pytest
import torch

from sparse_rl.objective.mismatch import overlap_bounds


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


def test_overlap_by_hand():
    q, p = torch.tensor([[0.5, 0.3]]), torch.tensor([[0.2, 0.4]])
    # min: 0.2 + 0.3 = 0.5; left over: q 0.2, p 0.4, so at most 0.2 more.
    lower, upper = overlap_bounds(q.log(), p.log())
    assert (lower.item(), upper.item()) == (pytest.approx(0.5), pytest.approx(0.7))
