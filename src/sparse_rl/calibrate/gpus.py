# SPDX-License-Identifier: Apache-2.0
"""GPUs by name: how much memory each has, how fast it is read, how fast it computes.

These are published figures; the share of them that is reached is in `cost.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sparse_rl.specs import suggestion


@dataclass(frozen=True, slots=True, kw_only=True)
class GPU:
    """Speeds are as published, None where they are not known here."""

    torch: str  # what torch calls it, as a pattern
    memory: float  # GiB that torch reports, about; the device at hand is asked
    bandwidth: float | None = None  # bytes a second
    flops: float | None = None  # dense operations a second in 16 bits


GPUS: dict[str, GPU] = {
    "b200": GPU(torch="NVIDIA B200", memory=178.3, bandwidth=8.0e12, flops=2250e12),
    "h200": GPU(torch="NVIDIA H200", memory=139.8, bandwidth=4.8e12, flops=989e12),
    "h100": GPU(torch="NVIDIA H100.*HBM3", memory=79.1, bandwidth=3.35e12, flops=989e12),
    "a100-80": GPU(torch="NVIDIA A100-SXM4-80GB", memory=79.2, bandwidth=2.04e12, flops=312e12),
    "a100-40": GPU(torch="NVIDIA A100-(SXM4|PCIE)-40GB", memory=39.4, bandwidth=1.555e12, flops=312e12),
    "rtx-pro-6000": GPU(torch="NVIDIA RTX PRO 6000.*", memory=94.9),
    "l40s": GPU(torch="NVIDIA L40S", memory=44.4, bandwidth=0.864e12, flops=362e12),
    "a6000": GPU(torch="NVIDIA RTX A6000", memory=47.4, bandwidth=0.768e12, flops=155e12),
    "l4": GPU(torch="NVIDIA L4", memory=22.0, bandwidth=0.3e12, flops=121e12),
    "a10": GPU(torch="NVIDIA A10", memory=22.0, bandwidth=0.6e12, flops=125e12),
    "5090": GPU(torch="NVIDIA GeForce RTX 5090", memory=31.3, bandwidth=1.79e12, flops=210e12),
    "4090": GPU(torch="NVIDIA GeForce RTX 4090", memory=23.5, bandwidth=1.008e12, flops=165e12),
    "3090": GPU(torch="NVIDIA GeForce RTX 3090", memory=23.6, bandwidth=0.936e12, flops=71e12),
    "t4": GPU(torch="(NVIDIA|Tesla) T4", memory=14.6, bandwidth=0.32e12, flops=65e12),
}


def find_gpu(name: str, instead: str) -> GPU:
    """The GPU that --gpu names, as here or as torch does; `instead` are the flags that do without a name."""
    name = gpu_of(name) or name
    if name.lower() not in GPUS:
        kinds = [known for known in GPUS if known.startswith(f"{name.lower()}-")]
        hint = f" (did you mean {' or '.join(kinds)}?)" if kinds else suggestion(name.lower(), GPUS)
        raise ValueError(f"--gpu {name!r} is unknown{hint}; choose one of {', '.join(GPUS)}, or give {instead}.")
    return GPUS[name.lower()]


def gpu_of(device: str) -> str | None:
    """Its name here, from the one that torch has; None if it is not known."""
    return next((name for name, gpu in GPUS.items() if re.fullmatch(gpu.torch, device)), None)
