# SPDX-License-Identifier: Apache-2.0
"""What is made of results: comparisons, predictors, tables and plots by hand, and the page."""

from __future__ import annotations

import json
import math
from itertools import combinations
from pathlib import Path

import made_up_evidence as made_up
import pytest
from matplotlib.figure import Figure

from sparse_rl.cli import main
from sparse_rl.evaluate.statistics import Estimate
from sparse_rl.report import evidence_plots
from sparse_rl.report.evidence import (
    STATISTICS,
    Case,
    Evidence,
    alarmed,
    auc,
    by_bed,
    cases,
    compare,
    interval,
    over_seeds,
    ratio,
    read_evidence,
    survival,
    threshold,
)
from sparse_rl.report.evidence_page import page
from sparse_rl.report.evidence_summary import in_short
from sparse_rl.report.evidence_tables import alarms_table, before_table, presets_table

ROOT = Path(__file__).parents[2]
DRAWN = ("arms-short", "curves-short", "matrix-short", "budget-short", "tails-short", "length-short", "predictors")
RESULTS, DOCUMENT = "benchmarks/evidence/results", "docs/evidence.md"


def test_comparisons_by_hand():
    assert compare(Estimate(0.9, 0.03, 3), Estimate(0.75, 0.04, 3)) == "more"  # 0.15 > 2.8 * 0.05
    assert compare(Estimate(0.9, 0.03, 3), Estimate(0.77, 0.04, 3)) == "unclear"
    assert compare(Estimate(0.7, 0.03, 3), Estimate(0.85, 0.04, 3)) == "no more"  # -0.15 + 0.14 < 0.02
    assert compare(Estimate(0.909, 0.0, 3), Estimate(0.9, 0.0, 3)) == "no more"  # by less than 0.01
    # Seeds that agree by chance: sqrt(0.03^2 + 0.04^2 + 0.12^2) / 3 = 0.13 / 3.
    assert over_seeds([[0.5, 0.03], [0.5, 0.04], [0.5, 0.12]]).se == pytest.approx(0.13 / 3)
    assert over_seeds([[0.4, 0.0], [0.6, None], [None, None]]) == Estimate(0.5, pytest.approx(0.1), 2)
    assert over_seeds([[0.4, 0.02]]) == Estimate(0.4, 0.02, 1)
    assert compare(Estimate(0.9, math.nan, 1), Estimate(0.1, 0.01, 3)) == "unclear"
    found = ratio(Estimate(0.9, 0.03, 3), Estimate(0.6, 0.01, 3))
    assert found.mean == pytest.approx(1.5)
    assert found.se == pytest.approx(1.5 * math.hypot(1 / 30, 1 / 60))


def test_auc_threshold_and_interval_by_hand():
    """KL 1, 3 of failed runs, 2, 0 of good ones: of four pairs three are in order."""
    found = [case(kl, change) for kl, change in ((1.0, -0.5), (3.0, -0.3), (2.0, 0.0), (0.0, 0.1))]
    assert auc(found, "kl") == 0.75
    assert auc(found, "overlap_mean") == 0.5  # all the same
    assert threshold(found, "kl") == (0.5, 0.75)
    elsewhere = [case(kl, change, "long") for kl, change in ((0.0, -0.5), (-1.0, 0.0))]
    assert auc(found + elsewhere, "kl") == 0.8  # a fifth pair; none between testbeds
    assert threshold([case(kl, change) for kl, change in ((1.0, 0.1), (2.0, -0.1))], "kl") == (1.5, 1.0)
    low, high = interval(found, lambda drawn: auc(drawn, "kl"))
    assert 0 <= low < 0.75 <= high <= 1
    assert interval(found, lambda drawn: auc(drawn, "kl")) == (low, high)


def case(kl, change, bed="short"):
    known = dict.fromkeys(STATISTICS, 0.5) | {"kl": kl}
    return Case((bed, "rkv", int(100 * kl)), known, change, change < 0)


def test_a_statistic_may_warn_on_one_testbed_and_not_on_another():
    """Low overlaps fail on the first, high ones on the second."""
    found = [Case((bed, "rkv", i), {"kl": i / 10}, 0.0, (i > 1) == (bed == "a")) for bed in "ab" for i in range(4)]
    assert by_bed(found, "kl") == {"a": 1.0, "b": 0.0} and auc(found, "kl") == 0.5
    assert math.isnan(by_bed(found[:2], "kl")["a"])


def test_cases_join_runs_with_what_was_measured():
    records = [made_up.before("short", "full", 0), made_up.before("short", "snapkv", 30, kl=0.7)]
    records += [made_up.run("short", "naive", 30, 0, 0.5, policy="snapkv"), made_up.run("short", "naive", 30, 0, 0.9)]
    records += made_up.seeds("short", "dense", 0, 0.95)
    (found,) = cases(Evidence(tuple(records)), ["naive"])  # nothing was measured for rkv
    for record in records:
        record["settings"]["testbed"]["name"] = "trial"
    assert cases(Evidence(tuple(records)), ["naive"]) == []  # never evidence
    assert (found.known["kl"], found.failed, found.setting) == (0.7, True, ("short", "snapkv", 30))
    assert found.change == pytest.approx(-0.3)


def test_the_page_begins_with_what_it_comes_to():
    """Three seeds each: dense 0.95, sparse_rl 0.9, which is 94.7 %, naive 0.4; the start is 0.8."""
    records = [
        *made_up.whole(naive=0.4),
        made_up.before("short", "rkv", 40),
        made_up.before("short", "rkv", 20, overlap_mean=0.5),
    ]
    records += made_up.seeds("short", "sparse_rl", 40, 0.93, eps=1e-2)
    for arm, four in (("dense", 0.96), ("naive", 0.2)):
        records += made_up.seeds("short", arm, 40, four, updates_per_rollout=4)
    said = dict(line.removeprefix("- **").split(":** ") for line in in_short(Evidence(tuple(records))))
    assert said["Of the dense arm's accuracy sparse_rl keeps"] == (
        "short (completions of 180 tokens in the dense arm, over all steps): "
        + ", ".join(["95 % with 50 % of KV saved"] * 3)
        + "."
    )
    (lost,) = (text for title, text in said.items() if title.startswith("Runs that collapse"))
    assert lost == "short: naive 9 of 9, sparse_rl 0 of 9."  # without the extreme budget, which naive does not have
    (highest,) = (text for title, text in said.items() if title.startswith("Of the arms with the papers' veto"))
    assert "reject_only at budget 40 (0.900 ± 0.006)" in highest
    (used,) = (text for title, text in said.items() if title.startswith("Used with"))
    assert used == "short: -0.100 ± 0.008 (clearly) under rkv:40, -0.100 ± 0.008 (clearly) under rkv:30."
    assert said["A veto at 1e-2 (the preset strict) instead of 1e-4 changes dense accuracy by"] == (
        "short: +0.030 ± 0.008 (clearly) at budget 40."
    )
    (updates,) = (text for title, text in said.items() if title.startswith("Four updates"))
    assert updates == "short: -0.210 ± 0.012 (clearly) with naive."  # -0.2 less +0.01
    (best,) = (text for title, text in said.items() if title.startswith("What, measured"))
    assert best == (
        "sparse_rl, 3 of 6 runs: overlap, mean, below 0.7, right in 100 % of either kind, in the mean (AUC 1.00)."
    )
    assert "sparse_rl_release at 60 and 40 and 30" in said["Not measured yet"] and "SmolLM2" in said["Not measured yet"]
    assert in_short(Evidence(())) == ["- **Not measured yet:** where time and memory go; SmolLM2."]


def test_the_alarm_of_anomalies_by_hand():
    """Over 15 % of ten steps: 1.5 in the sum of the last ten, steps to come counting as without."""
    (run,) = made_up.seeds("short", "naive", 40, 0.4)[:1]
    for curve, on in (([0.15] * 30, False), ([0.16] * 10, True), ([0.16] * 9, False), ([0.9, None, 0.7, 0.0], True)):
        run["results"]["curves"]["catastrophic"] = curve
        assert alarmed(run) == on, curve
    records = made_up.whole(naive=0.4)
    for run in records:
        if run["part"] == "a" and (run["settings"]["arm"], run["settings"]["budget"]) == ("naive", 40):
            run["results"]["curves"]["catastrophic"] = [0.5] * 10
    rows = alarms_table(Evidence(tuple(records)), ["short"]).splitlines()
    assert "| short | naive | 3 of 9 | 0 of 0 |" in rows
    assert "| short | sparse_rl | 0 of 3 | 0 of 9 |" in rows


def test_corrections_against_the_papers_by_hand():
    """Errors of 0.01 over three seeds are 0.0058, of a difference 0.0082: 0.03 is clear, 0.02 is not."""
    records = [
        r for r in made_up.whole(sparse_rl=0.9, reject_only=0.87, naive=0.4) if r["settings"].get("budget") != 20
    ]
    records += made_up.seeds("short", "tis", 40, 0.92)
    lines = presets_table(Evidence(tuple(records)), "short").splitlines()
    assert lines[2].startswith("| correction | budget 60 | budget 40 |")
    own = {line.split(" | ")[0].removeprefix("| "): line.split(" | ")[1:3] for line in lines[4:]}
    assert own["reject_only"] == ["**-0.030 ± 0.008**"] * 2 and own["naive"] == ["**-0.500 ± 0.008**"] * 2
    assert own["tis"] == ["missing", "+0.020 ± 0.008"] and "sparse_rl" not in own


def test_what_was_known_before_stands_beside_what_came_of_it():
    records = [made_up.before("short", "rkv", 60, overlap_p05=0.9 + 0.02 * seed, rejection=0.25) for seed in range(3)]
    records += [made_up.before("short", "snapkv", 60, overlap_p05=0.1), *made_up.seeds("short", "naive", 60, 0.4)]
    head, _, *rows = before_table(Evidence(tuple(records)), ["short"]).splitlines()[2:]
    names = head.split(" | ")
    (row,) = (row.split(" | ") for row in rows if row.startswith("| short | 60 |"))
    assert row[names.index("overlap, P05")] == "0.920 ± 0.012"  # 0.02 / sqrt(3)
    assert row[names.index("rollouts with a token xi < 1e-4")] == "25.0 ± 0.0 %"
    assert row[names.index("naive, after")] == "0.400 ± 0.006" and row[-1].startswith("–")
    assert {row.split(" | ")[3] for row in rows} == {"0.920 ± 0.012", "–"}


def test_the_law_of_a_constant_hazard_by_hand():
    """Budget 30 + interval 8 - prompt 18: evictions begin at token 20, and half-way to 180 is 100.

    Of ten rollouts one ends before the first eviction, two at 50 and 60, one at 140: 2 vetoes in 30 + 40 + 7 x 80.
    """
    record = made_up.before("short", "rkv", 30, first_veto=[140, 50, 10, 60])
    found = survival(Evidence((record,)), "short", 30)
    assert (found.begin, found.middle, found.total) == (20, 100, 10)
    assert found.hazard == pytest.approx(2 / 630)
    assert [found.left(token) for token in (10, 11, 100, 140, 180)] == pytest.approx([1, 0.9, 0.7, 0.7, 0.6])
    assert found.law(180) == pytest.approx(0.7 * math.exp(-80 * 2 / 630))
    assert survival(Evidence((made_up.before("short", "rkv", 200),)), "short", 200) is None  # never full
    assert survival(Evidence((record,)), "short", 40) is None


def test_smollm2_reads_as_a_testbed(tmp_path):
    matrix = {"full": [0.4, 0.02], "rkv:64": [0.3, 0.02], "rkv:48": [0.2, 0.02]}
    before = dict.fromkeys(STATISTICS, 0.5) | {"first_veto": [], "rollouts": 4, "length": 90, "kv_saved": 0.4}
    start = made_up.record("smollm2-start", "smollm2", {"seed": 0}, {"budget": 64, "matrix": matrix, "before": before})
    curves = made_up.run("x", "naive", 64, 0, 0.5)["results"]["curves"]
    own = {"budget": 64, "matrix": matrix | {"full": [0.55, 0.02]}, "curves": curves}
    arms = [
        made_up.record(f"smollm2-{arm}-s{s}", "smollm2", {"arm": arm, "seed": s}, own)
        for arm in ("dense", "naive")
        for s in range(3)
    ]
    evidence = read_evidence(made_up.write(tmp_path / "results", [start, *arms]))
    assert evidence.testbeds == ["smollm2"]
    assert evidence.start("smollm2").mean == 0.4
    assert evidence.end("smollm2", "dense", 0) == Estimate(0.55, pytest.approx(0.02 / 3**0.5), 3)
    assert evidence.end("smollm2", "naive", 64, "sparse").mean == 0.3
    assert evidence.under("smollm2", "naive", 64, "rkv:48").count == 3
    assert cases(evidence, ["naive"]) == []  # its overlap is on another scale
    text = page(evidence, "r", "o", "p", [])
    assert "## Arms and budgets: smollm2" in text
    assert "| 64 | naive | 0.550 ± 0.012 | 0.300 ± 0.012 | 0.300 ± 0.020 |" in text  # the last before training


def test_the_later_line_counts_and_a_broken_one_is_named(tmp_path):
    old, new = made_up.run("short", "dense", 0, 0, 0.5), made_up.run("short", "dense", 0, 0, 0.9)
    folder = made_up.write(tmp_path / "results", [old, new])
    assert read_evidence(folder).end("short", "dense", 0).mean == 0.9
    whole = json.dumps(old)
    odd = (whole.replace("0.5", "NaN"), whole.replace('"seconds"', '"s"'), "\udcff")
    for broken in ("{}", "[]", "", whole[:99], *odd):
        (folder / "b.jsonl").write_bytes(f"{whole}\n{broken}\n".encode(errors="surrogateescape"))
        with pytest.raises(ValueError, match=r"b\.jsonl, line 2, is not the record of a cell"):
            read_evidence(folder)
    with pytest.raises(ValueError, match="is no folder"):
        read_evidence(tmp_path / "nowhere")


def test_a_testbed_begins_with_one_model(tmp_path):
    records = [made_up.run("short", "dense", 0, seed, 0.9) for seed in range(3)]
    records.append(made_up.run("long", "dense", 0, 0, 0.9))
    for one, start in zip(records, ("aa", "aa", "aa", "bb"), strict=True):
        one["results"]["start"] = start
    assert len(read_evidence(made_up.write(tmp_path, records)).records) == 4
    records[1]["results"]["start"] = "cc"
    with pytest.raises(ValueError, match=r"short began with several models, aa \(.*cc \("):
        read_evidence(made_up.write(tmp_path, records))


def test_the_page_and_its_plots(tmp_path):
    records = made_up.whole(naive=0.4) + [made_up.before("short", "rkv", budget) for budget in made_up.BUDGETS]
    records += made_up.held("short", {0.86: 0.9, 0.1: 0.4}) + made_up.seeds("short", "tis", 40, 0.85, saved=0.7)
    records += made_up.seeds("short", "auto_distill", 0, 0.9, target=0.86)
    for run in records[-3:]:
        run["results"]["bins"] = {"distill/overlap_p05": [0.1, 0.5, None], "distill/overlap_p05_without": [0.3, 0.25]}
    results = made_up.write(tmp_path / "results", [r for r in records if r["settings"].get("arm") != "reject_only"])
    command = ["report", "--evidence", str(results), "--output", str(tmp_path / "evidence.md")]
    main(command)
    one = (tmp_path / "evidence.md").read_text()
    assert "| 40 | reject_only | missing |" in one  # never invented
    assert "| 40 | naive | 0.400 ± 0.006 |" in one
    assert "| tis | – | 40 | – | 0.10 ± 0.00 | 0.10 ± 0.00 | 30 ± 0 % | 0.850 ± 0.006 | 0.750 ± 0.006 |" in one
    assert "| schedule | 0.1 | 30@0+40@60 | 0.10 | 0.10 ± 0.00 | 0.10 ± 0.00 | 50 ± 0 % | 0.400 ± 0.006 |" in one
    assert "tokens: 0.500 ± 0.000 with the adapter, 0.250 ± 0.000 without." in one
    assert "| 40 | 40 % | 20.0 % | 0.900 | 0.300 | 0.050 | 0.990 |" in one
    for name in DRAWN:
        assert f"](evidence/{name}.png)" in one
        assert (tmp_path / "evidence" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert "time.png" not in one
    again = page(read_evidence(results), str(results), str(tmp_path / "evidence.md"), "evidence", DRAWN)
    assert again == one


def test_labels_of_nearby_points_do_not_lie_on_each_other():
    ends = {0.02: 0.5, 0.3: 0.8, 0.86: 0.801, 0.9: 0.802, 0.99: 0.85}
    figure = Figure(figsize=(9.0, 3.4), layout="constrained")
    assert evidence_plots._tails(figure, Evidence((*made_up.whole(), *made_up.held("short", ends))), "short")
    figure.draw_without_rendering()
    for panel in figure.axes:
        named = [text for text in panel.texts if text.get_text() in map("{:g}".format, ends)]
        assert len(named) == len(ends)
        for one, other in combinations(panel.texts, 2):
            assert not one.get_window_extent().overlaps(other.get_window_extent()), (one, other)


@pytest.mark.parametrize("wrong", [["runs/one"], ["--png", "plots"], ["--output", "evidence.html"]])
def test_evidence_makes_a_page_of_its_own(tmp_path, capsys, wrong):
    with pytest.raises(SystemExit):
        main(["report", "--evidence", str(tmp_path), "--output", str(tmp_path / "evidence.md"), *wrong])
    assert "evidence" in capsys.readouterr().err


def test_the_document_is_what_the_committed_results_give():
    drawn = [path.stem for path in sorted((ROOT / "docs" / "evidence").glob("*.png"))]
    evidence = read_evidence(ROOT / RESULTS)
    assert page(evidence, RESULTS, DOCUMENT, "evidence", drawn) == (ROOT / DOCUMENT).read_text()
