# SPDX-License-Identifier: Apache-2.0
"""Who holds which page: integers only, so that it can be tested without a model.

A `Holding` is one owner's pages in order. A page may be shared by several holdings; whoever writes must hold it alone.
Pages count from 1: page 0 is nobody's, and decode rows without a sequence write there.

The tensors behind the pages are in `cache.py`; who gets pages is decided in rollout/scheduler.py.
"""

from __future__ import annotations


class PagePool:
    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.free = list(range(num_pages, 0, -1))  # a stack: the page freed last is used first
        self.counts = [0] * (num_pages + 1)  # holdings that contain the page
        self.holdings: set[Holding] = set()
        self.peak_used = 0

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self.free)

    @property
    def num_available(self) -> int:
        return len(self.free)

    def pages_for(self, num_entries: int) -> int:
        return -(-num_entries // self.page_size)

    def open(self) -> Holding:
        """A new, empty holding."""
        holding = Holding(self)
        self.holdings.add(holding)
        return holding

    def check(self) -> None:
        """Raise unless every page is either free or counted once for each holding that has it."""
        counts = [0] * (self.num_pages + 1)
        for holding in self.holdings:
            assert len(set(holding.pages)) == len(holding.pages), f"page twice in {holding.pages}"
            for page in holding.pages:
                counts[page] += 1
        assert counts == self.counts and counts[0] == 0, "page counts do not match the holdings"
        assert sorted(self.free) == [page for page, count in enumerate(counts) if page and count == 0], (
            "free list is wrong"
        )


class Holding:
    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.pages: list[int] = []

    def take(self, num_pages: int) -> list[int]:
        """Append fresh pages."""
        assert num_pages <= self.pool.num_available, f"{num_pages} pages wanted of {self.pool.num_available} available"
        taken = [self.pool.free.pop() for _ in range(num_pages)]
        for page in taken:
            self.pool.counts[page] = 1
        self.pages += taken
        self.pool.peak_used = max(self.pool.peak_used, self.pool.num_used)
        return taken

    def share(self, pages: list[int]) -> None:
        """Append pages that another holding keeps too."""
        for page in pages:
            assert self.pool.counts[page] > 0, f"page {page} is free and cannot be shared"
            self.pool.counts[page] += 1
        self.pages += pages

    def trim(self, num_pages: int) -> None:
        """Give back all but the first pages."""
        for page in self.pages[num_pages:]:
            self.pool.counts[page] -= 1
            if self.pool.counts[page] == 0:
                self.pool.free.append(page)
        del self.pages[num_pages:]

    def close(self) -> None:
        self.trim(0)
        self.pool.holdings.discard(self)

    def writable(self, page_idx: int) -> bool:
        """Whether this holding alone has its page_idx-th page."""
        return self.pool.counts[self.pages[page_idx]] == 1
