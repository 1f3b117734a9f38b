# SPDX-License-Identifier: Apache-2.0
"""A run in the terminal: its first line for every kind of budget, its steps and evaluations."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from small_run import small_trainer

from sparse_rl.kv import RKV, Full, PagesMean
from sparse_rl.report.live import Live, _cell
from sparse_rl.train import ControlConfig


@pytest.mark.parametrize(
    ("kv", "auto", "said"),
    [
        (Full(), False, "KV full, correction"),
        (RKV(budget=12, interval=4, window=4), False, "KV rkv budget 12 + 4, correction"),
        (PagesMean(budget=64), False, "KV pages_mean budget 64, correction"),
        (RKV(budget=9, interval=4, window=4), True, "KV rkv budget auto (at first 9, 4 to "),
    ],
    ids=["full", "evict", "select", "auto"],
)
def test_a_run_says_its_budget(kv, auto, said, tmp_path, capsys):
    control = ControlConfig(auto=auto, smallest=4 if auto else None)
    trainer = small_trainer(tmp_path, parts={"kv": kv, "control": control})
    live = Live()
    live.on_begin(trainer)
    live.on_end()
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("value", "form", "shown"),
    [(-4e-5, "{:.4f}", "0.0000"), (-6e-5, "{:.4f}", "-0.0001"), (-0.0, "{:.1%}", "0.0%"), (-10.0, "{:.0f}", "-10")],
)
def test_what_is_shown_as_zero_has_no_sign(value, form, shown):
    assert _cell(value, form) == shown


def test_a_step_and_its_evaluation_are_a_line_each_under_the_headings(capsys):
    step = {"step": 7, "reward": 0.5, "correction/rejection_rate": 0.25, "rollout_corr/kl": 0.0125, "step_time": 3.0}
    step |= {"kv/saved_frac": 0.55, "completions/mean_length": 179, "grad_norm": 0.032, "rollout/tokens_per_s": 7737}
    evaluated = {"eval/dense/reward": 0.838, "eval/dense/reward_se": 0.016}
    Live().on_log({"step": 0} | evaluated)
    Live().on_log(step | evaluated)
    before, row, after = capsys.readouterr().err.splitlines()
    assert before == "     0 held out: dense cache 0.838 ± 0.016" and after == before.replace("0 held", "7 held")
    assert row.split() == ["7", "0.500", "25.0%", "0.0125", "55%", "179", "0.032", "7,737", "3.0"]


@pytest.mark.parametrize("pending", [None, {"reward": 0.5}], ids=["whole", "not evaluated"])
def test_a_run_that_has_ended_says_what_is_left(pending, tmp_path, capsys):
    trainer = small_trainer(tmp_path, steps=2)
    trainer.run.step, trainer.run.pending = 2, pending
    live = Live()
    live.on_begin(trainer)
    live.on_end()
    assert ("nothing is left to do" in capsys.readouterr().err) == (pending is None)


def test_a_stage_that_begins_is_shown_at_once():
    """Though the rollouts have just moved the line: grading may hang."""
    live, shown = Live(), []
    live.line.status = SimpleNamespace(update=lambda text: shown.append(str(text)))
    live.on_stage("grading")
    live.on_stage("learning")
    assert shown == ["grading", "learning"]


def test_a_run_that_never_began_can_end():
    Live().on_end()  # another observer may have raised before its turn came
