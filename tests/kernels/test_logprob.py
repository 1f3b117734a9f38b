# SPDX-License-Identifier: Apache-2.0
"""Passes over the logits against fp64 autograd, on random rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_rl.kernels.logprob import GROUP, logprob_gradient_ref, logsumexp_ref, most_likely
from sparse_rl.kernels.logprob_triton import logprob_gradient_triton, logsumexp_triton

IMPLEMENTATIONS = {"ref": (logsumexp_ref, logprob_gradient_ref), "triton": (logsumexp_triton, logprob_gradient_triton)}


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("size", [7, 4096, 5003])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_and_their_gradient(name, size, temperature, device):
    logsumexp, gradient = IMPLEMENTATIONS[name]
    logits = 8 * torch.randn(6, size, device=device)
    logits[0, 1], logits[1, :3] = 90.0, float("-inf")  # a certain token, and impossible ones
    ids, weights = torch.randint(3, size, (6,), device=device), torch.randn(6, device=device)
    exact = logits.double().requires_grad_()
    lse = torch.logsumexp(exact / temperature, dim=-1)
    logprobs = (exact / temperature).gather(1, ids[:, None])[:, 0] - lse
    (wanted,) = torch.autograd.grad((logprobs * weights.double()).sum(), exact)
    got = logsumexp(logits, temperature)
    torch.testing.assert_close(got.double(), lse.detach(), atol=1e-5, rtol=1e-6)
    torch.testing.assert_close(
        gradient(logits.clone(), got, ids, weights, temperature).double(), wanted, atol=1e-5, rtol=1e-5
    )


def test_rows_of_a_wider_tensor(device):
    wide = torch.randn(3, 40, device=device)
    logits, ids, weights = wide[:, :33], torch.tensor([0, 32, 5], device=device), torch.ones(3, device=device)
    lse = logsumexp_triton(logits, 1.0)
    torch.testing.assert_close(lse, logsumexp_ref(logits, 1.0))
    rest = wide[:, 33:].clone()
    expected = logprob_gradient_ref(logits, lse, ids, weights, 1.0)
    torch.testing.assert_close(logprob_gradient_triton(logits, lse, ids, weights, 1.0), expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(wide[:, 33:], rest), "nothing else is written"


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 8 * GROUP), st.integers(1, 24), st.booleans(), st.integers(0, 2**31))
def test_the_most_likely_are_those_of_a_sort(num_tokens, size, count, ties, seed):
    generator = torch.Generator().manual_seed(seed)
    count = min(count, size)
    logits = torch.randn(num_tokens, size, generator=generator)
    logits = logits.mul(2).round() if ties else logits
    ids = most_likely(logits, count)
    assert torch.equal(logits.gather(1, ids), logits.topk(count).values)
    assert all(len(set(row)) == count for row in ids.tolist()), "no id twice"
