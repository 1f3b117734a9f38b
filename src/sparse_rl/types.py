# SPDX-License-Identifier: Apache-2.0
"""The records that travel between stages. All are frozen; shapes stand beside each field.

Shape letters: T generated tokens, L layers, K KV heads, S kept cache entries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

FinishReason = Literal["stop", "stop_string", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What a rollout starts from.

    Prompt(text="2+2=", ids=(50, 43, 50, 61), columns={"answer": "4"})
    """

    ids: tuple[int, ...]
    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()  # the chat it was made of, if it was
    columns: dict[str, Any] = field(default_factory=dict)  # what else its dataset row says
    max_tokens: int | None = None  # its own limit, where lower than the sampling settings'


@dataclass(frozen=True, slots=True, kw_only=True)
class KVStats:
    """What one rollout's KV cache held, in entries per layer and KV head.

    A decode step's `held` counts the entries its attention had at hand, its own included. `full` is what the policy
    `full` would have held at the same steps, `hybrid` what transformers' own cache would: in a sliding layer never more
    than the window. Without sliding layers the two are equal. `read` counts the entries that attention was given: all
    that were held, unless the policy chooses among them.
    """

    held: tuple[int, ...]  # one per decode step (the first token comes from the prefill, so T - 1 of them)
    full: int  # sum over decode steps
    hybrid: float  # sum over decode steps, mean over layers
    peak: int  # largest number of entries ever held, prefill included
    peak_bytes: int  # whole pages, with positions and the query ring
    num_compressions: int
    read: float | None = None  # sum over decode steps, mean over layers; None: all that were held

    @property
    def num_read(self) -> float:
        """Entries read, sum over decode steps."""
        return sum(self.held) if self.read is None else self.read

    @property
    def read_frac(self) -> float:
        """Entries read over those that `full` would have read."""
        return self.num_read / self.full if self.full else 1.0

    @property
    def saved_frac(self) -> float:
        """1 - (sum over decode steps of entries held) / (the same for `full`)."""
        return 1.0 - sum(self.held) / self.full if self.full else 0.0

    @property
    def hybrid_saved_frac(self) -> float:
        """The same against transformers' hybrid cache; negative where that would have held less than this one."""
        return 1.0 - sum(self.held) / self.hybrid if self.hybrid else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One sampled completion, with the log-probs of the distribution it was actually sampled from."""

    prompt: Prompt
    sample: int  # which of the prompt's n samples
    token_ids: torch.Tensor  # (T,) int64, the stop id included when there is one
    sampler_logprobs: torch.Tensor  # (T,) fp32, natural log
    completion_mask: torch.Tensor  # (T,) bool; your own code says False of tokens it fed, as a tool's: read, not learnt
    finish_reason: FinishReason
    kv: KVStats
    top_ids: torch.Tensor | None = None  # (T, k) int64, most likely first
    top_logprobs: torch.Tensor | None = None  # (T, k) fp32
    kept_positions: tuple[torch.Tensor, ...] | None = None  # one (L, K, E) int32 a firing
    kept_at: tuple[int, ...] | None = None  # tokens seen at each of them, the prompt's included


def kv_saved_frac(rollouts: list[Rollout]) -> float:
    """1 - entries held / entries `full` would have held, over all decode steps of all rollouts."""
    full = sum(rollout.kv.full for rollout in rollouts)
    return 1.0 - sum(sum(rollout.kv.held) for rollout in rollouts) / full if full else 0.0


def kv_read_frac(rollouts: list[Rollout]) -> float:
    """Entries read / entries `full` would have read, over all decode steps of all rollouts."""
    full = sum(rollout.kv.full for rollout in rollouts)
    return sum(rollout.kv.num_read for rollout in rollouts) / full if full else 1.0
