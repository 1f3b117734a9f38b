# SPDX-License-Identifier: Apache-2.0
"""Rotations with several factors: sampler, learner and `generate` agree below, at and beyond the original length."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from moving_ropes import MOVING, ORIGINAL, POSITIONS, plain, settings

from sparse_rl.kv import RKV, Full
from sparse_rl.kv.sparse_cache import SparseCache
from sparse_rl.model import rope
from sparse_rl.model.dry_run import dry_run
from sparse_rl.model.load import LoadedModel
from sparse_rl.model.tiny import tiny_model, tiny_tokenizer
from sparse_rl.rollout import Engine, EngineConfig, Sampling
from sparse_rl.score import score

GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def loaded_for(case, longest=None):
    family, changed = settings(case)
    model = tiny_model(family, **changed)
    rope.fix(model, longest)
    return LoadedModel(model=model, tokenizer=tiny_tokenizer(), shape=dry_run(model))


@pytest.mark.parametrize("case", MOVING)
def test_log_xi_is_rounding_and_packing_changes_nothing(case, prompts):
    """Against a plain model that gets the whole in one forward, made long behind what is compared."""
    loaded = loaded_for(case)
    engine = Engine(loaded, Full(), EngineConfig(rows=4, page_size=16))
    batch = prompts(3, ORIGINAL - 8, ORIGINAL - 7, ORIGINAL, 90)  # end at 11, 48, 49, 56, 98
    rollouts = engine.generate(batch, Sampling(max_tokens=8, stop_ids=()))
    assert [len(r.prompt.ids) + len(r.token_ids) for r in rollouts] == [11, 48, 49, 56, 98]
    packed = score(loaded.model, rollouts)
    for rollout, dense in zip(rollouts, packed, strict=True):
        ids = [*rollout.prompt.ids, *rollout.token_ids.tolist()]
        filled = torch.tensor([ids + [0] * (POSITIONS - len(ids))])
        with torch.no_grad():
            logprobs = plain(case)(filled).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(-1, filled[0, 1:, None])[len(rollout.prompt.ids) - 1 : len(ids) - 1, 0]
        assert (expected - rollout.sampler_logprobs).abs().max() <= 1e-4
        assert (expected - dense.dense_logprobs).abs().max() <= 1e-4
        alone = score(loaded.model, [rollout])[0]
        torch.testing.assert_close(alone.dense_logprobs, dense.dense_logprobs, atol=2e-5, rtol=0)


@pytest.mark.parametrize("case", MOVING)
def test_a_long_answer_grows_out_of_the_original_length(case, prompts):
    loaded = loaded_for(case)
    (rollout,) = Engine(loaded, Full()).generate(prompts(10), Sampling(max_tokens=POSITIONS, stop_ids=()))
    assert len(rollout.token_ids) == POSITIONS - 10
    assert (score(loaded.model, [rollout])[0].dense_logprobs - rollout.sampler_logprobs).abs().max() <= 1e-4


@pytest.mark.parametrize("case", ["phi3", "longrope"])
def test_short_runs_are_as_transformers_has_them(case, prompts):
    loaded, own = loaded_for(case, longest=ORIGINAL), plain(case)
    batch = prompts(5, 20)
    rollouts = Engine(loaded, RKV(budget=1000)).generate(
        batch, Sampling(max_tokens=POSITIONS, temperature=0.0, stop_ids=())
    )
    for prompt, rollout in zip(batch, rollouts, strict=True):
        assert len(prompt) + len(rollout.token_ids) == ORIGINAL, "the short factor ends there"
        expected = own.generate(torch.tensor([prompt]), max_length=ORIGINAL, **GREEDY)[0, len(prompt) :]
        assert rollout.token_ids.tolist() == expected.tolist()


@pytest.mark.parametrize("case", MOVING)
def test_generate_keeps_the_factor_and_the_cache(case, prompts):
    """Phi-3's own would throw the cache away where the factor changes."""
    loaded, cache = loaded_for(case), SparseCache("full")
    (prompt,) = prompts(ORIGINAL - 20)
    (rollout,) = Engine(loaded, Full()).generate([prompt], Sampling(max_tokens=50, temperature=0.0, stop_ids=()))
    for given in ({}, {"past_key_values": cache}):
        out = loaded.model.generate(torch.tensor([prompt]), max_new_tokens=50, **GREEDY, **given)
        assert out[0, len(prompt) :].tolist() == rollout.token_ids.tolist()
    assert cache.get_seq_length() == len(prompt) + 49
    with pytest.raises(ValueError, match="the model was loaded for 128"):
        loaded.model.generate(torch.tensor([prompt]), max_new_tokens=200, **GREEDY)


@pytest.mark.parametrize("case", MOVING)
def test_a_cache_of_a_model_that_nobody_fixed_ends_at_the_original_length(case, prompts):
    first = POSITIONS // 2 if case == "dynamic" else ORIGINAL
    (prompt,) = prompts(first - 10)
    for number, ids, given in (
        (11, prompt, {"past_key_values": SparseCache("full")}),
        (20, prompt, {"past_key_values": SparseCache("full")}),
        (20, prompt, {}),
        (1, [*prompt, *prompt], {}),
    ):
        own = plain(case)
        own.set_attn_implementation("sparse_rl")
        refused = pytest.raises(ValueError, match=rf"from {first + 1} on this model's rotation .* changes for all")
        with refused if number != 11 else nullcontext():
            own.generate(torch.tensor([ids]), max_new_tokens=number, **GREEDY, **given)


def test_a_yarn_context_is_the_scaled_one(prompts):
    """As on Qwen's model cards: max_position_embeddings is not changed."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32}
    model = tiny_model(num_hidden_layers=2, max_position_embeddings=32, rope_parameters=yarn)
    loaded = LoadedModel(model=model, tokenizer=tiny_tokenizer(), shape=dry_run(model))
    (rollout,) = Engine(loaded, Full()).generate(prompts(20), Sampling(max_tokens=500, stop_ids=()))
    assert loaded.context == 128 == 20 + len(rollout.token_ids)
    assert (score(model, [rollout])[0].dense_logprobs - rollout.sampler_logprobs).abs().max() <= 1e-4
