# SPDX-License-Identifier: Apache-2.0
"""A clock on a call of the engine: tokens, seconds and entries between two of its steps.

The device is waited for at the two ends only, so that measuring does not slow what is measured.

Which window it looks for is decided in work.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from sparse_rl.bench.work import Window
from sparse_rl.rollout import Engine, Progress, Sampling
from sparse_rl.types import Prompt, Rollout

FULL = 0.9  # of the rows: refills leave a few empty at times


class _Enough(Exception):
    """Ends a call of the engine from within."""


@dataclass(frozen=True, slots=True)
class Mark:
    seconds: float
    steps: int  # decoded, tokens on their way to the host included
    tokens: int  # that have reached the host
    read: float


def _nothing(*_: object) -> None:
    pass


class Meter:
    """Watches a call; with `cut` it ends the call when the window does, with `exact` all rows have to be in flight."""

    def __init__(
        self,
        window: Window,
        rows: int,
        device: torch.device,
        *,
        cut: bool = False,
        exact: bool = False,
        show: Callable[[Progress], None] = _nothing,
        on_open: Callable[[], None] = _nothing,
        on_close: Callable[[], None] = _nothing,
    ) -> None:
        self.window, self.rows, self.device = window, rows, device
        self.cut, self.exact = cut, exact
        self.show, self.on_open, self.on_close = show, on_open, on_close
        self.first: Mark | None = None
        self.second: Mark | None = None
        self.last: Progress | None = None
        self.peak_pages = 0

    def step(self, progress: Progress) -> None:
        self.show(progress)
        self.last = progress
        self.peak_pages = max(self.peak_pages, progress.pages_used)
        filled = progress.num_rows >= (1.0 if self.exact else FULL) * self.rows
        if self.first is None:
            if filled and progress.num_tokens >= self.window.start * self.rows:
                self.first = self._mark(progress)
                self.on_open()
            elif self.cut and progress.num_tokens >= (self.window.start + self.window.steps) * self.rows:
                self._give_up(progress)
        elif self.second is None and progress.num_tokens >= self.first.tokens + self.window.steps * self.rows:
            if self.cut and not filled:
                self._give_up(progress)
            self.second = self._mark(progress)
            self.on_close()
            if self.cut:
                raise _Enough

    def _give_up(self, progress: Progress) -> None:
        if not self.exact:
            raise _Enough
        raise ValueError(
            f"only {progress.num_rows} of {self.rows} rows are in flight: the pool's {progress.num_pages} pages hold "
            "no more; give a larger --engine.pool_bytes or fewer --rows."
        )

    def _mark(self, progress: Progress) -> Mark:
        synchronize(self.device)
        return Mark(time.perf_counter(), progress.num_steps, progress.num_tokens, progress.read_so_far)

    @property
    def closed(self) -> bool:
        return self.second is not None

    @property
    def marks(self) -> tuple[Mark, Mark]:
        assert self.first is not None and self.second is not None
        return self.first, self.second

    @property
    def seconds(self) -> float:
        """Of the window, like the next two."""
        first, second = self.marks
        return second.seconds - first.seconds

    @property
    def steps(self) -> int:
        first, second = self.marks
        return second.steps - first.steps

    @property
    def entries(self) -> float:
        """Cache entries a row and step read, mean over layers."""
        first, second = self.marks
        return (second.read - first.read) / (second.tokens - first.tokens)

    @property
    def saved_frac(self) -> float:
        """Of everything up to the last step."""
        assert self.last is not None
        return 1.0 - self.last.held_so_far / self.last.full_so_far if self.last.full_so_far else 0.0

    @property
    def read_frac(self) -> float:
        """The same for entries read, mean over layers, of those a dense cache would read."""
        assert self.last is not None
        return self.last.read_so_far / self.last.full_so_far if self.last.full_so_far else 1.0


def run(engine: Engine, prompts: list[Prompt], sampling: Sampling, meter: Meter) -> tuple[list[Rollout], float]:
    """The call's rollouts (none if it was cut) and its seconds."""
    synchronize(meter.device)
    began = time.perf_counter()
    try:
        rollouts = engine.generate(prompts, sampling, on_step=meter.step)
    except _Enough:
        rollouts = []
    synchronize(meter.device)
    return rollouts, time.perf_counter() - began


def run_until(engine: Engine, prompts: list[Prompt], sampling: Sampling, *, unfinished: int) -> list[Rollout]:
    """What finishes until only this many requests are left."""
    finished: list[Rollout] = []

    def step(progress: Progress) -> None:
        if progress.num_requests - progress.num_finished <= unfinished:
            raise _Enough

    with suppress(_Enough):
        engine.generate(prompts, sampling, on_step=step, on_rollout=finished.append)
    return finished


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
