# SPDX-License-Identifier: Apache-2.0
"""From a batch of rollouts to moved weights: score, correct, loss, backward, in the cheapest order that is right.

    single pass   one update a rollout batch: the training forward's own log-probs, detached, are the dense ones
    score first   several updates, or a correction that needs a statistic of the whole batch: one forward without
                  gradient over everything, then the updates; what was rejected skips its backward

Rollouts whose loss is zero whatever the model says (no advantage, nothing to regularise) skip the backward, and all but
a random sample of them the forward as well; the sample stands for them in the diagnostics.

The formulas are in objective/loss.py and objective/correction.py, the optimiser in `learner.py`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from sparse_rl.objective.correction import Corrected, Correction
from sparse_rl.objective.loss import LossConfig, policy_loss, token_scale
from sparse_rl.objective.mismatch import TOP, diagnose
from sparse_rl.score.pack import Microbatch, flatten
from sparse_rl.score.score import score_microbatch
from sparse_rl.specs import check_choices
from sparse_rl.train.batch import OVERLAPS, Batch
from sparse_rl.train.guards import BadUpdate, Guards, optimizer_memory
from sparse_rl.train.layers import Activations, learner_layers
from sparse_rl.train.learner import Learner
from sparse_rl.train.shares import deal
from sparse_rl.types import Rollout

logger = logging.getLogger(__name__)

SAMPLE_FRAC, SAMPLE_MIN = 0.1, 8  # of the rollouts without a loss, scored for the diagnostics
Losses = list[tuple[tuple[int, ...], torch.Tensor]]  # of an update's microbatches, with their rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateConfig:
    """How a batch of rollouts becomes updates.

    updates_per_rollout: updates in one pass over a rollout batch, each on its share of whole groups
    num_iterations: passes over a rollout batch
    max_tokens: tokens of a learner forward, prompts included
    max_grad_norm: gradients are scaled down to this norm; .inf is off
    score_first: score the batch before learning: a forward more, but rejected rollouts skip their backward
    skip_zero_rows: leave out the forward of rollouts without a loss, but for a sample
    activations: what a layer keeps for its backward pass: "keep" (all), "recompute" or "offload" (to host memory)
    compile: compile the decoder layers on a GPU; takes up to a minute once, and a C compiler
    """

    updates_per_rollout: int = 1
    num_iterations: int = 1
    max_tokens: int = 8192
    max_grad_norm: float = 1.0
    score_first: bool = False
    skip_zero_rows: bool = True
    activations: Activations = "keep"
    compile: bool = True

    def __post_init__(self) -> None:
        check_choices(self, "update")
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
    overlap: tuple[torch.Tensor, ...]  # likewise, what both sides have in their top lists; none if that is unknown
    row_weights: torch.Tensor  # (R,) how many rollouts each stands for, 0 where it was not scored
    accepted: torch.Tensor  # (R,) bool, true where it was not scored
    bad: tuple[BadUpdate, ...] = ()  # whose loss or gradient was not finite


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
    guards: Guards | None = None,
) -> Updated:
    """Take the batch's updates. One with nothing to learn from, or that is not finite, changes nothing.

    Until the first has been taken the guards may stop it; what does not fit into memory they try again in smaller bits.
    """
    guards, first_update = guards or Guards(), learner.num_updates
    wide = torch.promote_types(learner.head.model.dtype, torch.float32)
    batch = Batch(rollouts, flatten(rollouts, learner.device), advantages.to(learner.device), loss, wide)
    num_top = 0 if batch.completions.top_ids is None else min(TOP, batch.completions.top_ids.shape[1])
    skip = config.skip_zero_rows and not correction.needs_batch  # a batch statistic runs over every token
    sampled, stands_for = _sample(batch.idle, skip, generator)
    score_first = config.score_first or correction.needs_batch or config.num_updates > 1

    def check() -> None:
        if learner.num_updates == first_update:
            guards.check_together()

    step = Step(
        correction=correction,
        config=config,
        temperature=temperature,
        max_length=max_length,
        num_top=num_top,
        scored=score_first,
        check=check,
    )
    results: list[dict[str, float]] = []
    bad: list[BadUpdate] = []
    compiles = config.compile and learner.device.type == "cuda"
    with learner_layers(learner.head.model, config.activations, compiles=compiles):
        look = partial(_score, learner, batch, step, sampled + batch.working if score_first else sampled)
        guards.fit(look, config.max_tokens, rollouts, learner)
        for i, members in enumerate(_minibatches(groups, config, generator)):
            part = batch.part(members)
            learn = partial(_optimise, learner, part, step)
            result, losses = guards.fit(learn, config.max_tokens, part.rollouts, learner)
            results.append(result)
            if not math.isfinite(result["loss"] + result["grad_norm"]):
                bad.append(_bad_update(i, members, part, result, losses))
    learner.masters.to_sampler()
    corrected = batch.correct(batch.tokens, correction)
    row_weights = torch.zeros(batch.num_rows)
    row_weights[batch.working] = 1.0
    row_weights[sampled] = stands_for
    metrics = _diagnostics(batch, corrected, row_weights)
    metrics["mismatch/sampling_se"] = _sampling_se(len(batch.idle), len(sampled)) * len(batch.idle) / batch.num_rows
    metrics |= {name: sum(result[name] for result in results) / len(results) for name in results[0]}
    metrics["correction/skipped_updates"] *= len(results)
    metrics["update/nonfinite"] = len(bad)
    metrics["update/max_tokens"] = guards.part("update", config.max_tokens)
    metrics["train/working_frac"] = len(batch.working) / batch.num_rows
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    return Updated(
        metrics=metrics,
        dense_logprobs=batch.dense_logprobs.float().cpu().split(lengths),
        overlap=batch.overlap[OVERLAPS[-1]].cpu().split(lengths) if batch.overlap else (),
        row_weights=row_weights,
        accepted=corrected.accepted.cpu(),
        bad=tuple(bad),
    )


def _bad_update(update: int, members: list[int], batch: Batch, result: dict[str, float], losses: Losses) -> BadUpdate:
    """With what went into it; lists go over its rollouts, that of microbatches over these."""
    rollouts, dense = batch.rollouts, batch.dense_logprobs.cpu()
    contents = {
        "microbatches": [(list(rows), float(loss)) for rows, loss in losses],
        "completion_mask": [rollout.completion_mask for rollout in rollouts],
        "sampler_logprobs": [rollout.sampler_logprobs for rollout in rollouts],
        "dense_logprobs": [part.clone() for part in dense.split([len(r.token_ids) for r in rollouts])],
        "advantages": batch.advantages.cpu(),
    }
    loss, norm = result["loss"], result["grad_norm"]
    return BadUpdate(loss=loss, grad_norm=norm, rows=rollouts, update=update, members=members, contents=contents)


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


def _sampling_se(num_idle: int, num_sampled: int) -> float:
    """Standard error, at most, of a share of the idle rows estimated from a sample without replacement."""
    if num_idle <= num_sampled:
        return 0.0
    return 0.5 * math.sqrt((num_idle - num_sampled) / ((num_idle - 1) * num_sampled))


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What all updates of a batch have in common."""

    correction: Correction
    config: UpdateConfig
    temperature: float
    max_length: int
    num_top: int  # of the model's own, for overlap
    scored: bool  # the dense log-probs are known
    check: Callable[[], None]  # called where it may stop


def _score(learner: Learner, batch: Batch, step: Step, chosen: list[int], max_tokens: int) -> None:
    """What the model says of some rollouts before it learns."""
    for microbatch in deal(batch.rollouts, max_tokens, chosen, learner.processes):
        step.check()
        with torch.no_grad():
            scores = score_microbatch(
                learner.head, batch.completions, microbatch, step.temperature, at_top=True, num_top=step.num_top
            )
        batch.observe(microbatch, scores)
    batch.share(learner.processes)


def _optimise(learner: Learner, batch: Batch, step: Step, max_tokens: int) -> tuple[dict[str, float], Losses]:
    """One optimiser step on the batch: its metrics, and the losses that were summed."""
    correction, loss = step.correction, batch.loss
    corrected = batch.correct(batch.tokens, correction)
    counted = batch.in_loss & corrected.kept if correction.denominator == "surviving" else batch.in_loss
    scale = token_scale(counted, batch.rows, batch.num_rows, loss.aggregation, step.max_length)
    working = batch.working
    if step.scored and loss.beta == 0:  # rejected rollouts have nothing to learn from
        accepted = corrected.accepted.tolist()
        working = [i for i in working if accepted[i]]
    working = learner.processes.by_first(lambda: working)  # a sum that another GPU rounded otherwise decides nothing
    learner.masters.zero_grad()
    losses: Losses = []
    totals = torch.zeros(4, dtype=torch.float64, device=batch.rows.device)  # loss, clipped, kl, used
    for microbatch in deal(batch.rollouts, max_tokens, working, learner.processes):
        step.check()
        parts = _backward(learner, batch, step, microbatch, corrected.weight, counted, scale)
        totals += parts
        if microbatch.indices:
            losses.append((microbatch.indices, parts[0]))
    batch.share(learner.processes)
    learner.processes.sum(totals)
    counts = torch.stack([batch.in_loss.sum(), counted.sum()]).double()
    total_loss, clipped, total_kl, used_tokens, in_loss, num_counted = torch.cat([totals, counts]).tolist()
    if not batch.working and bool((batch.advantages != 0).any()):
        logger.warning("all rollouts with an advantage ran into the length limit and are masked: nothing is learnt.")
    if batch.working and not used_tokens:
        logger.warning(
            "all %d rollouts with a loss, of %d, were rejected or masked: this update changes nothing.",
            len(batch.working),
            batch.num_rows,
        )
    metrics = {"loss": total_loss, "clip_ratio/region_mean": clipped / max(in_loss, 1.0)}
    if loss.beta > 0:
        metrics["kl"] = total_kl / max(num_counted, 1.0)
    skip = not used_tokens or not math.isfinite(total_loss)
    with optimizer_memory():
        return metrics | learner.step(step.config.max_grad_norm, skip=skip), losses


def _backward(
    learner: Learner,
    batch: Batch,
    step: Step,
    microbatch: Microbatch,
    weight: torch.Tensor,  # (T,) of the correction, if the batch was scored
    counted: torch.Tensor,  # (T,) bool: tokens of the denominator
    scale: torch.Tensor,  # (T,) of `token_scale`
) -> torch.Tensor:
    """Add a microbatch's gradient; returns its loss, clipped tokens, KL and tokens used, (4,) fp64."""
    loss, tokens = batch.loss, microbatch.tokens.to(batch.rows.device)
    num_top = 0 if step.scored else step.num_top
    scores = score_microbatch(
        learner.head, batch.completions, microbatch, step.temperature, at_top=num_top > 0, num_top=num_top
    )
    if not microbatch.indices:
        (scores.logprobs.sum() * 0.0).backward()
        return torch.zeros(4, dtype=torch.float64, device=tokens.device)
    if step.scored:
        weight = weight[tokens]
    else:
        batch.observe(microbatch, scores)
        weight = batch.correct(tokens, step.correction).weight
    reference = None
    if loss.beta > 0 and learner.ref_head is not None:
        with torch.no_grad():
            reference = score_microbatch(learner.ref_head, batch.completions, microbatch, step.temperature).logprobs
    weight, counted = torch.where(batch.in_loss[tokens], weight, 0.0), counted[tokens]
    output = policy_loss(
        scores.logprobs,
        batch.dense_logprobs[tokens],
        batch.advantages[batch.rows[tokens]],
        weight,
        counted,
        scale[tokens],
        batch.rows[tokens],
        batch.num_rows,
        loss,
        reference,
    )
    output.loss.backward()
    used = (weight != 0) | (counted & (loss.beta > 0))
    kl = output.kl.sum() if output.kl is not None else torch.zeros_like(output.loss)
    return torch.stack([part.detach().double() for part in (output.loss, output.clipped.sum(), kl, used.sum())])


def _diagnostics(batch: Batch, corrected: Corrected, row_weights: torch.Tensor) -> dict[str, float]:
    """The mismatch of all rollouts, from those that were scored."""
    row_weights = row_weights.to(batch.rows.device)
    scored = row_weights > 0
    mask = batch.completions.mask & scored[batch.rows]
    metrics = {"mismatch/coverage": float(scored.float().mean())}
    if not bool(mask.any()):
        return metrics
    log_xi = batch.dense_logprobs - batch.completions.sampler_logprobs
    metrics |= diagnose(log_xi, mask, batch.rows, row_weights, batch.overlap)
    rejected = (row_weights * ~corrected.accepted).sum() / row_weights.sum()
    weights = row_weights[batch.rows[mask]]
    dropped = (weights * ~corrected.kept[mask]).sum() / weights.sum()
    return metrics | {"correction/rejection_rate": float(rejected), "correction/dropped_frac": float(dropped)}
