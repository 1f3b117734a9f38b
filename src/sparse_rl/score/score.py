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
    scores: list[DenseScores] = []
    for batch in _batches(rollouts, max_tokens):
        scores += _score(model, batch, temperature)
    return scores


def _score(model: PreTrainedModel, rollouts: list[Rollout], temperature: float) -> list[DenseScores]:
    device = model.device
    boundaries, ids = [0], []
    predicting: list[int] = []
    for rollout in rollouts:
        start, prompt_len, num_tokens = boundaries[-1], len(rollout.prompt.ids), len(rollout.token_ids)
        ids += [*rollout.prompt.ids, *rollout.token_ids.tolist()]
        predicting += range(start + prompt_len - 1, start + prompt_len + num_tokens - 1)
        boundaries.append(len(ids))
    logits_TV = model(
        input_ids=torch.tensor(ids, device=device)[None],
        position_ids=packed_positions(boundaries, device),
        use_cache=False,
        kv=PackedRows(boundaries),
        logits_to_keep=torch.tensor(predicting, device=device),
    ).logits[0]

    scores, start = [], 0
    for rollout in rollouts:
        stop = start + len(rollout.token_ids)
        logprobs_TV = torch.log_softmax(logits_TV[start:stop].float() / (temperature or 1.0), dim=-1)
        top_ids = rollout.top_ids
        scores.append(
            DenseScores(
                dense_logprobs=logprobs_TV.gather(-1, rollout.token_ids.to(device)[:, None])[:, 0].cpu(),
                at_top_ids=None if top_ids is None else logprobs_TV.gather(-1, top_ids.to(device)).cpu(),
            )
        )
        start = stop
    return scores


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
