# SPDX-License-Identifier: Apache-2.0
"""One optimiser step from a batch of rollouts: score, correct, loss, backward, in the cheapest order that is right.

    single pass   the training forward's own log-probs, detached, are the dense ones: no extra forward
    score first   when a batch is used for several steps, or the correction needs a statistic of the whole batch:
                  one forward without gradient over everything, then the steps

Rollouts whose loss is zero whatever the model says (no advantage, nothing to regularise) skip the backward, and all but
a random sample of them the forward as well; the sample stands for them in the diagnostics.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import torch

from sparse_rl.objective.correction import Corrected, Correction, correct
from sparse_rl.objective.loss import LossConfig, policy_loss, token_scale
from sparse_rl.objective.mismatch import diagnose, overlap_bounds
from sparse_rl.score.head import Head
from sparse_rl.score.pack import Completions, Microbatch, flatten, pack
from sparse_rl.score.score import score_microbatch
from sparse_rl.train.master import MasterWeights
from sparse_rl.types import Rollout

logger = logging.getLogger(__name__)

SAMPLE_FRAC, SAMPLE_MIN = 0.1, 8  # of the rollouts without a loss, scored for the diagnostics


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateConfig:
    """How a batch becomes a step.

    max_tokens: tokens of a learner forward, prompts included
    max_grad_norm: gradients are scaled down to this norm
    skip_zero_rows: leave out the forward of rollouts without a loss, but for a sample
    """

    max_tokens: int = 8192
    max_grad_norm: float = 1.0
    skip_zero_rows: bool = True

    def __post_init__(self) -> None:
        for field in ("max_tokens", "max_grad_norm"):
            if getattr(self, field) <= 0:
                raise ValueError(f"update.{field} is {getattr(self, field)}; it must be above 0.")


class Learner:
    """The module, its fp32 masters and its optimiser."""

    def __init__(self, head: Head, optimizer: torch.optim.Optimizer, masters: MasterWeights) -> None:
        self.head = head
        self.optimizer = optimizer
        self.masters = masters


@dataclass(slots=True)
class Observed:
    """What forwards showed of a batch's tokens; nan where none looked."""

    dense_logprobs: torch.Tensor  # (T,)
    overlap: torch.Tensor  # (T,)
    accepted: torch.Tensor  # (R,) bool
    weights: torch.Tensor  # (R,) in the diagnostics: 0 not scored, else 1 over the chance of being scored


def update(
    learner: Learner,
    rollouts: list[Rollout],
    advantages: torch.Tensor,  # (R,)
    correction: Correction,
    loss: LossConfig,
    config: UpdateConfig,
    *,
    temperature: float,
    max_length: int,  # longest completion allowed
    generator: torch.Generator,
    dense_logprobs: torch.Tensor | None = None,  # (T,) at the rollout's weights, if this is not the first step
    ref_head: Head | None = None,
) -> dict[str, float]:
    """Take one step; returns its metrics. Nothing moves if no rollout has a loss or the gradient is not finite."""
    head = learner.head
    batch = flatten(rollouts, head.model.device)
    device = batch.rows.device
    advantages = advantages.to(device)
    truncated = torch.tensor([rollout.finish_reason == "length" for rollout in rollouts], device=device)
    left_out = truncated & loss.mask_truncated_completions
    idle = left_out | (advantages == 0) if loss.beta == 0 else torch.zeros_like(left_out)
    working = (~idle).nonzero()[:, 0].tolist()
    skip = config.skip_zero_rows and not correction.needs_batch  # a batch statistic runs over every token
    sampled, sample_weight = _sample(idle.nonzero()[:, 0].tolist(), skip, generator)

    observed = Observed(
        dense_logprobs=torch.full_like(batch.sampler_logprobs, math.nan),
        overlap=torch.full_like(batch.sampler_logprobs, math.nan),
        accepted=torch.ones(batch.num_rows, dtype=torch.bool, device=device),
        weights=torch.zeros(batch.num_rows, device=device),
    )
    observed.weights[working] = 1.0
    observed.weights[sampled] = sample_weight
    score_first = correction.needs_batch or dense_logprobs is not None
    if dense_logprobs is not None:  # scored already; the overlap was the first step's to measure
        observed.dense_logprobs = dense_logprobs.to(device)
        observed.weights.fill_(1.0)
    else:
        for microbatch in pack(rollouts, config.max_tokens, sampled + working if score_first else sampled):
            with torch.no_grad():
                scores = score_microbatch(head, batch, microbatch, temperature)
            _observe(observed, batch, microbatch, scores.logprobs, scores.at_ids)
    corrected = _correct(observed, batch, torch.arange(len(batch.rows), device=device), correction)
    in_loss = batch.mask & ~left_out[batch.rows]
    counted = in_loss & corrected.kept if correction.denominator == "surviving" else in_loss
    scale = token_scale(counted, batch.rows, batch.num_rows, loss.aggregation, max_length)

    learner.masters.zero_grad()
    totals = {"loss": 0.0, "clipped": 0.0, "kl": 0.0, "tokens": 0.0, "used": 0.0}
    for microbatch in pack(rollouts, config.max_tokens, working):
        tokens = microbatch.tokens.to(device)
        scores = score_microbatch(head, batch, microbatch, temperature)
        if not score_first:
            _observe(observed, batch, microbatch, scores.logprobs.detach(), scores.at_ids)
            part = _correct(observed, batch, tokens, correction)
        else:
            part = Corrected(weight=corrected.weight[tokens], kept=corrected.kept[tokens], accepted=corrected.accepted)
        reference = None
        if loss.beta > 0 and ref_head is not None:
            with torch.no_grad():
                reference = score_microbatch(ref_head, batch, microbatch, temperature).logprobs
        weight = torch.where(in_loss[tokens], part.weight, 0.0)
        output = policy_loss(
            scores.logprobs,
            observed.dense_logprobs[tokens],
            advantages[batch.rows[tokens]],
            weight,
            counted[tokens],
            scale[tokens],
            batch.rows[tokens],
            batch.num_rows,
            loss,
            reference,
        )
        output.loss.backward()
        observed.accepted[list(microbatch.indices)] = part.accepted[list(microbatch.indices)]
        totals["loss"] += float(output.loss.detach())
        totals["clipped"] += float(output.clipped.sum())
        totals["kl"] += float(output.kl.sum()) if output.kl is not None else 0.0
        totals["tokens"] += float(in_loss[tokens].sum())
        totals["used"] += float(((weight != 0) | (counted[tokens] & (loss.beta > 0))).sum())
    observed.accepted[idle] = corrected.accepted[idle]

    metrics = _diagnostics(observed, batch)
    metrics["train/loss"] = totals["loss"]
    metrics["train/clip_frac"] = totals["clipped"] / max(totals["tokens"], 1.0)
    if loss.beta > 0:
        metrics["train/kl_ref"] = totals["kl"] / max(totals["tokens"], 1.0)
    metrics["train/working_frac"] = len(working) / len(rollouts)
    if working and not totals["used"]:
        logger.warning("all %d rollouts with a loss were rejected or masked: this step changes nothing.", len(working))
    return metrics | _step(learner, config.max_grad_norm, skip=not totals["used"])


def _sample(idle: list[int], skip: bool, generator: torch.Generator) -> tuple[list[int], float]:
    """Which idle rollouts to score all the same, and how many each of them stands for."""
    if not idle:
        return [], 1.0
    count = len(idle) if not skip else min(len(idle), max(SAMPLE_MIN, math.ceil(SAMPLE_FRAC * len(idle))))
    order = torch.randperm(len(idle), generator=generator)[:count].tolist()
    return sorted(idle[i] for i in order), len(idle) / count


def _observe(
    observed: Observed,
    batch: Completions,
    microbatch: Microbatch,
    logprobs: torch.Tensor,
    at_top_ids: torch.Tensor | None,
) -> None:
    tokens = microbatch.tokens.to(logprobs.device)
    observed.dense_logprobs[tokens] = logprobs.detach()
    if at_top_ids is not None and batch.top_logprobs is not None:
        observed.overlap[tokens] = overlap_bounds(batch.top_logprobs[tokens], at_top_ids.detach())[0]


def _correct(observed: Observed, batch: Completions, tokens: torch.Tensor, correction: Correction) -> Corrected:
    """The correction of these tokens; what no forward has seen is left out."""
    dense = observed.dense_logprobs[tokens]
    seen = batch.mask[tokens] & ~dense.isnan()
    return correct(dense - batch.sampler_logprobs[tokens], seen, batch.rows[tokens], batch.num_rows, correction)


def _diagnostics(observed: Observed, batch: Completions) -> dict[str, float]:
    scored = observed.weights > 0
    mask = batch.mask & scored[batch.rows]
    metrics = {"mismatch/coverage": float(scored.float().mean())}
    if not bool(mask.any()):
        return metrics
    overlap = None if bool(observed.overlap[mask].isnan().any()) else observed.overlap.cpu()
    log_xi = observed.dense_logprobs - batch.sampler_logprobs
    metrics |= diagnose(log_xi.cpu(), mask.cpu(), batch.rows.cpu(), observed.weights.cpu(), overlap)
    rejected = (observed.weights * ~observed.accepted).sum() / observed.weights.sum()
    return metrics | {"correction/rejection_rate": float(rejected)}


def _step(learner: Learner, max_grad_norm: float, *, skip: bool) -> dict[str, float]:
    """Clip, step, publish. A gradient that is not finite moves nothing."""
    if skip:
        return {"train/grad_norm": 0.0, "train/skipped": 1.0}
    norm = float(torch.nn.utils.clip_grad_norm_(learner.masters.masters, max_grad_norm))
    if not math.isfinite(norm):
        logger.warning("the gradient norm is %s: this step changes nothing.", norm)
        learner.masters.zero_grad()
        return {"train/grad_norm": norm, "train/skipped": 1.0}
    learner.optimizer.step()
    learner.masters.publish()
    return {"train/grad_norm": norm, "train/skipped": 0.0}
