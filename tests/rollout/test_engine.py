# SPDX-License-Identifier: Apache-2.0
"""What a call promises: whole records, order, seeds, clear errors, and a model left as it was."""

from __future__ import annotations

import gc
import math
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from small_engine import engine

from sparse_rl.kv import RKV, Full, PagesMean
from sparse_rl.rollout import EngineConfig, Sampling, loop
from sparse_rl.rollout.memory import GuardedEngine, Memory
from sparse_rl.rollout.rows import Drawn, Fetch
from sparse_rl.rollout.sequence import Sequence


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


def test_a_part_of_a_list_is_sampled_as_in_the_whole_list(tiny, prompts):
    loaded, sampling = tiny(dtype=torch.float64), Sampling(max_tokens=12, n=2, stop_ids=())
    whole = engine(loaded).generate(prompts(5, 5, 5), sampling)
    part = engine(loaded).generate(prompts(5, 5, 5)[1:], sampling, first=1)
    assert [r.token_ids.tolist() for r in part] == [r.token_ids.tolist() for r in whole[2:]]


def test_torchs_own_random_state_is_untouched(tiny, prompts):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    engine(tiny()).generate(prompts(5), Sampling(max_tokens=5))
    assert torch.equal(torch.rand(3), expected)


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


def test_a_garbage_collector_gets_no_more_to_look_through_with_every_row(tiny, prompts, device):
    """Else it stops long rollouts for as long as it takes to look through all that torch has."""
    rows, marks, tracked = 32, [48, 176], []

    def count(progress):
        if len(tracked) < len(marks) and progress.num_steps >= marks[len(tracked)]:
            tracked.append(len(gc.get_objects()))

    engine(tiny(), rows=rows).generate(prompts(5), Sampling(max_tokens=200, n=rows, stop_ids=()), on_step=count)
    fetches = (marks[1] - marks[0]) / loop.pace(torch.device(device))[0]
    assert tracked[1] - tracked[0] < 4 * fetches


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
        ([[1] * 50], {"max_tokens": 60}, {"pool_pages": 6}, "or lower sampling.max_tokens"),
        ([[1] * 200], {"max_tokens": 30}, {"pool_pages": 2}, "needs 15; .*, or shorten the prompt.$"),
        ([[1] * 200], {"max_tokens": 33}, {"pool_pages": 2}, "or shorten the prompt and lower sampling.max_tokens.$"),
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


def test_one_string_is_not_a_list_of_prompts(tiny):
    with pytest.raises(ValueError, match="give a list"):
        engine(tiny()).generate("Once")


@pytest.mark.parametrize("sampling", [[Sampling(), Sampling()], [], {"max_tokens": 3}], ids=["list", "empty", "dict"])
def test_a_call_has_one_sampling(sampling, tiny):
    loaded = tiny()
    for made in (engine(loaded), GuardedEngine(loaded, Full(), EngineConfig(), Memory(), "rollout")):
        with pytest.raises(ValueError, match=rf"sampling is a {type(sampling).__name__}, but .* share one Sampling"):
            made.generate([[1], [2]], sampling)


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


@pytest.mark.parametrize("kv", [Full(), RKV(budget=16, interval=8), PagesMean(budget=48, dense_layers=1)])
@pytest.mark.some(2)
def test_tokens_read_several_steps_at_a_time_are_those_read_one_by_one(kv, tiny, prompts, monkeypatch):
    """A GPU's pace, a CPU's: the same rollouts and the same counts, whatever ends inside a fetch."""
    loaded = tiny(dtype=torch.float64)
    found = []
    for interval, lag in ((1, 0), (8, 1), (5, 2)):
        monkeypatch.setattr(loop, "pace", lambda _, every=(interval, lag): every)
        sampler, last = engine(loaded, kv, rows=5), []
        sampling = Sampling(max_tokens=60, n=6, top_logprobs=3, stop_ids=tuple(range(8)), stop=("a", "b"))
        rollouts = sampler.generate(prompts(5, 21, 90, seed=3), sampling, on_step=last.append)
        assert last[-1].num_tokens == sum(len(r.token_ids) for r in rollouts)
        assert last[-1].held_so_far == sum(sum(r.kv.held) for r in rollouts)
        assert last[-1].full_so_far == sum(r.kv.full for r in rollouts)
        assert last[-1].read_so_far == pytest.approx(sum(r.kv.read for r in rollouts))
        assert (last[-1].read_so_far < last[-1].held_so_far) == isinstance(kv, PagesMean)
        found.append(rollouts)
    assert {r.finish_reason for r in found[0]} >= {"stop", "stop_string"}
    for rollouts in found[1:]:
        for one, other in zip(rollouts, found[0], strict=True):
            assert one.finish_reason == other.finish_reason and one.kv == other.kv
            for name in ("token_ids", "sampler_logprobs", "top_ids", "top_logprobs"):
                torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=0, atol=1e-6)


@pytest.mark.parametrize("every", [(8, 1), (5, 2)])
def test_a_sequence_comes_back_with_its_last_token_however_many_were_read_at_once(every, tiny, prompts, monkeypatch):
    loaded = tiny(dtype=torch.float64)
    given, sampling = prompts(5, 21, 40, seed=3), Sampling(max_tokens=70, n=2, stop_ids=())
    expected = engine(loaded, rows=3).generate(given, sampling)
    monkeypatch.setattr(loop, "pace", lambda _: every)
    sampler = engine(loaded, rows=3, pool_pages=9)
    found = sampler.generate(given, sampling)
    assert sampler.stats.num_preemptions > 0
    assert [r.token_ids.tolist() for r in found] == [r.token_ids.tolist() for r in expected]


def test_what_was_read_is_kept_without_what_it_was_fetched_in():
    fetched = [torch.zeros(4, 3, dtype=torch.int64), torch.zeros(4, 3), torch.zeros(4, 3, 2), torch.zeros(4, 3, 2)]
    part = Fetch(fetched).wait().part(slice(1, 3), 2)
    for each in (part.tokens, part.logprobs, part.top_ids, part.top_logprobs):
        assert each.base is None and each.flags.c_contiguous and each.shape[:2] == (2, 2)


def test_the_row_that_is_not_finite_is_named(tiny):
    sequences = [Sequence(request=i, prompt_idx=0, prompt_len=4, max_tokens=99) for i in range(2)]
    scheduler = SimpleNamespace(policy=Full(), finish=lambda _: None)
    reader = loop.Loop(tiny(), Sampling(stop_ids=()), [], sequences, scheduler, None, None, None)
    logprobs = np.array([[-1.0, -1.0], [-1.0, np.nan]], dtype=np.float32)
    with pytest.raises(FloatingPointError, match=r"request 1 .* at token 1;"):
        reader.read_flight(sequences, Drawn(np.ones((2, 2), dtype=int), logprobs, None, None))


@pytest.mark.parametrize("ends", [True, False])
def test_what_is_drawn_after_an_end_may_be_anything(ends, tiny):
    sequence = Sequence(request=3, prompt_idx=0, prompt_len=4, max_tokens=99, held=list(range(5, 20)))
    scheduler = SimpleNamespace(policy=Full(), finish=lambda _: None)
    reader = loop.Loop(tiny(), Sampling(stop_ids=(9,)), [], [sequence], scheduler, None, None, None)
    reader.read_flight([sequence], Drawn(np.array([[70, 71]]), np.full((1, 2), -1.0, np.float32), None, None))
    tokens = np.array([[72, 9 if ends else 73, 74]])
    logprobs = np.array([[-0.5, -0.25, np.nan]], dtype=np.float32)
    with nullcontext() if ends else pytest.raises(FloatingPointError, match=r"request 3 .* at token 4;"):
        reader.read_flight([sequence], Drawn(tokens, logprobs, None, None))
        assert sequence.joined("tokens").tolist() == [70, 71, 72, 9]
        assert sequence.joined("logprobs").tolist() == [-1.0, -1.0, -0.5, -0.25]
        assert sequence.finish_reason == "stop" and sequence.held == [5, 6, 7]
        assert reader.held_so_far == reader.full_so_far == 5 + 6 + 7
