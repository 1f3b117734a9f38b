# SPDX-License-Identifier: Apache-2.0
"""Batched = one by one, packed = unpacked, small pool = large pool: rows meet through rounding alone."""

from __future__ import annotations

import pytest
import torch

from sparse_rl.kernels.sampling import request_key, token_keys_ref, uniform_ref
from sparse_rl.kv import GKV, H2O, RKV, Full, SnapKV, Streaming
from sparse_rl.model.attention import PackedRows, packed_positions
from sparse_rl.model.tiny import FAMILIES
from sparse_rl.rollout import Engine, EngineConfig, Sampling
from sparse_rl.rollout.runner import Runner
from sparse_rl.score import score
from sparse_rl.types import Prompt

POLICIES = [Full(), Streaming(budget=16, interval=9), SnapKV(budget=16, interval=9), RKV(budget=16, interval=9)]
LENGTHS = (3, 25, 17, 8, 40)
CLOSE_CALL = 1e-3  # fp32 tokens may differ where the two best perturbed logits are closer than this


def tokens(rollouts):
    return [rollout.token_ids.tolist() for rollout in rollouts]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
@pytest.mark.some(2)
def test_rows_do_not_matter_in_fp64(policy, tiny, prompts):
    loaded = tiny("qwen2", dtype=torch.float64)
    assert len(set(loaded.shape.windows)) == 2
    sampling = Sampling(max_tokens=36, n=2, seed=5, stop_ids=(0, 1, 2, 3))
    expected = Engine(loaded, policy, EngineConfig(rows=1, page_size=16)).generate(prompts(*LENGTHS), sampling)
    assert len({len(r.token_ids) for r in expected}) > 3, "lengths should be ragged"
    for rows, prefill in ((3, 8192), (16, 30)):
        config = EngineConfig(rows=rows, page_size=16, max_prefill_tokens=prefill)
        got = Engine(loaded, policy, config).generate(prompts(*LENGTHS), sampling)
        assert tokens(got) == tokens(expected)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a.sampler_logprobs, b.sampler_logprobs, atol=1e-6, rtol=0)
            assert a.kv == b.kv


TALLIES = [H2O(budget=8, interval=6, protect_prompt=True), GKV(budget=8, interval=6, window=4, protect_prompt=True)]


@pytest.mark.parametrize("policy", TALLIES, ids=lambda p: p.name)
def test_tallies_of_rows_that_keep_different_counts_are_their_own(policy, tiny, prompts):
    """Rows are cut together here, and the prompts that they keep differ in length."""
    loaded = tiny(dtype=torch.float64)
    sampling = Sampling(max_tokens=40, seed=5, stop_ids=())
    alone, together = (
        Engine(loaded, policy, EngineConfig(rows=rows, page_size=16)).generate(
            prompts(5, 11, 23), sampling, record_kept=True
        )
        for rows in (1, 3)
    )
    for rollout, expected in zip(together, alone, strict=True):
        assert rollout.token_ids.tolist() == expected.token_ids.tolist()
        for kept, should in zip(rollout.kept_positions, expected.kept_positions, strict=True):
            assert torch.equal(kept, should)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
@pytest.mark.some(1)
def test_one_prompt_alone_greedy_in_fp64(policy, tiny, prompts):
    loaded = tiny(dtype=torch.float64)
    sampling = Sampling(max_tokens=40, temperature=0.0, stop_ids=())
    together = Engine(loaded, policy, EngineConfig(rows=8, page_size=16)).generate(prompts(*LENGTHS), sampling)
    for prompt, rollout in zip(prompts(*LENGTHS), together, strict=True):
        (alone,) = Engine(loaded, policy, EngineConfig(rows=8, page_size=16)).generate([prompt], sampling)
        assert alone.token_ids.tolist() == rollout.token_ids.tolist()


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
@pytest.mark.some(1)
def test_rows_do_not_matter_beyond_rounding_in_fp32(policy, tiny, prompts):
    loaded = tiny()
    sampling = Sampling(max_tokens=36, seed=5, stop_ids=(), top_logprobs=loaded.vocab_size)
    one = Engine(loaded, policy, EngineConfig(rows=1, page_size=16)).generate(prompts(*LENGTHS), sampling)
    many = Engine(loaded, policy, EngineConfig(rows=10, page_size=16)).generate(prompts(*LENGTHS), sampling)
    for request, (a, b) in enumerate(zip(one, many, strict=True)):
        differs = (a.token_ids != b.token_ids).nonzero()[:, 0].tolist()
        same = differs[0] if differs else len(a.token_ids)
        torch.testing.assert_close(a.sampler_logprobs[:same], b.sampler_logprobs[:same], atol=1e-4, rtol=0)
        if differs:
            key = token_keys_ref(torch.tensor([request_key(5, request)]), torch.tensor([same]))
            noise = uniform_ref(key, loaded.vocab_size)[0]
            perturbed = a.top_logprobs[same] - (-torch.log1p(-noise)).log()[a.top_ids[same]]
            best = perturbed.topk(2).values
            assert best[0] - best[1] < CLOSE_CALL, f"request {request} differs at {same} without a close call"


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
@pytest.mark.some(2)
def test_pool_size_does_not_matter_in_fp64(policy, tiny, prompts):
    """Small pools preempt dense rows and admit fewer evicting ones; the tokens are the same."""
    loaded = tiny(dtype=torch.float64)
    sampling = Sampling(max_tokens=40, n=2, seed=2, stop_ids=())
    roomy = Engine(loaded, policy, EngineConfig(rows=6, page_size=16))
    expected = tokens(roomy.generate(prompts(*LENGTHS), sampling))
    assert roomy.stats.num_prefills == len(LENGTHS), "a group's prompt is prefilled once"
    for pages in (5, 14):  # 5 are what one dense row needs
        engine = Engine(loaded, policy, EngineConfig(rows=6, page_size=16, pool_pages=pages))
        assert tokens(engine.generate(prompts(*LENGTHS), sampling)) == expected
        assert engine.stats.peak_pages <= pages
        assert (engine.stats.num_preemptions > 0) == (policy.name == "full")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.some(4)
def test_packed_equals_unpacked(family, tiny, prompts):
    model = tiny(family, dtype=torch.float64).model
    rows = prompts(5, 33, 1, 50)
    boundaries = [0, 5, 38, 39, 89]
    with torch.no_grad():
        packed = model(
            input_ids=torch.tensor([[token for row in rows for token in row]], device=model.device),
            position_ids=packed_positions(boundaries, model.device),
            use_cache=False,
            kv=PackedRows(boundaries),
        ).logits[0]
        alone = [model(torch.tensor([row], device=model.device)).logits[0] for row in rows]
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-10, rtol=0)


def test_scores_do_not_depend_on_packing(tiny, prompts):
    loaded = tiny()
    engine = Engine(loaded, RKV(budget=16, interval=9), EngineConfig(rows=8, page_size=16))
    rollouts = engine.generate(prompts(*LENGTHS), Sampling(max_tokens=30, temperature=0.7, top_logprobs=4, stop_ids=()))
    together = score(loaded.model, rollouts, temperature=0.7)
    split = score(loaded.model, rollouts, temperature=0.7, max_tokens=60)
    alone = [score(loaded.model, [rollout], temperature=0.7)[0] for rollout in rollouts]
    for a, b, c in zip(together, split, alone, strict=True):
        torch.testing.assert_close(a.dense_logprobs, c.dense_logprobs, atol=1e-4, rtol=0)
        torch.testing.assert_close(b.dense_logprobs, c.dense_logprobs, atol=1e-4, rtol=0)
        torch.testing.assert_close(a.at_top_ids, c.at_top_ids, atol=1e-4, rtol=0)


def test_preemption_of_window_layers_in_fp64(tiny, prompts):
    """What comes back from host memory has its positions, which window layers mask by."""
    loaded = tiny("mistral", dtype=torch.float64)
    sampling = Sampling(max_tokens=40, n=2, seed=2, stop_ids=())
    engine = Engine(loaded, Full(), EngineConfig(rows=6, page_size=16, pool_pages=10))
    got = engine.generate(prompts(*LENGTHS), sampling)
    assert engine.stats.num_preemptions > 0
    assert tokens(got) == tokens(Engine(loaded, Full(), EngineConfig(rows=6)).generate(prompts(*LENGTHS), sampling))


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.7])
def test_scores_use_the_samplers_temperature(temperature, tiny, prompts):
    loaded = tiny()
    rollouts = Engine(loaded, Full()).generate(
        prompts(5, 30), Sampling(max_tokens=30, temperature=temperature, stop_ids=())
    )
    for rollout, dense in zip(rollouts, score(loaded.model, rollouts, temperature=temperature), strict=True):
        assert (dense.dense_logprobs - rollout.sampler_logprobs).abs().max() <= 1e-4


def test_prefill_keeps_to_its_limit(tiny, prompts, monkeypatch):
    sizes = []
    prefill = Runner.prefill
    monkeypatch.setattr(
        Runner, "prefill", lambda self, held, p: (sizes.append([h.prompt_len for h in held]), prefill(self, held, p))[1]
    )
    config = EngineConfig(rows=16, page_size=16, max_prefill_tokens=30)
    Engine(tiny(), Full(), config).generate(prompts(*LENGTHS), Sampling(max_tokens=3, stop_ids=()))
    assert sizes == [[3, 25], [17, 8], [40]]


@pytest.mark.parametrize("pages", [None, 14])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
@pytest.mark.some(2)
def test_reading_tokens_late_changes_nothing(policy, pages, tiny, prompts, monkeypatch):
    """As on a GPU: several steps at once, ends noticed when the row has gone on; stop ids, strings and limits."""
    loaded = tiny(dtype=torch.float64)
    free = Engine(loaded, policy).generate(prompts(*LENGTHS), Sampling(max_tokens=50, n=2, seed=3, stop_ids=()))
    stop_ids = tuple({int(rollout.token_ids[20]) for rollout in free[:4]})
    stop = loaded.tokenizer.decode(free[-1].token_ids[15:17])
    limits = [Prompt(ids=tuple(p), max_tokens=50 - 9 * i) for i, p in enumerate(prompts(*LENGTHS))]
    sampling = Sampling(max_tokens=50, n=2, seed=3, stop_ids=stop_ids, stop=(stop,) if stop else (), top_logprobs=3)

    def run():
        engine = Engine(loaded, policy, EngineConfig(rows=6, page_size=16, pool_pages=pages))
        return engine.generate(limits, sampling, record_kept=True)

    expected = run()
    assert len({r.finish_reason for r in expected}) >= 2
    for interval, lag in ((8, 1), (3, 2), (5, 0)):
        monkeypatch.setattr("sparse_rl.rollout.loop.pace", lambda device, got=(interval, lag): got)
        for got, want in zip(run(), expected, strict=True):
            assert got.token_ids.tolist() == want.token_ids.tolist() and got.finish_reason == want.finish_reason
            torch.testing.assert_close(got.sampler_logprobs, want.sampler_logprobs)
            assert torch.equal(got.top_ids, want.top_ids) and got.kv == want.kv
            for a, b in zip(got.kept_positions, want.kept_positions, strict=True):
                assert torch.equal(a, b)
