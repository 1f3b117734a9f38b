# SPDX-License-Identifier: Apache-2.0
"""Importance kernels where the policies' own tests do not reach: dead entries, several blocks, low precision."""

from __future__ import annotations

import pytest
import slow_policies
import torch

from sparse_rl.kernels import importance
from sparse_rl.kernels.importance import attention_importance_ref, redundancy_ref


def random(*size, seed=0):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("block", [8, 256])
def test_redundancy_of_live_entries_alone(block, monkeypatch):
    monkeypatch.setattr(importance, "SIMILARITY_BLOCK", block)
    k = random(1, 2, 30, 6)
    live = torch.rand(1, 2, 30, generator=torch.Generator().manual_seed(1)) < 0.7
    live[..., :3] = False
    got = redundancy_ref(k, live, threshold=0.5)
    for head in range(2):
        alive = live[0, head]
        expected = slow_policies.redundancy(k[0, head][alive].numpy(), threshold=0.5)
        torch.testing.assert_close(got[0, head][alive], torch.from_numpy(expected))
        assert not got[0, head][~alive].any()


def test_every_row_has_its_own_scale():
    k, q, candidates = random(2, 2, 20, 6), random(2, 4, 3, 6, seed=1), torch.ones(2, 2, 20, dtype=torch.bool)
    scale = torch.tensor([0.5, 3.0], dtype=torch.float64)
    both = attention_importance_ref(k, q, candidates, scale_B=scale, kernel=3)
    alone = attention_importance_ref(k[1:], q[1:], candidates[1:], scale_B=scale[1:], kernel=3)
    torch.testing.assert_close(both[1:], alone)


def test_half_precision_keys_are_scored_in_fp32():
    k, q = random(1, 2, 20, 6).bfloat16(), random(1, 4, 3, 6, seed=1).bfloat16()
    live, scale = torch.ones(1, 2, 20, dtype=torch.bool), torch.ones(1)
    attention = attention_importance_ref(k, q, live, scale_B=scale, kernel=3)
    exact = attention_importance_ref(k.double(), q.double(), live, scale_B=scale.double(), kernel=3)
    torch.testing.assert_close(attention.double(), exact, atol=1e-6, rtol=0)
    redundancy = redundancy_ref(k, live, threshold=0.5)
    torch.testing.assert_close(redundancy.double(), redundancy_ref(k.double(), live, threshold=0.5), atol=1e-6, rtol=0)
