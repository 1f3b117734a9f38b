# SPDX-License-Identifier: Apache-2.0
"""A long training run to plan, devices for it, and the bytes of a plan's line."""

from __future__ import annotations

from sparse_rl.kv import RKV
from sparse_rl.plan import Device, RunSize
from sparse_rl.plan.device import choose_device

BIG = Device(name="big", memory=10**15)
H200 = choose_device("cpu", gpu="h200")


def long_run(**changes) -> RunSize:
    """64 sequences of 16k tokens."""
    settings = {
        "kv": RKV(budget=512, interval=128),
        "rows": 64,
        "requests": 64,
        "prompt": 128,
        "completion": 16384,
        "max_tokens": 8192,
    }
    return RunSize(**(settings | changes))


def held(plan, name):
    return sum(line.bytes for line in plan.lines if line.name == name)
