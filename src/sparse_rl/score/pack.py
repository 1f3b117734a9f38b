# SPDX-License-Identifier: Apache-2.0
"""Rollouts side by side in one row: what a learner's forward takes, under a token budget, without padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sparse_rl.model.attention import PackedRows, packed_positions
from sparse_rl.types import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Some rollouts of a batch, packed. T is the number of their completion tokens.

    Two rollouts with prompts of 2 and 1 tokens and completions of 2 and 1:
        ids = [p, p, o, o, p, o]   boundaries = [0, 4, 6]   predicting = [1, 2, 4]   rows = [0, 0, 1]
    """

    indices: tuple[int, ...]  # of the rollouts in the batch
    ids: torch.Tensor  # prompts and completions
    boundaries: list[int]
    predicting: torch.Tensor  # (T,) positions whose next token is a completion token
    token_ids: torch.Tensor  # (T,) those tokens
    rows: torch.Tensor  # (T,) which of `indices` each belongs to
    mask: torch.Tensor  # (T,) bool, tokens the sampler chose
    sampler_logprobs: torch.Tensor  # (T,)
    top_ids: torch.Tensor | None  # (T, k)
    top_logprobs: torch.Tensor | None  # (T, k)

    def inputs(self, device: torch.device) -> dict[str, Any]:
        """Keywords of the module's forward."""
        return {
            "input_ids": self.ids.to(device)[None],
            "position_ids": packed_positions(self.boundaries, device),
            "use_cache": False,
            "kv": PackedRows(self.boundaries),
        }

    @property
    def num_rows(self) -> int:
        return len(self.indices)


def pack(rollouts: list[Rollout], max_tokens: int, indices: list[int] | None = None) -> list[Microbatch]:
    """Microbatches of at most `max_tokens` tokens each (a longer rollout goes alone), longest rollouts first."""
    chosen = list(range(len(rollouts))) if indices is None else indices
    lengths = {i: len(rollouts[i].prompt.ids) + len(rollouts[i].token_ids) for i in chosen}
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(chosen, key=lambda i: (-lengths[i], i)):  # first fit, decreasing
        fits = next((b for b, left in enumerate(room) if lengths[i] <= left), None)
        if fits is None:
            bins.append([i])
            room.append(max_tokens - lengths[i])
        else:
            bins[fits].append(i)
            room[fits] -= lengths[i]
    return [_microbatch(rollouts, sorted(members)) for members in bins]


def _microbatch(rollouts: list[Rollout], indices: list[int]) -> Microbatch:
    boundaries, ids = [0], []
    predicting: list[int] = []
    rows: list[int] = []
    chosen = [rollouts[i] for i in indices]
    for row, rollout in enumerate(chosen):
        start, prompt_len, num_tokens = boundaries[-1], len(rollout.prompt.ids), len(rollout.token_ids)
        ids += [*rollout.prompt.ids, *rollout.token_ids.tolist()]
        predicting += range(start + prompt_len - 1, start + prompt_len + num_tokens - 1)
        rows += [row] * num_tokens
        boundaries.append(len(ids))
    with_top = all(rollout.top_ids is not None for rollout in chosen)
    return Microbatch(
        indices=tuple(indices),
        ids=torch.tensor(ids),
        boundaries=boundaries,
        predicting=torch.tensor(predicting),
        token_ids=torch.cat([rollout.token_ids for rollout in chosen]),
        rows=torch.tensor(rows),
        mask=torch.cat([rollout.completion_mask for rollout in chosen]),
        sampler_logprobs=torch.cat([rollout.sampler_logprobs for rollout in chosen]),
        top_ids=torch.cat([r.top_ids for r in chosen if r.top_ids is not None]) if with_top else None,
        top_logprobs=torch.cat([r.top_logprobs for r in chosen if r.top_logprobs is not None]) if with_top else None,
    )
