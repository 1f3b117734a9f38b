# SPDX-License-Identifier: Apache-2.0
"""What the dense model says of sampled tokens: one packed forward over prompts and completions, full cache.

The temperature is the sampler's, the vocabulary is whole, so `dense_logprobs - sampler_logprobs` is log xi.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from sparse_rl.model.attention import PackedRows, packed_positions
from sparse_rl.score.head import Head
from sparse_rl.types import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseScores:
    dense_logprobs: torch.Tensor  # (T,) fp32, of the sampled tokens
    at_top_ids: torch.Tensor | None  # (T, k) fp32, at the rollout's own top ids


@torch.no_grad()
def score(
    model: PreTrainedModel, rollouts: list[Rollout], *, temperature: float = 1.0, max_tokens: int = 8192
) -> list[DenseScores]:
    """Dense scores of each rollout, in order, packed into forwards of at most `max_tokens` (or one rollout)."""
    head = Head(model)
    scores: list[DenseScores] = []
    for batch in _batches(rollouts, max_tokens):
        scores += _score(head, batch, temperature)
    return scores


def _score(head: Head, rollouts: list[Rollout], temperature: float) -> list[DenseScores]:
    device = head.model.device
    boundaries, ids = [0], []
    predicting: list[int] = []
    for rollout in rollouts:
        start, prompt_len, num_tokens = boundaries[-1], len(rollout.prompt.ids), len(rollout.token_ids)
        ids += [*rollout.prompt.ids, *rollout.token_ids.tolist()]
        predicting += range(start + prompt_len - 1, start + prompt_len + num_tokens - 1)
        boundaries.append(len(ids))
    inputs = {
        "input_ids": torch.tensor(ids, device=device)[None],
        "position_ids": packed_positions(boundaries, device),
        "use_cache": False,
        "kv": PackedRows(boundaries),
    }
    top_ids = [rollout.top_ids for rollout in rollouts if rollout.top_ids is not None]
    scores = head(
        inputs,
        torch.tensor(predicting, device=device),
        torch.cat([rollout.token_ids for rollout in rollouts]).to(device),
        temperature=temperature or 1.0,
        at_ids=torch.cat(top_ids).to(device) if top_ids else None,
    )
    lengths = [len(rollout.token_ids) for rollout in rollouts]
    logprobs = scores.logprobs.cpu().split(lengths)
    at_top = [None] * len(rollouts) if scores.at_ids is None else scores.at_ids.cpu().split(lengths)
    return [DenseScores(dense_logprobs=a, at_top_ids=b) for a, b in zip(logprobs, at_top, strict=True)]


def _batches(rollouts: list[Rollout], max_tokens: int) -> Iterator[list[Rollout]]:
    batch: list[Rollout] = []
    size = 0
    for rollout in rollouts:
        length = len(rollout.prompt.ids) + len(rollout.token_ids)
        if batch and size + length > max_tokens:
            yield batch
            batch, size = [], 0
        batch.append(rollout)
        size += length
    if batch:
        yield batch
