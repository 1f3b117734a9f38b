# SPDX-License-Identifier: Apache-2.0
"""Which of a kernel's two implementations runs, and how what the host has made reaches the device."""

from __future__ import annotations

import torch


def use_triton(x: torch.Tensor) -> bool:
    """Triton on a GPU, plain torch elsewhere; in fp64, where it serves as the reference, plain torch everywhere."""
    return x.is_cuda and x.dtype != torch.float64


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor of the host's on the device, without waiting for what that is doing."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
