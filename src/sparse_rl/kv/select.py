# SPDX-License-Identifier: Apache-2.0
"""Policies that keep every entry, and at each decode step read only the pages that matter to the query.

A page's landmarks stand for its keys; the pages of a row are weighed against the query, and attention reads the best of
them. Nothing is lost, so a page not read now may be read at the next step. Memory is that of a dense cache and the
landmarks; what shrinks is the reading, which bounds a decode step. Prefill is dense, and so are the first layers and
those with a sliding window.

How pages are weighed and listed is in kernels/landmarks.py.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch

from sparse_rl.kernels.decode import LayerPool
from sparse_rl.kernels.landmarks import choose_pages
from sparse_rl.kv.cache import DecodeStep, PagedCache
from sparse_rl.kv.policy import KVPolicy, N, at_least
from sparse_rl.kv.schedule import Schedule, load

SMALLEST_PAGE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectPolicy(KVPolicy, ABC):
    """Reads `budget` entries of what a sequence holds, in whole pages, per layer and KV head.

    budget: entries a decode step reads per layer and KV head, pages always read included; or a schedule of them
    first: pages at the beginning of the sequence that are always read
    last: pages at its end that are always read, the one being filled among them
    dense_layers: first layers that read everything
    """

    landmarks: ClassVar[int]  # of a page: 1 for the mean of its keys, 2 for their minimum and maximum

    budget: int | str = 1024
    first: int = 1
    last: int = 2
    dense_layers: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.budget, str):
            at_least(self, "budget", 1)
        at_least(self, "first", 0)
        at_least(self, "last", 1)
        at_least(self, "dense_layers", 0)
        _ = self.schedule  # what is wrong with it is said now

    @property
    def selection(self) -> SelectPolicy:
        return self

    @property
    def schedule(self) -> Schedule:
        """The budget by context length."""
        return load(self.budget)

    def check_reserved(self, page_size: int, *, inside: bool) -> None:
        """Raise unless the smallest budget holds the pages that are always read; `inside` an evicting policy or not."""
        reserved, least = (self.first + self.last) * page_size, min(self.schedule.budgets)
        if least < reserved:
            smaller = ["engine.page_size"] * (page_size > SMALLEST_PAGE) + ["kv.first", "kv.last"] * (not inside)
            raise ValueError(
                f"{'kv.select_budget' if inside else 'kv.budget'} is {least}, but the pages always read are {reserved} "
                f"entries (first {self.first} + last {self.last} pages of {page_size}); raise it to {reserved} or more"
                f"{', or lower ' if smaller else ''}{' or '.join(smaller)}."
            )

    def pages_read(self, length: N, context: N, page_size: int) -> tuple[N, N]:
        """How many pages a row that holds `length` entries of a `context` reads, and how many entries of them.

        The last page, which may be partly filled, is always among them.
        """
        held: N = -(-length // page_size)
        budget: N = self.schedule.at(context) // page_size
        count: N = torch.minimum(held, budget) if isinstance(held, torch.Tensor) else min(held, budget)
        return count, length - (held - count) * page_size

    def selects(self, layer_idx: int, window: int | None) -> bool:
        """Whether a layer chooses pages; one with a window reads what it holds."""
        return layer_idx >= self.dense_layers and window is None


def decode_step(selection: SelectPolicy | None) -> Callable[..., DecodeStep]:
    """What makes the decode steps of a policy, from the cache and where its rows stand."""
    return DecodeStep if selection is None else partial(SelectStep, selection)


class SelectStep(DecodeStep):
    """One new token for each row, which attends to the pages that the policy chooses."""

    def __init__(self, policy: SelectPolicy, cache: PagedCache, **step: Any) -> None:
        super().__init__(cache, **step)
        self.policy = policy
        self.counts_B, self.read_B = policy.pages_read(self.lengths_B, self.positions_B + 1, cache.page_size)
        self.width = min(policy.schedule.most // cache.page_size, self.pages_BN.shape[1])

    def pages_to_read(
        self, layer_idx: int, q_BHD: torch.Tensor, pool: LayerPool, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        policy = self.policy
        if not policy.selects(layer_idx, window):
            return self.pages_BN, self.lengths_B, self.max_length
        pages_BKM = choose_pages(
            q_BHD,
            pool,
            self.pages_BN,
            self.lengths_B,
            self.counts_B,
            first=policy.first,
            last=policy.last,
            width=self.width,
        )
        return pages_BKM, self.read_B, min(self.max_length, self.width * self.cache.page_size)
