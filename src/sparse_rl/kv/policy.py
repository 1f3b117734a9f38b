# SPDX-License-Identifier: Apache-2.0
"""What a KV policy is, and the one `select` that all eviction shares.

A policy is frozen settings. It says when a sequence's cache is cut (`trigger`), to how many entries (`target`), and
how important each entry is (`importance`). Which entries may not be dropped is said by a mask, never by a large score.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch

N = TypeVar("N", int, torch.Tensor)  # one count, or a row of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """Cache entries to compress, as a policy sees them; a row is one layer of one sequence."""

    k_BKSD: torch.Tensor  # after rotation
    v_BKSD: torch.Tensor
    positions_BKS: torch.Tensor  # logical
    live_BKS: torch.Tensor  # bool: written, and inside the layer's window if it has one
    recent_BS: torch.Tensor  # bool: the entries of the remembered queries, the newest `num_queries` slots
    queries_BHWD: torch.Tensor  # the last `num_queries` queries, in any order
    scale_B: torch.Tensor  # what attention multiplies q . k by


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPolicy:
    """Keeps and reads everything unless a subclass says otherwise."""

    name: ClassVar[str]

    @property
    def num_queries(self) -> int:
        """How many of the last queries the cache remembers for this policy."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictPolicy(KVPolicy, ABC):
    """Cuts a sequence's cache to `budget` entries whenever it has grown by `interval` beyond that.

    budget: entries kept per layer and KV head, sinks and window included
    interval: entries a cache grows by between two compressions
    sinks: first positions of the sequence that are never dropped
    protect_prompt: never drop prompt entries; they come on top of the budget
    """

    budget: int = 512
    interval: int = 128
    sinks: int = 0
    protect_prompt: bool = False

    def __post_init__(self) -> None:
        at_least(self, "budget", 1)
        at_least(self, "interval", 1)
        at_least(self, "sinks", 0)
        needed = self.sinks + self.num_queries
        if self.budget < needed:
            raise ValueError(
                f"kv.budget is {self.budget}, but the protected entries alone are {needed} (sinks {self.sinks} + "
                f"window {self.num_queries}); raise kv.budget to {needed} or more, or protect less."
            )

    def target(self, prompt_len: N) -> N:
        """Entries per layer and KV head left after a compression."""
        return self.budget + prompt_len * self.protect_prompt

    def trigger(self, prompt_len: N) -> N:
        """Entries at which a decoding sequence is compressed."""
        return self.target(prompt_len) + self.interval

    @abstractmethod
    def importance(self, entries: Entries) -> torch.Tensor:
        """How much each entry matters, B K S; higher is kept. Only live entries outside the window are read."""

    def kept(self, entries: Entries, lengths_B: torch.Tensor, prompt_lens_B: torch.Tensor) -> torch.Tensor:
        """The slots to keep of each row and head in storing order, B K T; row b uses its first min(length, target)."""
        first_B = (prompt_lens_B * self.protect_prompt).clamp(min=self.sinks)
        protected = (entries.positions_BKS < first_B[:, None, None]) | entries.recent_BS[:, None]
        importance = self.importance(entries).masked_fill(~entries.live_BKS, float("-inf"))
        counts_B = torch.minimum(lengths_B, self.target(prompt_lens_B))
        kept = select(importance, protected & entries.live_BKS, lengths_B, counts_B)
        return self.arrange(kept, importance, entries, counts_B)

    def arrange(
        self, kept_BKT: torch.Tensor, importance_BKS: torch.Tensor, entries: Entries, counts_B: torch.Tensor
    ) -> torch.Tensor:
        """The order in which kept entries are stored: by position, as `select` gives them."""
        return kept_BKT


def select(
    importance_BKS: torch.Tensor, protected_BKS: torch.Tensor, lengths_B: torch.Tensor, counts_B: torch.Tensor
) -> torch.Tensor:
    """Slots of the `counts` entries to keep of each row's `lengths`, ascending; B K T, short rows padded.

    Protected entries stay whatever their importance; the best of the others fill up the count. Of equal importance
    the later slot wins; nan counts as least.
    """
    size = importance_BKS.shape[-1]
    slot = torch.arange(size, device=importance_BKS.device)
    written_BKS = (slot < lengths_B[:, None])[:, None].expand_as(importance_BKS)
    assert bool((counts_B <= lengths_B).all()), "more entries to keep than there are"
    assert bool((protected_BKS.sum(-1) <= counts_B[:, None]).all()), "more protected entries than can be kept"

    # Two stable sorts make one order: empty slots, then by importance, then protected entries last.
    by_importance = importance_BKS.nan_to_num(nan=float("-inf")).argsort(dim=-1, stable=True)
    rank = written_BKS.int() + (written_BKS & protected_BKS).int()
    by_rank = rank.gather(-1, by_importance).argsort(dim=-1, stable=True)
    worst_first = by_importance.gather(-1, by_rank)

    best = slot >= size - counts_B[:, None]
    kept_BKS = torch.zeros_like(written_BKS).scatter(-1, worst_first, best[:, None].expand_as(importance_BKS))
    ascending = kept_BKS.logical_not().int().argsort(dim=-1, stable=True)
    return ascending[..., : int(counts_B.max())]


def at_least(policy: KVPolicy, field: str, least: int) -> None:
    """Raise unless a setting of the policy is at least this much."""
    given = getattr(policy, field)
    if not isinstance(given, int) or given < least:
        raise ValueError(f"kv.{field} is {given}; it must be a whole number, at least {least}.")
