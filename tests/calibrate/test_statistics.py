# SPDX-License-Identifier: Apache-2.0
"""Numbers of a cache worked out by hand, and intervals against the plain bootstrap."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

from sparse_rl.calibrate import CalibrationConfig
from sparse_rl.calibrate.analysis import analyse, measure_dense, met
from sparse_rl.calibrate.statistics import describe, intervals, quantiles, resampled, veto
from sparse_rl.calibrate.tokens import Tokens
from sparse_rl.kv.schedule import Schedule


def tokens(lengths, overlap=None, log_xi=None, entropy=None):
    total = sum(lengths)
    fill = np.ones(total, dtype=np.float32)
    overlap = fill if overlap is None else np.asarray(overlap, dtype=np.float32)
    return Tokens(
        rollouts=np.repeat(np.arange(len(lengths)), lengths).astype(np.int32),
        contexts=np.concatenate([10 + np.arange(length) for length in lengths]).astype(np.int32),
        lower=overlap,
        upper=overlap,
        top20=overlap * 0.5,
        entropy=0 * fill if entropy is None else np.asarray(entropy),
        log_xi=0 * fill if log_xi is None else np.asarray(log_xi),
        num_rollouts=len(lengths),
        held=30.0,
        read=20.0,
        full=120.0,
    )


def test_quantiles_are_values_that_occurred(seed):
    values = np.random.default_rng(seed).permutation(np.arange(1, 101) / 100)
    assert quantiles(values, [0.01, 0.05, 1.0]) == [0.01, 0.05, 1.0]
    assert quantiles(np.array([0.3]), [0.05]) == [0.3]
    several = np.random.default_rng(seed).random(random.randrange(20, 3000)).astype(np.float32)
    at = [0.01, 0.05, 0.5]
    assert quantiles(several, at) == np.quantile(several, at, method="inverted_cdf").tolist()


def test_veto_and_hazard_by_hand():
    # Of three rollouts the first is rejected at its second token, the last at its third and, again, its fourth.
    low = math.log(1e-5)
    found = veto(tokens([4, 5, 6], log_xi=[0, low, 0, 0, 0, 0, 0, 0, 0, 0, 0, low, low, 0, 0]))
    assert found["rejected_frac"] == pytest.approx(2 / 3)
    assert found["hazard"] == pytest.approx(2 / (2 + 5 + 3))
    assert found["catastrophic_frac"] == pytest.approx(3 / 15)
    assert veto(tokens([4, 5]))["hazard"] == 0.0


def test_the_hazard_predicts_rejection_at_any_length(seed):
    draw, hazard = np.random.default_rng(seed), 2e-3
    lengths = draw.integers(50, 1500, 3000)
    broken = draw.random(lengths.sum()) < hazard
    found = veto(tokens(lengths, log_xi=np.where(broken, -20.0, 0.0)))
    assert found["hazard"] == pytest.approx(hazard, rel=0.1)
    assert found["rejected_frac"] == pytest.approx((1 - np.exp(-hazard * lengths)).mean(), abs=0.03)


def test_bins_scales_and_decision_tokens():
    # Contexts 10..49 and 10..69; those of 30 and more overlap by 0.8, the decisions among them by 0.4.
    lengths = [40, 60]
    contexts = np.concatenate([10 + np.arange(length) for length in lengths])
    decision = contexts % 4 == 3
    overlap = np.where(contexts < 30, 1.0, np.where(decision, 0.4, 0.8))
    found = describe(
        tokens(lengths, overlap, entropy=np.where(decision, 0.7, 0.6)),
        [(0, 30), (30, 70)],
        entropy=0.69,
        bootstrap=20,
        least=15,
    )
    first, second = found["bins"]
    assert (first["tokens"], first["decision_tokens"], second["tokens"], second["decision_tokens"]) == (40, 10, 60, 15)
    assert first["lower"]["all"]["p05"] == 1.0 and first["lower"]["decision"] is None, "too few for a tail"
    assert second["lower"]["all"]["p05"] == pytest.approx(0.4)
    assert second["lower"]["all"]["mean"] == pytest.approx((45 * 0.8 + 15 * 0.4) / 60)
    assert second["top20"]["decision"]["mean"] == pytest.approx(0.2)
    assert found["kv_saved_frac"] == 0.75 and found["kv_read_frac"] == pytest.approx(1 / 6)
    assert found["mean_length"] == 50.0


def test_tokens_beyond_the_dense_runs_contexts_count_in_the_last_bin():
    """Too sparse a cache writes on and on: a hundred good tokens, then a thousand bad ones."""
    overlap = np.where(np.arange(1100) < 100, 1.0, 0.1)
    found = describe(tokens([1100], overlap), [(0, 60), (60, 110)], entropy=0.69, bootstrap=0, least=15)
    assert [each["tokens"] for each in found["bins"]] == [50, 1050]
    assert found["bins"][1]["lower"]["all"]["p05"] == pytest.approx(0.1)


def test_what_is_met_goes_with_the_budget_and_bins_without_tokens_are_named():
    config = CalibrationConfig(bin=30, min_tokens=20, overlap="lower", bootstrap=0)
    runs = {16: tokens([20], np.full(20, 0.5)), 32: tokens([20], np.full(20, 0.9))}  # neither gets to context 30
    results = analyse(measure_dense(tokens([50]), config), [16, 32], runs.__getitem__, config)
    assert results["bins"] == [(0, 30), (30, 60)] and results["schedule"]["budgets"] == (32,)
    assert results["schedule"]["met"] == met(Schedule((0,), (32,)), results, config) == [True, False]
    assert met(Schedule((0,), (16,)), results, config) == [False, False]
    (note,) = results["notes"]
    assert note.startswith("no budget has enough tokens in the contexts 30-60, which keep the budget before them")


def test_the_tail_of_decision_tokens_decides_where_it_is_asked_for():
    config = CalibrationConfig(bin=50, min_tokens=20, overlap="lower", tail="mean", target=0.6, bootstrap=0)
    entropy = [1.0] * 20 + [0.0] * 20
    runs = {16: tokens([40], [0.5] * 20 + [0.9] * 20, entropy=entropy), 32: tokens([40], entropy=entropy)}
    budgets = [
        analyse(measure_dense(runs[32], each), [16, 32], runs.__getitem__, each)["schedule"]["budgets"]
        for each in (config, replace(config, tokens="decision"))
    ]
    assert budgets == [(16,), (32,)], "a mean of 0.7 over all tokens, of 0.5 over those that decide"


def test_intervals_are_those_of_resampled_rollouts(seed):
    draw = np.random.default_rng(seed)
    lengths = draw.integers(20, 60, 40)
    rollouts = np.repeat(np.arange(40), lengths)
    values = np.clip(draw.beta(8, 1, 40)[rollouts] - 0.1 * draw.random(len(rollouts)), 0, 1)
    counts = resampled(40, 300, seed=1)
    assert (counts.sum(axis=1) == 40).all()
    plain: dict[str, list[float]] = {"p05": [], "p01": [], "mean": []}
    for drawn in counts.astype(int):
        again = np.repeat(values, drawn[rollouts])
        plain["mean"].append(again.mean())
        for name, value in zip(("p05", "p01"), quantiles(again, [0.05, 0.01]), strict=True):
            plain[name].append(value)
    found = intervals(values, rollouts, counts)
    for name, each in plain.items():
        assert found[f"{name}_interval"] == pytest.approx(np.quantile(each, [0.025, 0.975]).tolist(), abs=2e-3)
