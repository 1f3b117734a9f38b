# SPDX-License-Identifier: Apache-2.0
"""What the dense model says of sampled tokens: packed forwards over prompts and completions, full cache.

The temperature is the sampler's, the vocabulary is whole, so `dense_logprobs - sampler_logprobs` is log xi.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import transformers

from sparse_rl.score.head import Head, TokenScores
from sparse_rl.score.pack import Completions, Microbatch, flatten, pack
from sparse_rl.types import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseScores:
    dense_logprobs: torch.Tensor  # (T,) fp32, of the sampled tokens
    at_top_ids: torch.Tensor | None  # (T, k) fp32, at the rollout's own top ids


def score_microbatch(
    head: Head,
    completions: Completions,
    microbatch: Microbatch,
    temperature: float,
    *,
    at_top: bool = False,
    num_top: int = 0,
) -> TokenScores:
    """Scores of a microbatch's tokens: the learner's, with gradient where it is enabled, else the dense ones.

    For overlap also scores at the sampler's top ids (`at_top`), and `num_top` top ids of the model's own.
    """
    device = completions.rows.device
    tokens = microbatch.tokens.to(device)
    return head(
        microbatch.inputs(device),
        microbatch.predicting.to(device),
        completions.token_ids[tokens],
        temperature=temperature or 1.0,  # greedy reports its log-prob at temperature 1
        at_ids=completions.top_ids[tokens] if at_top and completions.top_ids is not None else None,
        num_top=num_top,
    )


@torch.no_grad()
def score(
    model: transformers.PreTrainedModel, rollouts: list[Rollout], *, temperature: float = 1.0, max_tokens: int = 8192
) -> list[DenseScores]:
    """Dense scores of each rollout, in order, from forwards of at most `max_tokens` (or one rollout)."""
    head, completions = Head(model), flatten(rollouts, model.device)
    logprobs = torch.zeros_like(completions.sampler_logprobs)
    at_top = None if completions.top_logprobs is None else torch.zeros_like(completions.top_logprobs)
    for microbatch in pack(rollouts, max_tokens):
        scores = score_microbatch(head, completions, microbatch, temperature, at_top=True)
        logprobs[microbatch.tokens] = scores.logprobs.float()
        if at_top is not None and scores.at_ids is not None:
            at_top[microbatch.tokens] = scores.at_ids
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    per_rollout = logprobs.cpu().split(lengths)
    top_per_rollout = [None] * len(rollouts) if at_top is None else at_top.cpu().split(lengths)
    return [
        DenseScores(dense_logprobs=dense, at_top_ids=top)
        for dense, top in zip(per_rollout, top_per_rollout, strict=True)
    ]
