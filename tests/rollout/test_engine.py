# SPDX-License-Identifier: Apache-2.0
"""What a call promises: ends, limits, order, seeds, statistics, clear errors, and a pool that stays whole."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sparse_rl.kv import RKV, Full, SnapKV, Streaming
from sparse_rl.rollout import Engine, EngineConfig, Sampling
from sparse_rl.rollout.loop import Loop
from sparse_rl.rollout.rows import CAPACITY
from sparse_rl.rollout.sequence import Sequence
from sparse_rl.types import Prompt


def engine(loaded, policy=None, **config):
    return Engine(loaded, policy, EngineConfig(**{"rows": 4, "page_size": 16, **config}))


def test_records_are_complete(tiny, prompts):
    rollouts = engine(tiny()).generate(prompts(4, 6), Sampling(max_tokens=9, n=3, top_logprobs=5, stop_ids=()))
    assert [(r.prompt.ids, r.sample) for r in rollouts] == [(tuple(p), s) for p in prompts(4, 6) for s in range(3)]
    for rollout in rollouts:
        assert rollout.token_ids.shape == rollout.sampler_logprobs.shape == rollout.completion_mask.shape == (9,)
        assert rollout.sampler_logprobs.dtype == torch.float32 and rollout.completion_mask.all()
        assert rollout.top_ids.shape == rollout.top_logprobs.shape == (9, 5)
        assert rollout.finish_reason == "length" and rollout.kept_positions is None
        where = (rollout.top_ids == rollout.token_ids[:, None]).nonzero()
        got = rollout.top_logprobs[where[:, 0], where[:, 1]]
        torch.testing.assert_close(got, rollout.sampler_logprobs[where[:, 0]])


def test_stop_ids_end_a_sample_and_are_part_of_it(tiny, prompts):
    loaded = tiny()
    free = engine(loaded).generate(prompts(5), Sampling(max_tokens=30, n=8, stop_ids=()))
    wanted = free[0].token_ids[12].item()
    for rollout, unstopped in zip(
        engine(loaded).generate(prompts(5), Sampling(max_tokens=30, n=8, stop_ids=(wanted,))), free, strict=True
    ):
        tokens = unstopped.token_ids.tolist()
        end = tokens.index(wanted) + 1 if wanted in tokens else 30
        assert rollout.token_ids.tolist() == tokens[:end]
        assert rollout.finish_reason == ("stop" if wanted in tokens else "length")


def test_the_models_own_end_tokens_stop_by_default(tiny, prompts):
    loaded = tiny(layers=2)
    rollouts = engine(loaded).generate(prompts(5), Sampling(max_tokens=2000, n=2))
    assert all(r.finish_reason == "stop" and r.token_ids[-1] == loaded.tokenizer.eos_token_id for r in rollouts)


def test_stop_strings(tiny):
    """Strings longer than a token, beyond ASCII, never found in the prompt."""
    loaded = tiny()
    sampling = Sampling(max_tokens=60, n=6, stop_ids=())
    free = engine(loaded).generate(["ab"], sampling)
    texts = [loaded.tokenizer.decode(r.token_ids) for r in free]
    stop = next(
        t[i : i + 2] for t in texts for i in range(20, 40) if t[i : i + 2].isprintable() and "�" not in t[i : i + 2]
    )
    rollouts = engine(loaded).generate(["ab"], Sampling(max_tokens=60, n=6, stop_ids=(), stop=(stop, "ab")))
    ended = 0
    for rollout, text, unstopped in zip(rollouts, texts, free, strict=True):
        got = loaded.tokenizer.decode(rollout.token_ids)
        if rollout.finish_reason == "stop_string":
            ended += 1
            assert stop in got and stop not in loaded.tokenizer.decode(rollout.token_ids[:-1])
            assert rollout.token_ids.tolist() == unstopped.token_ids.tolist()[: len(rollout.token_ids)]
        else:
            assert stop not in text
    assert ended > 0


def test_a_prompts_own_limit(tiny, prompts):
    batch = [Prompt(ids=tuple(p), max_tokens=m) for p, m in zip(prompts(5, 5, 5), (3, 1, 50), strict=True)]
    rollouts = engine(tiny()).generate(batch, Sampling(max_tokens=8, stop_ids=()))
    assert [len(r.token_ids) for r in rollouts] == [3, 1, 8]


def test_seeds(tiny, prompts):
    loaded = tiny()
    sampling = Sampling(max_tokens=12, n=2, seed=1, stop_ids=())
    first = [r.token_ids.tolist() for r in engine(loaded).generate(prompts(5, 5), sampling)]
    again = [r.token_ids.tolist() for r in engine(loaded).generate(prompts(5, 5), sampling)]
    other = [r.token_ids.tolist() for r in engine(loaded).generate(prompts(5, 5), Sampling(max_tokens=12, n=2, seed=2))]
    assert first == again and first != other
    assert first[0] != first[1], "samples of one prompt differ"
    twins = engine(loaded).generate([prompts(5)[0]] * 2, Sampling(max_tokens=12))
    assert twins[0].token_ids.tolist() != twins[1].token_ids.tolist(), "so do equal prompts"


def test_torchs_own_random_state_is_untouched(tiny, prompts):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    engine(tiny()).generate(prompts(5), Sampling(max_tokens=5))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("policy", [Full(), Streaming(budget=20, interval=7)], ids=lambda p: p.name)
def test_kv_statistics_by_hand(policy, tiny, prompts):
    loaded = tiny()
    (rollout,) = engine(loaded, policy).generate(prompts(15), Sampling(max_tokens=20, stop_ids=()))
    dense = list(range(16, 35))  # the first decode step holds 15 prompt entries and its own
    held = dense if policy.name == "full" else [*range(16, 28), *range(21, 28)]
    assert list(rollout.kv.held) == held and rollout.kv.full == rollout.kv.hybrid == sum(dense)
    assert rollout.kv.saved_frac == pytest.approx(1 - sum(held) / sum(dense))
    assert rollout.kv.peak == max(held) and rollout.kv.num_compressions == (0 if policy.name == "full" else 2)
    pages = -(-max(held) // 16)
    assert rollout.kv.peak_bytes == pages * 16 * loaded.shape.entry_bytes


def test_saved_fractions_of_window_layers(tiny, prompts):
    loaded = tiny("mistral")
    (rollout,) = engine(loaded, Streaming(budget=24, interval=8)).generate(
        prompts(30), Sampling(max_tokens=20, stop_ids=())
    )
    held = sum(rollout.kv.held)
    assert rollout.kv.hybrid == 24 * 19  # transformers keeps 24 entries in every layer
    assert rollout.kv.full == sum(range(31, 50))
    assert rollout.kv.saved_frac == pytest.approx(1 - held / sum(range(31, 50)))
    assert rollout.kv.hybrid_saved_frac == pytest.approx(1 - held / (24 * 19)) and rollout.kv.hybrid_saved_frac < 0


def test_evicting_really_frees_memory(tiny, prompts):
    """The pool a sparse call needs stays the same however long the responses are; the dense one grows."""
    loaded = tiny(layers=2)
    peaks = {}
    for name, policy in (("full", Full()), ("rkv", RKV(budget=32, interval=16))):
        for max_tokens in (60, 240):
            sampler = engine(loaded, policy)
            sampler.generate(prompts(10, 10, 10, 10), Sampling(max_tokens=max_tokens, stop_ids=()))
            peaks[name, max_tokens] = sampler.stats.peak_pages
    assert peaks["rkv", 240] == peaks["rkv", 60] == 4 * 3
    assert peaks["full", 240] > 3 * peaks["full", 60]


def test_long_prompts_are_compressed_at_the_end_of_their_prefill(tiny, prompts):
    policy = RKV(budget=20, interval=10)
    sampler = engine(tiny(), policy)
    (rollout,) = sampler.generate(prompts(100), Sampling(max_tokens=4, stop_ids=()), record_kept=True)
    assert rollout.kv.held == (21, 22, 23) and rollout.kv.peak == 100
    assert rollout.kept_positions[0].shape == (4, 2, 20)
    assert (rollout.kept_positions[0][..., -8:] == torch.arange(92, 100)).all()
    (rollout,) = engine(tiny(), RKV(budget=20, interval=10, protect_prompt=True)).generate(
        prompts(100), Sampling(max_tokens=40, stop_ids=())
    )
    assert max(rollout.kv.held) == 130 and rollout.kv.num_compressions == 1


def test_a_call_that_raises_leaves_the_pool_whole(tiny, prompts):
    loaded = tiny(layers=2)
    for policy in (Full(), SnapKV(budget=16, interval=8)):
        sampler = engine(loaded, policy)
        sampling = Sampling(max_tokens=40, n=3, seed=4, stop_ids=())
        expected = [r.token_ids.tolist() for r in sampler.generate(prompts(5, 9), sampling)]

        def interrupt(progress):
            if progress.num_tokens > 40:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            sampler.generate(prompts(5, 9), sampling, on_step=interrupt)
        cache = sampler.cache
        for tensor in (cache.k, cache.v, cache.positions, cache.queries):
            assert not tensor.any(), "what was written is forgotten"
        assert [r.token_ids.tolist() for r in sampler.generate(prompts(5, 9), sampling)] == expected


def test_logits_that_are_not_finite_raise_and_poison_nothing(tiny, prompts):
    loaded = tiny(seed=9)
    sampler = engine(loaded)
    expected = sampler.generate(prompts(5), Sampling(max_tokens=5))[0].token_ids.tolist()
    norm = loaded.model.model.norm.weight
    saved = norm.data.clone()
    norm.data.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match=r"request 0 .* not finite at token 0"):
        sampler.generate(prompts(5), Sampling(max_tokens=5))
    norm.data.copy_(saved)
    assert sampler.generate(prompts(5), Sampling(max_tokens=5))[0].token_ids.tolist() == expected


def test_training_mode_and_gradients_are_left_as_they_were(tiny, prompts):
    model = tiny().model
    model.train()
    model.model.layers[0].eval()
    modes = []
    engine(tiny()).generate(prompts(5), Sampling(max_tokens=5), on_step=lambda _: modes.append(model.training))
    assert not any(modes) and model.training and not model.model.layers[0].training
    model.eval()
    ids = torch.tensor(prompts(8), device=model.device)
    model(ids, use_cache=False).logits.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.zero_grad()


def test_progress_is_reported_as_it_goes(tiny, prompts, device):
    seen = []
    sampler = engine(tiny(), RKV(budget=16, interval=8), rows=2)
    rollouts = sampler.generate(prompts(5, 5, 5), Sampling(max_tokens=30, stop_ids=()), on_step=seen.append)
    steps = [progress.num_steps for progress in seen]
    assert steps == sorted(steps) and steps[-1] == sampler.stats.num_steps
    assert len(seen) == steps[-1] or device != "cpu", "every step, where several are not launched at once"
    assert max(p.num_rows for p in seen) == 2
    assert (seen[-1].num_finished, seen[-1].num_requests, seen[-1].num_tokens) == (3, 3, 90)
    assert seen[-1].held_so_far == sum(sum(r.kv.held) for r in rollouts)
    assert seen[-1].full_so_far == sum(r.kv.full for r in rollouts)


def test_a_context_limit_ends_a_sample(tiny, prompts):
    loaded = tiny(max_position_embeddings=32)
    (rollout,) = engine(loaded).generate(prompts(20), Sampling(max_tokens=100, stop_ids=()))
    assert len(rollout.token_ids) == 12 and rollout.finish_reason == "length"


def test_no_prompts_no_rollouts(tiny):
    assert engine(tiny()).generate([], Sampling()) == []


@pytest.mark.parametrize(
    ("batch", "sampling", "config", "message"),
    [
        ([[]], {}, {}, "prompt 0 is empty"),
        ([[1], [1] * 9000], {}, {}, "prompt 1 has 9000 tokens and the model's context is 8192"),
        ([[1, 259]], {}, {}, "the model has 259 tokens"),
        ([[1]], {"top_logprobs": 300}, {}, "the model has 259 tokens"),
        ([[1] * 50], {"max_tokens": 60}, {"pool_pages": 6}, "needs 7; set engine.pool_pages to at least 7"),
        ([[1] * 50], {}, {"pool_bytes": 1000}, "the pool has 0 pages"),
    ],
)
def test_bad_requests_are_named(batch, sampling, config, message, tiny):
    with pytest.raises(ValueError, match=message):
        engine(tiny(), **config).generate(batch, Sampling(**sampling))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": 0}, "sampling.n"),
        ({"max_tokens": 0}, "sampling.max_tokens"),
        ({"temperature": -1.0}, "sampling.temperature"),
        ({"temperature": math.nan}, "sampling.temperature"),
        ({"top_p": 0.0}, "sampling.top_p"),
        ({"top_k": 0}, "sampling.top_k"),
        ({"stop": ("",)}, "sampling.stop"),
    ],
)
def test_bad_sampling_is_named(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rows": 0}, "engine.rows"),
        ({"page_size": 20}, "engine.page_size"),
        ({"pool_pages": 1, "pool_bytes": 1}, "leave one out"),
        ({"max_prefill_tokens": 0}, "engine.max_prefill_tokens"),
    ],
)
def test_bad_engine_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**settings)


def test_bytes_count_pages_prefill_and_the_remembered_queries(tiny, prompts):
    loaded = tiny()
    page, ring = 16 * loaded.shape.entry_bytes, 4 * 8 * 4 * 32 * 4  # layers, window, heads, width, bytes
    sampler = engine(loaded, RKV(budget=16, interval=8))
    (rollout,) = sampler.generate(prompts(40), Sampling(max_tokens=10, stop_ids=()))
    assert rollout.kv.peak_bytes == 3 * page + ring
    # Rings of four rows and of nobody's; per row six integers, the table's two pages, its place in the order; a cursor;
    # and tokens and log-probs of the last steps.
    state = 8 * (6 * 5 + 2 * 5 + 4 + 1) + CAPACITY * 4 * (8 + 4)
    assert sampler.stats.peak_bytes == 3 * page + 5 * ring + state
    (rollout,) = engine(loaded, Streaming(budget=20, interval=10)).generate(prompts(100), Sampling(max_tokens=3))
    assert rollout.kv.peak_bytes == 7 * page


def test_a_prompt_of_exactly_the_budget_is_not_compressed(tiny, prompts):
    (rollout,) = engine(tiny(), Streaming(budget=20, interval=10)).generate(
        prompts(20), Sampling(max_tokens=2, stop_ids=())
    )
    assert rollout.kv.num_compressions == 0


@pytest.mark.parametrize("stop", [("é" * 8,), ("z", "abcdefghijkl")])
def test_the_tail_searched_covers_the_longest_stop_string(stop, tiny):
    scheduler = SimpleNamespace(policy=Full())
    loop = Loop(tiny(), Sampling(stop=stop, stop_ids=()), [], [], scheduler, None, None, None)
    ids = list(("qq" + stop[-1]).encode())
    assert loop.has_stop_string(ids)
    assert not loop.has_stop_string(ids[:-1])


def test_one_string_is_not_a_list_of_prompts(tiny):
    with pytest.raises(ValueError, match="give a list"):
        engine(tiny()).generate("Once")


def test_inference_mode_leaves_nothing_behind(tiny, prompts):
    loaded = tiny(seed=3)
    sampler = engine(loaded, RKV(budget=16, interval=8))
    sampling = Sampling(max_tokens=30, stop_ids=())
    with torch.inference_mode():
        expected = sampler.generate(prompts(5, 9), sampling)
    got = sampler.generate(prompts(5, 9), sampling)
    assert [r.token_ids.tolist() for r in got] == [r.token_ids.tolist() for r in expected]
    loaded.model(torch.tensor([[1, 2, 3]], device=loaded.model.device)).logits.sum().backward()
    loaded.model.zero_grad()


def test_an_engine_does_one_call_at_a_time(tiny, prompts):
    sampler = engine(tiny())
    with pytest.raises(RuntimeError, match="in the middle of a call"):
        sampler.generate(prompts(5), Sampling(max_tokens=5), on_step=lambda p: sampler.generate(prompts(3)))
    assert len(sampler.generate(prompts(5), Sampling(max_tokens=5))) == 1


@pytest.mark.parametrize("method", ["release", "resume"])
def test_memory_is_not_taken_from_a_call_that_runs(method, tiny, prompts):
    sampler = engine(tiny())
    with pytest.raises(RuntimeError, match="in the middle of a call"):
        sampler.generate(prompts(5), Sampling(max_tokens=5), on_step=lambda progress: getattr(sampler, method)())


def test_a_bounded_pool_is_kept_from_call_to_call(tiny, prompts):
    """Whatever their size: ReMax, say, samples many and then one of each prompt."""
    sampler = engine(tiny(), RKV(budget=16, interval=8), rows=8)
    pools = []
    for n in (8, 1, 8, 1):
        sampler.generate(prompts(5), Sampling(max_tokens=30, n=n, stop_ids=()))
        pools.append((sampler.cache.k.data_ptr(), sampler.stats.num_pages))
    assert len(set(pools)) == 1


def test_few_ways_to_sample_are_kept_ready(tiny, prompts):
    sampler = engine(tiny())
    for temperature in (1.0, 0.9, 0.8, 0.7, 1.0, 0.6):
        sampler.generate(prompts(5), Sampling(max_tokens=3, temperature=temperature))
    assert [baked[0] for baked in sampler.decoders] == [0.8, 0.7, 1.0, 0.6]
    decoder = sampler.decoders[1.0, 1.0, None, 0]
    sampler.generate(prompts(5), Sampling(max_tokens=3))
    assert sampler.decoders[1.0, 1.0, None, 0] is decoder


def test_graphs_of_all_sizes_can_be_made_at_once(tiny, prompts, monkeypatch):
    sampler = engine(tiny(), rows=13)
    sampler.generate(prompts(5), Sampling(max_tokens=3))
    (decoder,) = sampler.decoders.values()
    if not decoder.uses_graphs:
        decoder.capture()
        assert not decoder.graphs, "a CPU has none"
    monkeypatch.setattr("torch.cuda.device", lambda device: nullcontext())
    monkeypatch.setattr(decoder, "_capture", lambda batch: decoder.graphs.update({batch: None}))
    decoder.uses_graphs, decoder.graphs = True, {4: None}
    decoder.capture()
    assert sorted(decoder.graphs) == [3, 4, 6, 8, 13]


def test_released_memory_comes_back_when_asked_for_or_needed(tiny, prompts):
    sampler = engine(tiny(), Full())
    sampling = Sampling(max_tokens=20, stop_ids=())
    expected = [r.token_ids.tolist() for r in sampler.generate(prompts(5, 9), sampling)]
    pages = sampler.cache.k.shape[1]
    for resume in (True, False):
        sampler.release()
        assert sampler.cache.k.numel() == sampler.cache.v.numel() == sampler.cache.positions.numel() == 0
        if resume:
            sampler.resume()
            assert sampler.cache.k.shape[1] == pages
        assert [r.token_ids.tolist() for r in sampler.generate(prompts(5, 9), sampling)] == expected


def test_an_end_token_says_more_than_the_string_it_completes(tiny):
    loop = Loop(tiny(), Sampling(stop=("b",), stop_ids=(98,)), [], [], SimpleNamespace(policy=Full()), None, None, None)
    sequence = Sequence(request=0, prompt_idx=0, prompt_len=1, max_tokens=9)
    assert loop.end_of(sequence, np.array([97, 98]), np.array([False, True])) == (2, "stop")


def test_more_starts_than_the_output_buffer_holds(tiny, prompts):
    """Samples of one token never decode, so nothing but starting fills the buffer."""
    loaded = tiny(dtype=torch.float64)
    one, many = (
        engine(loaded, rows=rows).generate([[i] for i in range(100)], Sampling(max_tokens=1, stop_ids=()))
        for rows in (1, 100)
    )
    assert [r.token_ids.tolist() for r in one] == [r.token_ids.tolist() for r in many]


def test_a_batch_filled_up_with_nobodys_row_decodes_the_same(tiny, prompts, monkeypatch):
    def run():
        sampler = engine(tiny(dtype=torch.float64), RKV(budget=16, interval=8), rows=8)
        return [r.token_ids.tolist() for r in sampler.generate(prompts(5, 9, 3), Sampling(max_tokens=40, stop_ids=()))]

    expected = run()
    monkeypatch.setattr("sparse_rl.rollout.decoder.Decoder.batch_of", lambda self, count: self.rows.num_rows)
    assert run() == expected


def test_a_dense_pool_shrinks_with_the_work(tiny, prompts):
    sampler = engine(tiny(), rows=8)
    pages = []
    for n, max_tokens in ((8, 200), (1, 5)):
        sampler.generate(prompts(5), Sampling(max_tokens=max_tokens, n=n, stop_ids=()))
        pages.append(sampler.stats.num_pages)
    assert pages[1] < pages[0] // 2


def test_resuming_in_inference_mode_makes_ordinary_memory(tiny, prompts):
    sampler = engine(tiny())
    sampler.generate(prompts(5), Sampling(max_tokens=5))
    sampler.release()
    with torch.inference_mode():
        sampler.resume()
    assert not sampler.cache.k.is_inference()
