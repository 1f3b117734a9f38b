# SPDX-License-Identifier: Apache-2.0
"""Every evicting policy against a slow sequence (slow_evict.py), through the real cache, tallies included.

Layers with and without a window, ragged rows, pages that go from one row to another, many firings.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from evict_bench import DIM, PAGE, WINDOWS, Bench, name_of
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_rl.kv import GKV, H2O, POLICIES, RKV, TOVA, EvictPolicy, KeyDiff, Knorm, Random, SnapKV, Streaming

PER_HEAD = [
    Streaming(budget=20, interval=7),
    Streaming(budget=9, interval=30, sinks=0),
    SnapKV(budget=24, interval=9),
    SnapKV(budget=10, interval=12, window=8, sinks=2),
    SnapKV(budget=12, interval=6, window=3, kernel=3, protect_prompt=True),
    RKV(budget=24, interval=9),
    RKV(budget=12, interval=14, window=8, sinks=4),  # budget = protected entries
    RKV(budget=20, interval=6, window=2, lam=0.5, threshold=0.2, kernel=1),
    RKV(budget=16, interval=8, lam=0.0, protect_prompt=True),
    RKV(budget=24, interval=9, order="score"),
    RKV(budget=16, interval=8, order="score", protect_prompt=True),
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


def with_groups(policies):
    """Each with 1, 2 or 8 query heads a KV head, in turn: so every policy of three cases or more has all."""
    seen = Counter()
    for policy in policies:
        yield policy, (1, 2, 8)[seen[policy.name] % 3]
        seen[policy.name] += 1


GROUPED = list(with_groups(PER_HEAD + SHARED))


def test_every_evicting_policy_has_cases():
    evicting = {name for name, policy in POLICIES.items() if issubclass(policy, EvictPolicy)}
    assert {policy.name for policy in PER_HEAD} == {policy.name for policy in SHARED} == evicting
    for group in (1, 2, 8):
        assert {policy.name for policy, of in GROUPED if of == group} == evicting


@pytest.mark.parametrize(
    ("policy", "group"),
    GROUPED,
    ids=lambda x: name_of(x) if isinstance(x, EvictPolicy) else str(x),
)
@pytest.mark.some(20)
def test_policy_equals_slow_sequence(policy, group, monkeypatch):
    windows = WINDOWS
    if policy.index == "shared" and policy.sinks:
        windows = (12, 23)  # no layer sees all
    elif getattr(policy, "order", "position") == "score":
        windows = (None, None)  # as in the released code
    bench = Bench(policy, prompt_lens=[5, 11, 2], group=group, seed=policy.budget + group, windows=windows)
    seen, cut = [], type(policy).cut
    monkeypatch.setattr(type(policy), "cut", lambda *a, **k: (seen.append(a[3]), cut(*a, **k))[1])
    for b in range(3):
        # one longer than its trigger, one just full, one that is not cut at all
        bench.grow(b, policy.target(bench.slow[b].prompt_len, 0) + (17, 1, -2)[b])
    for _ in range(5):
        for b, kept in enumerate(bench.fire([0, 1, 2])):
            bench.check(b, kept, seen[-1])
        for b in range(3):
            bench.settle(b)
        for b in range(3):  # freed pages go to other rows, with the tallies that are in them
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
                    slow.tallies[place] = dict.fromkeys(slow.held[place], 0.0)
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
    new = lambda self, e: given.append(accumulate(self, e) - e.tally_BKS) or accumulate(self, e)  # noqa: E731
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
