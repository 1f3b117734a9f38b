# SPDX-License-Identifier: Apache-2.0
"""Memory that runs out: what that looks like, and an engine that goes on with less at once.

For what nobody foresaw; what a run needs is `plan`'s, and how large the cache is made the engine's.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from sparse_rl.kv import KVPolicy
from sparse_rl.model.load import LoadedModel
from sparse_rl.rollout.engine import Engine, EngineConfig
from sparse_rl.rollout.sampler import Sampling
from sparse_rl.types import Prompt, Rollout

logger = logging.getLogger(__name__)

SMALLER_ROLLOUT = (
    "give a smaller engine.pool_bytes or engine.max_prefill_tokens, a smaller KV budget, or fewer max_tokens"
)


def out_of_memory(error: BaseException | None) -> bool:
    """Whether the error, or what it was raised from, is memory that ran out on a GPU or the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if error is None:
        return False
    said = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return (isinstance(error, RuntimeError) and any(text in str(error) for text in said)) or out_of_memory(
        error.__cause__
    )


def free(device: torch.device) -> None:
    """Give memory back that nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def alone() -> bool:
    """Whether one process is the whole run. With several, one that goes its own way leaves the others waiting."""
    return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


class Memory:
    """How often memory ran out, by stage: a stage then does half as much at once, from there on."""

    def __init__(self) -> None:
        self.halved: dict[str, int] = {}

    def part(self, stage: str, whole: int) -> int:
        """What is left of a number that was halved as often as the stage ran out of memory."""
        return max(1, whole >> self.halved.get(stage, 0))

    def halve(self, stage: str, device: torch.device) -> None:
        self.halved[stage] = self.halved.get(stage, 0) + 1
        free(device)


class GuardedEngine(Engine):
    """An engine that goes on with half the rows, and half the prefill, where they do not fit into memory.

    Engines of one stage share what was halved.
    """

    def __init__(self, loaded: LoadedModel, kv: KVPolicy, config: EngineConfig, memory: Memory, stage: str) -> None:
        super().__init__(loaded, kv, config)
        self.given, self.memory, self.stage = config, memory, stage

    def generate(
        self,
        prompts: Sequence[Prompt | str | Sequence[int]],
        sampling: Sampling | None = None,
        *,
        on_restart: Callable[[], None] | None = None,
        **more: Any,
    ) -> list[Rollout]:
        """As an engine does; `on_restart` hears that all of it begins anew, rollouts that were given out included."""
        while True:
            self._shrink()
            try:
                return super().generate(prompts, sampling, **more)
            except (RuntimeError, MemoryError, ValueError) as error:
                self._check_hope(error)
            if on_restart is not None:
                on_restart()
            # Out here nothing holds on to the frames of the error, and what they hold can be freed.
            self.cache = None
            self.decoders.clear()
            in_use = min(self.config.rows, len(prompts) * (sampling.n if sampling is not None else 1))
            while self.config.rows >= max(in_use, 2):  # rows without a sample take no memory to speak of
                self.memory.halve(self.stage, self.loaded.shape.device)
                self._shrink()
            logger.warning(
                "out of memory while sampling (%s): it starts over, and engine.rows is %d, "
                "engine.max_prefill_tokens %d from here on.",
                self.stage,
                self.config.rows,
                self.config.max_prefill_tokens,
            )

    def _check_hope(self, error: Exception) -> None:
        """Raise the error if fewer rows are no remedy, or one that names another."""
        if not out_of_memory(error):
            raise error
        pool_given = self.given.pool_pages is not None or self.given.pool_bytes is not None
        if isinstance(error, ValueError) and pool_given:
            raise error  # it says so itself, and fewer rows would not make the pool smaller
        if self.config.rows == 1:
            raise ValueError(f"out of memory while sampling ({self.stage}); {SMALLER_ROLLOUT}.") from error

    def _shrink(self) -> None:
        rows = self.memory.part(self.stage, self.given.rows)
        tokens = self.memory.part(self.stage, self.given.max_prefill_tokens)
        self.config = replace(self.config, rows=rows, max_prefill_tokens=tokens)
