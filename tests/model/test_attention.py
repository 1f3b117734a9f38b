# SPDX-License-Identifier: Apache-2.0
"""The registered attention: equal to transformers' own without a context, and loud about what it does not do."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import StaticCache

from sparse_rl.kv import RKV
from sparse_rl.model.attention import PackedRows, UnsupportedModelError, attention, attention_mask, registered
from sparse_rl.model.dry_run import dry_run
from sparse_rl.model.tiny import FAMILIES
from sparse_rl.rollout import Engine, Sampling
from sparse_rl.score.pack import pack


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.some(4)
def test_without_a_context_it_is_plain_causal_attention(family, tiny, reference, prompts):
    model, expected = tiny(family).model, reference(family)
    ids = torch.tensor(prompts(70), device=model.device)
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, expected(ids).logits, atol=1e-4, rtol=0)
        cached = model(ids[:, :50], use_cache=True).past_key_values
        rest = model(ids[:, 50:], past_key_values=cached).logits  # keys longer than queries
        torch.testing.assert_close(rest, expected(ids).logits[:, 50:], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_generate_works_on_the_sampler_module(family, tiny, reference, prompts):
    ids = torch.tensor(prompts(20), device=tiny(family).model.device)
    settings = {"max_new_tokens": 60, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    ours = tiny(family).model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    assert ours.tolist() == reference(family).generate(ids, attention_mask=torch.ones_like(ids), **settings).tolist()


def test_padding_is_refused_and_ones_pass(tiny):
    model = tiny().model
    ids = torch.ones(2, 4, dtype=torch.long, device=model.device)
    mask = torch.ones_like(ids)
    model(ids, attention_mask=mask)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="padding mask"):
        model(ids, attention_mask=mask)


def test_a_ready_made_mask_is_refused(tiny):
    model = tiny().model
    ids = torch.ones(1, 4, dtype=torch.long, device=model.device)
    with pytest.raises(UnsupportedModelError, match="got a mask"):
        model(ids, attention_mask=torch.ones(1, 1, 4, 4, dtype=torch.bool, device=model.device))


def test_packed_positions_without_a_context_are_refused(tiny):
    model = tiny().model
    ids = torch.ones(1, 5, dtype=torch.long, device=model.device)
    positions = torch.tensor([[0, 1, 2, 0, 1]], device=model.device)
    model(ids, position_ids=positions, use_cache=False, kv=PackedRows([0, 3, 5]))
    with pytest.raises(UnsupportedModelError, match="PackedRows"):
        model(ids, position_ids=positions, use_cache=False)


def test_static_caches_are_refused(tiny):
    model = tiny().model
    ids = torch.ones(1, 4, dtype=torch.long, device=model.device)
    with pytest.raises(ValueError, match="static cache"):
        model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=16), use_cache=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"position_bias": torch.zeros(1, 2, 3, 3)}, "position_bias"),
        ({"dropout": 0.1}, "dropout"),
    ],
)
def test_what_is_not_implemented_raises(arguments, message):
    inputs = {name: torch.zeros(1, 2, 3, 8) for name in ("query", "key", "value")} | arguments
    with pytest.raises(UnsupportedModelError, match=message):
        attention(torch.nn.Identity(), **inputs, attention_mask=None, scaling=1.0)


def test_harmless_keywords_pass():
    inputs = {name: torch.zeros(1, 2, 3, 8) for name in ("query", "key", "value")}
    out, weights = attention(
        torch.nn.Identity(), **inputs, attention_mask=None, scaling=1.0, position_ids=torch.arange(3), softcap=None
    )
    assert out.shape == (1, 3, 2, 8) and weights is None


def test_masks_a_model_adds_are_refused():
    with pytest.raises(UnsupportedModelError, match="adds its own mask"):
        attention_mask(q_length=2, kv_length=2, use_vmap=True)


def test_without_a_scale_it_is_one_over_the_root_of_the_width():
    generator = torch.Generator().manual_seed(0)
    inputs = {name: torch.randn(1, 2, 3, 8, generator=generator) for name in ("query", "key", "value")}
    default, _ = attention(torch.nn.Identity(), **inputs, attention_mask=None)
    given, _ = attention(torch.nn.Identity(), **inputs, attention_mask=None, scaling=8**-0.5)
    torch.testing.assert_close(default, given)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_nobody_looks_for_packed_rows_in_the_positions(family, tiny, prompts, monkeypatch):
    """That would wait for a GPU in every prefill and every forward of the learner."""
    loaded = tiny(family)

    def look(position_ids):
        raise AssertionError("looked at the positions")

    monkeypatch.setattr("transformers.masking_utils.find_packed_sequence_indices", look)
    ids = torch.tensor([[1, 2]], device=loaded.model.device)
    with pytest.raises(AssertionError, match="looked"):
        loaded.model(input_ids=ids, position_ids=ids, use_cache=False)
    rollouts = Engine(loaded, RKV(budget=9)).generate(prompts(12, 5), Sampling(max_tokens=3, stop_ids=()))
    (microbatch,) = pack(rollouts, 100)
    loaded.model(**microbatch.inputs(loaded.model.device))


def test_a_context_shorter_than_the_probes_is_no_reason_to_refuse():
    config = transformers.GPT2Config(n_positions=40, n_embd=32, n_layer=1, n_head=2, vocab_size=64)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=registered())
    assert dry_run(model).num_layers == 1
