# SPDX-License-Identifier: Apache-2.0
"""H2O (arXiv 2306.14048): the heavy hitters, by the attention an entry received, and the newest entries.

    F_j = decay * F_j + sum_i mean_g softmax_j(scale * q_gi . k_j)        i over the last queries since the last firing

A firing counts the queries that the cache remembers, the last `window`, each with the weight it had in its step, and
none twice. With `window` at least `interval`, as it is if not given, a firing that comes `interval` tokens after
another misses none. Queries are missed where more than `window` tokens pass: before the first firing, which the prompt
is part of, and where a schedule's budget steps up. An entry that was dropped loses its sum.

Departures: the paper counts every query, the whole prompt's included, as does a `window` of budget + interval where
the prompt is no longer than the budget; fired at the interval, the paper drops one entry a step; one set per KV head
(mean over its query heads).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sparse_rl.kernels.mass import attention_mass
from sparse_rl.kv.policy import Entries, EvictPolicy, at_least, between


@dataclass(frozen=True, slots=True, kw_only=True)
class H2O(EvictPolicy):
    """Accumulated attention, and the newest entries.

    recent: newest entries that are never dropped; half of the budget, of a schedule's first, if not given
    window: last queries that the cache remembers and a firing counts; `interval` if not given. Earlier ones are missed
    decay: what an entry's tally is multiplied by at each firing; 1 forgets nothing, 0 everything
    """

    name: ClassVar[str] = "h2o"

    recent: int | None = None
    window: int | None = None
    decay: float = 1.0

    def __post_init__(self) -> None:
        if self.recent is not None:
            at_least(self, "recent", 0)
        if self.window is not None:
            at_least(self, "window", 1)
        between(self, "decay", 0.0, 1.0)
        EvictPolicy.__post_init__(self)

    @property
    def num_queries(self) -> int:
        return self.interval if self.window is None else self.window

    @property
    def num_recent(self) -> int:
        return max(0, self.schedule.budgets[0] - self.sinks) // 2 if self.recent is None else self.recent

    @property
    def copies(self) -> bool:
        return True  # the remembered queries of the rows

    @property
    def keeps_tally(self) -> bool:
        return True

    def accumulate(self, entries: Entries) -> torch.Tensor:
        assert entries.tally_BKS is not None
        return self.decay * entries.tally_BKS + received(entries, entries.fresh_B.clamp(max=self.num_queries))

    def importance(self, entries: Entries) -> torch.Tensor:
        assert entries.tally_BKS is not None
        return entries.tally_BKS


def received(entries: Entries, counts_B: torch.Tensor) -> torch.Tensor:
    """The attention that each entry had from the newest `counts` queries, B K S."""
    return attention_mass(
        entries.k_PKSD,
        entries.pages_BN,
        entries.queries_BHWD,
        entries.positions_BKS,
        lengths_B=entries.lengths_B,
        contexts_B=entries.contexts_B,
        counts_B=counts_B,
        windows_B=entries.windows_B,
        scale_B=entries.scale_B,
    )
