# SPDX-License-Identifier: Apache-2.0
"""A decode step's time at a context, and a device's reading and computing speed: what the cost model is checked by.

That model is in calibrate/cost.py; whole runs are measured in rollout.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from sparse_rl.bench.meter import Meter, run, synchronize
from sparse_rl.bench.work import BenchConfig, Window, check_positions, make_prompts, steps_to_fill
from sparse_rl.kv import EvictPolicy, KVPolicy
from sparse_rl.model.load import LoadedModel
from sparse_rl.rollout import Engine, EngineConfig, Progress, Sampling

BEFORE, TIMED = 16, 48  # steps without compressions: whatever is compiled or captured comes in the first
SIZES = {"cuda": (1 << 32, 8192), "cpu": (1 << 27, 1024)}  # bytes copied; rows and columns of a product


def time_step(
    loaded: LoadedModel,
    config: BenchConfig,
    policy: KVPolicy,
    engine: EngineConfig,
    context: int,
    *,
    show: Callable[[Progress], None],
) -> tuple[float, float]:
    """Seconds of a decode step with full rows and caches, and the mean context of the steps that were timed."""
    window = Window(start=BEFORE, steps=TIMED)
    if isinstance(policy, EvictPolicy):
        window = Window(start=steps_to_fill(policy, context) + policy.interval, steps=2 * policy.interval)
    last = window.start + window.steps
    work = replace(config, prompt=context, output=2 * last, max_steps=last, n=1, work="standard")
    check_positions(work)
    prompts = make_prompts(work, loaded.vocab_size)[: config.rows]
    device = loaded.shape.device
    meter = Meter(window, config.rows, device, cut=True, exact=True, show=show)
    own = Engine(loaded, policy, replace(engine, rows=config.rows))
    run(own, prompts, Sampling(max_tokens=work.output, stop_ids=(), seed=config.seed), meter)
    own.release()
    return meter.seconds / meter.steps, context + window.start + window.steps / 2


def device_speed(device: torch.device, dtype: torch.dtype) -> tuple[float, float]:
    """Bytes a second that are read and written, and operations a second of a product; the best of a few tries.

    Random numbers: a GPU multiplies ones or zeros at a higher clock than a model's weights.
    """
    size, side = SIZES.get(device.type, SIZES["cpu"])
    data = torch.randn(size // dtype.itemsize, dtype=dtype, device=device)
    a, b = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    copy = torch.empty_like(data)
    moved = _best(lambda: copy.copy_(data), device)
    product = _best(lambda: a @ b, device)
    return 2 * size / moved, 2.0 * side**3 / product


def _best(work: Callable[[], object], device: torch.device) -> float:
    found = []
    for _ in range(5):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        found.append(time.perf_counter() - began)
    return min(found)
