# SPDX-License-Identifier: Apache-2.0
"""What a calibration shows: its picture, and which rollouts would be rejected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparse_rl.objective.correction import PRESETS
from sparse_rl.objective.mismatch import CATASTROPHIC
from sparse_rl.report import calibration_page, calibration_plots
from sparse_rl.report.plots import plot_style


@pytest.mark.parametrize("name", ["calibrate_embedded", "calibrate_smollm2/snapkv", "calibrate_smollm2/pages_mean"])
def test_every_panel_names_its_axes_and_its_legend_covers_no_line(name):
    results = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / f"{name}.json").read_text())
    with plot_style():
        figure = calibration_plots._figure(results)
        figure.draw_without_rendering()
    for axes in figure.axes:
        assert axes.get_xlabel() and axes.get_ylabel()
        legend = axes.get_legend()
        assert not legend.get_window_extent().overlaps(axes.get_window_extent())
        low, high = legend.get_window_extent().intervalx
        assert low >= 0 and high <= figure.bbox.x1, "and it is on the picture"
    shown = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in figure.axes]
    assert "95 % interval" in shown[2], "what the bands are"
    if name == "calibrate_embedded":  # of which three targets have one schedule
        assert shown[4] == ["target 0.75", "target 0.80, 0.86, 0.92", "this schedule", "dense"]
        assert shown[3][:2] == shown[4][:2]


def test_rejections_are_of_whole_rollouts_and_say_which_veto_they_count():
    results = {"schedule": {"starts": [0, 60, 120], "budgets": [32, 48, 48]}}
    results["runs"] = [
        {"budget": budget, "rejected_frac": share} for budget, share in ((32, 0.583), (40, 0.354), (48, 0.125))
    ]
    assert calibration_page.rejections(results) == (
        "rollouts that a veto at xi < 1e-4 would reject: with a constant budget, 58.3 % at 32, 12.5 % at 48"
    )
    as_run = results | {"verified": {"rejected_frac": 0.1875, "rollouts": 48}}
    assert "reject: 18.8 % of 48 with the schedule as run; with a constant budget, 58.3 %" in (
        calibration_page.rejections(as_run)
    )
    assert PRESETS["sparse_rl"].veto == CATASTROPHIC == 1e-4, "the preset that the closing command names"
