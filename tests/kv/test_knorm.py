# SPDX-License-Identifier: Apache-2.0
"""Norms that differ by rounding alone are ties: what `knorm` keeps does not hang on the last bits."""

from __future__ import annotations

import torch

from sparse_rl.kv import Knorm
from sparse_rl.kv.knorm import rounded
from sparse_rl.rollout import Engine, EngineConfig, Sampling


def test_rounding_forgets_noise_and_keeps_order():
    x = torch.rand(10_000).mul(8).exp()
    assert ((rounded(x) / x - 1).abs() <= 2**-13).all()
    ascending = x.sort().values
    assert (rounded(ascending).diff() >= 0).all() and len(rounded(x).unique()) > 5_000
    noise = 1 + 2e-6 * (torch.rand(100) - 0.5)
    for norm in (4.0, 11.3137, 2.5e-3):  # none of them half-way between two
        assert len(rounded(norm * noise).unique()) == 1
    step = 2**-12  # of 13 bits from 1 to 2
    assert rounded(torch.tensor([0.0, 1.0, 1 + 0.4 * step, 1 + 1.5 * step])).tolist() == [0.0, 1.0, 1.0, 1 + 2 * step]


def test_keys_of_one_norm_leave_the_latest(tiny):
    """Tokens that repeat have keys of one norm in the first layer, whatever the rotation; fp32 on purpose."""
    engine = Engine(tiny("llama"), Knorm(budget=12, interval=6), EngineConfig(rows=1, page_size=16))
    (rollout,) = engine.generate([[7] * 40], Sampling(max_tokens=1, stop_ids=()), record_kept=True)
    assert (rollout.kept_positions[0][0] == torch.arange(28, 40)).all()
