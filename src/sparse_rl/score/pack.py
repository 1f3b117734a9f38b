# SPDX-License-Identifier: Apache-2.0
"""Rollouts side by side: all their completion tokens as one flat record, and rows for the learner's forward.

A batch's completion tokens stand one after the other, rollout by rollout; T counts them. What is known of a token
(its log-probs, its weight, its share of the denominator) is a flat (T,) tensor. A microbatch is some rollouts packed
into one row without padding; it says which of the T tokens it predicts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sparse_rl.model.attention import PackedRows, no_mask, packed_positions
from sparse_rl.types import Prompt, Rollout


class Packable(Protocol):
    """What a row can be packed from: a rollout, or a completion somebody wrote."""

    @property
    def prompt(self) -> Prompt: ...

    @property
    def token_ids(self) -> torch.Tensor: ...  # (T,) of the completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """The completion tokens of R rollouts."""

    num_rows: int
    token_ids: torch.Tensor  # (T,) int64
    rows: torch.Tensor  # (T,) which rollout
    mask: torch.Tensor  # (T,) bool, tokens the sampler chose
    sampler_logprobs: torch.Tensor  # (T,) fp32
    top_ids: torch.Tensor | None  # (T, k) int64, the sampler's most likely
    top_logprobs: torch.Tensor | None  # (T, k) fp32


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Some rollouts of a batch in one row.

    Two rollouts with prompts of 2 and 1 tokens and completions of 2 and 1:
        ids = [p, p, o, o, p, o]   boundaries = [0, 4, 6]   predicting = [1, 2, 4]   tokens = [0, 1, 2]
    """

    indices: tuple[int, ...]  # which rollouts
    ids: torch.Tensor  # prompts and completions
    boundaries: list[int]
    predicting: torch.Tensor  # places in the row whose next token is a completion token
    tokens: torch.Tensor  # which of the batch's T completion tokens those are

    def inputs(self, device: torch.device) -> dict[str, Any]:
        """Keywords of the module's forward."""
        return {
            "input_ids": self.ids.to(device)[None],
            "attention_mask": no_mask(device),
            "position_ids": packed_positions(self.boundaries, device),
            "use_cache": False,
            "kv": PackedRows(self.boundaries),
        }


def flatten(rollouts: list[Rollout], device: torch.device) -> Completions:
    """All completion tokens of the rollouts, in order."""
    lengths = torch.tensor([len(rollout.token_ids) for rollout in rollouts])
    top_ids = [rollout.top_ids for rollout in rollouts if rollout.top_ids is not None]
    top_logprobs = [rollout.top_logprobs for rollout in rollouts if rollout.top_logprobs is not None]
    if len(top_ids) not in (0, len(rollouts)):
        raise ValueError(f"{len(top_ids)} of {len(rollouts)} rollouts have top log-probs; all or none must.")
    return Completions(
        num_rows=len(rollouts),
        token_ids=torch.cat([rollout.token_ids for rollout in rollouts]).to(device),
        rows=torch.arange(len(rollouts)).repeat_interleave(lengths).to(device),
        mask=torch.cat([rollout.completion_mask for rollout in rollouts]).to(device),
        sampler_logprobs=torch.cat([rollout.sampler_logprobs for rollout in rollouts]).to(device),
        top_ids=torch.cat(top_ids).to(device) if top_ids else None,
        top_logprobs=torch.cat(top_logprobs).to(device) if top_logprobs else None,
    )


def pack(rollouts: Sequence[Packable], max_tokens: int, chosen: list[int] | None = None) -> list[Microbatch]:
    """The chosen rollouts (all, if none are named) in microbatches of at most `max_tokens`; a longer one goes alone."""
    chosen = list(range(len(rollouts))) if chosen is None else chosen
    lengths = {i: len(rollouts[i].prompt.ids) + len(rollouts[i].token_ids) for i in chosen}
    bins: list[list[int]] = []
    room: list[int] = []
    for i in sorted(chosen, key=lambda i: (-lengths[i], i)):  # first fit, longest first
        fits = next((b for b, left in enumerate(room) if lengths[i] <= left), None)
        if fits is None:
            bins.append([i])
            room.append(max_tokens - lengths[i])
        else:
            bins[fits].append(i)
            room[fits] -= lengths[i]
    first_token = torch.tensor([0, *(len(rollout.token_ids) for rollout in rollouts)]).cumsum(0).tolist()
    return [_microbatch(rollouts, sorted(members), first_token) for members in bins]


def _microbatch(rollouts: Sequence[Packable], indices: list[int], first_token: list[int]) -> Microbatch:
    boundaries = [0]
    ids: list[torch.Tensor] = []
    predicting: list[torch.Tensor] = []
    tokens: list[torch.Tensor] = []
    for i in indices:
        prompt_ids, token_ids = rollouts[i].prompt.ids, rollouts[i].token_ids
        start = boundaries[-1] + len(prompt_ids) - 1
        ids += [torch.tensor(prompt_ids), token_ids]
        predicting.append(torch.arange(start, start + len(token_ids)))
        tokens.append(torch.arange(first_token[i], first_token[i + 1]))
        boundaries.append(start + 1 + len(token_ids))
    return Microbatch(
        indices=tuple(indices),
        ids=torch.cat(ids),
        boundaries=boundaries,
        predicting=torch.cat(predicting),
        tokens=torch.cat(tokens),
    )
