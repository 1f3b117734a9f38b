# SPDX-License-Identifier: Apache-2.0
"""The least time a decode step can take on a device.

step = max(b N / BW, 2 N B / F) + B c kv / BW + 4 B V / BW

N parameters of linear layers, the head included, each b bytes; B rows; c cache entries read a row, of kv bytes each in
all layers; V vocabulary, its logits written and read in two bytes; BW memory bandwidth, F operations a second.
Attention's own operations, pointwise work, compressions, landmarks of pages and launches are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparse_rl.calibrate.cost import gpu
from sparse_rl.calibrate.gpus import GPUS, gpu_of

FORMULA = "max(b N / BW, 2 N B / F) + B c kv / BW + 4 B V / BW"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """What a step has to move and to compute, and what the device can."""

    linear: int  # N
    itemsize: int  # b
    rows: int  # B
    entries: float  # c
    entry_bytes: int  # kv
    vocabulary: int  # V
    bandwidth: float  # BW
    flops: float  # F

    @property
    def step_s(self) -> float:
        weights = max(self.itemsize * self.linear / self.bandwidth, 2 * self.linear * self.rows / self.flops)
        cache = self.rows * self.entries * self.entry_bytes / self.bandwidth
        return weights + cache + 4 * self.rows * self.vocabulary / self.bandwidth

    @property
    def tokens_per_s(self) -> float:
        return self.rows / self.step_s

    def __str__(self) -> str:
        return (
            f"b {self.itemsize}, N {self.linear:.4g}, B {self.rows}, c {self.entries:.1f}, kv {self.entry_bytes}, "
            f"V {self.vocabulary}, BW {self.bandwidth:.3g}, F {self.flops:.3g}"
        )


def linear_parameters(model: torch.nn.Module) -> int:
    """Parameters that take part in matrix products; a tied embedding counts once, as the head."""
    return sum(module.weight.numel() for module in model.modules() if isinstance(module, torch.nn.Linear))


def device_limits(name: str, dtype: torch.dtype) -> tuple[float | None, float | None]:
    """Bandwidth and operations a second that a device by its name reaches; None where they are not known."""
    short = gpu_of(name)
    if short is None or GPUS[short].bandwidth is None:
        return None, None
    known = gpu(short)
    return known.bandwidth, known.flops if dtype in (torch.bfloat16, torch.float16) else None
