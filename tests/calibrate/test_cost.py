# SPDX-License-Identifier: Apache-2.0
"""The cost model: the published check, a step by hand, and what must hold of any prediction."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from commands import assert_one_sentence, run

from sparse_rl.bench.roofline import device_limits
from sparse_rl.calibrate.cost import (
    Machine,
    Model,
    Reading,
    by_page,
    dense_eflops,
    gpu,
    sparse_eflops,
    speed_up,
    step_s,
)
from sparse_rl.calibrate.gpus import GPUS, find_gpu, gpu_of
from sparse_rl.cli.calibrate_cost import shape_model
from sparse_rl.kv import RKV, Full
from sparse_rl.kv.schedule import Schedule, constant, load
from sparse_rl.plan.device import choose_device

WORK = {"n": 8, "prompt": 200, "output": 37_000}
SMALL = Model(name="x", parameters=60, weights=50, layers=4, heads=4, kv_heads=2, head_dim=3, vocabulary=7)


@pytest.mark.parametrize(
    ("size", "printed", "with_dense"), [("1.7b", 4.8, 3.7), ("4b", 4.0, 3.4), ("8b", 3.9, 3.4), ("14b", 2.7, 2.5)]
)
def test_published_check(size, printed, with_dense):
    model, schedule = shape_model(f"qwen3-{size}", 2), load(f"sparrow/qwen3-{size}-0.86")
    dense = dense_eflops(model, **WORK)
    alone, both = Reading(schedule=schedule, dense_layers=0), Reading(schedule=schedule)
    assert dense / sparse_eflops(model, alone, **WORK, printed=True) == pytest.approx(printed, rel=0.02)
    assert dense / sparse_eflops(model, alone, **WORK) == pytest.approx(printed, rel=0.02)
    assert dense / sparse_eflops(model, both, **WORK) == pytest.approx(with_dense, rel=0.02)


def test_eflops_by_hand(monkeypatch):
    monkeypatch.setattr("sparse_rl.calibrate.cost.INTENSITY", 10.0)
    # D = 4 x 2 x 3 = 24, r = 2, I = 10, 2 samples of 3 + 4 tokens: contexts 3, 4, 5, 6.
    dense = 2 * 60 * 2 * 4 + 2 * (6 + 4) * 4 * 2 * 24 + 10 * (2 * 3 * 4 * 24 + 2 * 16 * 24)
    assert dense_eflops(SMALL, n=2, prompt=3, output=4) == dense
    # A budget of 4 reads 3, 4, 4, 4; pages of 2.
    reading = Reading(schedule=constant(4), page=2, dense_layers=0)
    choosing = 2 * 2 * 3 * 24 * 4 / 2 + 2 * 2 * 24 * 16 / 4 + 10 * (2 * 3 * 24 * 4 / 2 + 2 * 24 * 16 / 4)
    sparse = 2 * 2 * 60 * 4 + 2 * 2 * 2 * 24 * 15 + 2 * 10 * 2 * 24 * 15 + choosing
    assert sparse_eflops(SMALL, reading, n=2, prompt=3, output=4) == pytest.approx(sparse)
    # One of four layers dense: it reads all 18 and chooses nothing. An evicting policy chooses nothing at all.
    reads = 0.25 * 18 + 0.75 * 15
    mixed = 2 * 2 * 60 * 4 + 2 * (2 + 10) * 2 * 24 * reads
    one, none = replace(reading, dense_layers=1), replace(reading, dense_layers=1, landmarks=0)
    assert sparse_eflops(SMALL, one, n=2, prompt=3, output=4) == pytest.approx(mixed + 0.75 * choosing)
    assert sparse_eflops(SMALL, none, n=2, prompt=3, output=4) == pytest.approx(mixed)


def test_a_step_by_hand():
    machine = Machine(name="m", bandwidth=100.0, flops=50.0, fixed_s=0.5)
    # Weights: max(2 x 50 / 100, 2 x 50 x 3 / 50) = 6. An entry has 2 x 24 x 2 = 96 bytes, logits 4 x 7 a row.
    (dense,) = step_s(SMALL, machine, np.array([20]), rows=3)
    assert dense == pytest.approx(6 + 3 * (20 * 96 + 28) / 100 + 0.5)
    # One of four layers is dense; the others read 8 of 20 and 20 / 2 landmarks of 24 x 2 bytes.
    reading = Reading(schedule=Schedule((0, 10), (4, 8)), page=2, dense_layers=1)
    (sparse,) = step_s(SMALL, machine, np.array([20]), rows=3, reading=reading)
    moved = 0.25 * 20 * 96 + 0.75 * (8 * 96 + 10 * 48)
    assert sparse == pytest.approx(6 + 3 * (moved + 28) / 100 + 0.5)
    # Where all is read, nothing is chosen: as dense.
    (short,) = step_s(SMALL, machine, np.array([4]), rows=3, reading=reading)
    assert short == step_s(SMALL, machine, np.array([4]), rows=3)[0]


def test_predictions_move_the_right_way():
    model, machine = shape_model("qwen3-1.7b", 2), gpu("h200")
    reading = Reading(schedule=load("sparrow/qwen3-1.7b-0.86"))
    work = {"rows": 16, "prompt": 200, "output": 20_000}
    base = speed_up(model, machine, reading, **work)
    assert base > 1.5
    assert speed_up(model, machine, reading, **{**work, "output": 37_000}) > base
    assert speed_up(model, machine, reading, **{**work, "rows": 64}) > base
    assert speed_up(model, replace(machine, fixed_s=0.01), reading, **work) < base
    assert speed_up(model, machine, replace(reading, dense_layers=0), **work) > base
    assert speed_up(model, machine, replace(reading, schedule=constant(40_000)), **work) == pytest.approx(1.0)
    pages = by_page(model, machine, reading, [16, 32, 64, 128], **work)
    assert list(pages.values()) == sorted(pages.values()) and pages[16] == base


def test_how_policies_read():
    reading = Reading.of(RKV(budget=64, interval=16), 64)
    assert (reading.landmarks, reading.dense_layers) == (0, 0)
    assert reading.entries(np.array([10, 70, 200])).tolist() == [10, 70, 72]
    both = Reading.of(RKV(budget=1024, interval=128, select="pages_mean", select_budget=256), 16)
    at = np.array([100, 1000, 32768])
    assert both.held(at).tolist() == [100, 1000, 1088] and both.entries(at).tolist() == [100, 256, 256]
    model, machine = shape_model("qwen3-1.7b", 2), gpu("h200")
    times = [
        step_s(model, machine, at[-1:], rows=16, reading=Reading.of(policy, 16))[0]
        for policy in (RKV(budget=1024, interval=128, select="pages_mean", select_budget=256), RKV(budget=1024))
    ]
    # 26 of 28 layers read 256 entries and 1088 / 16 landmarks instead of reading 1088 entries
    width = 28 * 8 * 128 * 2
    saved = 16 * 26 / 28 * (2 * width * (1088 - 256) - width * 1088 / 16) / machine.bandwidth
    assert times[1] - times[0] == pytest.approx(saved)
    # A budget of 4 within 5 that are left of contexts 3, 4, 5, 6: it reads 3, 4, 4, 4 and weighs 17 of 18.
    alone = Reading(schedule=constant(4), page=2, dense_layers=0)
    counted = {"n": 2, "prompt": 3, "output": 4}
    few, all_of_it = (sparse_eflops(SMALL, each, **counted) for each in (replace(alone, left=constant(5)), alone))
    choosing = all_of_it - sparse_eflops(SMALL, replace(alone, landmarks=0), **counted)
    assert all_of_it - few == pytest.approx(choosing / 18)
    with pytest.raises(ValueError, match="'full' reads everything"):
        Reading.of(Full(), 64)


@pytest.mark.parametrize("command", [["plan"], ["calibrate", "cost"]])
def test_a_gpu_that_is_not_known_gets_the_nearest_name(command):
    assert_one_sentence(run(*command, "--gpu", "h20"), "--gpu 'h20' is unknown (did you mean 'h200'?); choose one of")
    assert_one_sentence(run(*command, "--gpu", "A100"), "(did you mean a100-80 or a100-40?)")


def test_one_table_has_the_gpus_of_every_command():
    code, out, _ = run("plan", "--model", "tiny", "--gpu", "rtx-pro-6000")
    assert code == 0 and "RTX-PRO-6000 (101.9 GB)" in out
    unknown = ["calibrate", "cost", "--gpu", "rtx-pro-6000"]
    assert_one_sentence(run(*unknown, "--flops", "1e14"), "is not known here; give --bandwidth and --flops")
    assert run(*unknown, "--flops", "1e14", "--bandwidth", "1e12")[0] == 0
    for name, known in GPUS.items():
        assert choose_device("cpu", gpu=name.upper()).memory == int(known.memory * 2**30) > 10**10
        assert known.bandwidth is None or gpu(name).bandwidth == pytest.approx(4.19 / 4.8 * known.bandwidth)


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", None),  # which is slower
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100-PCIE-40GB", "a100-40"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10G", None),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000"),
    ],
)
def test_a_gpu_at_hand_is_known_by_the_name_that_torch_has(device, name):
    assert gpu_of(device) == name
    assert name is None or find_gpu(device, "") is GPUS[name]
    known = name not in (None, "rtx-pro-6000")
    limits = (gpu(name).bandwidth, gpu(name).flops) if known else (None, None)
    assert device_limits(device, torch.bfloat16) == limits
