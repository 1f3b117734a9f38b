# SPDX-License-Identifier: Apache-2.0
"""The largest budget that a search can choose: where that fails too, it would stay there for ever, and says so."""

from __future__ import annotations

from dataclasses import replace

import pytest
from control_plant import CONFIG, GRID, LONGEST, Plant, controller, grid_of, tail

from sparse_rl.kv import RKV, PagesMean
from sparse_rl.train.control import Controller


@pytest.mark.parametrize("start", [0, 9])
def test_a_target_that_no_budget_holds_is_said_once_with_what_to_do(start, caplog):
    """Of the largest nothing is left out; from 1,000 tokens on a fifth of its tokens is bad, as with any budget."""
    control = controller(GRID[start], bins=3)
    for _ in range(60):
        control.observe([tail(0.2 * (i > 0), start=1000 * i, quantile=(0.9, 0.5, 0.4)[i]) for i in range(3)])
    assert control.levels[1:] == [17, 17]
    (said,) = (record.getMessage() for record in caplog.records)
    assert (
        "from 1000 tokens of context on, more than 5% of the tokens have an overlap under control.target 0.86" in said
    )
    assert f"with {GRID[-1]} entries, which leave nothing out: no budget holds it" in said
    assert "Resume with a lower control.target, such as 0.37 (0.915 of the tail of now)" in said


@pytest.mark.parametrize(
    ("config", "kv", "said"),
    [
        (
            {"largest": GRID[9]},
            {},
            f"and control.largest is {GRID[9]}; raise that, or resume with a lower control.target.",
        ),
        ({}, {"select": "quest", "select_budget": 256}, "and kv.select_budget is 256; raise that"),
        (
            {"largest": GRID[9], "statistic": "hazard"},
            {},
            f"more than 0.01% of the tokens have xi < 1e-4 with {GRID[9]} entries, and control.largest is {GRID[9]}; "
            "raise that, or resume with a higher control.hazard.",
        ),
    ],
)
def test_a_largest_budget_that_leaves_something_out_is_to_be_raised(config, kv, said, caplog):
    config = replace(CONFIG, **config)
    kv = RKV(budget=GRID[5], window=8, **kv)
    control = Controller(config, kv, grid_of(config, kv), LONGEST)
    for _ in range(60):
        control.observe([tail(0.2, hazard=0.01)])
    assert len(caplog.records) == 1 and said in caplog.text and "leave nothing out" not in caplog.text


@pytest.mark.parametrize(("short", "long", "said"), [(0.1, 0.5, "0.46"), (0.1, 0.97, "0.79"), (0.95, None, "hazard")])
def test_the_target_to_resume_with_is_of_contexts_that_had_the_largest_budget_and_lower(short, long, said, caplog):
    """The short contexts are still on their way up; and what a step has by chance is no reason to ask for more."""
    control = Controller(CONFIG, PagesMean(budget=GRID[-1]), GRID, 2000)
    control.bins[0].level = 0
    for _ in range(10):
        control.observe([tail(0.0, quantile=short), tail(0.2, start=1000, quantile=long)])
    (text,) = (record.getMessage() for record in caplog.records)
    assert "from 1000 tokens of context on" in text
    wanted = f"a lower control.target, or with control.statistic {said}." if long is None else f"such as {said} ("
    assert wanted in text


def test_a_largest_budget_above_all_contexts_is_not_to_be_raised(caplog):
    config = replace(CONFIG, largest=10 * LONGEST)
    control = Controller(config, RKV(budget=GRID[-1], window=8), grid_of(config), LONGEST)
    for _ in range(10):
        control.observe([tail(0.2)])
    assert "which leave nothing out" in caplog.text and "control.largest" not in caplog.text


def test_contexts_that_no_token_has_do_not_silence_it(caplog):
    control = controller(GRID[0], bins=2)
    for _ in range(60):
        control.observe([tail(0.2, start=1000)])
    assert "from 1000 tokens of context on" in caplog.text


def test_a_hazard_that_no_budget_holds_is_said_too(caplog):
    control = controller(GRID[-1], config=replace(CONFIG, statistic="hazard", hazard=0.005))
    for _ in range(10):
        control.observe([tail(0.0, hazard=0.05)])
    (text,) = (record.getMessage() for record in caplog.records)
    assert "more than 0.5% of the tokens have xi < 1e-4" in text and text.endswith("with a higher control.hazard.")


def test_a_target_that_is_held_is_not_warned_of(caplog):
    for loss in (0.0, 2.0):
        Plant([5, 8, 17], loss=loss).run(controller(GRID[0], bins=3), 100)
    assert caplog.records == []
