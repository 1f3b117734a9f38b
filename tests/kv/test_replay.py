# SPDX-License-Identifier: Apache-2.0
"""The sparse attention of whole completions says what the sampler said, under every kind of policy."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparse_rl.kv import (
    GKV,
    H2O,
    RKV,
    TOVA,
    Full,
    KeyDiff,
    Knorm,
    PagesMean,
    Quest,
    Random,
    SelectPolicy,
    SnapKV,
    Streaming,
    replay,
)
from sparse_rl.kv.replay import ReplayedRows
from sparse_rl.kv.schedule import Schedule
from sparse_rl.model.sampler_adapter import SamplerAdapter
from sparse_rl.rollout import Engine, EngineConfig, Sampling
from sparse_rl.score.at_ids import logprobs_at
from sparse_rl.score.head import Head
from sparse_rl.score.pack import flatten, pack
from sparse_rl.types import Prompt

PAGE = 16
POLICIES = [
    RKV(budget=24, interval=9, sinks=2),
    RKV(budget=16, interval=8, window=8, order="score"),
    SnapKV(budget=16, interval=8, window=4, protect_prompt=True),
    Streaming(budget=20, interval=7, sinks=3),
    PagesMean(budget=48, dense_layers=1),
    Quest(budget=48, first=0, last=1, dense_layers=0),
    RKV(budget=70, interval=9, select="quest", select_budget=48),
    H2O(budget=24, interval=9, index="shared"),
    TOVA(budget=20, interval=6, sinks=2, protect_prompt=True),
    KeyDiff(budget="20@0+32@90", interval=5),
    Knorm(budget=24, interval=9, recent=4),
    Random(budget=20, interval=1),
    GKV(budget="24@0+40@95", interval=8, window=8, index="shared"),
]


def replayed(loaded, rollouts, policy, temperature=1.0):
    """Log-probs of each rollout's tokens from packed sparse forwards."""
    completions, head = flatten(rollouts, loaded.model.device), Head(loaded.model)
    found = torch.zeros(len(completions.rows), dtype=loaded.shape.precise, device=loaded.model.device)
    for microbatch in pack(rollouts, 400):
        members = [rollouts[i] for i in microbatch.indices]
        rows = ReplayedRows(microbatch.boundaries, members, policy.selection, PAGE)
        inputs = microbatch.inputs(loaded.model.device) | {"kv": rows}
        ids = completions.token_ids[microbatch.tokens, None]
        found[microbatch.tokens] = logprobs_at(head, inputs, microbatch.predicting, ids, temperature)[:, 0]
    return found


def sampled(loaded, policy, prompts, **sampling):
    engine = Engine(loaded, policy, EngineConfig(rows=3, page_size=PAGE))
    settings = Sampling(n=2, stop_ids=(), **({"max_tokens": 40} | sampling))
    return engine.generate(prompts, settings, record_kept=True)


@pytest.mark.parametrize(
    ("policy", "family"),
    [*((policy, "llama") for policy in POLICIES), (POLICIES[0], "gemma3"), (POLICIES[4], "gemma3")],
    ids=lambda p: p if isinstance(p, str) else f"{p.name}-{p.budget}",
)
@torch.no_grad()
@pytest.mark.some(4)
def test_it_gives_the_samplers_log_probs(policy, family, tiny, prompts, monkeypatch):
    """Several cuts, short and long prompts, grouped heads, windows, blocks of a few queries."""
    monkeypatch.setattr(replay, "BLOCK", 9_000)
    loaded = tiny(family, layers=4, dtype=torch.float64)
    rollouts = sampled(loaded, policy, prompts(3, 77))
    assert isinstance(policy, SelectPolicy) or all(rollout.kv.num_compressions >= 2 for rollout in rollouts[2:])
    got = replayed(loaded, rollouts, policy)
    expected = torch.cat([rollout.sampler_logprobs for rollout in rollouts])
    torch.testing.assert_close(got.float().cpu(), expected, atol=1e-6, rtol=0)
    forgetful = [replace(rollout, kept_positions=None, kept_at=None) for rollout in rollouts]
    dense = replayed(loaded, forgetful, Full())
    assert (dense.cpu() - expected).abs().max() > 1e-3, "the cache holds all that matters"


@torch.no_grad()
def test_schedules_and_the_adapter_too(tiny, prompts, monkeypatch):
    policy = PagesMean(dense_layers=0, last=1)
    monkeypatch.setattr(PagesMean, "schedule", Schedule((0, 60, 98), (32, 48, 80)))
    loaded = tiny("qwen3", dtype=torch.float64)
    adapter = SamplerAdapter(loaded.model, r=3, alpha=6.0, seed=1)
    for pair in adapter.pairs:
        pair.b.normal_(std=0.1)
    plain = sampled(loaded, policy, prompts(90), temperature=0.7)
    with adapter.on(loaded.model):
        rollouts = sampled(loaded, policy, prompts(90), temperature=0.7)
        got = replayed(loaded, rollouts, policy, temperature=0.7)
    expected = torch.cat([rollout.sampler_logprobs for rollout in rollouts])
    torch.testing.assert_close(got.float().cpu(), expected, atol=1e-6, rtol=0)
    assert (replayed(loaded, rollouts, policy, temperature=0.7).cpu() - expected).abs().max() > 1e-2
    again = sampled(loaded, policy, prompts(90), temperature=0.7)
    assert all(torch.equal(a.sampler_logprobs, b.sampler_logprobs) for a, b in zip(again, plain, strict=True))


@pytest.mark.parametrize("policy", [POLICIES[0], POLICIES[4]], ids=lambda p: p.name)
def test_its_gradient_is_that_of_finite_differences(policy, tiny, prompts, monkeypatch):
    """Along the gradient itself, by the adapter's B. Norms compute in fp32, so the step cannot be much smaller."""
    monkeypatch.setattr(replay, "BLOCK", 9_000)
    loaded = tiny(dtype=torch.float64)
    rollouts = sampled(loaded, policy, prompts(60), max_tokens=30)
    adapter = SamplerAdapter(loaded.model, r=2, alpha=4.0, seed=0)
    bs = [pair.b for pair in adapter.pairs]
    with adapter.on(loaded.model):
        gradient = torch.autograd.grad(replayed(loaded, rollouts, policy).sum(), bs)
        slope = torch.stack([g.square().sum() for g in gradient]).sum().sqrt()
        sides = []
        for step in (1e-3, -1e-3):
            with torch.no_grad():
                for b, g in zip(bs, gradient, strict=True):
                    b.copy_(step * g / slope)
                sides.append(replayed(loaded, rollouts, policy).sum())
    torch.testing.assert_close((sides[0] - sides[1]) / 2e-3, slope, rtol=1e-2, atol=0)


@torch.no_grad()
def test_sequences_that_were_cut_alike_are_one_block(tiny, prompts):
    """Six samples of a prompt take no more blocks than one of them; a shorter one has a last block of its own."""
    loaded, policy = tiny(dtype=torch.float64), POLICIES[0]
    rollouts, cpu = sampled(loaded, policy, prompts(40, 40, 40)), torch.device("cpu")
    alone = ReplayedRows([0, 80], rollouts[:1], None, PAGE)._blocks(4, cpu)
    together = ReplayedRows([80 * i for i in range(7)], rollouts, None, PAGE)._blocks(4, cpu)
    assert [block.span for block in together] == [block.span for block in alone]
    assert all(len(block.offsets_R) == 6 for block in together) and len(alone) > 2
    shorter = ReplayedRows([0, 80, 159], rollouts[:2], None, PAGE)._blocks(4, cpu)
    assert [len(block.offsets_R) for block in shorter] == [2] * (len(alone) - 1) + [1, 1]


def test_one_token_has_no_decode_step_to_replay(tiny):
    loaded, policy = tiny(dtype=torch.float64), RKV(budget=24, interval=9)
    prompt = Prompt(ids=tuple(range(40)))
    rollouts = sampled(loaded, policy, [prompt], max_tokens=1)
    expected = torch.cat([rollout.sampler_logprobs for rollout in rollouts])
    torch.testing.assert_close(replayed(loaded, rollouts, policy).float().cpu(), expected, atol=1e-6, rtol=0)
