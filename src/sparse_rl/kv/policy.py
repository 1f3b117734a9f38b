# SPDX-License-Identifier: Apache-2.0
"""What a KV policy is, and the one cut that all eviction shares.

A policy is frozen settings. It says when a sequence's cache is cut (`trigger`), to how many entries (`target`), and
how important each entry is (`importance`). Which entries may not be dropped is said by a mask, never by a large score.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, TypeVar

import torch

from sparse_rl.kernels.compact import select_and_compact
from sparse_rl.kernels.decode import gather_pages_ref
from sparse_rl.kv.schedule import Schedule, load

N = TypeVar("N", int, torch.Tensor)  # one count, or a row of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """Cache entries to compress, as a policy sees them; a row is one layer of one sequence."""

    k_PKSD: torch.Tensor  # the pool; keys after rotation
    v_PKSD: torch.Tensor
    pages_BN: torch.Tensor  # the rows' pages in it
    lengths_B: torch.Tensor  # entries held
    contexts_B: torch.Tensor  # tokens seen
    prompt_lens_B: torch.Tensor
    positions_BKS: torch.Tensor  # logical
    live_BKS: torch.Tensor  # bool: written, and inside the layer's window if it has one
    recent_BS: torch.Tensor  # bool: the entries of the remembered queries, the newest `num_queries` slots
    queries_BHWD: torch.Tensor  # the last `num_queries` queries, in any order
    scale_B: torch.Tensor  # what attention multiplies q . k by

    @property
    def k_BKSD(self) -> torch.Tensor:  # noqa: N802
        """The rows' keys, copied out of the pool."""
        return gather_pages_ref(self.k_PKSD, self.pages_BN)

    @property
    def v_BKSD(self) -> torch.Tensor:  # noqa: N802
        """The rows' values, copied out of the pool."""
        return gather_pages_ref(self.v_PKSD, self.pages_BN)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPolicy:
    """Keeps and reads everything unless a subclass says otherwise."""

    name: ClassVar[str]

    @property
    def num_queries(self) -> int:
        """How many of the last queries the cache remembers for this policy."""
        return 0

    @property
    def bound(self) -> int | None:
        """Most entries a decoding sequence comes to hold, if that is one number for all of them."""
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictPolicy(KVPolicy, ABC):
    """Cuts a sequence's cache to `budget` entries whenever it has grown by `interval` beyond that.

    budget: entries kept per layer and KV head, sinks and window included; or a schedule of them by context length
    interval: entries a cache grows by between two compressions
    sinks: first positions of the sequence that are never dropped
    protect_prompt: never drop prompt entries; they come on top of the budget
    """

    budget: int | str = 512
    interval: int = 128
    sinks: int = 0
    protect_prompt: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.budget, str):
            at_least(self, "budget", 1)
        at_least(self, "interval", 1)
        at_least(self, "sinks", 0)
        needed = self.sinks + self.num_queries
        least = self.schedule.budgets[0]
        if least < needed:
            begins = f", which begins with {least}" if isinstance(self.budget, str) else ""
            raise ValueError(
                f"kv.budget is {self.budget}{begins}, but the protected entries alone are {needed} "
                f"(sinks {self.sinks} + window {self.num_queries}); raise it to {needed} or more, or protect less."
            )

    @property
    def copies(self) -> bool:
        """Whether a cut makes copies of all the entries it is given, so that it is better given few at a time."""
        return False

    @property
    def schedule(self) -> Schedule:
        """The budget by context length."""
        return load(self.budget)

    @property
    def bound(self) -> int | None:
        depends = self.protect_prompt or self.schedule.budgets[0] < self.schedule.most
        return None if depends else self.trigger(0, 0)

    def target(self, prompt_len: N, context: N) -> N:
        """Entries per layer and KV head left after a compression, once `context` tokens have been seen."""
        budget = self.schedule.at(context) if isinstance(self.budget, str) else self.budget
        return budget + prompt_len * self.protect_prompt

    def trigger(self, prompt_len: N, context: N) -> N:
        """Entries at which a decoding sequence is compressed. It never falls as the sequence grows."""
        return self.target(prompt_len, context) + self.interval

    @abstractmethod
    def importance(self, entries: Entries) -> torch.Tensor:
        """How much each entry matters, B K S; higher is kept. Only live entries outside the window are read."""

    def evict(self, entries: Entries, pools: tuple[torch.Tensor, ...], *, max_count: int) -> torch.Tensor:
        """Cut every row to min(length, target) entries, at most `max_count`, in place.

        Returns the slots that were kept of each row and head in storing order, B K max_count, short rows padded.
        """
        first_B = (entries.prompt_lens_B * self.protect_prompt).clamp(min=self.sinks)
        protected_BKS = (entries.positions_BKS < first_B[:, None, None]) | entries.recent_BS[:, None]
        importance_BKS = torch.where(entries.live_BKS, self.importance(entries), float("-inf"))
        counts_B = torch.minimum(entries.lengths_B, self.target(entries.prompt_lens_B, entries.contexts_B))
        return self.cut(entries, pools, importance_BKS, protected_BKS & entries.live_BKS, counts_B, max_count=max_count)

    def cut(
        self,
        entries: Entries,
        pools: tuple[torch.Tensor, ...],
        importance_BKS: torch.Tensor,
        protected_BKS: torch.Tensor,
        counts_B: torch.Tensor,
        *,
        max_count: int,
    ) -> torch.Tensor:
        """Keep the protected and the most important entries, stored in the order in which they were."""
        return select_and_compact(
            pools,
            entries.pages_BN,
            importance_BKS,
            protected_BKS,
            entries.lengths_B,
            counts_B,
            max_count=max_count,
        )


def at_least(policy: KVPolicy, field: str, least: int) -> None:
    """Raise unless a setting of the policy is at least this much."""
    given = getattr(policy, field)
    if not isinstance(given, int) or given < least:
        raise ValueError(f"kv.{field} is {given}; it must be a whole number, at least {least}.")
