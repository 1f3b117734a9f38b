# SPDX-License-Identifier: Apache-2.0
"""Policies against a slow implementation written from the formulas (slow_policies.py), through the real cache."""

from __future__ import annotations

from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from schedules import named
from slow_policies import cut_margin, keep, keep_streaming, rkv_scores, snapkv_scores

from sparse_rl.kv import GKV, H2O, RKV, TOVA, EvictPolicy, KeyDiff, Knorm, Random, SnapKV, Streaming, build_policy
from sparse_rl.kv.cache import PagedCache
from sparse_rl.kv.compress import compress
from sparse_rl.kv.pages import PagePool
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
        target = policy.target(self.prompt_len, self.positions[-1] + 1)
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


def random_keys(generator: torch.Generator, *size: int) -> torch.Tensor:
    """Keys with near-duplicates in them, as real ones have, so that the duplicate rule has something to do."""
    directions = torch.randn(*size[:-2], 4, size[-1], generator=generator, dtype=torch.float64)
    choice = torch.randint(0, 4, size[:-1], generator=generator)
    base = directions.gather(-2, choice[..., None].expand(*size))
    return base + 0.7 * torch.randn(size, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("group", [1, 2, 8])
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
    lengths = [policy.target(p, 0) + extra for p, extra in zip(prompt_lens, (1, policy.interval, 19), strict=True)]
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
        kept = compress(
            cache,
            policy,
            pages_BN=torch.tensor([h.pages + [0] * (width - len(h.pages)) for h in holdings]),
            lengths_B=torch.tensor(held),
            contexts_B=torch.tensor(seen),
            prompt_lens_B=torch.tensor(prompt_lens),
            queries_LBWHD=queries,
            max_count=max(min(n, policy.target(p, 0)) for n, p in zip(held, prompt_lens, strict=True)),
            record=True,
        )
        for (layer, b, h), sequence in slow.items():
            count = min(held[b], policy.target(prompt_lens[b], seen[b]))
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
            held[b] = min(held[b], policy.target(prompt_lens[b], seen[b]))
            holdings[b].trim(pool.pages_for(held[b]))
            more = policy.trigger(prompt_lens[b], seen[b]) - held[b] + b  # rows fall out of step
            grow(b, seen[b], seen[b] + more, held[b])
            seen[b], held[b] = seen[b] + more, held[b] + more


@contextmanager
def no_waiting():
    """Whatever waits for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "policy",
    [
        Streaming(budget=20, interval=9),
        SnapKV(budget=24, interval=9, sinks=2),
        RKV(budget=24, interval=9, protect_prompt=True),
        Streaming(budget=named((0, 30, 40), (16, 20, 26)), interval=9),
        Random(budget=20, interval=9),
        Knorm(budget=20, interval=9, recent=2),
        KeyDiff(budget=20, interval=9),
        TOVA(budget=20, interval=9),
        H2O(budget=20, interval=9, window=10),
        GKV(budget=24, interval=9, index="shared"),
    ],
    ids=lambda policy: f"{policy.name}-{policy.budget}",
)
def test_both_implementations_of_the_kernels_compress_alike(policy, device, monkeypatch):
    """Layers with and without a window, rows of different lengths; on a GPU, without ever waiting for it."""
    pytest.importorskip("triton")
    shape = AttentionShape(
        num_heads=6,
        num_kv_heads=2,
        head_dim=DIM,
        windows=(None, 30),
        scales=(0.3, 0.2),
        dtype=torch.float32,
        device=torch.device(device),
    )
    lengths, prompt_lens = [48, 37, 20], [5, 11, 2]
    counts = [min(n, policy.target(p, n)) for n, p in zip(lengths, prompt_lens, strict=True)]
    results = []
    for triton in (False, True):
        monkeypatch.setattr("sparse_rl.kernels.importance.use_triton", lambda _, triton=triton: triton)
        monkeypatch.setattr("sparse_rl.kernels.keys.use_triton", lambda _, triton=triton: triton)
        monkeypatch.setattr("sparse_rl.kernels.compact.use_triton", lambda _, triton=triton: triton)
        generator = torch.Generator().manual_seed(0)
        cache = PagedCache(
            shape,
            num_pages=12,
            page_size=PAGE,
            num_rows=3,
            num_queries=policy.num_queries,
            keeps_score=policy.keeps_score,
        )
        cache.scores.copy_(torch.rand(cache.scores.shape, generator=generator))
        cache.k.copy_(random_keys(generator, *cache.k.shape))
        cache.v.copy_(cache.k * 2)
        pages = torch.tensor([[3, 9, 1], [2, 11, 7], [5, 4, 0]], dtype=torch.int32)
        cache.positions[:, pages] = torch.arange(3 * PAGE, dtype=torch.int32).reshape(3, 1, PAGE).to(device)
        ints = torch.tensor([lengths, lengths, prompt_lens], device=device)
        queries = torch.randn(2, 3, policy.num_queries, 6, DIM, generator=generator).to(device)
        arguments = {
            "pages_BN": pages.to(device),
            "lengths_B": ints[0],
            "contexts_B": ints[1],
            "prompt_lens_B": ints[2],
            "queries_LBWHD": queries,
            "max_count": max(counts),
            "cut_B": ints[0] - 7,
        }
        if triton and device != "cpu":
            compress(deepcopy(cache), policy, **arguments)  # compiles
            clone = deepcopy(cache)
            with no_waiting():
                compress(clone, policy, **arguments)
        kept = compress(cache, policy, **arguments, record=True)
        results.append((kept, cache))
    (kept, cache), (kept_triton, cache_triton) = results
    for b, count in enumerate(counts):
        assert torch.equal(kept[:, b, :, :count], kept_triton[:, b, :, :count])
    for name in ("k", "v", "positions"):
        assert torch.equal(getattr(cache, name), getattr(cache_triton, name))
    torch.testing.assert_close(cache.scores, cache_triton.scores)


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
