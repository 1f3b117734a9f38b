# SPDX-License-Identifier: Apache-2.0
"""What a KV policy is, and the one cut that all eviction shares.

A policy is frozen settings. It says when a sequence's cache is cut (`trigger`), to how many entries (`target`), and
how important each entry is (`importance`). Which entries may not be dropped is said by a mask, never by a large number.

How a whole cache is cut is in `compress.py`; policies that choose what is read are in `select.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, TypeVar

import torch

from sparse_rl.kernels.compact import select_and_compact
from sparse_rl.kv.schedule import MOST, Schedule, load
from sparse_rl.model.dry_run import AttentionShape
from sparse_rl.specs import check_choices

if TYPE_CHECKING:
    from sparse_rl.kv.select import SelectPolicy

N = TypeVar("N", int, torch.Tensor)  # one count, or a row of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Entries:
    """Cache entries to compress, as a policy sees them; a row is one layer of one sequence, layer by layer."""

    k_PKSD: torch.Tensor  # the pool's keys, after rotation
    pages_BN: torch.Tensor  # the rows' pages in it
    lengths_B: torch.Tensor  # entries held
    fresh_B: torch.Tensor  # entries of them that came since the row was last cut
    contexts_B: torch.Tensor  # tokens seen
    prompt_lens_B: torch.Tensor
    positions_BKS: torch.Tensor  # logical
    live_BKS: torch.Tensor  # bool: written, and inside the layer's window if it has one
    recent_BS: torch.Tensor  # bool: the newest `num_recent` slots
    queries_BHWD: torch.Tensor  # the last `num_queries` queries, that of position p at p % num_queries
    scale_B: torch.Tensor  # what attention multiplies q . k by
    windows_B: torch.Tensor  # the layer's window
    num_layers: int
    tally_BKS: torch.Tensor | None = None  # of a policy that keeps them; 0 where the entry is fresh


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPolicy:
    """Keeps and reads everything unless a subclass says otherwise."""

    name: ClassVar[str]

    @property
    def num_queries(self) -> int:
        """How many of the last queries the cache remembers for this policy."""
        return 0

    @property
    def selection(self) -> SelectPolicy | None:
        """How a decode step chooses the pages it reads; it reads everything where this is None."""
        return None

    @property
    def num_landmarks(self) -> int:
        """Vectors that stand for the keys of a page."""
        return self.selection.landmarks if self.selection else 0

    @property
    def page_size(self) -> int:
        """Entries of a page where the engine's settings do not say: small pages where they are chosen among."""
        return 16 if self.selection else 64

    def check_page_size(self, page_size: int) -> None:
        """Raise unless there is something to choose among pages of this size, where they are chosen among."""
        if self.selection is not None:
            self.selection.check_reserved(page_size, inside=self.selection is not self)

    @property
    def bound(self) -> int | None:
        """No decoding sequence comes to hold more entries, whatever its length; None if there is no such number."""
        return None

    @property
    def keeps_tally(self) -> bool:
        """Whether every entry carries a number of the policy's from one cut to the next."""
        return False

    def entry_bytes(self, shape: AttentionShape) -> int:
        """What one token takes in every layer and KV head."""
        return shape.entry_bytes + self.keeps_tally * shape.tally_bytes

    def page_bytes(self, shape: AttentionShape, page_size: int) -> int:
        """A page's entries and landmarks."""
        return page_size * self.entry_bytes(shape) + self.num_landmarks * shape.landmark_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictPolicy(KVPolicy, ABC):
    """Cuts a sequence's cache to `budget` entries whenever it has grown by `interval` beyond that.

    budget: entries kept per layer and KV head, sinks and window included; or a schedule of them by context length
    interval: entries a cache grows by between two compressions
    sinks: first positions of the sequence that are never dropped
    protect_prompt: never drop prompt entries; they come on top of the budget
    select: policy by which a decode step chooses the pages it reads among those left, pages_mean or quest; or none
    select_budget: entries it reads, fewer than are held, or a schedule of them; of its settings the one to be given
    index: "per_head" keeps what is best for each layer and KV head; "shared" keeps one set for all of them
    """

    budget: int | str = 512
    interval: int = 128
    sinks: int = 0
    protect_prompt: bool = False
    select: Literal["none", "pages_mean", "quest"] = "none"
    select_budget: int | str | None = None
    index: Literal["per_head", "shared"] = "per_head"

    def __post_init__(self) -> None:
        if not isinstance(self.budget, str):
            at_least(self, "budget", 1)
        at_least(self, "interval", 1)
        at_least(self, "sinks", 0)
        if type(self.protect_prompt) is not bool:
            raise ValueError(f"kv.protect_prompt is {self.protect_prompt!r}; it must be true or false.")
        check_choices(self, "kv")
        needed = self.sinks + self.num_recent
        least = self.schedule.budgets[0]
        if least < needed:
            begins = f", which begins with {least}" if isinstance(self.budget, str) else ""
            raise ValueError(
                f"kv.budget is {self.budget}{begins}, but the protected entries alone are {needed} "
                f"(sinks {self.sinks} + newest {self.num_recent}); raise it to {needed} or more, or protect less."
            )
        _ = self.selection  # what is wrong with its settings is said now

    @property
    def selection(self) -> SelectPolicy | None:
        from sparse_rl.kv.inside import inside  # which imports this module

        return inside(self.select, self.select_budget)

    @property
    def num_recent(self) -> int:
        """How many of the newest entries are never dropped."""
        return self.num_queries

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
        return None if self.protect_prompt else self.schedule.most + self.interval

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

    def accumulate(self, entries: Entries) -> torch.Tensor:
        """The entries' new tallies, B K S, made of their old ones; `importance` then sees these."""
        raise NotImplementedError(f"{self.name} keeps no tally")

    def evict(self, entries: Entries, pools: tuple[torch.Tensor, ...], *, max_count: int) -> torch.Tensor:
        """Cut every row to min(length, target) entries, at most `max_count`, in place.

        Returns the slots that were kept of each row and head in storing order, B K max_count, short rows padded.
        """
        if self.keeps_tally:
            entries = replace(entries, tally_BKS=self.accumulate(entries))
            store_tallies(pools[3], entries)
        first_B = (entries.prompt_lens_B * self.protect_prompt).clamp(min=self.sinks)
        protected_BKS = (entries.positions_BKS < first_B[:, None, None]) | entries.recent_BS[:, None]
        protected_BKS = protected_BKS & entries.live_BKS
        importance_BKS = torch.where(entries.live_BKS, self.importance(entries), float("-inf"))
        if self.index == "shared":
            importance_BKS, protected_BKS = share(importance_BKS, protected_BKS, entries)
        counts_B = torch.minimum(entries.lengths_B, self.target(entries.prompt_lens_B, entries.contexts_B))
        return self.cut(entries, pools, importance_BKS, protected_BKS, counts_B, max_count=max_count)

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


def store_tallies(pool_PKS: torch.Tensor, entries: Entries) -> None:
    """Write tallies to the rows' pages, where they move with their entries; what fills tables up is nobody's page.

    Or one of the row's own that it has not come to, where they are masked until it has.
    """
    assert entries.tally_BKS is not None
    tally_BKNS = entries.tally_BKS.unflatten(-1, (entries.pages_BN.shape[1], -1))
    pool_PKS[entries.pages_BN] = tally_BKNS.transpose(1, 2).to(pool_PKS.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepsNewest(EvictPolicy, ABC):
    """An evicting policy that is told how many of the newest entries to keep.

    recent: newest entries that are never dropped
    """

    recent: int = 0

    def __post_init__(self) -> None:
        at_least(self, "recent", 0)
        EvictPolicy.__post_init__(self)

    @property
    def num_recent(self) -> int:
        return self.recent


def share(
    importance_BKS: torch.Tensor, protected_BKS: torch.Tensor, entries: Entries
) -> tuple[torch.Tensor, torch.Tensor]:
    """Importance and protection of a token as a whole: mean over heads, sum over the layers that still see it.

    Slot by slot, since one set for all makes a slot hold the same token everywhere. A token that some layer protects
    is protected in all; one that no layer sees any more goes first.
    """
    split = (entries.num_layers, -1)
    live_LBKS = entries.live_BKS.unflatten(0, split)
    total_BS = importance_BKS.unflatten(0, split).masked_fill(~live_LBKS, 0.0).mean(dim=2).sum(dim=0)
    total_BS = total_BS.masked_fill(~live_LBKS.any(dim=2).any(dim=0), float("-inf"))
    kept_BS = protected_BKS.unflatten(0, split).any(dim=2).any(dim=0)
    total_BS, kept_BS = (x.repeat(entries.num_layers, 1) for x in (total_BS, kept_BS))
    return total_BS[:, None].expand_as(importance_BKS), kept_BS[:, None].expand_as(importance_BKS)


def at_least(policy: KVPolicy, field: str, least: int) -> None:
    """Raise unless a setting of the policy is at least this much, and no more than there can be tokens."""
    given = getattr(policy, field)
    if type(given) is not int or given < least:
        raise ValueError(f"kv.{field} is {given!r}; it must be a whole number, at least {least}.")
    if given > MOST:
        raise ValueError(f"kv.{field} is {given}; it must be at most {MOST}.")


def between(policy: KVPolicy, field: str, low: float, high: float) -> None:
    """Raise unless a setting of the policy lies between these two."""
    given = getattr(policy, field)
    if isinstance(given, bool) or not isinstance(given, int | float) or not low <= given <= high:
        raise ValueError(f"kv.{field} is {given!r}; it must be a number between {low:g} and {high:g}.")
