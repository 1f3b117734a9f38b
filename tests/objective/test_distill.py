# SPDX-License-Identifier: Apache-2.0
"""The divergences of DistillSparse: numbers worked out by hand, and whose gradient each has."""

from __future__ import annotations

import math

import pytest
import torch

from sparse_rl.objective.distill import divergence, topk_kl


def test_values_by_hand():
    """log dense - log sparse = log 2 and 0: k3 = 2 - log 2 - 1, k2 = (log 2)^2 / 2."""
    dense, sparse = torch.tensor([0.4, 0.3]).log()[:, None], torch.tensor([0.2, 0.3]).log()[:, None]
    log2 = math.log(2.0)
    torch.testing.assert_close(divergence(dense, sparse, "forward"), torch.tensor([1.0 - log2, 0.0]))
    torch.testing.assert_close(divergence(dense, sparse, "reverse"), torch.tensor([log2**2 / 2, 0.0]))


def test_topk_by_hand_and_over_the_whole_vocabulary():
    """p = (.5, .25 | .25), q = (.25, .25 | .5): .5 log 2 + 0 - .25 log 2; all ids give the KL itself."""
    dense, sparse = torch.tensor([[0.5, 0.25]]).log(), torch.tensor([[0.25, 0.25]]).log()
    torch.testing.assert_close(topk_kl(dense, sparse), torch.tensor([0.25 * math.log(2.0)]))
    p, q = torch.randn(7, 30, dtype=torch.float64).log_softmax(-1), torch.randn(7, 30, dtype=torch.float64)
    expected = torch.nn.functional.kl_div(q.log_softmax(-1), p, log_target=True, reduction="none").sum(-1)
    torch.testing.assert_close(topk_kl(p, q.log_softmax(-1)), expected)


@pytest.mark.parametrize("kind", ["forward", "reverse", "topk"])
def test_each_has_the_gradient_it_is_named_by(kind):
    """In expectation over the sparse sampler's tokens, summed over the vocabulary; the dense side gets none."""
    dense = torch.randn(12, dtype=torch.float64).requires_grad_()
    logits = torch.randn(12, dtype=torch.float64, requires_grad=True)
    p, q = dense.log_softmax(-1), logits.log_softmax(-1)
    columns = [x[:, None] if kind != "topk" else torch.cat([x[:1, None], x[None]], dim=1) for x in (p, q)]
    chance = q.detach().exp() if kind != "topk" else torch.ones(1, dtype=torch.float64)
    got = torch.autograd.grad((chance * divergence(*columns, kind)).sum(), logits, retain_graph=True)[0]
    kl = (q.exp() * (q - p)).sum() if kind == "reverse" else (p.exp() * (p - q)).sum()
    torch.testing.assert_close(got, torch.autograd.grad(kl, logits, retain_graph=True)[0])
    assert torch.autograd.grad(divergence(*columns, kind).sum(), dense, allow_unused=True)[0] is None
