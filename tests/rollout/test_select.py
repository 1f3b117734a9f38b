# SPDX-License-Identifier: Apache-2.0
"""Policies that read chosen pages, through the engine: against a dense cache, and against loops over a masked model."""

from __future__ import annotations

import pytest
import torch
from replay import firing_times, replay_logprobs
from schedules import named
from slow_policies import chosen_pages, page_importance

from sparse_rl.kv import POLICIES, Full, PagesMean, Quest, SelectPolicy, Streaming, build_policy
from sparse_rl.kv.schedule import Schedule
from sparse_rl.kv.sparse_cache import SparseCache
from sparse_rl.rollout import Engine, EngineConfig, Sampling

SELECT = {name: policy for name, policy in POLICIES.items() if issubclass(policy, SelectPolicy)}
LENGTHS = (3, 90, 110, 101)
STEPS = Schedule((0, 60, 98), (32, 48, 80))


def tokens(rollouts):
    return [rollout.token_ids.tolist() for rollout in rollouts]


@pytest.mark.parametrize("name", SELECT)
def test_a_budget_above_the_context_is_a_dense_cache(name, tiny, prompts):
    loaded, sampling = tiny("qwen3", layers=4), Sampling(max_tokens=12, n=2, stop_ids=())
    config = EngineConfig(rows=3, page_size=16)
    dense = Engine(loaded, Full(), config).generate(prompts(*LENGTHS), sampling)
    got = Engine(loaded, build_policy(name, budget=192), config).generate(prompts(*LENGTHS), sampling)
    assert tokens(got) == tokens(dense)
    for a, b in zip(got, dense, strict=True):
        assert torch.equal(a.sampler_logprobs, b.sampler_logprobs)
        assert a.kv.read == sum(a.kv.held) and a.kv.saved_frac == 0.0


@pytest.mark.parametrize("name", SELECT)
def test_another_budget_holds_from_the_next_call_on(name, tiny, prompts):
    loaded, sampling = tiny(layers=4, dtype=torch.float64), Sampling(max_tokens=12, stop_ids=())
    config, (before, after) = EngineConfig(rows=3, page_size=16), (build_policy(name, budget=n) for n in (80, 48))
    engine = Engine(loaded, before, config)
    first = engine.generate(prompts(*LENGTHS), sampling)
    engine.use(after)
    second = engine.generate(prompts(*LENGTHS), sampling)
    expected = Engine(loaded, after, config).generate(prompts(*LENGTHS), sampling)
    assert tokens(second) == tokens(expected) and [r.kv.read for r in second] == [r.kv.read for r in expected]
    for got, fresh in zip(second, expected, strict=True):
        torch.testing.assert_close(got.sampler_logprobs, fresh.sampler_logprobs, atol=1e-6, rtol=0)
    assert (second[1].sampler_logprobs - first[1].sampler_logprobs).abs().max() > 1e-3, "the budget matters"
    assert second[1].kv.read < first[1].kv.read


def slow_rollout(model, rollout, policy, page, windows, held_at=range):
    """Log-probs of a rollout's tokens and the entries read: every query of a decode step sees the pages it chooses.

    `held_at(context)` gives the positions held, in their order, the newest included; all of them if not given. Layer by
    layer, since the queries of a layer depend on what the layers before it read.
    """
    prompt_len, num_kv_heads = len(rollout.prompt.ids), model.config.num_key_value_heads
    ids = torch.tensor([[*rollout.prompt.ids, *rollout.token_ids.tolist()]], device=model.device)
    total = ids.shape[1] - 1
    age = torch.arange(total)[:, None] - torch.arange(total)[None, :]
    visible = torch.stack([(age >= 0) & (age < (window or total)) for window in windows])
    visible = visible[:, None].repeat(1, num_kv_heads, 1, 1)
    for position in range(prompt_len, total):
        gone = list(set(range(position)) - set(held_at(position + 1)))
        visible[:, :, position, gone] = False
    read = 0
    for layer_idx, window in enumerate(windows):
        if layer_idx < policy.dense_layers or window is not None:
            read += sum(len(held_at(context)) for context in range(prompt_len + 1, total + 1))
            continue
        seen: dict = {}
        replay_logprobs(model, ids, visible, seen)
        queries, keys = (x.cpu().numpy() for x in seen[layer_idx][:2])
        group = queries.shape[0] // keys.shape[0]
        for position in range(prompt_len, total):
            held = list(held_at(position + 1))
            pages = [held[s : s + page] for s in range(0, len(held), page)]
            for head in range(num_kv_heads):
                own = queries[head * group : (head + 1) * group, position]
                importance = [page_importance(own, keys[head, entries], policy.landmarks) for entries in pages]
                chosen = chosen_pages(importance, policy.schedule.at(position + 1) // page, policy.first, policy.last)
                for n in set(range(len(pages))) - set(chosen):
                    visible[layer_idx, head, position, pages[n]] = False
            read += int(visible[layer_idx, 0, position].sum())
    logprobs = replay_logprobs(model, ids, visible)[0, prompt_len - 1 :]
    return logprobs.gather(-1, rollout.token_ids.to(ids.device)[:, None])[:, 0].float().cpu(), read / len(windows)


@pytest.mark.parametrize(
    ("family", "policy", "schedule"),
    [
        ("llama", PagesMean(budget=64, dense_layers=1), None),
        ("llama", Quest(budget=64, first=0, last=1, dense_layers=0), None),
        ("qwen3", PagesMean(dense_layers=0, last=1), STEPS),
        ("gemma3", Quest(budget=64, dense_layers=0), None),  # the first layer has a window
    ],
    ids=["pages_mean", "quest", "schedule", "windows"],
)
@pytest.mark.some(2)
def test_decoding_equals_loops(family, policy, schedule, tiny, reference, prompts, monkeypatch):
    """Several samples of long and short prompts through few rows, so that pages are shared, copied and used again."""
    if schedule is not None:
        monkeypatch.setattr(type(policy), "schedule", schedule)
    loaded, model = tiny(family, dtype=torch.float64), reference(family, dtype=torch.float64)
    engine = Engine(loaded, policy, EngineConfig(rows=2, page_size=16))
    rollouts = engine.generate(prompts(90, 55), Sampling(max_tokens=18, n=2, stop_ids=()))
    dense = Engine(loaded, Full()).generate(prompts(90, 55), Sampling(max_tokens=18, n=2, stop_ids=()))
    assert (rollouts[0].sampler_logprobs - dense[0].sampler_logprobs).abs().max() > 1e-3, "it reads all that matters"
    for rollout in rollouts:
        expected, read = slow_rollout(model, rollout, policy, 16, loaded.shape.windows)
        torch.testing.assert_close(rollout.sampler_logprobs, expected, atol=1e-6, rtol=0)
        assert rollout.kv.read == pytest.approx(read)
        assert sum(rollout.kv.held) == rollout.kv.full


@pytest.mark.parametrize("select", SELECT)
@pytest.mark.some(1)
def test_pages_are_chosen_among_those_an_evicting_policy_left(select, tiny, reference, prompts):
    """After each cut entries stand in other pages, whose landmarks are then others."""
    steps = "48@0+64@125"  # by the tokens of the context, more than are ever held
    policy = Streaming(budget=100, interval=9, sinks=4, select=select, select_budget=steps)
    settings = {"layers": 4, "dtype": torch.float64}  # the first two layers read all
    loaded, model = tiny(**settings), reference(**settings)
    rollouts = Engine(loaded, policy, EngineConfig(rows=2)).generate(
        prompts(120, 91), Sampling(max_tokens=30, n=2, stop_ids=())
    )
    for rollout in rollouts:
        prompt_len = len(rollout.prompt.ids)
        assert rollout.kv.num_compressions >= 2
        times = firing_times(prompt_len, len(rollout.token_ids), policy.budget, policy.budget + policy.interval)

        def held_at(context, times=times):
            """Of the tokens before, those the last firing kept and those that came since."""
            fired = max((time for time in times if time < context), default=None)
            recent = 0 if fired is None else fired - policy.budget + policy.sinks
            return [*range(min(policy.sinks, recent)), *range(recent, context)]

        expected, read = slow_rollout(model, rollout, policy.selection, 16, loaded.shape.windows, held_at)
        torch.testing.assert_close(rollout.sampler_logprobs, expected, atol=1e-6, rtol=0)
        assert rollout.kv.read == pytest.approx(read) and rollout.kv.read < sum(rollout.kv.held) < rollout.kv.full


def test_rows_pools_and_preemption_do_not_matter(tiny, prompts):
    loaded, policy = tiny("qwen2", dtype=torch.float64), Quest(budget=64, dense_layers=0)
    sampling = Sampling(max_tokens=20, n=2, seed=5, stop_ids=(0, 1, 2, 3))
    expected = Engine(loaded, policy, EngineConfig(rows=1, page_size=16)).generate(prompts(*LENGTHS), sampling)
    for more in ({"rows": 8, "max_prefill_tokens": 30}, {"rows": 8, "pool_pages": 17}):
        engine = Engine(loaded, policy, EngineConfig(**{"page_size": 16, **more}))
        for _ in range(2):
            got = engine.generate(prompts(*LENGTHS), sampling)
            assert tokens(got) == tokens(expected)
            for a, b in zip(got, expected, strict=True):
                torch.testing.assert_close(a.sampler_logprobs, b.sampler_logprobs, atol=1e-6, rtol=0)
                assert a.kv == b.kv
            engine.release()
        assert (engine.stats.num_preemptions > 0) == ("pool_pages" in more)


def test_published_schedules_say_how_many_pages_are_read():
    """1.7b-0.86 at 32,000 tokens: 253 pages and 3 reserved ones; at 1,000 tokens 29 and 3; at 500 all 32."""
    policy = PagesMean(budget="sparrow/qwen3-1.7b-0.86")
    lengths = torch.tensor([32_000, 1_000, 500, 32_009])
    counts, read = policy.pages_read(lengths, lengths, 16)
    assert counts.tolist() == [256, 32, 32, 256] and read.tolist() == [4096, 512 - 8, 500, 4096 - 7]
    assert [policy.pages_read(n, n, 16)[1] for n in lengths.tolist()] == read.tolist()


def test_pages_are_small_where_they_are_chosen_among(tiny):
    assert Engine(tiny(), PagesMean()).page_size == 16 and Engine(tiny(), Full()).page_size == 64
    assert Engine(tiny(), PagesMean(), EngineConfig(page_size=32)).page_size == 32


def test_landmarks_count_as_memory(tiny, prompts):
    shape = tiny().shape
    vector = shape.num_layers * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
    found = {}
    for policy in (Full(), PagesMean(), Quest()):
        engine = Engine(tiny(), policy, EngineConfig(rows=2, page_size=16))
        (rollout,) = engine.generate(prompts(33), Sampling(max_tokens=2, stop_ids=()))
        found[policy.name] = rollout.kv.peak_bytes
        assert sum(pool.nbytes for pool in engine.cache.page_pools) == (engine.cache.num_pages + 1) * engine._page_bytes
    assert found["pages_mean"] - found["full"] == 3 * vector and found["quest"] - found["full"] == 3 * 2 * vector


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"budget": 47}, r"47.*always read are 48 entries \(first 1 \+ last 2 pages of 16\).*48 or more"),
        ({"budget": "32@0+96@50"}, "kv.budget is 32, but the pages always read are 48"),
        ({"budget": 100, "first": 6}, "128 or more"),
        ({"last": 0}, "kv.last is 0"),
        ({"first": -1}, "kv.first is -1"),
        ({"dense_layers": -1}, "kv.dense_layers"),
        ({"budget": 0}, "kv.budget is 0"),
    ],
)
def test_bad_settings_are_named(settings, message, tiny):
    with pytest.raises(ValueError, match=message):
        Engine(tiny(), PagesMean(**settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"select": "pages"}, "kv.select is 'pages'; choose one of none, pages_mean, quest"),
        ({"select_budget": 64}, "kv.select is none"),
        ({"select": "quest", "select_budget": 0}, "kv.select_budget is 0"),
        ({"select": "quest", "select_budget": True}, "kv.select_budget is True; it must be a whole number"),
        (
            {"select": "quest", "select_budget": "gone.json"},
            "kv.select_budget is 'gone.json', but there is no such file",
        ),
        ({"select": "quest"}, "kv.select is quest, but kv.select_budget is missing"),
        (
            {"select": "quest", "select_budget": 640},
            r"is 640, but no more than 640 .*budget 512 \+ interval 128",
        ),
    ],
)
def test_bad_settings_inside_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        build_policy("streaming", **settings)


def test_pages_always_read_are_named_with_settings_there_are(tiny):
    inside = Streaming(budget=200, interval=9, select="quest", select_budget=47)
    with pytest.raises(ValueError, match=r"^kv.select_budget is 47.* pages of 32\); raise.* 96 .*engine.page_size\.$"):
        Engine(tiny(), inside, EngineConfig(page_size=32))
    with pytest.raises(ValueError, match=r"^kv.select_budget is 47.* pages of 16\); raise it to 48 or more\.$"):
        SparseCache(inside)
    with pytest.raises(ValueError, match=r"^kv.budget is 47.*raise it to 48 or more, or lower kv.first or kv.last\.$"):
        SparseCache("quest", 47)


def test_the_budget_is_that_of_the_context_not_of_what_is_held():
    policy = PagesMean(budget=named((0, 100), (48, 96)))
    for context, expected in ((99, (3, 42)), (100, (6, 90))):  # of 6 pages, the last with 10 entries
        assert policy.pages_read(90, context, 16) == expected
        counts, read = policy.pages_read(torch.tensor([90, 20]), torch.tensor([context, 20]), 16)
        assert (counts.tolist(), read.tolist()) == ([expected[0], 2], [expected[1], 20])


def test_what_a_prompt_holds_on_top_may_be_left_unread():
    inside = {"select": "quest", "select_budget": 1024}
    assert build_policy("streaming", protect_prompt=True, **inside).selection == Quest()
    assert build_policy("streaming", budget=named((0, 900), (100, 4000)), **inside).selection == Quest()
