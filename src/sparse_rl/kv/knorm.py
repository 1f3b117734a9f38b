# SPDX-License-Identifier: Apache-2.0
"""Keys of small norm (arXiv 2406.11430): they draw most attention in trained models.

    importance_j = -|k_j|        to 13 bits, about one part in ten thousand

Rotation leaves norms as they are, so keys of one token in the first layer differ by rounding alone, and so do all keys
of a head whose model normalises them. These are ties, and of equal entries the later stays.

Departure: the paper cuts prompts; here it fires during decoding like the rest, and the paper's dense first layers are
not set apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sparse_rl.kernels.keys import key_norms
from sparse_rl.kv.policy import Entries, KeepsNewest

BITS = 13  # of a norm that count


@dataclass(frozen=True, slots=True, kw_only=True)
class Knorm(KeepsNewest):
    """The keys of smallest norm."""

    name: ClassVar[str] = "knorm"

    def importance(self, entries: Entries) -> torch.Tensor:
        return -rounded(key_norms(entries.k_PKSD, entries.pages_BN))


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Positive numbers to the nearest of `BITS` significant bits, in fp32."""
    step = 1 << (24 - BITS)
    return ((x.float().view(torch.int32) + step // 2) & -step).view(torch.float32)
