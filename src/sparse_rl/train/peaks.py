# SPDX-License-Identifier: Apache-2.0
"""How much of the GPU a stage took, to be held against the plan. Never the host's memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class MemoryPeaks:
    """Most bytes allocated by stage: `with peaks("rollout"): ...` gives memory/rollout_peak_bytes; on a CPU nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        if self.device.type != "cuda":
            yield
            return
        torch.cuda.reset_peak_memory_stats(self.device)
        try:
            yield
        finally:
            self.bytes[f"memory/{stage}_peak_bytes"] = float(torch.cuda.max_memory_allocated(self.device))
