# SPDX-License-Identifier: Apache-2.0
"""Where a step's GPU time goes: kernel durations summed by what the kernels' names say.

What runs under `torch.profiler.record_function("compaction")` is compaction whatever its name.

The host's time and the gaps between kernels are in none of them: rollout.py takes them as what is left of a step.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch._C._autograd import DeviceType

# Tried in this order: flash kernels name CUTLASS too. What starts with an underscore is ours.
KERNELS: dict[str, str] = {
    r"^_(page_importance|top_pages|write_landmarks)": "selection",
    r"^_(attention_importance|sum_cosines|spare_duplicates|softmax_totals|select|key_)": "compaction",
    r"^_(decode|write|packed_attention)|flash|fmha": "attention",
    r"^_sample": "sampling",
    r"nvjet|gemm|gemv|cutlass|xmma|cublas|splitK|^triton_(tem|mm)": "linear",
}
OTHER = "pointwise"
CATEGORIES = (*dict.fromkeys(("attention", "linear", "sampling", "selection", *KERNELS.values())), OTHER)
COMPACTION = "compaction"  # the annotation


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    start_ns: int
    duration_ns: int


def category(name: str) -> str:
    return next((kind for pattern, kind in KERNELS.items() if re.search(pattern, name)), OTHER)


def split(kernels: Iterable[Kernel], spans: Iterable[tuple[int, int]] = ()) -> dict[str, float]:
    """Seconds by category; kernels that begin inside one of the spans (start, end) are compaction."""
    ordered = sorted(spans)
    starts = [start for start, _ in ordered]
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    for kernel in kernels:
        before = bisect_right(starts, kernel.start_ns) - 1
        inside = before >= 0 and kernel.start_ns < ordered[before][1]
        seconds[COMPACTION if inside else category(kernel.name)] += kernel.duration_ns / 1e9
    return seconds


class Profiler:
    """Kernels between `start` and `stop`, read from the raw trace: the event tree takes minutes for long ones."""

    def __init__(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        self.profile = torch.profiler.profile(activities=activities)

    def start(self) -> None:
        self.profile.start()

    def stop(self) -> None:
        self.profile.stop()

    def seconds(self) -> dict[str, float]:
        """GPU time by category."""
        inner: Any = self.profile.profiler
        on_gpu = [event for event in inner.kineto_results.events() if event.device_type() == DeviceType.CUDA]
        spans = [(e.start_ns(), e.end_ns()) for e in on_gpu if e.is_user_annotation() and e.name() == COMPACTION]
        kernels = (Kernel(e.name(), e.start_ns(), e.duration_ns()) for e in on_gpu if not e.is_user_annotation())
        return split(kernels, spans)
