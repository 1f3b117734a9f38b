# SPDX-License-Identifier: Apache-2.0
"""A batch of rollouts and what is known of their tokens, in one process or several.

Scored and corrected, not yet learnt.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from sparse_rl.objective.correction import Corrected, Correction, correct
from sparse_rl.objective.loss import LossConfig
from sparse_rl.objective.mismatch import TOP, overlap_bounds, overlap_top
from sparse_rl.score.head import TokenScores
from sparse_rl.score.pack import Completions, Microbatch
from sparse_rl.train.processes import Processes
from sparse_rl.types import Rollout

OVERLAPS = ("overlap", "overlap_upper", f"overlap_top{TOP}")


class Batch:
    """Rollouts with what is known of their T completion tokens; dense log-probs are nan until they are `scored`."""

    def __init__(
        self,
        rollouts: list[Rollout],
        completions: Completions,
        advantages: torch.Tensor,
        loss: LossConfig,
        dtype: torch.dtype = torch.float32,  # of dense log-probs
    ) -> None:
        self.rollouts, self.completions, self.advantages, self.loss = rollouts, completions, advantages, loss
        self.rows, self.num_rows, device = completions.rows, len(rollouts), completions.rows.device
        self.dense_logprobs = torch.full_like(completions.sampler_logprobs, math.nan, dtype=dtype)
        names = OVERLAPS if completions.top_ids is not None else ()
        self.overlap = {name: torch.full_like(completions.sampler_logprobs, math.nan) for name in names}
        self.scored = torch.zeros_like(completions.mask)
        self.observed: list[torch.Tensor] = []  # tokens of which only this process knows
        truncated = torch.tensor([rollout.finish_reason == "length" for rollout in rollouts], device=device)
        left_out = truncated & loss.mask_truncated_completions
        self.in_loss = completions.mask & ~left_out[self.rows]
        idle = (left_out | (advantages == 0)) & (loss.beta == 0)
        self.idle, self.working = idle.nonzero()[:, 0].tolist(), (~idle).nonzero()[:, 0].tolist()

    def part(self, members: list[int]) -> Batch:
        """Some of its rollouts, in order, with the dense log-probs that are known."""
        if len(members) == self.num_rows:
            return self
        chosen = torch.tensor(members, device=self.rows.device)
        tokens = torch.isin(self.rows, chosen).nonzero()[:, 0]
        completions = replace(
            self.completions,
            num_rows=len(members),
            token_ids=self.completions.token_ids[tokens],
            rows=torch.searchsorted(chosen, self.rows[tokens]),
            mask=self.completions.mask[tokens],
            sampler_logprobs=self.completions.sampler_logprobs[tokens],
            top_ids=None,
            top_logprobs=None,
        )
        part = Batch([self.rollouts[i] for i in members], completions, self.advantages[chosen], self.loss)
        part.dense_logprobs, part.scored = self.dense_logprobs[tokens], self.scored[tokens]
        return part

    def observe(self, microbatch: Microbatch, scores: TokenScores) -> None:
        """Remember what a forward at the rollout's weights said."""
        if not microbatch.indices:
            return
        tokens, completions = microbatch.tokens.to(self.rows.device), self.completions
        self.observed.append(tokens)
        self.dense_logprobs[tokens], self.scored[tokens] = scores.logprobs.detach(), True
        if completions.top_ids is None or completions.top_logprobs is None or scores.at_ids is None:
            return
        assert scores.top_ids is not None and scores.top_logprobs is not None
        ids, logprobs, num_top = completions.top_ids[tokens], completions.top_logprobs[tokens], scores.top_ids.shape[1]
        lower, upper = overlap_bounds(logprobs, scores.at_ids.detach())
        top = overlap_top(ids[:, :num_top], logprobs[:, :num_top], scores.top_ids, scores.top_logprobs)
        for name, values in zip(OVERLAPS, (lower, upper, top), strict=True):
            self.overlap[name][tokens] = values.float()

    def share(self, processes: Processes) -> None:
        """Tell the other processes what was observed here, and hear what was observed there."""
        if processes.size == 1:
            return
        known, ours = [self.dense_logprobs, *self.overlap.values()], torch.zeros_like(self.completions.mask)
        for tokens in self.observed:
            ours[tokens] = True
        self.observed.clear()
        told = torch.stack([torch.where(ours, values, 0.0) for values in known] + [ours.float()])
        *heard, seen = processes.sum(told)
        for values, there in zip(known, heard, strict=True):
            values.copy_(torch.where(seen > 0, there, values))
        self.scored |= seen > 0

    def correct(self, tokens: torch.Tensor, correction: Correction) -> Corrected:
        """The correction of these tokens; what no forward has seen is left out."""
        seen = self.completions.mask[tokens] & self.scored[tokens]
        log_xi = self.dense_logprobs[tokens] - self.completions.sampler_logprobs[tokens]
        return correct(log_xi, seen, self.rows[tokens], self.num_rows, correction)

    @property
    def tokens(self) -> torch.Tensor:
        return torch.arange(len(self.rows), device=self.rows.device)
