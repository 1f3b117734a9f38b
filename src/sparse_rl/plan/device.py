# SPDX-License-Identifier: Apache-2.0
"""How much memory there is: on the device at hand, on a GPU by name, or as given.

All of it, whoever holds some already; memory of GPUs by name is in calibrate/gpus.py.
"""

from __future__ import annotations

import os
import re

import torch

from sparse_rl.calibrate.gpus import find_gpu
from sparse_rl.model.load import check_device
from sparse_rl.plan.records import Device

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
LEAST = 10**6  # bytes: below it somebody forgot the unit


def choose_device(device: str, *, gpu: str | None = None, memory: str | None = None) -> Device:
    """The named GPU, one of this much memory, or else the run's own device."""
    if gpu is not None and memory is not None:
        raise ValueError("--gpu and --memory both say how much memory there is; leave one out.")
    if gpu is not None:
        return Device(name=gpu.upper(), memory=int(find_gpu(gpu, "--memory").memory * 2**30))
    if memory is not None:
        count = parse_bytes(memory)
        return Device(name=f"a GPU of {count / 1e9:.1f} GB", memory=count)
    if device.startswith("cuda"):
        try:
            properties = torch.cuda.get_device_properties(torch.device(device))
        except (RuntimeError, AssertionError) as error:  # no driver, or no such device
            raise ValueError(
                f"device {device!r} is not on this machine; `sparse-rl plan` takes --gpu NAME or --memory BYTES."
            ) from error
        return Device(name=properties.name, memory=properties.total_memory)
    check_device(device)
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Device(name="this machine's CPU", memory=host, cuda=False)


def parse_bytes(text: str) -> int:
    """80GB, 80 GB, 74.5GiB or a plain number of bytes."""
    match = re.fullmatch(r"\s*([\d.]+(?:e\d+)?)\s*([a-z]*)\s*", text, flags=re.IGNORECASE)
    try:
        count = int(float(match[1]) * UNITS[match[2].upper()]) if match else 0
    except (ValueError, KeyError, OverflowError):
        count = 0
    if count < 1:
        raise ValueError(f"--memory is {text!r}; write bytes, or a number with GB or GiB, as in 80GB.")
    if count < LEAST:
        raise ValueError(f"--memory is {text!r}, {count:,} bytes, which no GPU has; write a unit, as in 80GB.")
    return count
