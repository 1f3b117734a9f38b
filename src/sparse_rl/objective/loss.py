# SPDX-License-Identifier: Apache-2.0
"""The policy loss as a sum over tokens, each already divided by the batch's one denominator.

    rho_t  = pi_theta(o_t) / pi_old(o_t)
    ppo    -min( min(rho, delta) A, clip(rho, 1 - low, 1 + high) A )
    gspo   the same with rho = (prod_t rho_t)^(1/T) of the rollout
    cispo  -stop_gradient( min(rho, cispo_max) ) A log pi_theta
    loss   sum_t scale_t ( weight_t * surrogate_t + beta * k3_t )

`token_scale` counts the denominator before the microbatches, so that their losses add up to the batch's.

Weights, and what they drop, come from `correction.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from sparse_rl.objective.correction import MAX_LOG_RATIO, sum_rows
from sparse_rl.specs import check_choices, refuse_unused

UNREAD = {  # settings by the surrogate that does not read them
    "ppo": ("cispo_max",),
    "gspo": ("cispo_max",),
    "cispo": ("clip_low", "clip_high", "delta"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """The surrogate and how tokens are averaged.

    surrogate: "ppo", "gspo" (a ratio a rollout) or "cispo" (a clipped weight on the log-prob)
    clip_low: how far below 1 the ratio may move the policy
    clip_high: how far above 1 the ratio may move the policy; clip_low, if it is left out
    delta: upper bound of the unclipped ratio (dual clip)
    cispo_max: upper bound of cispo's weight
    beta: coefficient of the KL to the reference model (k3)
    aggregation: "token_mean", "sequence_mean", or "fixed_length" (every rollout divided by the longest allowed)
    mask_truncated_completions: leave out rollouts that ran into the length limit
    """

    surrogate: Literal["ppo", "gspo", "cispo"] = "ppo"
    clip_low: float = 0.2
    clip_high: float | None = None
    delta: float | None = None
    cispo_max: float = 5.0
    beta: float = 0.0
    aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] = "token_mean"
    mask_truncated_completions: bool = False

    def __post_init__(self) -> None:
        check_choices(self, "loss")
        for field in ("clip_low", "clip_high", "beta", "cispo_max"):
            if not (getattr(self, field) or 0.0) >= 0:
                raise ValueError(f"loss.{field} is {getattr(self, field)}; it must be 0 or more.")
        if self.clip_low > 1:
            raise ValueError(f"loss.clip_low is {self.clip_low}; it must be at most 1, which lets the ratio fall to 0.")
        why = f"loss.surrogate is {self.surrogate!r}, which does not read it; leave it out"
        bounds = "(cispo_max bounds cispo; clip_low, clip_high and delta the others)"
        refuse_unused(self, "loss", f"{why} {bounds}", *UNREAD[self.surrogate])
        if self.delta is not None and not self.delta > self.upper:
            raise ValueError(f"loss.delta is {self.delta}; it must be above 1 + loss.clip_high = {self.upper}.")

    @property
    def upper(self) -> float:
        """Ratios above this are clipped."""
        return 1.0 + (self.clip_low if self.clip_high is None else self.clip_high)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    loss: torch.Tensor  # scalar, with gradient
    clipped: torch.Tensor  # (T,) bool: the clip decides the token's gradient
    kl: torch.Tensor | None  # (T,) k3 to the reference, detached


def token_scale(
    counted: torch.Tensor,  # (T,) bool: tokens of the denominator
    rows: torch.Tensor,
    num_rows: int,
    aggregation: str,
    max_length: int,
) -> torch.Tensor:
    """What a token's loss is multiplied by, (T,): 1 over the denominator it belongs to."""
    if aggregation == "token_mean":
        return torch.full(counted.shape, 1.0 / max(int(counted.sum()), 1), device=counted.device)
    if aggregation == "fixed_length":
        return torch.full(counted.shape, 1.0 / (num_rows * max_length), device=counted.device)
    length_R = sum_rows(counted.float(), rows, num_rows).clamp(min=1)
    return 1.0 / (num_rows * length_R[rows])


def policy_loss(
    learner_logprobs: torch.Tensor,  # (T,) with gradient
    dense_logprobs: torch.Tensor,  # (T,) pi_old
    advantages: torch.Tensor,  # (T,) the rollout's, at each of its tokens
    weight: torch.Tensor,  # (T,) of the correction, 0 where dropped
    mask: torch.Tensor,  # (T,) bool: tokens the KL term reads
    scale: torch.Tensor,  # (T,) of `token_scale`
    rows: torch.Tensor,
    num_rows: int,
    config: LossConfig,
    ref_logprobs: torch.Tensor | None = None,
) -> LossOutput:
    """The summed loss of these tokens; `where` keeps what is dropped out of the gradient."""
    used = weight != 0
    log_rho = torch.where(mask, learner_logprobs - dense_logprobs, 0.0)
    if config.surrogate == "gspo":
        mean_R = sum_rows(log_rho, rows, num_rows) / sum_rows(mask.float(), rows, num_rows).clamp(min=1)
        log_rho = mean_R[rows]
    rho = log_rho.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    if config.surrogate == "cispo":
        clipped = rho > config.cispo_max
        surrogate = -rho.clamp(max=config.cispo_max).detach() * advantages * learner_logprobs
    else:
        bounded = rho.clamp(1.0 - config.clip_low, config.upper)
        free = rho if config.delta is None else rho.clamp(max=config.delta)
        clipped = bounded * advantages < free * advantages
        surrogate = -torch.minimum(free * advantages, bounded * advantages)
    token_loss = torch.where(used, weight * surrogate, 0.0)
    kl = None
    if config.beta > 0:
        if ref_logprobs is None:
            raise ValueError("loss.beta is above 0, but there are no log-probs of a reference model.")
        difference = torch.where(mask, ref_logprobs - learner_logprobs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        kl = difference.exp() - difference - 1.0
        token_loss = token_loss + config.beta * kl
        kl = kl.detach()
    return LossOutput(loss=(token_loss * scale).sum(), clipped=(clipped & used).detach(), kl=kl)
