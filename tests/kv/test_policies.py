# SPDX-License-Identifier: Apache-2.0
"""Policies against a slow implementation written from the formulas (slow_policies.py), through the real cache."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_policies import cut_margin, keep, keep_streaming, rkv_scores, snapkv_scores

from sparse_rl.kv import POLICIES, RKV, EvictPolicy, SnapKV, Streaming, build_policy
from sparse_rl.kv.cache import PagedCache
from sparse_rl.kv.pages import PagePool
from sparse_rl.kv.policy import select
from sparse_rl.model.dry_run import AttentionShape

LAYERS, DIM, PAGE = 2, 12, 16
TOLERANCE = 1e-9  # in fp64, of scores that are of the order 1 / n


@dataclass
class Slow:
    """One sequence, layer and head of the slow implementation: keys and positions in physical order."""

    policy: EvictPolicy
    keys: np.ndarray
    positions: list[int]
    prompt_len: int

    def scores(self, queries: np.ndarray) -> np.ndarray:
        policy, scale = self.policy, DIM**-0.5
        if isinstance(policy, RKV):
            return rkv_scores(
                self.keys, queries, window=policy.window, scale=scale, kernel=policy.kernel, lam=policy.lam,
                threshold=policy.threshold,
            )  # fmt: skip
        assert isinstance(policy, SnapKV)
        return snapkv_scores(self.keys, queries, window=policy.window, scale=scale, kernel=policy.kernel)

    def check(self, kept_positions: list[int], queries: np.ndarray) -> None:
        """The fast kept set equals the slow one, except for entries within tolerance of the cut."""
        policy, n = self.policy, len(self.positions)
        target = policy.target(self.prompt_len)
        first = max(policy.sinks, self.prompt_len if policy.protect_prompt else 0)
        protected = frozenset(i for i, position in enumerate(self.positions) if position < first)
        if isinstance(policy, Streaming):
            expected = keep_streaming(n=n, budget=target, sinks=len(protected))
            assert kept_positions == [self.positions[i] for i in expected]
            return
        scores = self.scores(queries)
        settings = {"n": n, "window": policy.window, "budget": target, "protected": protected}
        expected = keep(scores, **settings)
        fast = [self.positions.index(position) for position in kept_positions]
        lowest, highest = cut_margin(scores, **settings)
        for i in set(expected) ^ set(fast):
            assert i < n - policy.window and i not in protected
            assert highest - TOLERANCE <= scores[i] <= lowest + TOLERANCE, f"entry {i} is not near the cut"
        assert len(fast) == min(n, target)

    def cut(self, kept_positions: list[int]) -> None:
        """Go on from what the cache kept, in the order it stores it."""
        index = [self.positions.index(position) for position in kept_positions]
        self.keys, self.positions = self.keys[index], [self.positions[i] for i in index]


CASES = {
    "streaming": [Streaming(budget=20, interval=7), Streaming(budget=9, interval=30, sinks=0)],
    "snapkv": [
        SnapKV(budget=24, interval=9),
        SnapKV(budget=10, interval=12, window=8, sinks=2),
        SnapKV(budget=12, interval=6, window=3, kernel=3, protect_prompt=True),
    ],
    "rkv": [
        RKV(budget=24, interval=9),
        RKV(budget=12, interval=14, window=8, sinks=4),  # budget = protected entries
        RKV(budget=20, interval=6, window=2, lam=0.5, threshold=0.2, kernel=1),
        RKV(budget=16, interval=8, lam=0.0, protect_prompt=True),
        RKV(budget=24, interval=9, order="score"),
        RKV(budget=16, interval=8, order="score", protect_prompt=True),
    ],
}


def test_every_evicting_policy_has_cases():
    assert set(CASES) == {name for name, policy in POLICIES.items() if issubclass(policy, EvictPolicy)}


def random_keys(generator: torch.Generator, *size: int) -> torch.Tensor:
    """Keys with near-duplicates in them, as real ones have, so that the duplicate rule has something to do."""
    directions = torch.randn(*size[:-2], 4, size[-1], generator=generator, dtype=torch.float64)
    choice = torch.randint(0, 4, size[:-1], generator=generator)
    base = directions.gather(-2, choice[..., None].expand(*size))
    return base + 0.7 * torch.randn(size, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize(
    "policy", [p for cases in CASES.values() for p in cases], ids=lambda p: f"{p.name}-{p.budget}-{p.interval}"
)
def test_policy_equals_slow_implementation(policy, group):
    """Several sequences of different lengths at once, many firings in a row."""
    generator = torch.Generator().manual_seed(100 * policy.budget + group)
    batch, heads, num_firings = 3, 2, 5
    shape = AttentionShape(
        num_heads=heads * group,
        num_kv_heads=heads,
        head_dim=DIM,
        windows=(None,) * LAYERS,
        scales=(DIM**-0.5,) * LAYERS,
        dtype=torch.float64,
        device=torch.device("cpu"),
    )
    prompt_lens = [5, 11, 2]
    lengths = [policy.target(p) + extra for p, extra in zip(prompt_lens, (1, policy.interval, 19), strict=True)]
    pool = PagePool(200, PAGE)
    holdings = [pool.open() for _ in range(batch)]
    cache = PagedCache(shape, num_pages=200, page_size=PAGE, num_rows=batch, num_queries=policy.num_queries)
    slow = {
        (layer, b, h): Slow(policy, np.zeros((0, DIM)), [], prompt_lens[b])
        for layer in range(LAYERS)
        for b in range(batch)
        for h in range(heads)
    }

    def grow(b: int, start: int, stop: int, entries: int) -> None:
        """Append tokens [start, stop) to sequence b, which holds `entries`."""
        count = stop - start
        holdings[b].take(pool.pages_for(entries + count) - len(holdings[b].pages))
        keys = random_keys(generator, LAYERS, heads, count, DIM)
        slots = torch.arange(entries, entries + count)
        page = torch.tensor(holdings[b].pages)[slots // PAGE]
        cache.k[:, page, :, slots % PAGE] = keys.permute(2, 0, 1, 3)
        cache.v[:, page, :, slots % PAGE] = 2.0 * keys.permute(2, 0, 1, 3)
        cache.positions[:, page, :, slots % PAGE] = torch.arange(start, stop, dtype=torch.int32)[:, None, None]
        for (layer, b_, h), sequence in slow.items():
            if b_ == b:
                sequence.keys = np.concatenate([sequence.keys, keys[layer, h].numpy()])
                sequence.positions = [*sequence.positions, *range(start, stop)]

    seen, held = list(lengths), list(lengths)
    for b in range(batch):
        grow(b, 0, lengths[b], 0)
    for _ in range(num_firings):
        queries = torch.randn(
            LAYERS, batch, policy.num_queries, heads * group, DIM, generator=generator, dtype=torch.float64
        )
        width = max(len(h.pages) for h in holdings)
        kept = cache.compress(
            policy,
            pages_BN=torch.tensor([h.pages + [0] * (width - len(h.pages)) for h in holdings]),
            lengths_B=torch.tensor(held),
            contexts_B=torch.tensor(seen),
            prompt_lens_B=torch.tensor(prompt_lens),
            queries_LBWHD=queries,
            record=True,
        )
        for (layer, b, h), sequence in slow.items():
            count = min(held[b], policy.target(prompt_lens[b]))
            positions = kept[layer, b, h, :count].tolist()
            grouped = queries[layer, b, :, h * group : (h + 1) * group].transpose(0, 1).numpy()
            sequence.check(positions, grouped)
            if getattr(policy, "order", "position") == "position":
                assert positions == sorted(positions)
            else:
                self_scores = sequence.scores(grouped)
                stored = [self_scores[sequence.positions.index(p)] for p in positions[: -policy.window]]
                assert all(a >= b - TOLERANCE for a, b in pairwise(stored))
                assert positions[-policy.window :] == list(range(seen[b] - policy.window, seen[b]))
            sequence.cut(positions)
            slots = torch.arange(count)
            page = torch.tensor(holdings[b].pages)[slots // PAGE]
            stored_keys = cache.k[layer, page, h, slots % PAGE].numpy()
            np.testing.assert_array_equal(stored_keys, sequence.keys)
            np.testing.assert_array_equal(cache.v[layer, page, h, slots % PAGE].numpy(), 2.0 * sequence.keys)
            assert cache.positions[layer, page, h, slots % PAGE].tolist() == sequence.positions
        for b in range(batch):
            held[b] = min(held[b], policy.target(prompt_lens[b]))
            holdings[b].trim(pool.pages_for(held[b]))
            more = policy.trigger(prompt_lens[b]) - held[b] + b  # rows fall out of step
            grow(b, seen[b], seen[b] + more, held[b])
            seen[b], held[b] = seen[b] + more, held[b] + more


@st.composite
def selections(draw):
    batch, heads, size = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    lengths = torch.randint(1, size + 1, (batch,), generator=generator)
    counts = (lengths * torch.rand(batch, generator=generator)).ceil().long().clamp(min=1)
    importance = torch.randint(-2, 3, (batch, heads, size), generator=generator).float()  # many ties
    importance[torch.rand(importance.shape, generator=generator) < 0.1] = float(
        draw(st.sampled_from(["nan", "inf", "-inf"]))
    )
    order = torch.rand(batch, heads, size, generator=generator).argsort(-1).argsort(-1)
    num_protected = (counts * torch.rand(batch, generator=generator)).long()
    inside = torch.arange(size) < lengths[:, None]
    rank = order.masked_fill(~inside[:, None], size).argsort(-1).argsort(-1)
    protected = (rank < num_protected[:, None, None]) & inside[:, None]
    return importance, protected, lengths, counts


@given(selections())
@settings(max_examples=200, deadline=None)
def test_select_keeps_protected_and_the_best_of_the_rest(case):
    importance, protected, lengths, counts = case
    kept = select(importance, protected, lengths, counts)
    for b in range(len(lengths)):
        count = int(counts[b])
        for h in range(importance.shape[1]):
            chosen = kept[b, h, :count].tolist()
            assert chosen == sorted(set(chosen)) and len(chosen) == count and chosen[-1] < lengths[b]
            assert set(protected[b, h].nonzero()[:, 0].tolist()) <= set(chosen)
            score = importance[b, h].nan_to_num(nan=float("-inf")).tolist()
            free = [i for i in range(int(lengths[b])) if not protected[b, h, i]]
            best = sorted(free, key=lambda i: (score[i], i), reverse=True)
            expected = best[: count - int(protected[b, h].sum())]
            assert set(chosen) == set(expected) | set(protected[b, h].nonzero()[:, 0].tolist())


def test_select_by_hand():
    importance = torch.tensor([[[5.0, 1.0, 3.0, 3.0, 0.0, 9.0]]])
    protected = torch.tensor([[[False, False, False, False, True, False]]])
    # Slot 5 is empty (length 5). Protected 4 stays, 0 is best, of the equal 2 and 3 the later wins.
    assert select(importance, protected, torch.tensor([5]), torch.tensor([3])).tolist() == [[[0, 3, 4]]]


def test_select_refuses_more_protected_entries_than_it_keeps():
    with pytest.raises(AssertionError, match="protected"):
        select(torch.zeros(1, 1, 4), torch.ones(1, 1, 4, dtype=torch.bool), torch.tensor([4]), torch.tensor([3]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "rvk"}, "did you mean 'rkv'"),
        ({"policy": "rkv", "bugdet": 4}, "did you mean 'budget'"),
        ({"policy": "full", "budget": 4}, "takes no settings"),
        ({"policy": "streaming", "window": 4}, "kv.window is not a setting of policy 'streaming'"),
        ({"policy": "rkv", "budget": 7}, "protected entries alone are 8"),
        ({"policy": "streaming", "budget": 3}, "protected entries alone are 4"),
        ({"policy": "rkv", "interval": 0}, "at least 1"),
        ({"policy": "rkv", "sinks": -1}, "at least 0"),
        ({"policy": "snapkv", "window": 0}, "at least 1"),
        ({"policy": "snapkv", "kernel": 4}, "odd"),
        ({"policy": "rkv", "lam": 1.5}, "between 0 and 1"),
        ({"policy": "rkv", "order": "random"}, '"position" or "score"'),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        build_policy(**settings)
