# SPDX-License-Identifier: Apache-2.0
"""A decode step's time at a context, and a device's reading and computing speed: what the cost model is checked by."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from sparse_rl.bench.meter import synchronize
from sparse_rl.bench.rollout import measure
from sparse_rl.bench.work import BenchConfig, steps_to_fill
from sparse_rl.kv import KVPolicy
from sparse_rl.rollout import EngineConfig, Progress

LEAST_STEPS = 64
SIZES = {"cuda": (1 << 30, 8192), "cpu": (1 << 27, 1024)}  # bytes read; rows and columns of a product


def time_step(
    config: BenchConfig,
    policy: KVPolicy,
    engine: EngineConfig,
    dtype: torch.dtype,
    context: int,
    *,
    say: Callable[[str], None],
    show: Callable[[Progress], None],
) -> tuple[float, float]:
    """Seconds of a decode step with full rows, and the mean context of the steps that were timed."""
    steps = steps_to_fill(policy, context)
    last = max(LEAST_STEPS, steps + 2 * int(getattr(policy, "interval", 0)))
    work = replace(
        config, prompt=context, output=2 * last, max_steps=last, n=1, work="standard", profile=False, against=""
    )
    results = measure(work, policy, engine, dtype, say=say, show=show)
    window = results["window"]
    return results["step_ms"] / 1e3, context + window["first_step"] + window["steps"] / 2


def device_speed(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes a second that are read, and operations a second of a product; the best of a few tries."""
    size, side = SIZES.get(device.type, SIZES["cpu"])
    data = torch.ones(size // dtype.itemsize, dtype=dtype, device=device)
    a, b = (torch.ones(side, side, dtype=dtype, device=device) for _ in range(2))
    read = _best(lambda: data.max(), device)
    product = _best(lambda: a @ b, device)
    return size / read, 2.0 * side**3 / product


def _best(work: Callable[[], object], device: torch.device) -> float:
    found = []
    for _ in range(5):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        found.append(time.perf_counter() - began)
    return min(found)
