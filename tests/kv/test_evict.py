# SPDX-License-Identifier: Apache-2.0
"""Every evicting policy against a slow sequence (slow_evict.py), through the real cache, scores included.

Layers with and without a window, ragged rows, pages that go from one row to another, many firings.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from replay import firing_times, replay_logprobs, rollout_visibility
from slow_evict import SlowSequence

from sparse_rl.kv import GKV, H2O, POLICIES, RKV, TOVA, EvictPolicy, KeyDiff, Knorm, Random, SnapKV, Streaming
from sparse_rl.kv import policy as policy_module
from sparse_rl.kv.cache import PagedCache
from sparse_rl.kv.compress import compress
from sparse_rl.kv.pages import PagePool
from sparse_rl.model.dry_run import AttentionShape
from sparse_rl.rollout import Engine, EngineConfig, Sampling

DIM, PAGE = 8, 16
WINDOWS, SCALES = (23, None), (0.4, 0.3)
TOLERANCE = 1e-9
PER_HEAD = [
    Random(budget=14, interval=9, seed=5),
    Random(budget=20, interval=5, recent=4, sinks=2, protect_prompt=True),
    Knorm(budget=14, interval=9),
    Knorm(budget=6, interval=9, recent=4, sinks=2),  # budget = protected entries
    KeyDiff(budget=14, interval=9),
    KeyDiff(budget=18, interval=6, recent=3, protect_prompt=True),
    TOVA(budget=14, interval=9),
    TOVA(budget=12, interval=11, recent=2, sinks=3, protect_prompt=True),
    H2O(budget=14, interval=8),  # every query between two firings once
    H2O(budget=12, interval=9, window=4, decay=0.7, sinks=1),  # some never
    H2O(budget=10, interval=5, window=40, recent=0),  # more than a cache ever holds
    H2O(budget=14, interval=8, window=11, decay=0.0, protect_prompt=True),
    GKV(budget=14, interval=9, window=4),
    GKV(budget=9, interval=7, window=6, sinks=3, decay=1.0),
    GKV(budget=16, interval=5, window=8, kernel=3, lam=0.8, threshold=0.2, protect_prompt=True),
]
SHARED = [
    Streaming(budget=14, interval=9, index="shared"),
    Random(budget=14, interval=9, index="shared"),
    Knorm(budget=14, interval=9, sinks=2, index="shared"),
    KeyDiff(budget=14, interval=9, index="shared"),
    TOVA(budget=14, interval=9, index="shared"),
    H2O(budget=14, interval=8, window=8, index="shared"),
    SnapKV(budget=14, interval=9, window=4, sinks=3, index="shared"),
    RKV(budget=14, interval=9, window=4, protect_prompt=True, index="shared"),
    GKV(budget=14, interval=9, window=4, index="shared"),
]
GROUPED = [(policy, (1, 2, 8)[i % 3]) for i, policy in enumerate(PER_HEAD + SHARED)]
GROUPED += [(PER_HEAD[0], 8), (PER_HEAD[2], 2), (TOVA(budget=9, interval=4), 8)]  # each is there with all three


def test_every_evicting_policy_has_cases():
    evicting = {name for name, policy in POLICIES.items() if issubclass(policy, EvictPolicy)}
    assert {policy.name for policy in PER_HEAD} >= evicting - {"streaming", "snapkv", "rkv"}  # in test_policies.py
    assert {policy.name for policy in SHARED} == evicting
    for group in (1, 2, 8):
        assert {policy.name for policy, of in GROUPED if of == group} >= evicting - {"streaming", "snapkv", "rkv"}


class Bench:
    """Sequences in a real cache, each beside its slow twin."""

    def __init__(self, policy, *, prompt_lens, heads=2, group=2, seed=0, keys=None, windows=WINDOWS):
        self.policy, self.heads, self.group = policy, heads, group
        self.random = np.random.default_rng(seed)
        self.new_keys = keys or (lambda *size: self.random.normal(size=size))
        shape = AttentionShape(
            num_heads=heads * group,
            num_kv_heads=heads,
            head_dim=DIM,
            windows=windows,
            scales=SCALES,
            dtype=torch.float64,
            device=torch.device("cpu"),
        )
        rows = len(prompt_lens)
        self.cache = PagedCache(
            shape,
            num_pages=90,
            page_size=PAGE,
            num_rows=rows,
            num_queries=policy.num_queries,
            keeps_score=policy.keeps_score,
        )
        self.cache.scores.fill_(1e6)  # whatever others left
        self.pool = PagePool(90, PAGE)
        self.slow, self.holdings, self.cut = [], [], [0] * rows
        for prompt_len in prompt_lens:
            none = np.zeros((len(WINDOWS), heads, 0, DIM)), np.zeros((len(WINDOWS), heads * group, 0, DIM))
            self.slow.append(SlowSequence(policy, prompt_len, windows, SCALES, *none))
            self.holdings.append(self.pool.open())

    def length(self, b):
        return len(self.slow[b].held[0, 0])

    def grow(self, b, count):
        slow, entries = self.slow[b], self.length(b)
        keys = self.new_keys(len(WINDOWS), self.heads, count, DIM)
        queries = self.random.normal(size=(len(WINDOWS), self.heads * self.group, count, DIM))
        pages = self.holdings[b]
        pages.take(max(0, self.pool.pages_for(entries + count) - len(pages.pages)))
        slots = torch.arange(entries, entries + count)
        page = torch.tensor(pages.pages)[slots // PAGE]
        self.cache.k[:, page, :, slots % PAGE] = torch.from_numpy(keys).permute(2, 0, 1, 3)
        self.cache.v[:, page, :, slots % PAGE] = -torch.from_numpy(keys).permute(2, 0, 1, 3)
        new = torch.arange(slow.seen, slow.seen + count, dtype=torch.int32)
        self.cache.positions[:, page, :, slots % PAGE] = new[:, None, None]
        slow.grow(keys, queries)

    def ring(self, b):
        """The last queries, that of position p at p % W."""
        slow, width = self.slow[b], self.policy.num_queries
        ring = np.zeros((len(WINDOWS), width, self.heads * self.group, DIM))
        for p in range(max(0, slow.seen - width), slow.seen):
            ring[:, p % width] = slow.queries[:, :, p]
        return torch.from_numpy(ring)

    def fire(self, rows):
        """Cut these rows together; the positions that each layer and head keeps, by row."""
        policy, tables = self.policy, [self.holdings[b].pages for b in rows]
        width = max(map(len, tables))
        counts = [min(self.length(b), policy.target(self.slow[b].prompt_len, 0)) for b in rows]
        kept = compress(
            self.cache,
            policy,
            pages_BN=torch.tensor([table + [0] * (width - len(table)) for table in tables]),
            lengths_B=torch.tensor([self.length(b) for b in rows]),
            contexts_B=torch.tensor([self.slow[b].seen for b in rows]),
            prompt_lens_B=torch.tensor([self.slow[b].prompt_len for b in rows]),
            queries_LBWHD=torch.stack([self.ring(b) for b in rows], dim=1),
            max_count=max(counts),
            cut_B=torch.tensor([self.cut[b] for b in rows]),
            record=True,
        )
        result = []
        for i, (b, count) in enumerate(zip(rows, counts, strict=True)):
            self.cut[b] = count
            result.append({place: kept[place[0], i, place[1], :count].tolist() for place in self.slow[b].places})
        return result

    def check(self, b, kept, fast):
        """Importance and what was kept are what the slow sequence says, and the cache holds it."""
        slow, policy = self.slow[b], self.policy
        importance = slow.fire()
        for (layer, head), expected in importance.items():
            slots = [slot for slot, p in enumerate(slow.held[layer, head]) if p in expected]
            got = fast.unflatten(0, (len(WINDOWS), -1))[layer, b, head, slots]
            free = [p not in slow.protected(layer, head) for p in np.array(slow.held[layer, head])[slots]]
            wanted = [expected[slow.held[layer, head][slot]] for slot in slots]
            np.testing.assert_allclose(got.numpy()[free], np.array(wanted)[free], atol=TOLERANCE)
        kept_anywhere = set().union(*(slow.protected(*place) for place in slow.places))
        for place in slow.places:
            held, chosen = slow.held[place], kept[place]
            protected = kept_anywhere if policy.index == "shared" else slow.protected(*place)
            assert chosen == sorted(set(chosen)) and set(chosen) <= set(held)
            assert len(chosen) == min(len(held), policy.target(slow.prompt_len, 0))
            assert protected <= set(chosen)
            free = [(importance[place].get(p, -np.inf), p) for p in held if p not in protected]
            best = sorted(free)[len(free) - (len(chosen) - len(protected)) :]
            worst = min(best, default=(np.inf, 0))[0]
            for p in set(chosen) ^ ({p for _, p in best} | protected):
                assert abs(importance[place][p] - worst) < TOLERANCE, f"{p} in {place} is not near the cut"
        slow.keep(kept)
        self.check_cache(b)

    def check_cache(self, b):
        slow = self.slow[b]
        for layer, head in slow.places:
            held = slow.held[layer, head]
            slots = torch.arange(len(held))
            page = torch.tensor(self.holdings[b].pages)[slots // PAGE]
            where = (layer, page, head, slots % PAGE)
            assert self.cache.positions[where].tolist() == held
            np.testing.assert_array_equal(self.cache.k[where].numpy(), slow.keys[layer, head, held])
            np.testing.assert_array_equal(self.cache.v[where].numpy(), -slow.keys[layer, head, held])
            if self.policy.keeps_score:
                expected = [slow.scores[layer, head][p] for p in held]
                np.testing.assert_allclose(self.cache.scores[where].numpy(), expected, atol=1e-9)

    def settle(self, b):
        self.holdings[b].trim(self.pool.pages_for(self.length(b)))


def name_of(policy):
    return f"{policy.name}-{policy.budget}-{policy.interval}"


@pytest.mark.parametrize(
    ("policy", "group"),
    GROUPED,
    ids=lambda x: name_of(x) if isinstance(x, EvictPolicy) else str(x),
)
def test_policy_equals_slow_sequence(policy, group, monkeypatch):
    windows = (12, 23) if policy.sinks and policy.index == "shared" else WINDOWS  # no layer sees all
    bench = Bench(policy, prompt_lens=[5, 11, 2], group=group, seed=policy.budget + group, windows=windows)
    seen, cut = [], policy_module.select_and_compact
    monkeypatch.setattr(policy_module, "select_and_compact", lambda *a, **k: (seen.append(a[2]), cut(*a, **k))[1])
    for b in range(3):
        # one longer than its trigger, one just full, one that is not cut at all
        bench.grow(b, policy.target(bench.slow[b].prompt_len, 0) + (17, 1, -3)[b])
    for _ in range(5):
        for b, kept in enumerate(bench.fire([0, 1, 2])):
            bench.check(b, kept, seen[-1])
        for b in range(3):
            bench.settle(b)
        for b in range(3):  # freed pages go to other rows, with the scores that are in them
            bench.grow(b, policy.interval + 2 * b)


@pytest.mark.parametrize(
    "policy", [Knorm(budget=9, interval=4), KeyDiff(budget=9, interval=4), Knorm(budget=9, interval=4, index="shared")]
)
def test_of_equal_keys_the_later_stay(policy):
    """All keys of a unit length and one direction: every importance is the same."""
    bench = Bench(policy, prompt_lens=[3], keys=lambda *size: np.zeros(size) + np.eye(DIM)[0])
    bench.grow(0, 20)
    (kept,) = bench.fire([0])
    assert all(positions == list(range(11, 20)) for positions in kept.values())


@given(
    st.sampled_from([p for p in PER_HEAD + SHARED if p.budget > 6]),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 40)), min_size=2, max_size=3),
    st.integers(0, 1000),
)
@settings(max_examples=25, deadline=None)
def test_order_of_rows_is_irrelevant_and_protected_entries_stay(policy, rows, seed):
    """Two firings; together, in turn and backwards give the same, true positions, exactly as many as the budget."""
    results = []
    for order in ([list(range(len(rows)))], [[b] for b in reversed(range(len(rows)))]):
        bench = Bench(policy, prompt_lens=[prompt for prompt, _ in rows], seed=seed)
        for firing in range(2):
            for b, (prompt, more) in enumerate(rows):
                bench.grow(b, (max(prompt, policy.num_queries) if not firing else 0) + more)
            kept = {}
            for together in order:
                kept |= dict(zip(together, bench.fire(together), strict=True))
            for b in kept:
                slow = bench.slow[b]
                for place, positions in kept[b].items():
                    assert len(positions) == min(len(slow.held[place]), policy.target(slow.prompt_len, 0))
                    assert slow.protected(*place) <= set(positions)
                    slow.scores[place] = dict.fromkeys(slow.held[place], 0.0)
                slow.keep(kept[b])
                for layer, head in slow.places:
                    table = torch.tensor(bench.holdings[b].pages)
                    slot = torch.arange(len(kept[b][layer, head]))
                    stored = bench.cache.k[layer, table[slot // PAGE], head, slot % PAGE].numpy()
                    np.testing.assert_array_equal(stored, slow.keys[layer, head, kept[b][layer, head]])
            results.append((firing, kept))
    half = len(results) // 2
    assert results[:half] == results[half:]


@pytest.mark.parametrize(("window", "counted"), [(None, (8, 8, 8)), (22, (22, 8, 8)), (3, (3, 3, 3))])
def test_h2o_counts_the_last_queries_since_the_last_firing(window, counted, monkeypatch):
    """A query gives 1 in all. The first firing comes after budget + interval tokens, later ones after `interval`."""
    bench = Bench(H2O(budget=14, interval=8, window=window), prompt_lens=[2], windows=(None, None))
    given = []
    accumulate = H2O.accumulate
    new = lambda self, e: given.append(accumulate(self, e) - e.scores_BKS) or accumulate(self, e)  # noqa: E731
    monkeypatch.setattr(H2O, "accumulate", new)
    for count in (22, 8, 8):
        bench.grow(0, count)
        bench.slow[0].keep(bench.fire([0])[0])
    torch.testing.assert_close(
        torch.stack([mass.sum(-1) for mass in given]),
        torch.tensor(counted, dtype=torch.float64)[:, None, None].expand(-1, 2, 2),
    )


def test_random_is_a_uniform_choice_of_all_that_came():
    """After many firings the first half of the context holds half of what is kept; heads and seeds differ."""
    kept = {}
    for seed in (0, 1):
        bench = Bench(Random(budget=100, interval=50, seed=seed), prompt_lens=[4])
        bench.cache.windows.fill_(1 << 30)
        bench.grow(0, 150)
        for _ in range(8):
            (now,) = bench.fire([0])
            bench.slow[0].keep(now)
            bench.grow(0, 50)
        kept[seed] = now
    early = [sum(p < 250 for p in positions) for now in kept.values() for positions in now.values()]
    assert 0.42 < sum(early) / (100 * len(early)) < 0.58
    assert len({tuple(positions) for now in kept.values() for positions in now.values()}) == 8


STATEFUL = [H2O(budget=16, interval=9, window=9), GKV(budget=16, interval=9, window=5)]


@pytest.mark.parametrize("policy", STATEFUL, ids=lambda p: p.name)
def test_scores_travel_with_copied_saved_and_restored_pages(policy, tiny):
    loaded = tiny()
    cache = PagedCache(loaded.shape, num_pages=6, page_size=16, num_rows=2, num_queries=4, keeps_score=True)
    cache.scores.copy_(torch.rand(cache.scores.shape))
    before = cache.scores.clone()
    cache.copy_pages([1, 2], [5, 3])
    assert torch.equal(cache.scores[:, [5, 3]], before[:, [1, 2]])
    saved = cache.save([5, 3])
    cache.scores.zero_()
    cache.restore(saved, [2, 6])
    assert torch.equal(cache.scores[:, [2, 6]], before[:, [1, 2]])
    cache.clear()
    assert not cache.scores.any()
    held = sum(pool.nbytes for pool in cache.pools)
    assert held == 7 * 16 * policy.entry_bytes(loaded.shape) > 7 * 16 * loaded.shape.entry_bytes
    cache.release()
    assert cache.scores.numel() == 0


@pytest.mark.parametrize("policy", STATEFUL, ids=lambda p: p.name)
def test_scores_of_a_full_engine_do_not_leak(policy, tiny, prompts):
    """A small pool whose pages go round, refills, samples of one prompt, a second call: what one row alone draws."""
    loaded = tiny("gemma3", dtype=torch.float64)
    sampling = Sampling(max_tokens=30, n=2, seed=3, stop_ids=(0, 1, 2, 3))
    batch = prompts(3, 40, 25)
    alone = Engine(loaded, policy, EngineConfig(rows=1, page_size=16)).generate(batch, sampling)
    engine = Engine(loaded, policy, EngineConfig(rows=3, page_size=16, pool_pages=8))
    engine.generate(prompts(40, 40, seed=9), sampling)
    assert engine.cache.scores.any()
    together = engine.generate(batch, sampling)
    assert [r.token_ids.tolist() for r in together] == [r.token_ids.tolist() for r in alone]
    assert max(rollout.kv.num_compressions for rollout in together) >= 3
    page = 16 * policy.entry_bytes(loaded.shape)
    for rollout in together:
        assert rollout.kv.peak_bytes == -(-rollout.kv.peak // 16) * page + loaded.shape.query_bytes(policy.num_queries)


@pytest.mark.parametrize(
    "policy",
    [*STATEFUL, H2O(budget=16, interval=9, window=12, index="shared"), TOVA(budget=16, interval=9)],
    ids=name_of,
)
def test_the_engines_own_queries_and_keys_decide_what_is_kept(policy, tiny, reference, prompts):
    """Every firing, by a slow sequence that is fed the queries and keys of the masked dense model."""
    loaded, model = tiny("gemma3", dtype=torch.float64), reference("gemma3", dtype=torch.float64)
    engine = Engine(loaded, policy, EngineConfig(rows=2, page_size=16))
    for rollout in engine.generate(prompts(3, 24), Sampling(max_tokens=50, n=1, stop_ids=()), record_kept=True):
        prompt_len = len(rollout.prompt.ids)
        ids = torch.tensor([[*rollout.prompt.ids, *rollout.token_ids.tolist()]], device=model.device)
        seen: dict = {}
        replay_logprobs(model, ids, rollout_visibility(rollout, policy, loaded.shape), seen)
        layers = sorted(seen)
        queries, keys = (np.stack([seen[layer][i].cpu().numpy() for layer in layers]) for i in (0, 1))
        none = keys[:, :, :0], queries[:, :, :0]
        slow = SlowSequence(policy, prompt_len, loaded.shape.windows, loaded.shape.scales, *none)
        times = firing_times(prompt_len, len(rollout.token_ids), policy.target(0, 0), policy.trigger(0, 0))
        assert len(times) >= 3
        for time, kept in zip(times, rollout.kept_positions, strict=True):
            slow.grow(keys[:, :, slow.seen : time], queries[:, :, slow.seen : time])
            importance = slow.fire()
            chosen = {place: kept[place].tolist() for place in slow.places}
            for place in slow.places:
                assert slow.protected(*place) <= set(chosen[place])
                dropped = [importance[place][p] for p in slow.live(*place) if p not in chosen[place]]
                free = [p for p in chosen[place] if p not in slow.protected(*place)]
                stayed = [importance[place].get(p, -np.inf) for p in free]
                if policy.index == "per_head" and dropped and stayed:
                    assert max(dropped) <= min(stayed) + TOLERANCE
                elif dropped and stayed:
                    assert max(dropped) <= min(x for x in stayed if x > -np.inf) + TOLERANCE
            slow.keep(chosen)


def test_one_set_for_all_layers_and_heads(tiny, prompts):
    engine = Engine(tiny(), SnapKV(budget=16, interval=8, index="shared"), EngineConfig(rows=2, page_size=16))
    for rollout in engine.generate(prompts(40, 5), Sampling(max_tokens=40, stop_ids=()), record_kept=True):
        assert len(rollout.kept_positions) >= 3
        for kept in rollout.kept_positions:
            assert (kept == kept[:1, :1]).all()


@pytest.mark.parametrize(
    ("policy", "settings", "message"),
    [
        ("knorm", {"index": "shard"}, '"per_head" or "shared"'),
        ("knorm", {"recent": -1}, "at least 0"),
        ("knorm", {"budget": 8, "recent": 7, "sinks": 2}, "protected entries alone are 9"),
        ("h2o", {"decay": 1.5}, "between 0 and 1"),
        ("h2o", {"window": 0}, "at least 1"),
        ("gkv", {"budget": 15}, "protected entries alone are 16"),
        ("gkv", {"lam": -0.1}, "between 0 and 1"),
        ("gkv", {"decay": "a"}, "kv.decay is 'a'; it must be a number between 0 and 1"),
        ("snapkv", {"kernel": "7"}, "kv.kernel is '7'; it must be a whole number"),
        ("snapkv", {"kernel": 7.0}, "kv.kernel is 7.0; it must be a whole number"),
        ("random", {"seed": 1.5}, "kv.seed is 1.5; it must be a whole number"),
        ("knorm", {"sinks": True}, "kv.sinks is True; it must be a whole number"),
        ("knorm", {"budget": 10**20}, "kv.budget is 1(0){20}; it must be at most 16777216"),
    ],
)
def test_bad_settings_are_named(policy, settings, message):
    with pytest.raises(ValueError, match=message):
        POLICIES[policy](**settings)
