# SPDX-License-Identifier: Apache-2.0
"""A cache with room for everything gives the dense result: log_xi at rounding, `generate`'s own tokens."""

from __future__ import annotations

import pytest
import torch

from sparse_rl.kv import RKV, Full, SnapKV, Streaming
from sparse_rl.model.tiny import FAMILIES, WINDOW
from sparse_rl.rollout import Engine, EngineConfig, Sampling
from sparse_rl.score import score

ROOMY = [Full(), Streaming(budget=1000), SnapKV(budget=1000), RKV(budget=1000)]


def teacher_forced(model, rollout):
    ids = torch.tensor([[*rollout.prompt.ids, *rollout.token_ids.tolist()]], device=model.device)
    with torch.no_grad():
        logprobs = torch.log_softmax(model(ids).logits[0, :-1].float(), dim=-1)
    return logprobs.gather(-1, ids[0, 1:, None])[-len(rollout.token_ids) :, 0].cpu()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.some(3)
def test_log_xi_is_rounding(family, tiny, reference, prompts):
    loaded = tiny(family)
    windowed = ("qwen2", "mistral", "gemma2", "gemma3", "gpt_oss")
    assert any(w is not None and w <= 32 for w in loaded.shape.windows) == (family in windowed)
    for policy in (ROOMY[0], ROOMY[3]):
        engine = Engine(loaded, policy, EngineConfig(rows=4, page_size=16))
        rollouts = engine.generate(prompts(1, 7, 64, 90), Sampling(max_tokens=40, n=2, stop_ids=()))
        assert max(len(r.prompt.ids) + len(r.token_ids) for r in rollouts) > 2 * WINDOW
        for rollout in rollouts:
            log_xi = teacher_forced(reference(family), rollout) - rollout.sampler_logprobs
            assert log_xi.abs().max() <= 1e-4
            assert rollout.kv.num_compressions == 0
        for rollout, dense in zip(rollouts, score(loaded.model, rollouts), strict=True):
            assert (dense.dense_logprobs - rollout.sampler_logprobs).abs().max() <= 1e-4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.some(3)
def test_greedy_equals_generate(family, tiny, reference, prompts):
    batch = prompts(3, 40, 61)
    engine = Engine(tiny(family), RKV(budget=1000), EngineConfig(rows=4, page_size=16))
    rollouts = engine.generate(batch, Sampling(max_tokens=40, temperature=0.0, stop_ids=()))
    model = reference(family)
    for prompt, rollout in zip(batch, rollouts, strict=True):
        ids = torch.tensor([prompt], device=model.device)
        expected = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=40,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert rollout.token_ids.tolist() == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("policy", ROOMY, ids=lambda policy: policy.name)
@pytest.mark.some(2)
def test_every_policy_with_room_samples_the_dense_tokens(policy, tiny, prompts):
    sampling = Sampling(max_tokens=40, n=2, seed=3, stop_ids=())
    loaded = tiny(dtype=torch.float64)
    dense = Engine(loaded, Full(), EngineConfig(rows=4)).generate(prompts(5, 30), sampling)
    sparse = Engine(loaded, policy, EngineConfig(rows=4)).generate(prompts(5, 30), sampling)
    assert [r.token_ids.tolist() for r in sparse] == [r.token_ids.tolist() for r in dense]
    assert all(r.kv.saved_frac == 0.0 for r in sparse)


def test_an_evicted_cache_is_not_dense(tiny, reference, prompts):
    """The tests above can fail: the same check with a small budget does."""
    engine = Engine(tiny(), RKV(budget=16, interval=8), EngineConfig(rows=4, page_size=16))
    rollouts = engine.generate(prompts(7, 64), Sampling(max_tokens=80, stop_ids=()))
    worst = max((teacher_forced(reference(), r) - r.sampler_logprobs).abs().max() for r in rollouts)
    assert worst > 0.1


def test_a_budget_that_covers_every_window_loses_nothing(tiny, reference, prompts):
    """All layers slide, entries outside the window go first: 23 entries and the next token's are then all it sees."""
    loaded = tiny("mistral")
    assert set(loaded.shape.windows) == {WINDOW}
    tight = {"budget": WINDOW - 1, "interval": 8}
    for policy in (Streaming(**tight, sinks=0), Streaming(**tight, sinks=4), SnapKV(**tight), RKV(**tight)):
        engine = Engine(loaded, policy, EngineConfig(rows=4, page_size=16))
        for rollout in engine.generate(prompts(7, 64), Sampling(max_tokens=64, stop_ids=())):
            assert rollout.kv.num_compressions >= 5
            log_xi = teacher_forced(reference("mistral"), rollout) - rollout.sampler_logprobs
            assert log_xi.abs().max() <= 1e-4
