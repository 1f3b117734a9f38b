# SPDX-License-Identifier: Apache-2.0
"""G-KV (arXiv 2512.00504): R-KV with a tally that outlives the queries that gave it.

    s = attention / max(attention)                          of the last `window` queries, as in SnapKV
    F = max(decay * F, s)                                   kept with the entry from firing to firing
    importance = lam * F - (1 - lam) * redundancy / max(redundancy)

Departures: attention is SnapKV's here (maximum over query heads on logits, window keys left out of the softmax); the
released code takes the maximum of weights over all keys. Redundancy is R-KV's. An entry's tally begins once it
has left the window.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sparse_rl.kernels.importance import redundancy
from sparse_rl.kv.policy import Entries, between
from sparse_rl.kv.snapkv import SnapKV


@dataclass(frozen=True, slots=True, kw_only=True)
class GKV(SnapKV):
    """The best attention an entry has had, fading, less redundancy among keys.

    decay: what an entry's tally is multiplied by at each firing; 1 forgets nothing, 0 everything
    lam: weight of attention against redundancy, 0 to 1
    threshold: cosine above which two keys are duplicates; the newest one of each key is spared
    """

    name: ClassVar[str] = "gkv"

    window: int = 16
    kernel: int = 1
    decay: float = 0.8
    lam: float = 0.5
    threshold: float = 0.5

    def __post_init__(self) -> None:
        between(self, "decay", 0.0, 1.0)
        between(self, "lam", 0.0, 1.0)
        between(self, "threshold", -1.0, 1.0)
        SnapKV.__post_init__(self)

    @property
    def keeps_tally(self) -> bool:
        return True

    def accumulate(self, entries: Entries) -> torch.Tensor:
        assert entries.tally_BKS is not None
        return torch.maximum(self.decay * entries.tally_BKS, of_greatest(SnapKV.importance(self, entries)))

    def importance(self, entries: Entries) -> torch.Tensor:
        assert entries.tally_BKS is not None
        repetition = redundancy(entries.k_PKSD, entries.pages_BN, entries.live_BKS, threshold=self.threshold)
        repetition = repetition.masked_fill(entries.recent_BS[:, None], 0.0)
        return self.lam * entries.tally_BKS - (1.0 - self.lam) * of_greatest(repetition)


def of_greatest(values_BKS: torch.Tensor) -> torch.Tensor:
    """Values as shares of the greatest of their row and head, none below 0; zeros where all are."""
    greatest = values_BKS.amax(dim=-1, keepdim=True)
    return values_BKS / torch.where(greatest > 0, greatest, 1.0)
