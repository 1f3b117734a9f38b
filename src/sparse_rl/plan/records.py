# SPDX-License-Identifier: Apache-2.0
"""The records of a plan, and the stages of a step at which things are held.

    rollout    weights and optimiser rest, rows decode into the KV pool
    head       the learner has run its layers and works on one chunk of logits
    layers     the backward pass is in the last layer
    embedding  the backward pass is through: the embedding's gradient is added to its fp32 sum

A stage's peak is the sum of its lines. Learning is the worst of the last three.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sparse_rl.kv import KVPolicy

LEARNING = ("head", "layers", "embedding")
ALWAYS = ("rollout", *LEARNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Where it is to run."""

    name: str
    memory: int  # bytes
    cuda: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSize:
    """The settings that decide what a process of a run holds."""

    kv: KVPolicy  # with the largest budget it may come to
    rows: int  # sequences decoded together
    requests: int  # of a step, all processes together
    prompt: int  # tokens of the longest prompt
    completion: int  # most tokens sampled
    max_tokens: int  # of a learner forward
    page_size: int = 64
    pool_pages: int | None = None  # if it is given
    prefill_tokens: int = 8192
    top_logprobs: int = 20
    graphs: bool = True
    activations: Literal["keep", "recompute", "offload"] = "keep"
    moments: Literal["fp32", "8bit"] = "fp32"
    on_host: bool = False  # masters and moments
    reference: bool = False
    lora: int = 0  # parameters of the adapters; 0 trains the model itself
    auto: int = 0  # the smallest budget it may come to, where it moves
    distill: int = 0  # parameters of the sampler's adapter
    merged: bool = False  # it samples from a copy of the projections with the adapter in it
    ranks: int = 1  # processes that share masters, gradients and moments

    @property
    def length(self) -> int:
        """Tokens of the longest sequence."""
        return self.prompt + self.completion

    @property
    def forward_tokens(self) -> int:
        """Tokens of the largest learner forward: a sequence longer than max_tokens goes alone."""
        whole_batch = self.length * -(-self.requests // self.ranks)
        return max(self.length, min(self.max_tokens, whole_batch))

    @property
    def rows_used(self) -> int:
        return min(self.rows, -(-self.requests // self.ranks))

    @property
    def bounded(self) -> bool:
        """Whether the pool stays through learning, as the engine decides it."""
        return self.kv.bound is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """One thing that is held."""

    name: str
    bytes: int
    stages: tuple[str, ...]
    formula: str
    where: Literal["device", "host", "driver"] = "device"  # driver: on the device, but not torch's
