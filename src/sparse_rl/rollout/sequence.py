# SPDX-License-Identifier: Apache-2.0
"""One request on its way: where its cache is, what it has sampled.

When it runs is the scheduler's, when it ends the loop's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from sparse_rl.kv.pages import Holding
from sparse_rl.rollout.rows import Drawn
from sparse_rl.types import FinishReason


@dataclass(slots=True, eq=False)
class Sequence:
    request: int  # number of the request in the call; with the seed it decides the random numbers
    prompt_idx: int
    prompt_len: int
    max_tokens: int

    holding: Holding | None = None  # its pages, while it runs
    row: int = -1  # its query ring, while it runs
    num_entries: int = 0  # physical: entries held per layer and KV head
    num_cut: int = 0  # entries that its last compression left; 0 before the first

    num_drawn: int = 0  # tokens drawn
    num_tokens: int = 0  # of them, those that have come from the device; none after its end
    # What came, and the place of its own in each; no pairs, which a garbage collector would look through meanwhile.
    parts: list[Drawn] = field(default_factory=list)
    places: list[int] = field(default_factory=list)

    key: int = 0  # random key of the request
    held: list[int] = field(default_factory=list)  # entries at each decode step
    read: float = 0.0  # entries that decode steps read so far, mean over layers
    compressed_at: list[int] = field(default_factory=list)  # index of the token drawn in that step; 0 for the prompt
    kept_positions: list[torch.Tensor] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def seen(self) -> int:
        """Logical: tokens that have been through the model, so the position of the newest, which is still to go."""
        return self.prompt_len + self.num_drawn - 1

    def joined(self, what: Literal["tokens", "logprobs", "top_ids", "top_logprobs"]) -> torch.Tensor:
        """What has come from the device, token by token."""
        parts = [getattr(drawn, what)[i] for drawn, i in zip(self.parts, self.places, strict=True)]
        return torch.from_numpy(np.concatenate(parts)[: self.num_tokens])

    def newest(self, count: int) -> list[int]:
        """The last tokens that have come from the device, at most so many, before its end."""
        found: list[list[int]] = []
        for drawn, i in zip(reversed(self.parts), reversed(self.places), strict=True):
            if count <= 0:
                break
            found.append(drawn.tokens[i, -count:].tolist())
            count -= len(found[-1])
        return [token for part in reversed(found) for token in part]

    @property
    def final_entries(self) -> int:
        """Entries a dense cache would hold at the end: the last token is never written."""
        return self.prompt_len + self.max_tokens - 1


@dataclass(slots=True, eq=False)
class HeldPrompt:
    """A prefilled prompt, kept until all its samples have started."""

    prompt_idx: int
    prompt_len: int
    holding: Holding
    num_entries: int
    num_pending: int  # samples not started
    num_cut: int = 0  # entries that a compression left; 0 without one
    queries_LWHD: torch.Tensor | None = None
    logits_V: torch.Tensor | None = None  # of the last prompt token
    compressed_at: list[int] = field(default_factory=list)
    kept_positions: list[torch.Tensor] = field(default_factory=list)

    @property
    def seen(self) -> int:
        return self.prompt_len
