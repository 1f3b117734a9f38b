# SPDX-License-Identifier: Apache-2.0
"""From a batch of rollouts to moved weights: score, correct, loss, backward, in the cheapest order that is right.

    single pass   one update a rollout batch: the training forward's own log-probs, detached, are the dense ones
    score first   several updates, or a correction that needs a statistic of the whole batch: one forward without
                  gradient over everything, then the updates; what was rejected skips its backward

Rollouts whose loss is zero whatever the model says (no advantage, nothing to regularise) skip the backward, and all but
a random sample of them the forward as well; the sample stands for them in the diagnostics.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sparse_rl.objective.correction import Corrected, Correction, correct
from sparse_rl.objective.loss import LossConfig, policy_loss, token_scale
from sparse_rl.objective.mismatch import diagnose, overlap_bounds
from sparse_rl.score.head import TokenScores
from sparse_rl.score.pack import Microbatch, flatten, pack
from sparse_rl.score.score import score_microbatch
from sparse_rl.train.learner import Learner
from sparse_rl.types import Rollout

logger = logging.getLogger(__name__)

SAMPLE_FRAC, SAMPLE_MIN = 0.1, 8  # of the rollouts without a loss, scored for the diagnostics


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateConfig:
    """How a batch of rollouts becomes updates.

    updates_per_rollout: updates in one pass over a rollout batch, each on its share of whole groups
    num_iterations: passes over a rollout batch
    max_tokens: tokens of a learner forward, prompts included
    max_grad_norm: gradients are scaled down to this norm
    score_first: score the batch before learning: a forward more, but rejected rollouts skip their backward
    skip_zero_rows: leave out the forward of rollouts without a loss, but for a sample
    """

    updates_per_rollout: int = 1
    num_iterations: int = 1
    max_tokens: int = 8192
    max_grad_norm: float = 1.0
    score_first: bool = False
    skip_zero_rows: bool = True

    def __post_init__(self) -> None:
        for field in ("updates_per_rollout", "num_iterations", "max_tokens", "max_grad_norm"):
            if not getattr(self, field) > 0:
                raise ValueError(f"update.{field} is {getattr(self, field)}; it must be above 0.")

    @property
    def num_updates(self) -> int:
        """Optimiser steps a rollout batch."""
        return self.updates_per_rollout * self.num_iterations


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """What came of a batch: its metrics, and what the dense model said of each rollout."""

    metrics: dict[str, float]
    dense_logprobs: tuple[torch.Tensor, ...]  # one (T,) a rollout, nan where it was not scored
    accepted: torch.Tensor  # (R,) bool, true where it was not scored


class Batch:
    """Rollouts with what is known of their T completion tokens; dense log-probs are nan until a forward has looked."""

    def __init__(self, rollouts: list[Rollout], advantages: torch.Tensor, loss: LossConfig, device: torch.device):
        self.rollouts, self.advantages = rollouts, advantages.to(device)
        self.completions = flatten(rollouts, device)
        self.rows, self.num_rows = self.completions.rows, len(rollouts)
        self.dense_logprobs = torch.full_like(self.completions.sampler_logprobs, math.nan)
        self.overlap = torch.full_like(self.completions.sampler_logprobs, math.nan)
        truncated = torch.tensor([rollout.finish_reason == "length" for rollout in rollouts], device=device)
        left_out = truncated & loss.mask_truncated_completions
        self.in_loss = self.completions.mask & ~left_out[self.rows]
        idle = (left_out | (self.advantages == 0)) & (loss.beta == 0)
        self.idle, self.working = idle.nonzero()[:, 0].tolist(), (~idle).nonzero()[:, 0].tolist()

    def part(self, members: list[int], loss: LossConfig) -> Batch:
        """Some of its rollouts, with what is known of them."""
        if len(members) == self.num_rows:
            return self
        device = self.rows.device
        part = Batch([self.rollouts[i] for i in members], self.advantages[members], loss, device)
        tokens = torch.cat([(self.rows == i).nonzero()[:, 0] for i in members])
        part.dense_logprobs = self.dense_logprobs[tokens]
        return part

    def observe(self, microbatch: Microbatch, scores: TokenScores) -> None:
        tokens = microbatch.tokens.to(self.rows.device)
        self.dense_logprobs[tokens] = scores.logprobs.detach()
        if scores.at_ids is not None and self.completions.top_logprobs is not None:
            self.overlap[tokens] = overlap_bounds(self.completions.top_logprobs[tokens], scores.at_ids.detach())[0]

    def correct(self, tokens: torch.Tensor, correction: Correction) -> Corrected:
        """The correction of these tokens; what no forward has seen is left out."""
        dense = self.dense_logprobs[tokens]
        seen = self.completions.mask[tokens] & ~dense.isnan()
        log_xi = dense - self.completions.sampler_logprobs[tokens]
        return correct(log_xi, seen, self.rows[tokens], self.num_rows, correction)

    @property
    def tokens(self) -> torch.Tensor:
        return torch.arange(len(self.rows), device=self.rows.device)


def update(
    learner: Learner,
    rollouts: list[Rollout],
    advantages: torch.Tensor,  # (R,)
    groups: list[int],  # which group each rollout belongs to, 0 .. G - 1
    correction: Correction,
    loss: LossConfig,
    config: UpdateConfig,
    *,
    temperature: float,
    max_length: int,  # longest completion allowed
    generator: torch.Generator,  # decides minibatches and the sample of idle rollouts
) -> Updated:
    """Take the batch's updates. One with nothing to learn from, or a gradient that is not finite, changes nothing."""
    batch = Batch(rollouts, advantages, loss, learner.device)
    skip = config.skip_zero_rows and not correction.needs_batch  # a batch statistic runs over every token
    sampled, stands_for = _sample(batch.idle, skip, generator)
    score_first = config.score_first or correction.needs_batch or config.num_updates > 1
    for microbatch in pack(rollouts, config.max_tokens, sampled + batch.working if score_first else sampled):
        with torch.no_grad():
            batch.observe(microbatch, score_microbatch(learner.head, batch.completions, microbatch, temperature))
    results = [
        _optimise(learner, batch.part(members, loss), correction, loss, config, score_first, temperature, max_length)
        for members in _minibatches(groups, config, generator)
    ]
    accepted = batch.correct(batch.tokens, correction).accepted.cpu()
    row_weights = torch.zeros(batch.num_rows)
    row_weights[batch.working] = 1.0
    row_weights[sampled] = stands_for
    metrics = _diagnostics(batch, accepted, row_weights)
    # A share of n idle rows, estimated from m of them, is off by at most 0.5 / sqrt(m), less what m of n already know.
    num_idle, num_sampled = len(batch.idle), max(len(sampled), 1)
    spread = 0.5 * math.sqrt((1 / num_sampled) * (1 - num_sampled / num_idle)) if num_idle > num_sampled else 0.0
    metrics["mismatch/sampling_se"] = spread * num_idle / batch.num_rows
    metrics |= {name: sum(result[name] for result in results) / len(results) for name in results[0]}
    metrics["correction/skipped_updates"] *= len(results)
    metrics["train/working_frac"] = len(batch.working) / batch.num_rows
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    return Updated(metrics=metrics, dense_logprobs=batch.dense_logprobs.cpu().split(lengths), accepted=accepted)


def _minibatches(groups: list[int], config: UpdateConfig, generator: torch.Generator) -> Iterator[list[int]]:
    """The rollouts of each update: whole groups, in a new order every pass."""
    num_groups = max(groups) + 1
    if config.updates_per_rollout > num_groups:
        raise ValueError(
            f"update.updates_per_rollout is {config.updates_per_rollout}, but a rollout batch has {num_groups} groups; "
            "lower it, or sample more prompts a step."
        )
    for _ in range(config.num_iterations):
        if config.updates_per_rollout == 1:
            yield list(range(len(groups)))
            continue
        order = torch.randperm(num_groups, generator=generator)
        for share in order.tensor_split(config.updates_per_rollout):
            chosen = set(share.tolist())
            yield [i for i, group in enumerate(groups) if group in chosen]


def _sample(idle: list[int], skip: bool, generator: torch.Generator) -> tuple[list[int], float]:
    """Which idle rollouts to score all the same, and how many each of them stands for."""
    if not idle:
        return [], 1.0
    count = len(idle) if not skip else min(len(idle), max(SAMPLE_MIN, math.ceil(SAMPLE_FRAC * len(idle))))
    order = torch.randperm(len(idle), generator=generator)[:count].tolist()
    return sorted(idle[i] for i in order), len(idle) / count


def _optimise(
    learner: Learner,
    batch: Batch,
    correction: Correction,
    loss: LossConfig,
    config: UpdateConfig,
    scored: bool,
    temperature: float,
    max_length: int,
) -> dict[str, float]:
    """One optimiser step on the batch."""
    corrected = batch.correct(batch.tokens, correction)
    counted = batch.in_loss & corrected.kept if correction.denominator == "surviving" else batch.in_loss
    scale = token_scale(counted, batch.rows, batch.num_rows, loss.aggregation, max_length)
    working = batch.working
    if scored and loss.beta == 0:  # rejected rollouts have nothing to learn from
        accepted = corrected.accepted.tolist()
        working = [i for i in working if accepted[i]]
    learner.masters.zero_grad()
    totals = torch.zeros(5, dtype=torch.float64, device=batch.rows.device)  # loss, clipped, kl, tokens, used
    for microbatch in pack(batch.rollouts, config.max_tokens, working):
        tokens = microbatch.tokens.to(batch.rows.device)
        scores = score_microbatch(learner.head, batch.completions, microbatch, temperature)
        if scored:
            weight = corrected.weight[tokens]
        else:
            batch.observe(microbatch, scores)
            weight = batch.correct(tokens, correction).weight
        reference = None
        if loss.beta > 0 and learner.ref_head is not None:
            with torch.no_grad():
                reference = score_microbatch(learner.ref_head, batch.completions, microbatch, temperature).logprobs
        weight = torch.where(batch.in_loss[tokens], weight, 0.0)
        output = policy_loss(
            scores.logprobs,
            batch.dense_logprobs[tokens],
            batch.advantages[batch.rows[tokens]],
            weight,
            counted[tokens],
            scale[tokens],
            batch.rows[tokens],
            batch.num_rows,
            loss,
            reference,
        )
        output.loss.backward()
        used = (weight != 0) | (counted[tokens] & (loss.beta > 0))
        kl = output.kl.sum() if output.kl is not None else totals.new_zeros(())
        parts = [output.loss.detach(), output.clipped.sum(), kl, batch.in_loss[tokens].sum(), used.sum()]
        totals += torch.stack([part.double() for part in parts])
    total_loss, clipped, total_kl, num_tokens, used_tokens = totals.tolist()
    if batch.working and not used_tokens:
        logger.warning(
            "all %d rollouts with a loss were rejected or masked: this update changes nothing.", len(batch.working)
        )
    metrics = {"loss": total_loss, "clip_ratio/region_mean": clipped / max(num_tokens, 1.0)}
    if loss.beta > 0:
        metrics["kl"] = total_kl / max(num_tokens, 1.0)
    return metrics | learner.step(config.max_grad_norm, skip=not used_tokens)


def _diagnostics(batch: Batch, accepted: torch.Tensor, row_weights: torch.Tensor) -> dict[str, float]:
    """The mismatch of all rollouts, from those that were scored."""
    scored = row_weights > 0
    rows = batch.rows.cpu()
    mask = batch.completions.mask.cpu() & scored[rows]
    metrics = {"mismatch/coverage": float(scored.float().mean())}
    if not bool(mask.any()):
        return metrics
    overlap = batch.overlap.cpu()
    log_xi = (batch.dense_logprobs - batch.completions.sampler_logprobs).cpu()
    metrics |= diagnose(log_xi, mask, rows, row_weights, None if bool(overlap[mask].isnan().any()) else overlap)
    rejected = (row_weights * ~accepted).sum() / row_weights.sum()
    return metrics | {"correction/rejection_rate": float(rejected)}
