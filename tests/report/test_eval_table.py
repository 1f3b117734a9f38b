# SPDX-License-Identifier: Apache-2.0
"""Tables of an evaluation from numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
from matplotlib.figure import Figure

from sparse_rl.evaluate import Cell, Evaluation
from sparse_rl.evaluate.protocols import PROTOCOLS
from sparse_rl.evaluate.results import Measured, headlines
from sparse_rl.report.eval_page import _shown_from_0, draw
from sparse_rl.report.eval_table import departures, details, failures, groups, markdown, overview, print_tables


def cell(cache, mean, **more):
    numbers = {
        "model": "m",
        "benchmark": "toy",
        "cache": cache,
        "metrics": {"pass@1": {"mean": mean, "se": 0.0125, "count": 4}},
        "problems": 4,
        "n": 1,
        "samples": 4,
        "failed": 0,
        "failures": {},
        "truncated": 1,
        "tokens": 400,
        "tokens_per_answer": 100.0,
        "kv_saved_frac": 0.0,
        "peak_entries": 1234.4,
        "generate_s": 5.0,
        "capture_s": 1.0,
        "tokens_per_s": 100.0,
        "departures": [],
    }
    numbers |= more
    return {"kv_read_frac": 1.0 - numbers["kv_saved_frac"]} | numbers


def results(*cells, **more):
    known = {"protocol": "default", "notes": [], "headlines": [], "command": "sparse-rl eval", "hardware": "a chip"}
    return (
        known
        | {
            "partial": None,
            "resumes": [],
            "versions": {"torch": "2"},
            "commit": "abc",
            "cells": list(cells),
            "wall_s": 9.0,
        }
        | more
    )


DENSE = cell("full", 0.5)
SPARSE = cell("rkv:8", 0.4, kv_saved_frac=0.625, difference={"pass@1": {"mean": -0.1, "se": 0.05, "count": 4}})


def test_dense_and_sparse_stand_side_by_side():
    found = results(DENSE, SPARSE)
    table = overview(found, "m")
    assert table.head == ["cache", "toy, pass@1", "KV saved", "tokens/answer", "tok/s"]
    assert table.rows == [["full", "50.0 ± 1.2", "0 %", "100", "100"], ["rkv:8", "40.0 ± 1.2", "62 %", "100", "100"]]
    row = dict(zip(details(found, "m").head, details(found, "m").rows[1], strict=True))
    assert row["against full"] == "-10.0 ± 5.0" and row["KV saved"] == "62.5 %" and row["cut off"] == "25.0 %"
    assert row["peak entries"] == "1,234" and row["samples"] == "4 x 1" and row["grader failed"] == "0"
    assert "| rkv:8 | 40.0 ± 1.2 |" in markdown(found)


def test_what_was_read_is_shown_where_a_cache_read_less_than_it_held():
    found = results(DENSE, cell("pages_mean:8", 0.4, kv_read_frac=0.125), cell("rkv:8", 0.4, kv_saved_frac=0.75))
    assert overview(found, "m").head[2:4] == ["KV saved", "KV read"]
    assert [row[2:4] for row in overview(found, "m").rows] == [["0 %", "100 %"], ["0 %", "12 %"], ["75 %", "25 %"]]
    row = dict(zip(details(found, "m").head, details(found, "m").rows[1], strict=True))
    assert row["KV saved"] == "0.0 %" and row["KV read"] == "12.5 %"


def test_without_a_dense_cache_there_is_no_difference():
    assert "against full" not in details(results(cell("rkv:8", 0.4)), "m").head


def test_a_number_nobody_has_is_a_dash():
    nothing = cell("full", None, tokens_per_s=None)
    nothing["metrics"]["pass@1"]["se"] = None
    rows = details(results(nothing), "m").rows
    assert rows[0][2] == "–" and rows[0][-1] == "–"


def test_the_headline_is_shown_where_there_is_one():
    headline = [{"model": "m", "cache": "full", "mean": 0.25, "se": 0.01}]
    table = overview(results(DENSE, headlines=headline), "m")
    assert table.head[2] == "average" and table.rows[0][2] == "25.0 ± 1.0"


def test_the_headline_is_the_plain_average_of_all_its_sets():
    names = PROTOCOLS["sparse-rl"].headline
    evaluation = Evaluation(models=("m",), benchmarks=names, protocol="sparse-rl")
    # One set is half right (se 0.5 of two problems), the others all right (se 0).
    values = {name: [1.0, 1.0] for name in names} | {names[0]: [0.0, 1.0]}
    measured = [Measured(cell=Cell("m", name, "full"), numbers={}, values={"any": values[name]}) for name in names]
    (found,) = headlines(evaluation, measured)
    assert found["mean"] == pytest.approx((len(names) - 0.5) / len(names))
    assert found["se"] == pytest.approx(0.5 / len(names)) and math.isfinite(found["se"])
    some = Evaluation(models=("m",), benchmarks=names[1:], protocol="sparse-rl")
    assert headlines(some, measured[1:]) == []


def test_a_table_that_is_partial_has_gaps():
    by_level = {level: {"mean": 0.5, "se": None, "count": 2} for level in ("1", "2")}
    cells = (cell("full", 0.5, by_level=by_level), cell("rkv:8", 0.25), cell("full", 0.75, benchmark="b"))
    found = results(*cells, partial="PARTIAL: 2 of 4 cells are done.")
    table = overview(found, "m")
    assert table.head[1:3] == ["toy, pass@1", "b, pass@1"]
    assert [row[1:3] for row in table.rows] == [["50.0 ± 1.2", "75.0 ± 1.2"], ["25.0 ± 1.2", "–"]]
    assert groups(found, "m")[0].rows == [["1", "2", "50.0", "–"], ["2", "2", "50.0", "–"]]
    assert "(partial)" in markdown(found) and "PARTIAL: 2 of 4" in markdown(found) and "<svg" in draw(found, "m")


def test_names_are_no_markup(capsys):
    print_tables(results(cell("full", 0.5, model="models/m[/x][red]")))
    assert capsys.readouterr().out.count("models/m[/x][red]") == 2


def test_an_axis_of_nothing_is_a_percent():
    axes = Figure().subplots()
    axes.plot([0, 1], [0.0, 0.0])
    _shown_from_0(axes)
    assert axes.get_ylim() == (0, 1)
    axes.plot([0, 1], [40.0, 60.0])
    axes.autoscale()
    _shown_from_0(axes)
    assert axes.get_ylim()[0] == 0 and axes.get_ylim()[1] > 60


def test_who_went_on_is_said():
    resume = {"command": "sparse-rl eval", "resumed": "2026-01-01", "hardware": "another chip"}
    assert "Resumed 2026-01-01 with hardware another chip." in markdown(results(DENSE, resumes=[resume]))


def test_levels_fold_out():
    by_level = {level: {"mean": 0.5, "se": None, "count": 2} for level in ("1", "2")}
    (table,) = groups(results(cell("full", 0.5, by_level=by_level), cell("rkv:8", 0.5, by_level=by_level)), "m")
    assert table.head == ["level", "problems", "full", "rkv:8"] and table.rows[0] == ["1", "2", "50.0", "50.0"]


def test_departures_and_failures_are_said_once():
    first, second = cell("full", 0.5, departures=["n is 2"]), cell("full", 0.5, departures=["n is 2"], benchmark="b")
    assert departures(results(first, second)) == ["Departs from protocol default: n is 2 (toy, b)."]
    many = {f"reason {i}": i for i in range(1, 8)}
    (said,) = failures(results(cell("full", 0.5, failures=many), cell("rkv:8", 0.5, failures={"reason 1": 9})))
    assert "10 x reason 1, 7 x reason 7" in said and "and 2 other reasons" in said
