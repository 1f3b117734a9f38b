# SPDX-License-Identifier: Apache-2.0
"""SnapKV (arXiv 2404.14469) for decoding: what the last queries attend to.

Departures from the paper, as R-KV and Sparse-RL use it: fired during decoding, one set per KV head (the maximum over
its query heads, on logits), window keys left out of the softmax, max-pooling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sparse_rl.kernels.importance import attention_importance
from sparse_rl.kv.policy import Entries, EvictPolicy, at_least


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapKV(EvictPolicy):
    """Pooled attention of the last `window` queries.

    window: last queries whose attention counts; their own entries are never dropped
    kernel: width of the max-pooling over neighbouring entries, odd
    """

    name: ClassVar[str] = "snapkv"

    window: int = 8
    kernel: int = 7

    def __post_init__(self) -> None:
        at_least(self, "window", 1)
        at_least(self, "kernel", 1)
        if self.kernel % 2 == 0:
            raise ValueError(f"kv.kernel is {self.kernel}; the pooling width must be odd and positive.")
        EvictPolicy.__post_init__(self)

    @property
    def num_queries(self) -> int:
        return self.window

    def importance(self, entries: Entries) -> torch.Tensor:
        return attention_importance(
            entries.k_PKSD,
            entries.pages_BN,
            entries.queries_BHWD,
            entries.live_BKS & ~entries.recent_BS[:, None],
            scale_B=entries.scale_B,
            kernel=self.kernel,
        )
