# SPDX-License-Identifier: Apache-2.0
"""SparseCache under transformers' `generate`: the engine's tokens, log-probs and memory, and clear refusals."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
from plain_torch import run_triton
from schedules import named

import sparse_rl
from sparse_rl.kv import RKV, EvictPolicy, Full, SnapKV, Streaming, build_policy
from sparse_rl.kv.sparse_cache import SparseCache
from sparse_rl.model.tiny import FAMILIES
from sparse_rl.rollout import Engine, EngineConfig, Sampling

LENGTHS = (7, 41, 23, 30)  # the second and the fourth are over every budget below
NEW = 40


def padded(prompts, device):
    """The prompts padded on the left, and their mask."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return ids, mask


def generate(model, prompts, cache, **settings):
    """New tokens of each row, and their log-probs."""
    ids, mask = padded(prompts, model.device)
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | settings
    out = model.generate(
        ids, attention_mask=mask, past_key_values=cache, output_logits=True, return_dict_in_generate=True, **settings
    )
    tokens = out.sequences[:, ids.shape[1] :]
    logprobs = torch.stack(out.logits, dim=1).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    return tokens, logprobs


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


def test_a_second_generate_goes_on_from_the_first(tiny, reference, prompts):
    """With a large budget it is what transformers' own cache gives; padding between the turns is left out."""
    model, own = tiny(dtype=torch.float64).model, reference(dtype=torch.float64)
    settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    outputs = []
    for each, cache in ((model, SparseCache("rkv", budget=500)), (own, None)):
        ids, mask = padded(prompts(9, 14), each.device)
        for turn in range(2):
            more, more_mask = padded([[], *prompts(4, 11, seed=turn + 1), [0] * 12], each.device)
            more, more_mask = more[1:3], more_mask[1:3]  # a column of padding alone comes first
            out = each.generate(ids, attention_mask=mask, past_key_values=cache, **settings)
            ids = torch.cat([out, more], dim=1)
            mask = torch.cat([mask, torch.ones_like(out[:, mask.shape[1] :]), more_mask], dim=1)
        outputs.append(each.generate(ids, attention_mask=mask, past_key_values=cache, **settings).tolist())
    assert outputs[0] == outputs[1]


def test_a_row_that_ended_early_cannot_lose_its_padding(tiny, prompts):
    """generate feeds padding to it, which the next turn's mask leaves out."""
    model, cache = tiny().model, SparseCache("rkv", budget=500)
    ids, mask = padded(prompts(9, 14), model.device)
    more = torch.ones((2, 3), dtype=ids.dtype, device=ids.device)
    with torch.no_grad():
        model(torch.cat([ids, more], dim=1), attention_mask=torch.cat([mask, more], dim=1), past_key_values=cache)
        mask = torch.cat([mask, more, more], dim=1)
        model(more, attention_mask=mask, past_key_values=cache)
        mask = torch.cat([mask, more], dim=1)
        mask[0, ids.shape[1] + 1 : ids.shape[1] + 3] = 0
        with pytest.raises(ValueError, match=r"tokens of row 0 that .* reset\(\) and give the whole texts"):
            model(more, attention_mask=mask, past_key_values=cache)
        cache.reset()
        model(ids, past_key_values=cache)


def test_a_further_call_without_the_mask_is_refused(tiny, prompts):
    """Positions would count the padding of the first."""
    model, cache = tiny().model, SparseCache("rkv", budget=500)
    ids, mask = padded(prompts(9, 14), model.device)
    settings = {"max_new_tokens": 3, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, **settings)
    more = torch.cat([out, out[:, -3:]], dim=1)
    with pytest.raises(
        ValueError, match=r"changed for tokens of row 0 that .* give the padding of the prompts with it"
    ):
        model.generate(more, attention_mask=torch.ones_like(more), past_key_values=cache, **settings)


def test_a_cache_outlives_inference_mode(tiny, prompts):
    model, cache, other = tiny().model, SparseCache("rkv", budget=20, interval=4), SparseCache("rkv", 20, interval=4)
    ids = torch.tensor(prompts(50), device=model.device)
    with torch.inference_mode():
        model(ids, past_key_values=cache)
        twin = copy.deepcopy(cache)
    with torch.no_grad():
        model(ids, past_key_values=other)
        more = [model(ids[:, :1], past_key_values=each).logits for each in (cache, twin, other)]  # into cut pages
    assert torch.equal(more[0], more[2]) and torch.equal(more[1], more[2])


def test_another_model_needs_another_cache(tiny, prompts):
    cache = SparseCache("streaming", budget=8)
    generate(tiny(layers=2).model, prompts(5), cache)
    with pytest.raises(ValueError, match="a model of 4 layers on a SparseCache that holds the entries of 2"):
        generate(tiny(layers=4).model, prompts(60), cache)


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


def fed(model, prompts, tokens_BT, cache, change=lambda step, *state: state):
    """Log-probs of given tokens, B T, one after the other; `change` may give another cache and mask after a step."""
    ids, mask = padded(prompts, model.device)
    logprobs = []
    with torch.no_grad():
        for step in range(tokens_BT.shape[1]):
            logits = model(
                ids,
                attention_mask=mask,
                position_ids=(mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :],
                past_key_values=cache,
            ).logits[:, -1]
            cache, mask = change(step, cache, mask)
            ids = tokens_BT[:, step : step + 1]
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
            logprobs.append(logits.log_softmax(-1).gather(-1, ids))
    return torch.cat(logprobs, dim=1), cache


STATEFUL = [build_policy("h2o", budget=20, interval=9), SnapKV(budget=20, interval=9, window=7)]


@pytest.mark.parametrize("policy", STATEFUL, ids=lambda policy: policy.name)
@pytest.mark.parametrize("how", ["copied", "pickled", "reordered"])
@pytest.mark.some(3)
def test_a_row_takes_all_it_has_with_it(how, policy, tiny, prompts):
    """In a copy, from a file, or in another row, it goes on, and is cut, as if it had been there from the start."""
    model = tiny(dtype=torch.float64).model
    given = prompts(7, 18, 41)  # cut after 22, 31; 11, 20, 29; and 0, 9, 18, 27 tokens
    tokens = torch.randint(1, 200, (3, 34), device=model.device)
    order, last = [2, 0, 2] if how == "reordered" else [0, 1, 2], 16

    def change(step, cache, mask):
        if step != last:
            return cache, mask
        if how == "reordered":
            cache.reorder_cache(torch.tensor(order))
            return cache, mask[order]
        twin = copy.deepcopy(cache) if how == "copied" else pickle.loads(pickle.dumps(cache))
        assert twin.pool.offsets[1, 0] * 8 == twin.pool.k[1].data_ptr() - twin.pool.anchor[0].data_ptr()
        for _ in range(12):  # the other one goes its own way
            mask = torch.cat([mask, mask[:, -1:]], dim=1)
            model(tokens[:, :1], attention_mask=mask, past_key_values=cache)
        return twin, mask[:, :-12]

    found, cache = fed(model, given, tokens, SparseCache(policy), change)
    before = torch.cat([tokens[order, :last], tokens[:, last:]], dim=1)
    expected, fresh = fed(model, [given[row] for row in order], before, SparseCache(policy))
    torch.testing.assert_close(found[:, last + 1 :], expected[:, last + 1 :], rtol=0, atol=1e-10)
    for name in ("prompt_lens", "contexts", "entries", "cut", "num_compressions"):
        assert getattr(cache, name) == getattr(fresh, name), name
    assert all(torch.equal(cache.positions(row), fresh.positions(row)) for row in range(3))
    assert min(cache.num_compressions) >= 2


def test_beams_carry_their_caches_with_them(tiny, reference, prompts):
    """What a beam says its tokens are worth is what they are worth to a cache that never saw another beam."""
    settings = {"num_beams": 3, "max_new_tokens": 12}
    given = prompts(9, 17)
    ids, mask = padded(given, tiny().model.device)
    settings |= {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    model, own = tiny(dtype=torch.float64).model, reference(dtype=torch.float64)
    ours = model.generate(ids, attention_mask=mask, past_key_values=SparseCache("rkv", budget=200), **settings)
    assert ours.tolist() == own.generate(ids, attention_mask=mask, **settings).tolist()
    settings |= {"num_return_sequences": 3, "output_scores": True, "return_dict_in_generate": True}
    fired = SparseCache("rkv", budget=10, interval=4)
    out = model.generate(ids, attention_mask=mask, past_key_values=fired, **settings)
    assert min(fired.num_compressions) >= 2
    beams = [prompt for prompt in given for _ in range(3)]
    alone, _ = fed(model, beams, out.sequences[:, ids.shape[1] :], SparseCache(fired.policy))
    torch.testing.assert_close(out.sequences_scores.double(), alone.mean(dim=1), rtol=0, atol=1e-5)


def test_what_cannot_be_done_is_refused(tiny, prompts):
    model = tiny().model
    ids, mask = padded(prompts(4, 9), model.device)
    for given in (None, RKV, 7):
        with pytest.raises(ValueError, match=f"policy is {re.escape(repr(given))}; give a policy's name"):
            SparseCache(given)
    with pytest.raises(ValueError, match="budget beside a policy object"):
        SparseCache(Full(), budget=4)
    with pytest.raises(ValueError, match="did you mean 'rkv'"):
        SparseCache("rvk", budget=4)
    with pytest.raises(ValueError, match="padded on its left"), torch.no_grad():
        model(ids, attention_mask=mask.flip(1), past_key_values=SparseCache())
    with pytest.raises(ValueError, match="no prefill_chunk_size with prompts of unlike lengths"):
        model.generate(ids, attention_mask=mask, past_key_values=SparseCache(), prefill_chunk_size=4, max_new_tokens=2)
    with pytest.raises(ValueError, match="no gradients"):
        model(ids, past_key_values=SparseCache())
    with pytest.raises(ValueError, match="assisted decoding"):
        model.generate(ids[1:], past_key_values=SparseCache(), prompt_lookup_num_tokens=3, max_new_tokens=9)
    with pytest.raises(ValueError, match=r"has 10 columns, .* but for use_cache=False"):
        model.generate(ids, attention_mask=mask, past_key_values=SparseCache(), use_cache=False, max_new_tokens=3)
    cache = SparseCache()
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.raises(ValueError, match="holds 2 rows and got 1"):
            model(ids[:1], past_key_values=cache)
        with pytest.raises(ValueError, match=r"layer 0 has .*float64.*the cache began with .*float32"):
            tiny(dtype=torch.float64).model(ids, past_key_values=cache)
    with pytest.raises(ValueError, match="output_attentions asks for weights"):
        model.generate(ids, past_key_values=SparseCache(), output_attentions=True, max_new_tokens=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_that_is_fed_again_is_refused(family, tiny):
    model, cache = tiny(family).model, SparseCache()
    ids = torch.arange(1, 9, device=model.device)[None]
    with pytest.raises(ValueError, match=r"has seen .* use_cache=False"):  # by its mask or its position
        model.generate(ids, past_key_values=cache, use_cache=False, max_new_tokens=3)


@pytest.mark.parametrize(
    ("first", "count", "second", "said"),
    [
        ((4, 9), 6, (4, 9), "has 9 columns, but with what the cache has seen there are"),
        ((4, 9), 12, (4, 9), "no token is new to this SparseCache, which has seen 20; .* or call reset"),
        ((9,), 4, (5,), "no token is new to this SparseCache, which has seen 12"),
    ],
)
def test_a_used_cache_wants_all_it_has_seen(first, count, second, said, tiny, prompts):
    model, cache = tiny().model, SparseCache()
    generate(model, prompts(*first), cache, max_new_tokens=count)
    with pytest.raises(ValueError, match=said):
        generate(model, prompts(*second), cache)
    cache.reset()
    generate(model, prompts(*second), cache, max_new_tokens=2)
