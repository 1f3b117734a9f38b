# SPDX-License-Identifier: Apache-2.0
"""A SparseCache that goes on with another call, is copied or reordered; and clear refusals."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
import torch
import transformers
from padded_batch import generate, padded

from sparse_rl.kv import RKV, Full, SnapKV, build_policy
from sparse_rl.kv.sparse_cache import SparseCache
from sparse_rl.model.tiny import FAMILIES


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


@pytest.mark.parametrize("layer", [0, 1])
def test_a_call_without_the_cache_knows_nothing_of_a_pass_that_was_cut_short(layer, monkeypatch, prompts):
    """Latent attention makes keys of what the cache hands out; a pass can end in between."""
    settings = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "vocab_size": 259}
    settings |= {"kv_lora_rank": 8, "q_lora_rank": None, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8}
    settings |= {"num_key_value_heads": 2, "v_head_dim": 12, "intermediate_size": 32, "first_k_dense_replace": 2}
    config = transformers.AutoConfig.for_model("deepseek_v3", **settings)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sparse_rl").eval()
    ids, cache, update = torch.tensor(prompts(9)), SparseCache("rkv", budget=500), SparseCache.update

    def stopped(self, keys, values, layer_idx, *args):
        handed = update(self, keys, values, layer_idx, *args)
        if layer_idx == layer:
            raise KeyboardInterrupt
        return handed

    with torch.no_grad():
        expected = model(ids[:, :1], use_cache=False).logits
        model(ids, past_key_values=cache)
        monkeypatch.setattr(SparseCache, "update", stopped)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, :1], past_key_values=cache)
        torch.testing.assert_close(model(ids[:, :1], use_cache=False).logits, expected)


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
@pytest.mark.some(3)
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
