# SPDX-License-Identifier: Apache-2.0
"""Sequences in a real cache, each beside its slow twin (slow_evict.py)."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from slow_evict import SlowSequence

from sparse_rl.kv import Knorm
from sparse_rl.kv.cache import PagedCache
from sparse_rl.kv.compress import compress
from sparse_rl.kv.pages import PagePool
from sparse_rl.model.dry_run import AttentionShape

DIM, PAGE, HEADS = 8, 16, 2
WINDOWS, SCALES = (23, None), (0.4, 0.3)
TOLERANCE = 1e-9
ROUNDED = 2.0**-9  # a norm that lies half-way between two steps may go either way


class Bench:
    """Sequences in a real cache, each beside its slow twin."""

    def __init__(self, policy, *, prompt_lens, group=2, seed=0, keys=None, windows=WINDOWS):
        self.policy, self.group = policy, group
        self.tolerance = ROUNDED if isinstance(policy, Knorm) else TOLERANCE
        self.random = np.random.default_rng(seed)
        self.new_keys = keys or self.near_duplicates
        shape = AttentionShape(
            num_heads=HEADS * group,
            num_kv_heads=HEADS,
            head_dim=DIM,
            value_dim=DIM,
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
            keeps_tally=policy.keeps_tally,
        )
        self.cache.tallies.fill_(1e6)  # whatever others left
        self.pool = PagePool(90, PAGE)
        self.slow, self.holdings, self.cut = [], [], [0] * rows
        for prompt_len in prompt_lens:
            none = np.zeros((len(WINDOWS), HEADS, 0, DIM)), np.zeros((len(WINDOWS), HEADS * group, 0, DIM))
            self.slow.append(SlowSequence(policy, prompt_len, windows, SCALES, *none))
            self.holdings.append(self.pool.open())

    def near_duplicates(self, *size):
        """Keys of few directions, as real ones are, so that the duplicate rule has something to do."""
        directions = self.random.normal(size=(*size[:-2], 4, size[-1]))
        choice = self.random.integers(0, 4, size=(*size[:-1], 1))
        return np.take_along_axis(directions, choice, axis=-2) + 0.7 * self.random.normal(size=size)

    def length(self, b):
        return len(self.slow[b].held[0, 0])

    def grow(self, b, count):
        slow, entries = self.slow[b], self.length(b)
        keys = self.new_keys(len(WINDOWS), HEADS, count, DIM)
        queries = self.random.normal(size=(len(WINDOWS), HEADS * self.group, count, DIM))
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
        ring = np.zeros((len(WINDOWS), width, HEADS * self.group, DIM))
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
            np.testing.assert_allclose(got.numpy()[free], np.array(wanted)[free], atol=self.tolerance)
        kept_anywhere = set().union(*(slow.protected(*place) for place in slow.places))
        for place in slow.places:
            held, chosen = slow.held[place], kept[place]
            protected = kept_anywhere if policy.index == "shared" else slow.protected(*place)
            assert len(chosen) == len(set(chosen)) and set(chosen) <= set(held)
            self.check_order(chosen, importance[place])
            assert len(chosen) == min(len(held), policy.target(slow.prompt_len, 0))
            assert protected <= set(chosen)
            free = [(importance[place].get(p, -np.inf), p) for p in held if p not in protected]
            best = sorted(free)[len(free) - (len(chosen) - len(protected)) :]
            worst = min(best, default=(np.inf, 0))[0]
            for p in set(chosen) ^ ({p for _, p in best} | protected):
                assert abs(importance[place][p] - worst) < self.tolerance, f"{p} in {place} is not near the cut"
        slow.keep(kept)
        self.check_cache(b)

    def check_order(self, chosen, importance):
        """By position, or by falling importance and then the window."""
        if getattr(self.policy, "order", "position") == "position":
            assert chosen == sorted(chosen)
            return
        stored = [importance.get(p, -np.inf) for p in chosen[: -self.policy.window]]
        assert all(a >= b - TOLERANCE for a, b in pairwise(stored))
        newest = chosen[-self.policy.window :]
        assert newest == list(range(newest[0], newest[0] + self.policy.window)) and newest[-1] == max(chosen)

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
            if self.policy.keeps_tally:
                expected = [slow.tallies[layer, head][p] for p in held]
                np.testing.assert_allclose(self.cache.tallies[where].numpy(), expected, atol=1e-9)

    def settle(self, b):
        self.holdings[b].trim(self.pool.pages_for(self.length(b)))


def name_of(policy):
    return f"{policy.name}-{policy.budget}-{policy.interval}"
