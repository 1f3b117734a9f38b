# SPDX-License-Identifier: Apache-2.0
"""Loss and gradient equal TRL's own `_compute_loss` on the same batch, for every case both have."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from trl.trainer import grpo_trainer

from sparse_rl.objective.loss import LossConfig, policy_loss, token_scale

LONGEST = 9
LENGTHS = [9, 4, 1, 6]


def batch(seed: int):
    generator = torch.Generator().manual_seed(seed)
    size = (len(LENGTHS), LONGEST)
    dense = -3 * torch.rand(size, generator=generator, dtype=torch.float64)
    learner = dense + 0.4 * torch.randn(size, generator=generator, dtype=torch.float64)
    ref = dense + 0.3 * torch.randn(size, generator=generator, dtype=torch.float64)
    advantages = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)
    mask = torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]
    return dense, learner, ref, advantages, mask


def trl_loss(loss_type, level, low, high, delta, beta, seed):
    dense, learner, ref, advantages, mask = batch(seed)
    learner = learner.clone().requires_grad_()
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *args, **kwargs: (learner, torch.zeros_like(learner), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=beta,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=delta, steps_per_generation=1),
        loss_type=loss_type,
        epsilon_low=low,
        epsilon_high=high,
        use_vllm=False,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        max_completion_length=LONGEST,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        accelerator=SimpleNamespace(num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x),
    )
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(LENGTHS), 1, dtype=torch.long),
        "completion_ids": torch.zeros(mask.shape, dtype=torch.long),
        "completion_mask": mask.long(),
        "advantages": advantages,
        "old_per_token_logps": dense,
        "ref_per_token_logps": ref,
        "num_items_in_batch": mask.sum(),
    }
    loss = grpo_trainer.GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    return loss.detach(), learner.grad[mask]


def our_loss(aggregation, surrogate, low, high, delta, beta, seed):
    dense, learner, ref, advantages, mask = batch(seed)
    rows = torch.arange(len(LENGTHS))[:, None].expand_as(mask)[mask]
    learner = learner[mask].clone().requires_grad_()
    everything = torch.ones_like(rows, dtype=torch.bool)
    bounds = {"clip_low": low, "clip_high": high, "delta": delta}
    bounds = {"cispo_max": high} if surrogate == "cispo" else bounds
    config = LossConfig(surrogate=surrogate, beta=beta, aggregation=aggregation, **bounds)
    output = policy_loss(
        learner,
        dense[mask],
        advantages[rows],
        torch.ones_like(learner),
        everything,
        token_scale(everything, rows, len(LENGTHS), aggregation, LONGEST).double(),
        rows,
        len(LENGTHS),
        config,
        ref[mask],
    )
    output.loss.backward()
    return output.loss.detach(), learner.grad


AGGREGATIONS = {"grpo": "sequence_mean", "dr_grpo": "fixed_length", "dapo": "token_mean", "bnpo": "token_mean"}


@pytest.mark.parametrize("beta", [0.0, 0.04])
@pytest.mark.parametrize("delta", [None, 1.5])
@pytest.mark.parametrize(("low", "high"), [(0.2, 0.2), (0.1, 0.28)])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", AGGREGATIONS)
def test_clipped_losses(loss_type, level, low, high, delta, beta):
    for seed in range(3):
        expected, expected_gradient = trl_loss(loss_type, level, low, high, delta, beta, seed)
        surrogate = "ppo" if level == "token" else "gspo"
        loss, gradient = our_loss(AGGREGATIONS[loss_type], surrogate, low, high, delta, beta, seed)
        torch.testing.assert_close(loss, expected, atol=1e-6, rtol=0)
        torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=0)


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_cispo(beta):
    expected, expected_gradient = trl_loss("cispo", "token", 0.2, 1.1, None, beta, 0)
    loss, gradient = our_loss("token_mean", "cispo", 0.2, 1.1, None, beta, 0)
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=0)
