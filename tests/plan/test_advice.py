# SPDX-License-Identifier: Apache-2.0
"""What fits: the pool, the rows, and advice that makes a run fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from long_run import BIG, H200, held, long_run

from sparse_rl.kv import RKV, Full, Quest, SnapKV
from sparse_rl.model.shapes import shape_config
from sparse_rl.plan import Device, as_json, lines, make_plan, model_size, remedies, rows_that_fit, summary, together
from sparse_rl.plan.memory import largest


def test_a_dense_pool_takes_what_is_left_and_says_how_many_rows_that_is(qwen):
    plan = make_plan(qwen, long_run(kv=Full(), activations="recompute", moments="fp32"), H200)
    a_row = -(-(128 + 16384 - 1) // 64) * 64 * qwen.attention.entry_bytes
    assert plan.pages_wanted * plan.page_bytes == 65 * a_row
    resident = 14 * qwen.parameters + held(plan, "rows") + 600_000_000
    free = H200.memory - resident - int(0.1 * H200.memory)
    assert plan.pages == free // plan.page_bytes
    assert not plan.rollout_fits and plan.rows_in_flight == free // a_row - 1
    text = summary(plan)
    assert text.startswith("does not fit: ") and f"needs {65 * a_row / 1e9:.1f} GB" in text
    assert f"{plan.rows_in_flight} rows in flight" in text and "beside weights, masters and optimizer moments" in text


@pytest.mark.parametrize("policy", [Full(), RKV()], ids=lambda policy: policy.name)
@pytest.mark.parametrize("memory", [40e9, 150e9])
@pytest.mark.some(2)
def test_rows_that_fit_is_the_most(policy, memory):
    size = model_size(shape_config("qwen2.5-1.5b"), "small", torch.bfloat16)
    device, run = Device(name="some", memory=int(memory)), long_run()
    rows = rows_that_fit(size, run, device, policy)

    def fits(count):
        return make_plan(size, replace(run, kv=policy, rows=count, requests=count), device).rollout_fits

    assert rows > 0 and fits(rows) and not fits(rows + 1)


def test_rows_are_shown_of_the_runs_own_policy_and_of_one_that_evicts(qwen):
    """A policy that selects holds everything, and has no more rows than the dense cache."""
    for kv, names in (
        (Full(), ["dense", "rkv 512+128"]),
        (SnapKV(budget=64), ["dense", "snapkv 64+128"]),
        (Quest(budget=256), ["dense", "quest 256", "rkv 512+128"]),
    ):
        plan = make_plan(qwen, long_run(kv=kv), H200)
        (line,) = [line for line in lines(plan) if line.startswith("rows in flight that fit: ")]
        shown = [part.split(" ", 1) for part in line.partition(": ")[2].split(", ")]
        assert [name for _, name in shown] == names
        if len(shown) == 3:
            assert int(shown[1][0]) <= int(shown[0][0]) < int(shown[2][0])


def test_sparse_rows_are_many_times_the_dense_ones(qwen):
    run = long_run(moments="8bit")
    assert rows_that_fit(qwen, run, H200, RKV()) > 15 * rows_that_fit(qwen, run, H200, Full())


def test_a_pool_of_a_given_size_is_taken_as_it_is(qwen):
    plan = make_plan(qwen, long_run(kv=Full(), pool_pages=1000, activations="recompute", moments="8bit"), H200)
    assert plan.pages == 1000 and plan.fits and plan.rows_in_flight == 1000 // plan.pages_a_row
    least = make_plan(qwen, long_run(kv=Full(), pool_pages=plan.pages_a_row - 1, activations="recompute"), BIG)
    assert not least.fits, "not one sequence has room"


def test_fp32_adam_on_7b_does_not_fit_one_h200_and_a_saver_does(qwen):
    plan = make_plan(qwen, long_run(activations="recompute"), H200)
    assert plan.rollout_fits and not plan.learning_fits
    assert plan.held(plan.learning) > 18 * qwen.parameters  # 137 GB before activations
    chosen = together(plan)
    assert chosen and chosen[-1].plan.fits
    for saver in ({"moments": "8bit"}, {"on_host": True}):
        assert make_plan(qwen, long_run(activations="recompute", **saver), H200).fits


def test_each_remedy_brings_it_down_and_together_they_suffice(qwen):
    generator = torch.Generator().manual_seed(5)
    for _ in range(30):
        draw = torch.rand(5, generator=generator).tolist()
        run = long_run(
            kv=Full() if draw[0] < 0.5 else RKV(),
            rows=int(8 + 300 * draw[1]),
            max_tokens=int(4096 + 60000 * draw[2]),
            activations=["keep", "recompute"][draw[3] < 0.5],
        )
        plan = make_plan(qwen, run, Device(name="some", memory=int(40e9 + 160e9 * draw[4])))
        if plan.fits:
            continue
        for remedy in remedies(plan):
            after = remedy.plan
            down = after.held(after.learning) < plan.held(plan.learning) or after.wanted < plan.wanted
            assert down or after.rows_in_flight > plan.rows_in_flight, remedy.setting
        chosen = together(plan)
        if chosen:
            assert chosen[-1].plan.fits
            settings = [remedy.setting for remedy in chosen]
            assert len({setting.split()[0] for setting in settings}) == len(settings), "no setting twice"


def test_advice_does_not_name_what_is_not_needed(qwen):
    chosen = [remedy.setting for remedy in together(make_plan(qwen, long_run(), H200))]
    assert chosen == ["update.activations offload"], "the KV pool is given back, which is just enough"
    dense = make_plan(qwen, long_run(kv=Full(), moments="8bit", rows=96, requests=96, activations="recompute"), H200)
    settings = [remedy.setting for remedy in remedies(dense)]
    assert any(setting.startswith("kv.policy rkv") for setting in settings)
    assert [remedy.setting.split()[0] for remedy in together(dense)] == ["engine.rows"]


def test_a_pool_that_was_given_stays_as_it_is_until_it_is_left_out(qwen):
    """One that is too large for the device is not made smaller by a sparse policy."""
    run = long_run(kv=Full(), pool_pages=40_000, activations="recompute", moments="8bit")
    plan = make_plan(qwen, run, H200)
    assert not plan.rollout_fits and plan.pool_fits
    found = {remedy.setting: remedy.plan for remedy in remedies(plan)}
    assert all(after.run.pool_pages == 40_000 for setting, after in found.items() if "pool" not in setting)
    (left_out,) = [after.run for setting, after in found.items() if "pool" in setting]
    assert left_out == replace(run, pool_pages=None)
    assert together(plan)[0].setting == "engine.pool_pages null --engine.pool_bytes null"


def test_a_budget_is_not_halved_below_what_it_protects(qwen):
    run = long_run(kv=SnapKV(budget=300, window=200), rows=2000, requests=2000, activations="recompute")
    plan = make_plan(qwen, run, H200)
    assert not plan.rollout_fits
    assert not [remedy.setting for remedy in remedies(plan) if remedy.setting.startswith("kv.budget")]


def test_on_a_cpu_what_is_held_adds_up_to_the_peak(qwen):
    """There the host's memory is the device's."""
    cpu = Device(name="a CPU", memory=10**13, cuda=False)
    numbers = as_json(make_plan(qwen, long_run(distill=qwen.adapters(8), activations="recompute"), cpu))
    assert all(sum(phase["holds"].values()) == phase["peak_bytes"] for phase in numbers["phases"].values())
    assert numbers["host"] == {} and "positions kept" in numbers["phases"]["rollout"]["holds"]


def test_largest():
    for most, limit in ((0, 5), (1, 0), (1000, 137), (10, 10), (10, 99)):
        assert largest(lambda n, limit=limit: n <= limit, most) == min(most, limit)


def test_compression_counts_no_more_than_a_sequence_has(qwen):
    """A budget that nobody reaches is never cut."""
    held = [make_plan(qwen, long_run(kv=RKV(budget=budget)), H200).holds("rollout") for budget in (20_000, 10_000_000)]
    few, many = ([line.bytes for line in lines if line.name == "compression"] for lines in held)
    assert few == many and len(few) == 1
