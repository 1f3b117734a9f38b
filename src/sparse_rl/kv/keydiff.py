# SPDX-License-Identifier: Apache-2.0
"""KeyDiff (arXiv 2504.15364): the keys that are least like the others.

    importance_j = -cos(k_j, mean_i k_i / |k_i|)        i over all live entries of the layer and KV head

Departure: the paper cuts block by block while a prompt is read and one entry a step afterwards; here it fires at the
interval. The mean is over what is held then, and not over what was dropped before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sparse_rl.kernels.keys import key_likeness
from sparse_rl.kv.policy import Entries, KeepsNewest


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyDiff(KeepsNewest):
    """The keys that point away from the mean direction of all keys."""

    name: ClassVar[str] = "keydiff"

    def importance(self, entries: Entries) -> torch.Tensor:
        return -key_likeness(entries.k_PKSD, entries.pages_BN, entries.live_BKS)
