# SPDX-License-Identifier: Apache-2.0
"""What kernels share: which of the two implementations runs, how finely it sums, how the host's numbers reach it.

How the work is cut into blocks is each kernel's own.
"""

from __future__ import annotations

import torch


def use_triton(x: torch.Tensor) -> bool:
    """Triton on a GPU, plain torch elsewhere; in fp64, where it serves as the reference, plain torch everywhere."""
    return x.is_cuda and x.dtype != torch.float64


def upcast(x: torch.Tensor) -> torch.Tensor:
    """At least fp32: what is summed, and so that numbers do not tie by rounding."""
    return x if x.dtype == torch.float64 else x.float()


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host's on the device, without waiting for what that is doing."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
