# SPDX-License-Identifier: Apache-2.0
"""Advantages, every correction preset and every aggregation against numbers worked out by hand."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from sparse_rl.objective.advantage import advantages
from sparse_rl.objective.correction import PRESETS, Correction, correct
from sparse_rl.objective.loss import LossConfig, policy_loss, token_scale

REWARDS, GROUPS = torch.tensor([1.0, 0.0, 0.0, 1.0, 1.0, 1.0]), torch.tensor([0, 0, 0, 0, 1, 1])


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        # group 0: mean 1/2, squared deviations sum to 1, so std = sqrt(1/3); group 1: all equal
        ("grpo", [0.5 / 3**-0.5, -0.5 / 3**-0.5, -0.5 / 3**-0.5, 0.5 / 3**-0.5, 0.0, 0.0]),
        ("dr_grpo", [0.5, -0.5, -0.5, 0.5, 0.0, 0.0]),
        # the others' mean: 1/3 for a right one, 2/3 for a wrong one
        ("rloo", [2 / 3, -2 / 3, -2 / 3, 2 / 3, 0.0, 0.0]),
        ("remax", [0.0, -1.0, -1.0, 0.0, 0.75, 0.75]),
    ],
)
def test_advantages(estimator, expected):
    got = advantages(REWARDS, GROUPS, estimator, torch.tensor([1.0, 0.25]))
    torch.testing.assert_close(got, torch.tensor(expected), atol=1e-5, rtol=0)


def test_the_constant_is_added_to_the_deviation_and_not_to_the_variance():
    """Rewards 0, 0.001 and 0.002 have a deviation of 0.001: 0.001 / (0.001 + 1e-6) = 0.999, not 0.707."""
    got = advantages(torch.tensor([0.0, 0.001, 0.002]), torch.zeros(3, dtype=torch.long), "grpo")
    assert got.tolist() == pytest.approx([-1 / 1.001, 0.0, 1 / 1.001], abs=1e-5)


def test_a_group_of_one_has_no_advantage():
    for estimator in ("grpo", "dr_grpo", "rloo"):
        assert advantages(torch.tensor([1.0]), torch.tensor([0]), estimator).tolist() == [0.0]


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_equal_rewards_give_exactly_no_advantage(estimator):
    for reward, count in product((0.7, 0.1, 100.1), (3, 6, 16)):
        assert not advantages(torch.full((count,), reward), torch.zeros(count, dtype=torch.long), estimator).any()


def test_unknown_advantage():
    with pytest.raises(ValueError, match="choose one of"):
        advantages(REWARDS, GROUPS, "gpo")


# Two rollouts: xi = (0.8, 1.6, 0.4) and (1.2, 5e-5, 1.0).
XI = [0.8, 1.6, 0.4, 1.2, 5e-5, 1.0]
ROWS = torch.tensor([0, 0, 0, 1, 1, 1])
MEAN_RELEASE = (0.8 + 1.5 + 0.4 + 1.2 + 5e-5 + 1.0) / 6

BY_HAND = {
    "none": ([1, 1, 1, 1, 1, 1], [True, True]),
    "sparse_rl": ([0.8, 1.6, 0.4, 0, 0, 0], [True, False]),
    "strict": ([0.8, 1.6, 0.4, 0, 0, 0], [True, False]),
    "bounded": ([0.8, 0, 0, 0, 0, 0], [True, False]),
    "sparse_rl_release": ([0.8 / MEAN_RELEASE, 0, 0, 0, 0, 0], [True, False]),
    "prefix": ([0.8, 1.6, 0.4, 1.2, 0, 0], [True, True]),
    "mask": ([0.8, 1.6, 0.4, 1.2, 0, 1.0], [True, True]),
    # One of 3 tokens: 1 - exp(-3e-4) = 0.0003 is under 0.1, far more than chance gives.
    "hazard": ([0.8, 1.6, 0.4, 0, 0, 0], [True, False]),
    "reject_only": ([1, 1, 1, 0, 0, 0], [True, False]),
    "reweight_only": (XI, [True, True]),
    "tis": ([0.8, 1.6, 0.4, 1.2, 5e-5, 1.0], [True, True]),
    "icepop": ([0.8, 1.6, 0, 1.2, 0, 1.0], [True, True]),
    # geometric means 0.8 and 0.039: both far outside
    "geometric": ([0, 0, 0, 0, 0, 0], [False, False]),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_presets(preset):
    weight, accepted = BY_HAND[preset]
    corrected = correct(torch.tensor(XI).log(), torch.ones(6, dtype=torch.bool), ROWS, 2, PRESETS[preset])
    torch.testing.assert_close(corrected.weight, torch.tensor(weight, dtype=torch.float32), atol=1e-6, rtol=1e-5)
    assert corrected.accepted.tolist() == accepted
    assert corrected.kept.tolist() == [w != 0 for w in weight]


def test_strict_rejects_what_the_paper_lets_pass():
    log_xi, mask, rows = torch.tensor([5e-3, 1.0, 2e-2]).log(), torch.ones(3, dtype=torch.bool), torch.tensor([0, 0, 1])
    accepted = {
        name: correct(log_xi, mask, rows, 2, PRESETS[name]).accepted.tolist() for name in ("sparse_rl", "strict")
    }
    assert accepted == {"sparse_rl": [True, True], "strict": [False, True]}


def test_bounds_truncate_and_mask_at_every_level():
    log_xi, mask = torch.tensor([0.5, 2.0, 4.0, 0.25]).log(), torch.ones(4, dtype=torch.bool)
    rows = torch.tensor([0, 0, 1, 1])

    def weights(**fields):
        return correct(log_xi, mask, rows, 2, Correction(**fields)).weight.tolist()

    assert weights(lower=0.4, upper=1.5) == pytest.approx([0.5, 1.5, 1.5, 0.4])
    assert weights(level="sequence", upper=1.0) == pytest.approx([1.0, 1.0, 1.0, 1.0])  # both products are 1
    assert weights(level="geometric", lower=0.9, upper=1.1, action="mask") == pytest.approx([1.0] * 4)
    assert weights(level="token", lower=0.4, upper=3.0, action="mask") == pytest.approx([0.5, 2.0, 0.0, 0.0])


def test_a_bound_of_sequences_forgets_no_veto():
    """One rollout has an anomalous token and a product within the bound, one neither, one a product above it."""
    log_xi, rows = torch.tensor([5e-3, 4.0, 1.0, 2.0, 4.0, 4.0]).log(), torch.tensor([0, 0, 1, 1, 2, 2])
    correction = Correction(level="sequence", upper=10, action="mask", veto=1e-2)
    corrected = correct(log_xi, torch.ones(6, dtype=torch.bool), rows, 3, correction)
    assert corrected.accepted.tolist() == [False, True, False]
    assert corrected.weight.tolist() == pytest.approx([0, 0, 2, 2, 0, 0])


def test_a_rollouts_ratio_is_its_tokens_product_or_geometric_mean():
    xi, rows = torch.tensor([0.5, 2.0, 8.0, 7.0]), torch.tensor([0, 1, 1, 1])
    mask = torch.tensor([True, True, True, False])
    for level, expected in (("sequence", [0.5, 16.0, 16.0]), ("geometric", [0.5, 4.0, 4.0])):
        weight = correct(xi.log(), mask, rows, 2, Correction(level=level)).weight
        assert weight[mask].tolist() == pytest.approx(expected)


def test_extreme_and_broken_ratios_stay_finite():
    """Weights are clamped, the veto is not; nan rejects; masked tokens do not matter."""
    log_xi = torch.tensor([500.0, -500.0, float("nan"), float("nan"), 0.0])
    mask = torch.tensor([True, True, True, False, True])
    rows = torch.tensor([0, 1, 2, 3, 3])
    corrected = correct(log_xi, mask, rows, 4, PRESETS["sparse_rl"])
    assert corrected.accepted.tolist() == [True, False, False, True]
    assert corrected.weight.tolist() == pytest.approx([math.exp(20.0), 0.0, 0.0, 0.0, 1.0])
    assert corrected.weight.isfinite().all()


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [("token_mean", [1 / 4] * 4), ("sequence_mean", [1 / 6, 1 / 6, 1 / 6, 1 / 2]), ("fixed_length", [1 / 20] * 4)],
)
def test_token_scale(aggregation, expected):
    rows = torch.tensor([0, 0, 0, 1])
    scale = token_scale(torch.ones(4, dtype=torch.bool), rows, 2, aggregation, max_length=10)
    assert scale.tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("token_mean", 1 / 2), ("sequence_mean", 1 / 4), ("fixed_length", 1 / 20)]
)
def test_a_rollout_with_nothing_counted_is_still_one_of_them(aggregation, expected):
    counted, rows = torch.tensor([True, True, False]), torch.tensor([0, 0, 1])
    scale = token_scale(counted, rows, 2, aggregation, max_length=10)
    assert scale[counted].tolist() == pytest.approx([expected] * 2)


def test_policy_loss_by_hand():
    # rho = 1.5 with A = 1 is clipped at 1.2; rho = 0.5 with A = -1 is clipped at 0.8; rho = 1 is free.
    learner = torch.tensor([1.5, 0.5, 1.0]).log().requires_grad_()
    advantages_T, weight = torch.tensor([1.0, -1.0, 2.0]), torch.tensor([2.0, 1.0, 0.5])
    output = policy_loss(
        learner, torch.zeros(3), advantages_T, weight, torch.ones(3, dtype=torch.bool), torch.full((3,), 0.25),
        torch.tensor([0, 0, 1]), 2, LossConfig(),
    )  # fmt: skip
    # -(2 * 1.2 * 1 + 1 * 0.8 * -1 + 0.5 * 1 * 2) / 4 = -0.65
    assert output.loss.item() == pytest.approx(-0.65)
    assert output.clipped.tolist() == [True, True, False]
    output.loss.backward()
    assert learner.grad.tolist() == pytest.approx([0.0, 0.0, -0.25])


def test_a_sequences_ratio_is_the_mean_of_its_unmasked_tokens():
    # (1.21 * 1)^(1/2) = 1.1 where the third token is not the sampler's; -(1.1 + 1.1) / 2
    learner = torch.tensor([1.21, 1.0, 9.0]).log()
    output = policy_loss(
        learner, torch.zeros(3), torch.ones(3), torch.tensor([1.0, 1.0, 0.0]), torch.tensor([True, True, False]),
        torch.full((3,), 0.5), torch.zeros(3, dtype=torch.long), 1, LossConfig(surrogate="gspo"),
    )  # fmt: skip
    assert output.loss.item() == pytest.approx(-1.1)


def test_tokens_that_are_dropped_are_not_counted_as_clipped():
    learner = torch.tensor([1.5, 1.5]).log()
    output = policy_loss(
        learner, torch.zeros(2), torch.ones(2), torch.tensor([0.0, 1.0]), torch.ones(2, dtype=torch.bool),
        torch.ones(2), torch.tensor([0, 1]), 2, LossConfig(),
    )  # fmt: skip
    assert output.clipped.tolist() == [False, True]


def test_dropped_tokens_have_no_gradient_even_if_broken():
    learner = torch.tensor([0.0, float("nan"), float("inf")], requires_grad=True)
    weight, rows = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0, 1, 1])
    output = policy_loss(
        learner, torch.zeros(3), torch.ones(3), weight, torch.tensor([True, False, False]), torch.ones(3), rows, 2,
        LossConfig(),
    )  # fmt: skip
    output.loss.backward()
    assert output.loss.item() == -1.0 and learner.grad.tolist() == [-1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Correction(lower=2.0, upper=1.0), "above correction.upper"),
        (lambda: Correction(veto=-1.0), "correction.veto"),
        (lambda: Correction(veto=2.0), "correction.veto is 2.0; it must be below 1"),
        (lambda: LossConfig(clip_low=-0.1), "loss.clip_low"),
        (lambda: LossConfig(clip_low=3), "loss.clip_low is 3; it must be at most 1"),
        (lambda: LossConfig(delta=1.1), "loss.delta"),
        (lambda: LossConfig(cispo_max=3), "loss.cispo_max is given, but loss.surrogate is 'ppo', which does not"),
        (lambda: LossConfig(surrogate="gspo", cispo_max=3), "loss.cispo_max is given, but loss.surrogate is 'gspo'"),
        (lambda: LossConfig(surrogate="cispo", clip_low=0.1), "loss.clip_low is given, but loss.surrogate is 'cispo'"),
        (lambda: LossConfig(surrogate="cispo", clip_high=3), "loss.clip_high is given, but"),
        (lambda: LossConfig(surrogate="cispo", delta=1.1), "loss.delta is given, but loss.surrogate is 'cispo'"),
        (lambda: LossConfig(aggregation="token-mean"), "loss.aggregation is 'token-mean'; choose one of token_mean"),
        (lambda: LossConfig(surrogate="grpo"), "loss.surrogate"),
        (lambda: Correction(level="seq"), "correction.level"),
        (lambda: Correction(weight=False, level="geometric"), "correction.level is geometric, which changes nothing"),
        (lambda: Correction(action="mask", lower=0.0, upper=math.inf), "correction.action is mask, which changes"),
        (lambda: Correction(weight=False, normalize=True), "correction.normalize is true, which changes nothing"),
        (lambda: Correction(upper=2.0, denominator="surviving"), "correction.denominator is surviving, which changes"),
        (lambda: Correction(denominator="survivors"), "correction.denominator"),
        (lambda: Correction(veto=1e-4, drops="suffix"), "correction.drops is 'suffix'; choose one of rollout, rest"),
        (lambda: Correction(drops="rest"), "correction.drops is rest, but nothing is anomalous; set correction.veto"),
        (lambda: Correction(hazard=1e-4), "correction.hazard is 0.0001, but nothing is anomalous"),
        (lambda: Correction(veto=1e-4, hazard=-1.0), "correction.hazard is -1.0"),
        (lambda: Correction(veto=1e-4, hazard=1e-4, drops="token"), "leave one of them out"),
    ],
)
def test_bad_settings_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_bounds_without_weights_to_truncate_are_refused():
    with pytest.raises(ValueError, match=r"correction.weight is false"):
        Correction(weight=False, upper=2.0)
    assert Correction(weight=False, lower=0.0, upper=float("inf")).weight is False
    assert Correction(weight=False, upper=2.0, action="mask").upper == 2.0
