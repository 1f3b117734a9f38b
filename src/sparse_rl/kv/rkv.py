# SPDX-License-Identifier: Apache-2.0
"""R-KV (arXiv 2505.24133): attended to, and not a repetition of other entries.

    importance = lam * attention - (1 - lam) * redundancy

Departure: entries stay in ascending position order. The released code stores them by importance, and as pooling and the
last-duplicate rule read neighbours, its later firings differ; `order="score"` reproduces it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from sparse_rl.kernels.compact import compact_ref, select_ref
from sparse_rl.kernels.importance import redundancy
from sparse_rl.kv.policy import Entries, between
from sparse_rl.kv.snapkv import SnapKV


@dataclass(frozen=True, slots=True, kw_only=True)
class RKV(SnapKV):
    """Attention of the last `window` queries, less redundancy among keys.

    lam: weight of attention against redundancy, 0 to 1
    threshold: cosine above which two keys are duplicates; the newest one of each key is spared
    order: how kept entries are stored, by "position" or by "score" as in the released code
    """

    name: ClassVar[str] = "rkv"

    lam: float = 0.1
    threshold: float = 0.5
    order: Literal["position", "score"] = "position"

    def __post_init__(self) -> None:
        between(self, "lam", 0.0, 1.0)
        between(self, "threshold", -1.0, 1.0)
        SnapKV.__post_init__(self)

    @property
    def copies(self) -> bool:
        return self.order == "score"

    def importance(self, entries: Entries) -> torch.Tensor:
        attention = SnapKV.importance(self, entries)
        repetition = redundancy(entries.k_PKSD, entries.pages_BN, entries.live_BKS, threshold=self.threshold)
        return self.lam * attention - (1.0 - self.lam) * repetition

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
        if self.order == "position":
            return SnapKV.cut(self, entries, pools, importance_BKS, protected_BKS, counts_B, max_count=max_count)
        kept_BKE = select_ref(importance_BKS, protected_BKS, entries.lengths_B, counts_B, max_count=max_count)
        kept_BKE = best_first(kept_BKE, importance_BKS, entries.recent_BS, counts_B)
        compact_ref(pools, entries.pages_BN, kept_BKE, counts_B)
        return kept_BKE


def best_first(
    kept_BKE: torch.Tensor, importance_BKS: torch.Tensor, recent_BS: torch.Tensor, counts_B: torch.Tensor
) -> torch.Tensor:
    """Kept slots by falling importance, then the window in its own order, then padding."""
    # A stable sort on each key, the least important key first.
    padding = torch.arange(kept_BKE.shape[-1], device=kept_BKE.device) >= counts_B[:, None]
    recent = recent_BS[:, None].expand_as(importance_BKS).gather(-1, kept_BKE)
    worth = importance_BKS.gather(-1, kept_BKE).masked_fill(recent, float("-inf"))
    order = worth.argsort(dim=-1, descending=True, stable=True)
    rank = recent.int() + 2 * padding[:, None].int()
    order = order.gather(-1, rank.gather(-1, order).argsort(dim=-1, stable=True))
    return kept_BKE.gather(-1, order)
