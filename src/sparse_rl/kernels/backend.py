# SPDX-License-Identifier: Apache-2.0
"""Which of a kernel's two implementations runs."""

from __future__ import annotations

import torch


def use_triton(x: torch.Tensor) -> bool:
    """Triton on a GPU, plain torch elsewhere; in fp64, where it serves as the reference, plain torch everywhere."""
    return x.is_cuda and x.dtype != torch.float64
