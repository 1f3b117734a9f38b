# SPDX-License-Identifier: Apache-2.0
"""The least time a decode step can take on a device.

step = max(b N / BW, 2 N B / F) + B c kv / BW + 4 B V / BW

N parameters of linear layers, the head included, each b bytes; B rows; c cache entries read a row, of kv bytes each in
all layers; V vocabulary, its logits written and read in two bytes; BW memory bandwidth, F operations a second.
Attention's own operations, pointwise work, compressions, landmarks of pages and launches are not in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sparse_rl.calibrate.cost import Machine, Model, gpu, step_s
from sparse_rl.calibrate.gpus import GPUS, gpu_of

FORMULA = "max(b N / BW, 2 N B / F) + B c kv / BW + 4 B V / BW"


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """What a step has to move and to compute, and what the device can."""

    model: Model  # N, b, kv and V
    machine: Machine  # BW and F
    rows: int  # B
    entries: float  # c

    @property
    def step_s(self) -> float:
        return float(step_s(self.model, self.machine, np.array([self.entries]), rows=self.rows)[0])

    @property
    def tokens_per_s(self) -> float:
        return self.rows / self.step_s

    def __str__(self) -> str:
        model, machine = self.model, self.machine
        return (
            f"b {model.itemsize}, N {model.weights:.4g}, B {self.rows}, c {self.entries:.1f}, kv {model.kv_bytes}, "
            f"V {model.vocabulary}, BW {machine.bandwidth:.3g}, F {machine.flops:.3g}"
        )


def device_limits(name: str, dtype: torch.dtype) -> tuple[float | None, float | None]:
    """Bandwidth and operations a second that a device by its name reaches; None where they are not known."""
    short = gpu_of(name)
    if short is None or GPUS[short].bandwidth is None:
        return None, None
    known = gpu(short)
    return known.bandwidth, known.flops if dtype in (torch.bfloat16, torch.float16) else None
