# SPDX-License-Identifier: Apache-2.0
"""What an anomalous token takes along: properties over random rollouts, and the length law by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from sparse_rl.objective.correction import PRESETS, Correction, correct
from sparse_rl.objective.loss import token_scale

ANOMALOUS = math.log(1e-5)
PRESETS_HERE = ("sparse_rl", "prefix", "mask", "hazard")


def made_up(lengths, chance, generator):
    """Log-ratios of rollouts with anomalies, some tokens not the sampler's."""
    rows = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    log_xi = 0.3 * torch.randn(len(rows), generator=generator)
    anomalous = torch.rand(len(rows), generator=generator) < chance
    mask = torch.rand(len(rows), generator=generator) < 0.9
    return torch.where(anomalous, ANOMALOUS, log_xi), mask, rows, anomalous & mask


@pytest.fixture
def generator(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("preset", PRESETS_HERE)
def test_without_an_anomaly_nothing_changes(preset, generator):
    log_xi, mask, rows, _ = made_up([5, 1, 40, 9], 0.0, generator)
    got, plain = (correct(log_xi, mask, rows, 4, PRESETS[name]) for name in (preset, "reweight_only"))
    assert torch.equal(got.weight, plain.weight) and torch.equal(got.kept, mask) and got.accepted.all()


def test_each_action_keeps_what_it_says_and_no_less_than_the_one_before(generator):
    lengths = torch.randint(1, 40, (60,), generator=generator).tolist()
    log_xi, mask, rows, anomalous = made_up(lengths, 0.05, generator)
    kept = {name: correct(log_xi, mask, rows, 60, PRESETS[name]).kept for name in PRESETS_HERE}
    for row in range(60):
        at = rows == row
        bad, chosen = anomalous[at], mask[at]
        first = int(bad.nonzero()[0]) if bad.any() else len(bad)
        before = torch.arange(len(bad)) < first
        assert torch.equal(kept["prefix"][at], chosen & before)
        assert torch.equal(kept["mask"][at], chosen & ~bad)
        assert torch.equal(kept["sparse_rl"][at], chosen & (first == len(bad)))
    assert not (kept["sparse_rl"] & ~kept["prefix"]).any() and not (kept["prefix"] & ~kept["mask"]).any()
    assert not (kept["sparse_rl"] & ~kept["hazard"]).any()


def test_dropping_tokens_alone_is_masking_below_a_bound_and_leaves_the_cap_free(generator):
    log_xi, mask, rows, anomalous = made_up([30, 20, 10], 0.2, generator)
    by_bound = correct(log_xi, mask, rows, 3, Correction(lower=1e-4, action="mask"))
    assert torch.equal(correct(log_xi, mask, rows, 3, PRESETS["mask"]).weight, by_bound.weight)
    capped = correct(log_xi, mask, rows, 3, replace(PRESETS["mask"], upper=1.1))
    assert torch.equal(capped.kept, mask & ~anomalous) and float(capped.weight.max()) == pytest.approx(1.1)


def test_a_broken_ratio_is_anomalous_and_one_that_the_sampler_did_not_choose_is_not():
    log_xi = torch.tensor([0.0, math.nan, 0.0, math.nan, 0.0])
    mask, rows = torch.tensor([True, True, True, False, True]), torch.tensor([0, 0, 0, 1, 1])
    assert correct(log_xi, mask, rows, 2, PRESETS["prefix"]).weight.tolist() == [1, 0, 0, 0, 1]
    assert correct(log_xi, mask, rows, 2, PRESETS["mask"]).weight.tolist() == [1, 0, 1, 0, 1]


@pytest.mark.parametrize(
    ("denominator", "aggregation", "expected"),
    [
        # Rollouts of 4 and 2 tokens; the first is cut before its third.
        ("fixed", "token_mean", [1 / 6, 1 / 6, 1 / 6, 1 / 6]),
        ("surviving", "token_mean", [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        ("fixed", "sequence_mean", [1 / 8, 1 / 8, 1 / 4, 1 / 4]),
        ("surviving", "sequence_mean", [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
    ],
)
def test_denominators_after_a_cut(denominator, aggregation, expected):
    log_xi, rows = torch.tensor([0.0, 0.0, ANOMALOUS, 0.0, 0.0, 0.0]), torch.tensor([0, 0, 0, 0, 1, 1])
    mask = torch.ones(6, dtype=torch.bool)
    kept = correct(log_xi, mask, rows, 2, replace(PRESETS["prefix"], denominator=denominator)).kept
    scale = token_scale(kept if denominator == "surviving" else mask, rows, 2, aggregation, max_length=10)
    assert kept.tolist() == [True, True, False, False, True, True]
    assert scale[kept].tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("length", "rejected_from"),
    # Mean counts 0.08, 0.4, 0.8, 3.2 at a hazard of 1e-4. P(N >= 1) = 0.077; P(N >= 1) = 0.33, P(N >= 2) = 0.062;
    # P(N >= 2) = 0.19, P(N >= 3) = 0.047; P(N >= 6) = 0.105, P(N >= 7) = 0.045
    [(800, 1), (4_000, 2), (8_000, 3), (32_000, 7)],
)
def test_how_many_anomalies_a_length_may_have(length, rejected_from):
    for count, accepted in ((rejected_from - 1, True), (rejected_from, False)):
        log_xi = torch.zeros(length)
        log_xi[torch.randperm(length)[:count]] = ANOMALOUS
        rows = torch.zeros(length, dtype=torch.long)
        got = correct(log_xi, torch.ones(length, dtype=torch.bool), rows, 1, PRESETS["hazard"])
        assert got.accepted.tolist() == [accepted]


def test_the_veto_grows_with_length_and_with_a_hazard_it_does_not(generator):
    """At the paper's hazard, 9.1e-5: the veto rejects 31 % at 4k and 95 % at 32k; `hazard` at most 10 % at both."""
    for length, expected in ((4_000, 0.31), (32_000, 0.95)):
        anomalous = torch.rand(100 * length, generator=generator) < 9.1e-5
        log_xi, mask = torch.where(anomalous, ANOMALOUS, 0.0), torch.ones(100 * length, dtype=torch.bool)
        rows = torch.arange(100).repeat_interleave(length)
        veto, hazard = (correct(log_xi, mask, rows, 100, PRESETS[name]).accepted for name in ("sparse_rl", "hazard"))
        assert float((~veto).float().mean()) == pytest.approx(expected, abs=0.2)
        assert float((~hazard).float().mean()) < 0.25
        worse = torch.rand(100 * length, generator=generator) < 2e-3  # twenty times the usual
        log_xi = torch.where(worse, ANOMALOUS, 0.0)
        assert float(correct(log_xi, mask, rows, 100, PRESETS["hazard"]).accepted.float().mean()) < 0.1
