# SPDX-License-Identifier: Apache-2.0
"""Every number a run writes is defined, and the files take a crash, a resumed run and what JSON does not know."""

from __future__ import annotations

import time

import pytest
from small_run import small_trainer
from small_sft import small_sft

from sparse_rl.metrics import METRICS, Timer, definition, read_log
from sparse_rl.objective.loss import LossConfig
from sparse_rl.train import ControlConfig
from sparse_rl.train.distill import DistillConfig


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """metrics.jsonl of a small run with a reference model, a baseline, a sampler's adapter and a budget that moves."""
    folder = tmp_path_factory.mktemp("metrics") / "run"
    control = ControlConfig(auto=True, smallest=8, largest=32, budgets=3, multiple=1, bin=16)
    parts = {"loss": LossConfig(beta=0.1), "distill": DistillConfig(r=2, every=1), "control": control}
    small_trainer(folder, parts=parts, advantage="remax", steps=2).train()
    return read_log(folder / "metrics.jsonl")


def test_every_metric_of_a_run_is_defined_and_every_definition_is_met(lines, tmp_path):
    small_sft(tmp_path / "run", steps=1).train()
    written = {name for line in [*lines, *read_log(tmp_path / "run" / "metrics.jsonl")] for name in line}
    assert [name for name in written if not definition(name)] == []
    for function in ("digits", "declines"):
        assert {f"rewards/{function}/mean", f"rewards/{function}/std"} <= written
    met = {definition(name) for name in written}
    missed = [name for name, text in METRICS.items() if text not in met]
    assert all(name.startswith("memory/") for name in missed), "only a GPU's memory is not measured here"


def test_every_step_has_one_line_and_finite_numbers(lines):
    assert [line["step"] for line in lines] == [0, 1, 2]
    for line in lines:
        unknown = {name for name, value in line.items() if value is None}
        assert unknown <= {"rewards/declines/mean", "rewards/declines/std"}, (
            "it may have declined every completion of a step"
        )
        assert all(type(line[name]) in (int, float) for name in line.keys() - unknown)
    assert "reward" not in lines[0] and "eval/dense/reward" in lines[0] and "eval/sparse/reward" in lines[2]
    assert [line["num_tokens"] for line in lines] == sorted(line["num_tokens"] for line in lines)


def test_a_step_s_parts_take_no_longer_than_the_step(lines):
    for line in lines:
        parts = sum(value for name, value in line.items() if name.startswith("time/") and name != "time/save_s")
        assert 0 < parts <= line["step_time"]


@pytest.mark.parametrize(
    "name",
    [
        "nonsense",
        "rewards/a/b/mean",
        "rewards//mean",
        "eval/full/reward",
        "eval/dense/rewards",
        "Reward",
        "kv/saved_frac ",
    ],
)
def test_names_that_nobody_defined(name):
    assert definition(name) is None


def test_reward_functions_of_any_name_are_defined():
    assert definition("rewards/<lambda>/mean") and definition("rewards/my.judge (v2)/std")


def test_a_half_written_last_line_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    for content, expected in (
        (b"", []),
        (b'{"step": 1}\n', [1]),
        (b'{"step": 1}\n{"step": 2', [1]),
        (b'{"step": 1}\n{"step": 2}', [1]),  # it may go on
        (b'{"st', []),
    ):
        path.write_bytes(content)
        assert [line["step"] for line in read_log(path)] == expected


def test_the_timer_adds_up_by_stage_even_where_a_stage_fails():
    timer = Timer()
    for _ in range(2):
        with timer("rollout"):
            time.sleep(0.01)
    with pytest.raises(ZeroDivisionError), timer("reward"):
        1 / 0  # noqa: B018
    assert list(timer.seconds) == ["time/rollout_s", "time/reward_s"]
    assert timer.seconds["time/rollout_s"] >= 0.02 > timer.seconds["time/reward_s"]
