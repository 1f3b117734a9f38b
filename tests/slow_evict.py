# SPDX-License-Identifier: Apache-2.0
"""Slow float64 references for what slow_policies.py does not have: one whole sequence, token by token, loop by loop.

A `SlowSequence` knows the keys and queries of every token it has seen, and per layer and KV head which positions are
held and what tally each of them carries. It says how important every held entry is; it never decides what to keep.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import slow_policies

from sparse_rl.kernels.sampling import mix, request_key
from sparse_rl.kv import GKV, H2O, RKV, TOVA, EvictPolicy, KeyDiff, Knorm, Random, SnapKV, Streaming

Numbers = dict[int, float]  # by position


def length(x: np.ndarray) -> float:
    return math.sqrt(sum(float(a) ** 2 for a in x))


@dataclass
class SlowSequence:
    policy: EvictPolicy
    prompt_len: int
    windows: tuple[int | None, ...]
    scales: tuple[float, ...]
    keys: np.ndarray  # (L, K, T, D)
    queries: np.ndarray  # (L, H, T, D)
    held: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    tallies: dict[tuple[int, int], Numbers] = field(default_factory=dict)
    last_firing: int = 0  # tokens seen then

    def __post_init__(self) -> None:
        self.places = [(layer, head) for layer in range(self.keys.shape[0]) for head in range(self.keys.shape[1])]
        self.group = self.queries.shape[1] // self.keys.shape[1]
        for place in self.places:
            self.held[place], self.tallies[place] = list(range(self.seen)), {}

    @property
    def seen(self) -> int:
        return self.keys.shape[2]

    def grow(self, keys: np.ndarray, queries: np.ndarray) -> None:
        for place in self.places:
            self.held[place] += range(self.seen, self.seen + keys.shape[2])
        self.keys = np.concatenate([self.keys, keys], axis=2)
        self.queries = np.concatenate([self.queries, queries], axis=2)

    def live(self, layer: int, head: int) -> list[int]:
        window = self.windows[layer]
        return [p for p in self.held[layer, head] if window is None or self.seen - p < window]

    def protected(self, layer: int, head: int) -> set[int]:
        first = max(self.policy.sinks, self.prompt_len if self.policy.protect_prompt else 0)
        newest = self.held[layer, head][len(self.held[layer, head]) - self.policy.num_recent :]
        return {p for p in self.live(layer, head) if p < first or p in newest}

    def weights(self, layer: int, head: int, query_head: int, at: int) -> Numbers:
        """What the query of position `at` gave each held entry in its own step."""
        window, scale = self.windows[layer], self.scales[layer]
        seen = [p for p in self.held[layer, head] if p <= at and (window is None or at - p < window)]
        q = self.queries[layer, query_head, at]
        products = [zip(q, self.keys[layer, head, p], strict=True) for p in seen]
        logits = [scale * sum(float(a) * float(b) for a, b in product) for product in products]
        top = max(logits)
        total = sum(math.exp(x - top) for x in logits)
        return {p: math.exp(x - top) / total for p, x in zip(seen, logits, strict=True)}

    def fire(self) -> dict[tuple[int, int], Numbers]:
        """Update the tallies, then say how important every live entry is."""
        own = {place: self.importance(*place) for place in self.places}
        if self.policy.index == "per_head":
            return own
        shared: Numbers = {}
        for layer, _ in self.places[:: self.keys.shape[1]]:
            heads = [own[layer, head] for head in range(self.keys.shape[1])]
            for p in heads[0]:
                shared[p] = shared.get(p, 0.0) + sum(head[p] for head in heads) / len(heads)
        return dict.fromkeys(self.places, shared)

    def importance(self, layer: int, head: int) -> Numbers:
        policy, live = self.policy, self.live(layer, head)
        keys = {p: self.keys[layer, head, p] for p in live}
        if isinstance(policy, Streaming):
            return {p: float(p) for p in live}
        if isinstance(policy, Random):
            start = mix((self.prompt_len + request_key(policy.seed, 0)) % 2**64)
            start = mix((start + layer * self.keys.shape[1] + head) % 2**64)
            return {p: float(mix((start + p) % 2**64) % 2**24) for p in live}
        if isinstance(policy, Knorm):
            parts = {p: math.frexp(length(keys[p])) for p in live}
            return {p: -math.ldexp(round(m * 2**13), e - 13) for p, (m, e) in parts.items()}
        if isinstance(policy, KeyDiff):
            units = {p: keys[p] / (length(keys[p]) + 1e-8) for p in live}
            total = sum(units.values())
            return {p: -float(units[p] @ total) / (length(total) + 1e-8) for p in live}
        if isinstance(policy, TOVA):
            num_heads, total = self.queries.shape[1], dict.fromkeys(live, 0.0)
            for query_head in range(num_heads):
                weights = self.weights(layer, query_head // self.group, query_head, self.seen - 1)
                total = {p: total[p] + weights.get(p, 0.0) / num_heads for p in live}
            return total
        if isinstance(policy, H2O):
            return self.heavy_hitters(layer, head)
        return self.attended(layer, head, live)

    def heavy_hitters(self, layer: int, head: int) -> Numbers:
        """The last `window` queries since the last firing count, each once."""
        policy, tally = self.policy, self.tallies[layer, head]
        assert isinstance(policy, H2O)
        for p in self.held[layer, head]:
            tally[p] = policy.decay * tally.get(p, 0.0)
        for at in range(max(self.last_firing, self.seen - (policy.window or policy.interval)), self.seen):
            for g in range(self.group):
                for p, weight in self.weights(layer, head, head * self.group + g, at).items():
                    tally[p] += weight / self.group
        return {p: tally[p] for p in self.live(layer, head)}

    def attended(self, layer: int, head: int, live: list[int]) -> Numbers:
        """SnapKV, R-KV and G-KV, from slow_policies.py."""
        policy = self.policy
        assert isinstance(policy, SnapKV)
        keys = self.keys[layer, head][live]
        queries = self.queries[layer, head * self.group : (head + 1) * self.group, self.seen - policy.window :]
        settings = {"window": policy.window, "scale": self.scales[layer], "kernel": policy.kernel}
        outside, inside = live[: len(live) - policy.window], live[len(live) - policy.window :]
        values = slow_policies.snapkv_importance(keys, queries, **settings)
        if isinstance(policy, RKV):
            values = slow_policies.rkv_importance(keys, queries, **settings, lam=policy.lam, threshold=policy.threshold)
        if not isinstance(policy, GKV):
            return dict(zip(outside, values, strict=True)) | dict.fromkeys(inside, 0.0)
        tally, repeated = self.tallies[layer, head], slow_policies.redundancy(keys, threshold=policy.threshold)
        for p in self.held[layer, head]:
            tally[p] = policy.decay * tally.get(p, 0.0)
        result = dict.fromkeys(inside, 0.0)
        for i, p in enumerate(outside):
            tally[p] = max(tally[p], values[i] / max(values))
            result[p] = policy.lam * tally[p] - (1 - policy.lam) * repeated[i] / max(repeated[: len(outside)])
        return result

    def keep(self, kept: dict[tuple[int, int], list[int]]) -> None:
        self.held = {place: list(positions) for place, positions in kept.items()}
        self.tallies = {
            place: {p: self.tallies[place][p] for p in kept[place] if p in self.tallies[place]} for place in self.places
        }
        self.last_firing = self.seen
