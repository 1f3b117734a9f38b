# SPDX-License-Identifier: Apache-2.0
"""The most memory a stage of a step took."""

from __future__ import annotations

import torch

from sparse_rl.train.peaks import MemoryPeaks


def test_a_run_s_peaks_are_a_stage_s(monkeypatch):
    readings = iter([7, 5])
    resets = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(readings))
    peaks = MemoryPeaks(torch.device("cuda"))
    for stage in ("rollout", "update"):
        with peaks(stage):
            assert len(resets) == len(peaks.bytes) + 1, "counted from the stage's start"
    assert peaks.bytes == {"memory/rollout_peak_bytes": 7.0, "memory/update_peak_bytes": 5.0}
    on_cpu = MemoryPeaks(torch.device("cpu"))
    with on_cpu("rollout"):
        pass
    assert on_cpu.bytes == {}
