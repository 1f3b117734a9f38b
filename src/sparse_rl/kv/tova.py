# SPDX-License-Identifier: Apache-2.0
"""TOVA (arXiv 2401.06104): what the newest query attends to, in the mean of a layer's heads.

    importance_j = mean_h softmax_j(scale * q_h . k_j)        one set a layer, shared by its heads

Departure: the paper drops one entry at every step; here `interval` entries are dropped together, by the last query.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sparse_rl.kv.h2o import received
from sparse_rl.kv.policy import Entries, KeepsNewest


@dataclass(frozen=True, slots=True, kw_only=True)
class TOVA(KeepsNewest):
    """The newest query's attention; all KV heads of a layer keep the same entries."""

    name: ClassVar[str] = "tova"

    @property
    def num_queries(self) -> int:
        return 1

    def importance(self, entries: Entries) -> torch.Tensor:
        mass_BKS = received(entries, torch.ones_like(entries.lengths_B))
        return mass_BKS.mean(dim=1, keepdim=True).expand_as(mass_BKS)
