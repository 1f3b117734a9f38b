# SPDX-License-Identifier: Apache-2.0
"""What the dense model says of sampled tokens: packed forwards over prompts and completions, full cache.

The temperature is the sampler's, the vocabulary is whole, so `dense_logprobs - sampler_logprobs` is log xi.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from sparse_rl.score.head import Head, TokenScores
from sparse_rl.score.pack import Microbatch, pack
from sparse_rl.types import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseScores:
    dense_logprobs: torch.Tensor  # (T,) fp32, of the sampled tokens
    at_top_ids: torch.Tensor | None  # (T, k) fp32, at the rollout's own top ids


def score_microbatch(head: Head, microbatch: Microbatch, temperature: float) -> TokenScores:
    """Scores of a microbatch's completion tokens on the model's device: the learner's with gradient, else the dense."""
    device = head.model.device
    return head(
        microbatch.inputs(device),
        microbatch.predicting.to(device),
        microbatch.token_ids.to(device),
        temperature=temperature or 1.0,  # greedy reports its log-prob at temperature 1
        at_ids=None if microbatch.top_ids is None else microbatch.top_ids.to(device),
    )


@torch.no_grad()
def score(
    model: PreTrainedModel, rollouts: list[Rollout], *, temperature: float = 1.0, max_tokens: int = 8192
) -> list[DenseScores]:
    """Dense scores of each rollout, in order."""
    head = Head(model)
    scores: dict[int, DenseScores] = {}
    for microbatch in pack(rollouts, max_tokens):
        tokens = score_microbatch(head, microbatch, temperature)
        lengths = [len(rollouts[i].token_ids) for i in microbatch.indices]
        logprobs = tokens.logprobs.cpu().split(lengths)
        at_top = [None] * len(lengths) if tokens.at_ids is None else tokens.at_ids.cpu().split(lengths)
        for i, dense, at in zip(microbatch.indices, logprobs, at_top, strict=True):
            scores[i] = DenseScores(dense_logprobs=dense, at_top_ids=at)
    return [scores[i] for i in range(len(rollouts))]
