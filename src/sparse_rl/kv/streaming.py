# SPDX-License-Identifier: Apache-2.0
"""StreamingLLM (arXiv 2309.17453): the first tokens and the most recent ones.

Departure: keys keep the rotation of their true position; the paper re-numbers positions inside the cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sparse_rl.kv.policy import Entries, EvictPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Streaming(EvictPolicy):
    """First `sinks` positions and the most recent entries; sinks 0 is a plain recent window."""

    name: ClassVar[str] = "streaming"

    sinks: int = 4

    def importance(self, entries: Entries) -> torch.Tensor:
        return entries.positions_BKS.float()
