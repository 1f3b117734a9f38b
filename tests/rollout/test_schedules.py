# SPDX-License-Identifier: Apache-2.0
"""The engine with a budget that grows with the context: the dense model with a mask (replay.py), on any batching."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from replay import replay_logprobs, rollout_visibility, scheduled_firings
from schedules import named
from small_engine import engine

from sparse_rl.kv import RKV, SnapKV, Streaming
from sparse_rl.rollout import Sampling
from sparse_rl.rollout.scheduler import entries_needed
from sparse_rl.rollout.sequence import Sequence

RISING = ((0, 30, 45, 70, 110), (12, 16, 17, 33, 40))  # slower and faster than a cache grows, within an interval too
SAMPLING = Sampling(max_tokens=70, stop_ids=(), seed=5)
POLICIES = [
    Streaming(budget=named(*RISING), interval=7),
    SnapKV(budget=named(*RISING), interval=5, window=4, protect_prompt=True),
    RKV(budget=named(*RISING), interval=9, sinks=2),
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_engine_equals_masked_dense_model(policy, tiny, reference, prompts):
    """Rows of different contexts, so of different budgets, are cut together."""
    loaded, model = tiny(dtype=torch.float64), reference(dtype=torch.float64)
    rollouts = engine(loaded, policy).generate(prompts(3, 42), SAMPLING, record_kept=True)
    for rollout in rollouts:
        assert len({kept.shape[-1] for kept in rollout.kept_positions}) >= 2
        ids = torch.tensor([[*rollout.prompt.ids, *rollout.token_ids.tolist()]], device=model.device)
        visible = rollout_visibility(rollout, policy, loaded.shape)
        logprobs = replay_logprobs(model, ids, visible)[0, len(rollout.prompt.ids) - 1 :]
        expected = logprobs.gather(-1, rollout.token_ids.to(ids.device)[:, None])[:, 0].float().cpu()
        torch.testing.assert_close(rollout.sampler_logprobs, expected, atol=1e-6, rtol=0)


def test_neither_rows_nor_the_pool_nor_the_pace_change_a_cut(tiny, prompts, monkeypatch):
    policy, given = POLICIES[0], prompts(20, 33)
    first = engine(tiny(dtype=torch.float64), policy, rows=1).generate(given, SAMPLING, record_kept=True)
    sequences = [Sequence(request=0, prompt_idx=0, prompt_len=n, max_tokens=70) for n in (20, 33)]
    least = max(-(-entries_needed(policy, sequence) // 16) for sequence in sequences)
    monkeypatch.setattr("sparse_rl.rollout.loop.pace", lambda device: (8, 1))
    for config in ({"rows": 2}, {"rows": 2, "pool_pages": least}):
        sampler = engine(tiny(dtype=torch.float64), policy, **config)
        for one, other in zip(first, sampler.generate(given, SAMPLING, record_kept=True), strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            assert one.kv.held == other.kv.held
            for kept, others in zip(one.kept_positions, other.kept_positions, strict=True):
                assert torch.equal(kept, others)
        assert sampler.stats.num_preemptions == 0
    with pytest.raises(ValueError, match=f"needs {least}; .*, or lower kv.budget or kv.interval"):
        engine(tiny(dtype=torch.float64), policy, pool_pages=least - 1).generate(given, SAMPLING)


def test_one_budget_throughout_is_that_budget(tiny, prompts):
    given, steps = prompts(20, 61), RISING[0]
    same = replace(POLICIES[2], budget=named(steps, (24,) * len(steps)))
    results = [engine(tiny(), policy).generate(given, SAMPLING) for policy in (same, replace(same, budget=24))]
    for one, other in zip(*results, strict=True):
        assert one.kv == other.kv and one.kv.num_compressions > 5
        assert torch.equal(one.token_ids, other.token_ids)
        assert torch.equal(one.sampler_logprobs, other.sampler_logprobs)


def test_the_kv_that_was_saved_is_that_of_the_schedule(tiny, prompts):
    policy = POLICIES[0]
    (rollout,) = engine(tiny(), policy).generate(prompts(20), SAMPLING)
    held, steps, left = 20, [], dict(scheduled_firings(20, 70, policy))
    assert left == {20: 12, 27: 12, 38: 16, 46: 17, 53: 17, 60: 17, 67: 17}, "by hand; at 70 tokens 33 + 7 are due"
    for seen in range(20, 89):
        held = left.get(seen, held) + 1
        steps.append(held)
    assert rollout.kv.held == tuple(steps) and rollout.kv.full == sum(range(21, 90))
    assert rollout.kv.saved_frac == pytest.approx(1 - sum(steps) / sum(range(21, 90)))
    assert rollout.kv.peak == max(steps) == 17 + 22 and rollout.kv.num_compressions == len(left)


def test_another_budget_between_calls_is_an_engine_with_that_budget(tiny, prompts):
    """Smaller, larger and by steps; decode steps are made anew only where a row needs more room than before."""
    loaded, given = tiny(), prompts(3, 42)
    moving, made = engine(loaded, RKV(budget=24, interval=5, window=4)), []
    for budget in (24, 12, 60, 61, "16@0+40@50"):
        policy = RKV(budget=budget, interval=5, window=4)
        moving.use(policy)
        got, expected = (each.generate(given, SAMPLING) for each in (moving, engine(loaded, policy)))
        for one, other in zip(got, expected, strict=True):
            assert torch.equal(one.token_ids, other.token_ids) and one.kv.held == other.kv.held
        made.append(next(iter(moving.decoders.values())))
    assert made[0] is made[1] and made[1] is not made[2] and made[2] is made[3] is made[4]
