# SPDX-License-Identifier: Apache-2.0
"""A pool of pages for a few rows that are there from beginning to end: each has `width` pages, one after the other.

The engine's rows come and go and share the pages of their prompts: it has a `PagePool` beside a `PagedCache` instead.
"""

from __future__ import annotations

import torch

from sparse_rl.kv.cache import PagedCache
from sparse_rl.kv.policy import KVPolicy
from sparse_rl.model.dry_run import AttentionShape

GROWTH = 4  # a pool that is full grows by one in so many


class RowPool(PagedCache):
    def __init__(
        self, shape: AttentionShape, policy: KVPolicy, *, page_size: int, num_rows: int, num_entries: int
    ) -> None:
        self.num_rows, self.width = num_rows, -(-num_entries // page_size)
        super().__init__(
            shape,
            num_pages=num_rows * self.width,
            page_size=page_size,
            num_rows=num_rows,
            num_queries=policy.num_queries,
            keeps_tally=policy.keeps_tally,
            num_landmarks=policy.num_landmarks,
        )

    def pages(self, row: int, num_entries: int | None = None) -> list[int]:
        """Those of a row, or as many as hold its first entries."""
        width = self.width if num_entries is None else -(-num_entries // self.page_size)
        first = 1 + row * self.width
        return list(range(first, first + width))

    def held(self, row: int, num_entries: int) -> torch.Tensor:
        """The positions of a row's first entries, L K S."""
        return self.positions[:, self.pages(row)].transpose(1, 2).flatten(2)[..., :num_entries].long()

    def reorder(self, rows: list[int]) -> None:
        """Row i goes on from what row rows[i] holds."""
        sources, targets = ([page for row in order for page in self.pages(row)] for order in (rows, range(len(rows))))
        self.copy_pages(sources, targets)
        self.queries[:, : len(rows)] = self.queries[:, rows]

    def fit(self, num_entries: int, most: int | None) -> None:
        """Give every row pages for so many entries: more if they are short, fewer if none needs more than `most`."""
        needed, wanted = -(-num_entries // self.page_size), self.width
        if needed > self.width:
            wanted = max(needed, self.width + self.width // GROWTH)
        if most is not None:
            wanted = max(needed, min(wanted, -(-most // self.page_size)))
        if wanted == self.width:
            return
        kept = min(wanted, self.width) * self.page_size
        saved = self.save([page for row in range(self.num_rows) for page in self.pages(row, kept)])
        self.width = wanted
        self.resume(self.num_rows * wanted)
        self.restore(saved, [page for row in range(self.num_rows) for page in self.pages(row, kept)])
