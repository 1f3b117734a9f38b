# SPDX-License-Identifier: Apache-2.0
"""SparseCache under transformers' `generate`: the engine's tokens, log-probs and memory."""

from __future__ import annotations

import pytest
import torch
from padded_batch import NEW, generate, padded
from plain_torch import run_triton
from schedules import named

import sparse_rl
from sparse_rl.kv import RKV, EvictPolicy, Full, SnapKV, Streaming, build_policy
from sparse_rl.kv.sparse_cache import SparseCache
from sparse_rl.rollout import Engine, EngineConfig, Sampling

LENGTHS = (7, 41, 23, 30)  # the second and the fourth are over every budget below


def rollouts(loaded, prompts, policy):
    engine = Engine(loaded, policy, EngineConfig(rows=4, page_size=16))
    return engine.generate(prompts, Sampling(max_tokens=NEW, temperature=0.0, stop_ids=()))


CASES = [  # qwen2 has sliding layers among full ones
    ("qwen2", Full()),
    ("llama", Streaming(budget=16, interval=4, sinks=2)),
    ("qwen2", SnapKV(budget=20, interval=7, window=4)),
    ("llama", RKV(budget=23, interval=9, window=6, sinks=1)),  # just as long as a prompt
    ("qwen2", RKV(budget=24, interval=9, window=6)),
    ("llama", RKV(budget=24, interval=5, order="score")),
    ("llama", SnapKV(budget=named((0, 25, 32), (16, 19, 26)), interval=5, window=4)),
    ("qwen2", SnapKV(budget=16, interval=5, window=3, protect_prompt=True)),
    ("llama", SnapKV(budget=20, interval=6, window=4, index="shared")),
    ("qwen2", build_policy("random", budget=16, interval=6, recent=2)),
    ("llama", build_policy("knorm", budget=16, interval=6)),
    ("qwen2", build_policy("keydiff", budget=16, interval=6)),
    ("llama", build_policy("tova", budget=16, interval=6)),
    ("qwen2", build_policy("h2o", budget=16, interval=6, window=8, recent=4)),
    ("llama", build_policy("gkv", budget=20, interval=6, window=4)),
    ("llama", build_policy("pages_mean", budget=48, last=1, dense_layers=1)),  # of the 81 entries of the longest
    ("llama", Streaming(budget=64, interval=4, select="quest", select_budget=48, sinks=2)),
]


@pytest.mark.parametrize(("family", "policy"), CASES, ids=[f"{family}-{policy.name}" for family, policy in CASES])
@pytest.mark.some(4)
def test_tokens_of_a_padded_batch_are_the_engines(family, policy, tiny, prompts):
    layers = 4 if getattr(policy, "select", "none") != "none" else 2  # two read all
    loaded = tiny(family, layers=layers, dtype=torch.float64)
    cache = SparseCache(policy)
    given = prompts(*LENGTHS, seed=3)
    tokens, logprobs = generate(loaded.model, given, cache)
    expected = rollouts(loaded, given, policy)
    assert tokens.tolist() == [rollout.token_ids.tolist() for rollout in expected]
    torch.testing.assert_close(
        logprobs.float(), torch.stack([r.sampler_logprobs for r in expected]).to(logprobs.device)
    )
    if isinstance(policy, EvictPolicy) and policy.budget != 64:
        fired = cache.num_compressions
        assert fired == [rollout.kv.num_compressions for rollout in expected] and min(fired) >= 2


IN_FP32 = [
    ("llama", RKV(budget=20, interval=6)),
    ("gemma3", RKV(budget=20, interval=6)),
    ("llama", build_policy("knorm", budget=20, interval=6)),
    ("qwen3", build_policy("knorm", budget=20, interval=6)),  # norms of keys all alike
    ("llama", build_policy("h2o", budget=20, interval=6)),
    ("llama", build_policy("quest", budget=48, dense_layers=1)),
]


@pytest.mark.parametrize(("family", "policy"), IN_FP32, ids=[f"{family}-{policy.name}" for family, policy in IN_FP32])
@pytest.mark.some(3)
def test_log_probs_in_fp32_are_the_engines(family, policy, tiny, prompts):
    loaded = tiny(family)
    given = prompts(*LENGTHS, seed=5)
    tokens, logprobs = generate(loaded.model, given, SparseCache(policy))
    expected = rollouts(loaded, given, policy)
    compared = 0
    for row, rollout in enumerate(expected):  # until rounding takes another token
        same = (tokens[row].cpu() == rollout.token_ids).int().cumprod(0).bool()
        compared += int(same.sum())
        error = (logprobs[row].cpu() - rollout.sampler_logprobs)[same].abs().max()
        assert error < 1e-4
    assert compared > 0.9 * len(expected) * NEW


@pytest.mark.parametrize("name", ["rkv", "quest"])
@pytest.mark.some(0)
def test_a_gpus_kernels_are_given_what_they_count_on(name, tiny, prompts, monkeypatch):
    loaded = tiny()
    policy = build_policy(name, budget=48, dense_layers=1) if name == "quest" else RKV(budget=20, interval=6)
    given, few = prompts(7, 46), 8
    _, expected = generate(loaded.model, given, SparseCache(policy), max_new_tokens=few)
    run_triton(monkeypatch)
    _, logprobs = generate(loaded.model, given, SparseCache(policy), max_new_tokens=few)
    torch.testing.assert_close(logprobs, expected, atol=1e-4, rtol=0)


def test_a_model_with_its_own_attention_is_told_what_to_do(reference, prompts):
    model = reference()
    with pytest.raises(ValueError, match=r"set_attn_implementation\('sparse_rl'\)"):
        generate(model, prompts(5), SparseCache("streaming", budget=8))


def test_changing_the_attention_is_all_a_user_does(tiny, prompts):
    from sparse_rl.model.tiny import tiny_model

    loaded = tiny(dtype=torch.float64)
    model = tiny_model(dtype=torch.float64, device=loaded.model.device, attn_implementation="sdpa", num_hidden_layers=2)
    model.set_attn_implementation("sparse_rl")
    given = prompts(30, 12)
    tokens, _ = generate(model, given, sparse_rl.SparseCache("snapkv", 16, interval=8))
    assert tokens.tolist() == [r.token_ids.tolist() for r in rollouts(loaded, given, SnapKV(budget=16, interval=8))]


def test_memory_is_bounded_by_the_trigger(tiny, prompts):
    loaded, policy = tiny(), RKV(budget=20, interval=10, window=5)
    cache, shape = SparseCache(policy), loaded.shape
    peaks = []

    class Watched(type(cache)):
        def _end(self, num_tokens):
            super()._end(num_tokens)
            peaks.append(self.num_bytes)

    cache.__class__ = Watched
    generate(loaded.model, prompts(90, 70), cache, max_new_tokens=60)
    pages = -(-policy.trigger(90, 0) // cache.page_size)
    bound = (2 * pages + 1) * cache.page_size * shape.entry_bytes + 3 * shape.query_bytes(5)
    assert len(peaks) == 60 and max(peaks) <= bound
    assert cache.pool.k.nbytes * 3 < 4 * 2 * (90 + 60) * shape.num_kv_heads * shape.head_dim * 4  # L B S K D bytes


def test_padding_takes_no_budget_and_positions_are_true(tiny, prompts):
    cache = SparseCache(Full())
    generate(tiny().model, prompts(3, 20), cache, max_new_tokens=5)
    assert cache.entries == [7, 24] and cache.get_seq_length() == 24
    assert (cache.positions(0).cpu() == torch.arange(7)).all()


def test_larger_pages_are_the_engines(tiny, prompts):
    loaded, policy, given = tiny(layers=4, dtype=torch.float64), build_policy("quest", budget=96), prompts(300)
    engine = Engine(loaded, policy, EngineConfig(rows=1, page_size=32))
    (expected,) = engine.generate(given, Sampling(max_tokens=12, temperature=0.0, stop_ids=()))
    found = {
        size: generate(loaded.model, given, SparseCache(policy, page_size=size), max_new_tokens=12)[1]
        for size in (16, 32)
    }
    torch.testing.assert_close(found[32][0].cpu().float(), expected.sampler_logprobs, atol=1e-4, rtol=0)
    assert (found[16] - found[32]).abs().max() > 1e-3
    for size in (0, 8, 24, True):
        with pytest.raises(ValueError, match=f"page_size is {size}; it must be a multiple of 16"):
            SparseCache("rkv", page_size=size)


def test_a_chunk_over_the_trigger_is_cut(tiny, prompts):
    model, cache = tiny().model, SparseCache("streaming", budget=16, interval=4)
    ids, mask = padded(prompts(40), model.device)
    with torch.no_grad():
        for first in (0, 10, 30):
            last = {0: 10, 10: 30, 30: 40}[first]
            model(ids[:, first:last], attention_mask=mask[:, :last], past_key_values=cache)
    assert cache.entries == [16] and cache.contexts == [40] and cache.num_compressions == [2]
    assert (cache.positions(0).cpu() == torch.tensor([*range(4), *range(28, 40)])).all()


def test_a_protected_prompt_that_comes_in_chunks_stays(tiny, prompts):
    """And with it the policies that ask for its length do what they do in the engine."""
    loaded, given = tiny(dtype=torch.float64), prompts(37)
    for policy in (SnapKV(budget=16, interval=7, protect_prompt=True), build_policy("random", budget=48, interval=4)):
        cache = SparseCache(policy)
        tokens, _ = generate(loaded.model, given, cache, prefill_chunk_size=8)
        assert cache.prompt_lens == [37] and min(cache.num_compressions) >= 2
        assert tokens.tolist() == [r.token_ids.tolist() for r in rollouts(loaded, given, policy)]
    more = torch.tensor([given[0][:5]], device=loaded.model.device)
    with torch.no_grad():
        loaded.model(more, past_key_values=cache)  # a second turn is none of the prompt
    assert cache.prompt_lens == [37]
