# SPDX-License-Identifier: Apache-2.0
"""The verdicts on made-up results in which each claim is true, false or undecided."""

from __future__ import annotations

import math
import random

import made_up_evidence as made_up
import pytest

from sparse_rl.report.evidence import (
    STATISTICS,
    Evidence,
    auc,
    cases,
)
from sparse_rl.report.evidence_claims import FAILS, HOLDS, UNTESTED, tail_beats_mean, verdicts


def states(records):
    return {verdict.claim: verdict.state for verdict in verdicts(Evidence(tuple(records)))}


def state(records, words):
    return next(state for claim, state in states(records).items() if words in claim)


def test_naive_collapses():
    assert state(made_up.whole(naive=0.4), "Naive") == HOLDS  # starts at 0.8
    assert state(made_up.whole(naive=0.85), "Naive") == FAILS
    assert state(one_budget(0.74, 0.74, 0.85), "Naive") == HOLDS  # two of three
    assert state(one_budget(0.74, 0.85, 0.85), "Naive") == UNTESTED
    assert state(one_budget(0.779, 0.779, 0.779), "Naive") == FAILS  # down by 0.021, of an error of 0.0112
    gone = made_up.whole(naive=0.85)
    for run in [r for r in gone if r["settings"].get("arm") == "naive" and r["part"] == "a"][:2]:
        run["results"]["not_finite"] = True
    assert state(gone, "Naive") == HOLDS


def one_budget(*ends):
    """All is well with naive but at one budget, where its three seeds end so."""
    records = made_up.whole(naive=0.85)
    own = [r for r in records if r["settings"].get("arm") == "naive" and r["settings"].get("budget") == 40]
    for run, end in zip(own, ends, strict=True):
        run["results"]["dense"] = [end, 0.01]
    return records


def test_within_three_percent():
    assert state(made_up.whole(sparse_rl=0.945), "within 3 %") == HOLDS  # 0.9947 ± 0.0086 of dense
    assert state(made_up.whole(sparse_rl=0.8), "within 3 %") == FAILS
    assert state(made_up.whole(sparse_rl=0.92), "within 3 %") == UNTESTED  # 0.968 ± 0.0085
    few = [r for r in made_up.whole() if r["settings"].get("arm") != "sparse_rl" or r["part"] != "a"]
    for budget in made_up.BUDGETS:
        few += made_up.seeds("short", "sparse_rl", budget, 0.95, saved=0.2)
    assert state(few, "within 3 %") == UNTESTED  # nothing saves 35 %


def test_rejection_and_reweighting():
    alone = {"naive": 0.4, "sparse_rl": 0.93}
    assert state(made_up.whole(**alone, reject_only=0.6, reweight_only=0.7), "both needed") == HOLDS
    assert state(made_up.whole(**alone, reject_only=0.6, reweight_only=0.94), "both needed") == FAILS
    assert state(made_up.whole(**alone, reject_only=0.6, reweight_only=0.92), "both needed") == UNTESTED
    assert state(made_up.whole(naive=0.95), "both needed") == UNTESTED  # nothing to correct


def test_sparse_trained_under_sparse_inference():
    assert state(made_up.whole(trained=0.8), "Sparse-trained") == HOLDS  # dense-trained has 0.7
    assert state(made_up.whole(trained=0.68), "Sparse-trained") == FAILS
    assert state(made_up.whole(trained=0.71), "Sparse-trained") == UNTESTED


def test_extreme_budgets():
    assert state(made_up.whole(extreme=0.5), "Extreme") == HOLDS
    assert state(made_up.whole(extreme=0.95), "Extreme") == FAILS
    assert state(made_up.whole(extreme=0.92), "Extreme") == UNTESTED
    mild = [r for r in made_up.whole() if r["settings"].get("budget") != made_up.SWEEP[0]]
    assert state(mild, "Extreme") == UNTESTED  # 30 of 180 tokens is no extreme


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        ((0.4, 0.6, 0.9, 0.93), HOLDS),  # it starts at 0.8
        ((0.4, 0.9, 0.9, 0.93), HOLDS),  # between the two anything goes
        ((0.4, 0.6, 0.7, 0.93), FAILS),  # at the threshold it collapses
        ((0.4, 0.6, 0.9, 0.7), FAILS),
        ((0.85, 0.9, 0.9, 0.93), FAILS),  # it collapses nowhere
        ((0.85, 0.6, 0.9, 0.93), UNTESTED),
    ],
)
def test_the_tail_decides(ends, expected):
    targets = (0.1, 0.5, 0.86, 0.98)
    given = dict(zip(targets, ends, strict=True))
    assert state(made_up.whole() + made_up.held("short", given), "stable") == expected
    found = next(
        v for v in verdicts(Evidence(tuple(made_up.whole() + made_up.held("short", given)))) if "P05" in v.rule
    )
    assert f"{ends[2]:.3f} ± 0.006 at 0.86, held 0.86" in found.findings["short"].numbers


def test_the_tail_decides_nothing_where_it_is_not_held_or_a_run_is_missing():
    ends = {0.1: 0.4, 0.5: 0.6, 0.86: 0.9, 0.98: 0.93}
    assert state(made_up.whole() + made_up.held("short", ends, short=0.02), "stable") == HOLDS
    assert state(made_up.whole() + made_up.held("short", ends, short=0.04), "stable") == UNTESTED
    for left_out in (0, 1):  # the calibration, a run
        records = made_up.held("short", ends)
        del records[left_out]
        assert state(made_up.whole() + records, "stable") == UNTESTED
    one = made_up.held("short", ends)
    one[-1]["results"]["dense"] = [0.5, 0.01]  # of three at 0.98
    assert state(made_up.whole() + one, "stable") == UNTESTED


def test_without_schedules_the_tail_is_judged_at_constant_budgets():
    def judged(tis, tails, seeds=3):
        measured = [
            made_up.before("long", "rkv", budget, overlap_p05=tail)
            for budget, tail in zip(made_up.BUDGETS, tails, strict=True)
            for _ in range(seeds)
        ]
        trained = [run for budget in made_up.BUDGETS for run in made_up.seeds("long", "tis", budget, tis)]
        records = (*made_up.whole("long"), *trained, *measured)
        (found,) = (verdict for verdict in verdicts(Evidence(records)) if "stable" in verdict.claim)
        return found.findings["long"]

    assert judged(0.4, (0.99, 0.95, 0.5)).state == FAILS
    assert "at budget 60, P05 0.990 (3 of 3 collapse)" in judged(0.4, (0.99, 0.95, 0.5)).numbers
    assert "budget 30" not in judged(0.4, (0.99, 0.95, 0.5)).numbers  # its tail is below the threshold
    assert judged(0.9, (0.99, 0.95, 0.5)).state == UNTESTED  # one half of the claim
    assert judged(0.4, (0.8, 0.7, 0.5)).state == UNTESTED
    assert judged(0.4, (0.99, 0.95, 0.5), seeds=2).numbers == "missing: tis at budget 60 has 2 of 3 seeds"


def test_a_claim_is_judged_only_where_its_runs_are_planned():
    real = [record for record in made_up.whole() if record["settings"].get("arm") in (None, "dense", "naive")]
    for record in real:
        record["settings"]["testbed"] = {"name": "short", "budgets": [60]}
    found = {verdict.claim: verdict.findings for verdict in verdicts(Evidence(tuple(real)))}
    assert [not findings for claim, findings in found.items() if "stable" in claim or "both" in claim] == [True, True]


@pytest.mark.parametrize(
    ("predicting", "expected"), [("overlap_p05", HOLDS), ("overlap_mean", FAILS), (None, UNTESTED)]
)
def test_tail_against_mean(predicting, expected):
    """Runs of 24 settings; one statistic tells which fail, the others are random."""
    draw = random.Random(3)
    records = [made_up.before("short", "full", 0), *made_up.seeds("short", "dense", 0, 0.95)]
    for budget in range(20, 44):
        failed = draw.random() < 0.5
        known = {name: draw.random() for name in STATISTICS}
        if predicting:
            known[predicting] = 0.2 * draw.random() + (0.1 if failed else 0.6)
        records.append(made_up.before("short", "rkv", budget, **known))
        records += made_up.seeds("short", "naive", budget, 0.5 if failed else 0.85)
    assert tail_beats_mean(Evidence(tuple(records))).state == expected
    few = [r for r in records if r["settings"]["budget"] < 26]
    assert "4 of each are needed" in tail_beats_mean(Evidence(tuple(few))).numbers
    for run in (r for r in records if r["settings"].get("arm") == "dense"):
        run["results"]["dense"] = [0.85, 0.01]  # it learns too little
    assert cases(Evidence(tuple(records)), ["naive"]) == []


def test_a_tail_that_warns_of_the_wrong_runs_does_not_beat_the_mean():
    """Both say the opposite of a warning, the tail less so."""
    records = [made_up.before("short", "full", 0), *made_up.seeds("short", "dense", 0, 0.95)]
    for i in range(24):
        failed = i % 2 == 0
        mean = (0.8 if failed else 0.2) + 0.001 * i
        known = dict.fromkeys(STATISTICS, 0.5) | {"overlap_mean": mean, "overlap_p05": 0.5 if i % 3 else mean}
        records.append(made_up.before("short", "rkv", 20 + i, **known))
        records += made_up.seeds("short", "naive", 20 + i, 0.5 if failed else 0.85)
    evidence = Evidence(tuple(records))
    found = cases(evidence, ["naive"])
    assert auc(found, "overlap_mean") < auc(found, "overlap_p05") < 0.5
    assert tail_beats_mean(evidence).state != HOLDS


def test_two_perfect_predictors_cannot_be_told_apart():
    records = [made_up.before("short", "full", 0), *made_up.seeds("short", "dense", 0, 0.95)]
    for budget in range(20, 30):
        known = dict.fromkeys(STATISTICS, budget / 100) | {"kl": None}
        records.append(made_up.before("short", "rkv", budget, **known))
        records += made_up.seeds("short", "naive", budget, 0.5 if budget < 25 else 0.85)
    evidence = Evidence(tuple(records))
    finding = tail_beats_mean(evidence)
    assert finding.state == UNTESTED
    assert "cannot be told apart" in finding.numbers
    assert math.isnan(auc(cases(evidence, ["naive"]), "kl"))  # nowhere known


def test_missing_runs_and_a_dense_arm_that_does_not_learn_decide_nothing():
    records = made_up.whole(naive=0.4)
    dropped = next(r for r in records if r["settings"].get("arm") == "naive" and r["part"] == "a")
    assert state([r for r in records if r is not dropped], "Naive") == UNTESTED
    assert set(states(made_up.whole(naive=0.4, dense=0.85)).values()) == {UNTESTED}  # +0.05
    assert set(states([]).values()) == {UNTESTED}


def test_testbeds_may_differ():
    both = made_up.whole("short", naive=0.4) + made_up.whole("long", naive=0.85)
    assert state(both, "Naive") == "holds (short); does not hold here (long)"
