# SPDX-License-Identifier: Apache-2.0
"""The first line of a run in the terminal, for every kind of budget."""

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
        (RKV(budget=9, interval=4, window=4), True, "KV rkv budget auto from 9@0, 4 to "),
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


def test_a_stage_that_begins_is_shown_at_once():
    """Though the rollouts have just moved the line: grading may hang."""
    live, shown = Live(), []
    live.line.status = SimpleNamespace(update=lambda text: shown.append(str(text)))
    live.on_stage("grading")
    live.on_stage("learning")
    assert shown == ["grading", "learning"]


def test_a_run_that_never_began_can_end():
    Live().on_end()  # another observer may have raised before its turn came
