# SPDX-License-Identifier: Apache-2.0
"""From rewards to advantages, one number a rollout. All rollouts of a group count, rejected ones included.

Completions that nobody graded are left out before, in train/trainer.py.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch

Estimator = Literal["grpo", "dr_grpo", "rloo", "remax"]
STD_EPS = 1e-6


def advantages(
    rewards_R: torch.Tensor,
    groups_R: torch.Tensor,  # which group each rollout belongs to, 0 .. num_groups - 1
    estimator: Estimator,
    greedy_rewards: torch.Tensor | None = None,  # remax: reward of each group's greedy rollout
) -> torch.Tensor:
    """A_i, (R,) fp32.

    grpo     (r - mean) / (std + 1e-6) of the group, std with n - 1
    dr_grpo  r - mean
    rloo     r - mean of the others
    remax    r - reward of the greedy rollout of the same prompt
    """
    if estimator not in get_args(Estimator):
        raise ValueError(f"advantage {estimator!r} is unknown; choose one of {', '.join(get_args(Estimator))}.")
    rewards_R = rewards_R.double()  # the fp32 mean of equal rewards is not always those rewards
    if estimator == "remax":
        if greedy_rewards is None:
            raise ValueError("advantage 'remax' needs the reward of a greedy rollout of every prompt.")
        return (rewards_R - greedy_rewards.double()[groups_R]).float()
    num_groups = int(groups_R.max()) + 1
    size = torch.bincount(groups_R, minlength=num_groups).double()  # of each group, as are mean, spread, variance
    zeros = torch.zeros_like(size)
    mean = zeros.index_add(0, groups_R, rewards_R) / size.clamp(min=1)
    spread = zeros.scatter_reduce(0, groups_R, rewards_R, "amax", include_self=False)
    spread = spread - zeros.scatter_reduce(0, groups_R, rewards_R, "amin", include_self=False)
    centred_R = torch.where(spread[groups_R] == 0, 0.0, rewards_R - mean[groups_R])  # equal rewards say nothing
    if estimator == "dr_grpo":
        return centred_R.float()
    if estimator == "rloo":  # r - (sum - r) / (n - 1) = (r - mean) * n / (n - 1)
        return (centred_R * (size / (size - 1).clamp(min=1))[groups_R]).float()
    variance = zeros.index_add(0, groups_R, centred_R**2) / (size - 1).clamp(min=1)
    return (centred_R / (variance.sqrt() + STD_EPS)[groups_R]).float()
