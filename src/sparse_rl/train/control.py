# SPDX-License-Identifier: Apache-2.0
"""Holding the sampler as close to the dense model as asked for, by moving the budget while training.

Each bin of context lengths has a budget of its own on a geometric grid. A step says which share of the bin's tokens is
bad: overlap under the target (a share of 5 % is a 5th percentile at the target), or xi under 1e-4. With enough of them
a budget passes or fails. While it is not known where the two meet, a bin goes down by one or two grid steps and up by
up to four; then it stays at the cheapest that passed. It leaves that upwards if it fails by more than a tenth, and
tries the next cheaper one if it has long been twice as good as asked for, less and less often if that fails.

Budgets do not fall with length: a bin uses no less than those before it. Where a policy evicts, what a shorter context
lost a longer one cannot get back: a bin that fails with twice the budget of the one before it lifts that one instead.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, Literal

import torch

from sparse_rl.calibrate.search import with_budget
from sparse_rl.kv import EvictPolicy, KVPolicy
from sparse_rl.kv.schedule import Schedule
from sparse_rl.objective.correction import check_choices
from sparse_rl.objective.tail import BinTail, tails
from sparse_rl.train.update import Updated
from sparse_rl.types import Rollout

logger = logging.getLogger(__name__)

UP, DOWN = 4, 2  # most grid steps at once
ENOUGH = 10  # bad tokens expected at the limit before a budget is judged
SLACK, SPARE = 1.1, 0.5  # of the limit: a held budget fails above the one, and may be lowered below the other
WAIT, LONGEST_WAIT = 20, 320  # judgements of a held budget between two tries of a cheaper one


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlConfig:
    """What is measured by context length, and how the budget follows it.

    auto: move kv.budget, from where it stands, to hold the target; kv.budget auto is the same from the policy's default
    statistic: what is held: the "tail" of overlap at target, or the "hazard", the share of tokens with xi < 1e-4
    target: overlap that all but a share `quantile` of the tokens should have, on the scale of overlap_top20
    quantile: the share of tokens that may have less
    hazard: share of tokens that may have xi < 1e-4 (only with statistic hazard)
    bin: tokens of context a bin
    every: steps between two measurements; 0 never measures
    patience: measurements before a budget is judged
    smallest: smallest budget of the grid
    largest: largest budget of the grid
    budgets: how many there are, each the same factor above the one before
    multiple: they are multiples of this, pages say
    """

    auto: bool = False
    statistic: Literal["tail", "hazard"] = "tail"
    target: float = 0.86
    quantile: float = 0.05
    hazard: float = 1e-4
    bin: int = 2000
    every: int = 1
    patience: int = 2
    smallest: int = 256
    largest: int = 16384
    budgets: int = 18
    multiple: int = 16

    def __post_init__(self) -> None:
        check_choices(self, "control")
        for field in ("target", "quantile", "hazard"):
            if not 0.0 < getattr(self, field) < 1.0:
                raise ValueError(f"control.{field} is {getattr(self, field)}; it must be above 0 and below 1.")
        for field in ("bin", "patience", "smallest", "multiple"):
            if getattr(self, field) < 1:
                raise ValueError(f"control.{field} is {getattr(self, field)}; it must be at least 1.")
        if self.every < 0 or (self.auto and not self.every):
            raise ValueError(f"control.every is {self.every}; it must be at least 0, and with control.auto at least 1.")
        if self.budgets < 2 or self.largest <= self.smallest:
            raise ValueError(
                f"control.budgets is {self.budgets}, from control.smallest {self.smallest} to control.largest "
                f"{self.largest}; give at least 2, the largest above the smallest."
            )
        if len(self.grid) < self.budgets:
            raise ValueError(
                f"control.budgets is {self.budgets}, but from {self.smallest} to {self.largest} there are only "
                f"{len(self.grid)} multiples of {self.multiple} that far apart; lower control.budgets or "
                "control.multiple."
            )

    @property
    def grid(self) -> tuple[int, ...]:
        """The budgets to choose among, ascending."""
        factor = (self.largest / self.smallest) ** (1 / (self.budgets - 1))
        exact = (self.smallest * factor**i for i in range(self.budgets))
        return tuple(sorted({max(1, round(value / self.multiple)) * self.multiple for value in exact}))

    @property
    def limit(self) -> float:
        """The share of tokens that may be bad."""
        return self.quantile if self.statistic == "tail" else self.hazard

    def bad(self, tail: BinTail) -> float:
        """The share of a bin's tokens that is."""
        return tail.under if self.statistic == "tail" else tail.hazard


@dataclass(slots=True)
class BinState:
    """Where a bin stands; levels are places in the grid."""

    level: int
    failed: int = -1  # highest that did
    passed: int | None = None  # lowest that did, above the one that failed
    stride: int = 1
    seen: bool = False
    held: int = 0  # judgements since the cheapest was found
    wait: int = WAIT
    lifted: bool = False  # for a longer context, so that its own passing does not say that it could be cheaper
    measurements: float = 0.0
    tokens: float = 0.0
    bad: float = 0.0

    def add(self, tokens: float, share: float) -> None:
        self.seen = True
        self.measurements += 1
        self.tokens += tokens
        self.bad += tokens * share

    def fade(self, keep: float) -> None:
        self.measurements, self.tokens, self.bad = (keep * x for x in (self.measurements, self.tokens, self.bad))

    def keep(self, level: int) -> None:
        """Stay there, as if the next cheaper one had failed."""
        self.level, self.failed, self.passed, self.held, self.stride = level, level - 1, level, 0, 1

    def judged(self, at: int, limit: float, patience: int, top: int) -> int:
        """The level to go to from the level `at`, which the bin has been measured at."""
        if self.measurements < patience or max(self.tokens * limit, self.bad / 2) < ENOUGH:
            return self.level
        share = self.bad / self.tokens
        holding = self.passed == at and self.failed == at - 1
        self.fade(0.5 if holding else 0.0)
        if holding:
            if share <= limit * SLACK:
                return self._hold(at, share <= limit * SPARE)
            self.stride = 1
        if share > limit:
            return self._fail(at, top)
        return self._pass(at) if at == self.level else self.level  # else a bin before it asks for more

    def _hold(self, at: int, spare: bool) -> int:
        self.held = self.held + 1 if spare else 0
        if self.held < self.wait or at == 0:
            return at
        self.held, self.wait, self.failed = 0, min(2 * self.wait, LONGEST_WAIT), at - 2
        self.fade(0.0)
        return at - 1

    def _pass(self, at: int) -> int:
        self.passed, self.held, self.failed = at, 0, min(self.failed, at - 1)  # it may have failed here before
        if not self.lifted:
            self.wait = WAIT
        if at - self.failed <= 1:
            self.stride = 1
            return at
        if self.failed < 0:
            step, self.stride = self.stride, min(2 * self.stride, DOWN)
            return max(at - step, 0)
        return max((self.failed + at) // 2, at - DOWN)

    def _fail(self, at: int, top: int) -> int:
        self.failed, self.held = at, 0
        if self.passed is not None and self.passed > at:
            return min((at + self.passed + 1) // 2, at + UP)
        self.passed = None
        step, self.stride = self.stride, min(2 * self.stride, UP)
        return min(at + step, top)


class Controller:
    """The budget of every bin, from a policy that says where they start."""

    def __init__(self, config: ControlConfig, kv: KVPolicy, context: int) -> None:
        schedule = schedule_of(kv)
        if schedule is None:
            raise ValueError(f"control.auto moves kv.budget, but kv.policy {kv.name} has none; choose another policy.")
        self.config, self.kv, self.grid = config, kv, config.grid
        calibrated = len(set(schedule.budgets)) > 1
        if calibrated and schedule.most > self.grid[-1]:
            raise ValueError(
                f"kv.budget goes up to {schedule.most}, above control.largest {self.grid[-1]}; raise control.largest."
            )
        try:
            with_budget(kv, self.grid[0])
        except ValueError as error:
            raise ValueError(f"control.smallest is too small for this policy: {error}") from error
        self.bins = []
        for start in range(0, context, config.bin):
            level = min(bisect_left(self.grid, schedule.at(start)), len(self.grid) - 1)
            self.bins.append(BinState(level))
            if calibrated:  # it is taken to be the cheapest that passes
                self.bins[-1].keep(level)
        factor = (config.largest / config.smallest) ** (1 / (config.budgets - 1))
        self.doubling = max(1, round(math.log(2) / math.log(factor))) if isinstance(kv, EvictPolicy) else None

    @property
    def levels(self) -> list[int]:
        """Of every bin, no lower than those before it; one that no token fell into yet gives way to its neighbours."""
        least = list(accumulate((state.level * state.seen for state in self.bins), max))
        most, found = len(self.grid) - 1, []
        for state, low in zip(reversed(self.bins), reversed(least), strict=True):
            if state.seen:
                most = low
            found.append(low if state.seen else min(max(state.level, low), most))
        return found[::-1]

    @property
    def policy(self) -> KVPolicy:
        """The policy with the budgets of now."""
        starts = tuple(i * self.config.bin for i in range(len(self.bins)))
        return with_budget(self.kv, Schedule(starts, tuple(self.grid[level] for level in self.levels)).text)

    def observe(self, measured: list[BinTail]) -> int:
        """Take up what a step measured; returns how many of its bins have another budget now."""
        before, seen = self.levels, set()
        for tail in measured:
            i = min(tail.start // self.config.bin, len(self.bins) - 1)
            state = self.bins[i]
            seen.add(i)
            state.add(tail.tokens, self.config.bad(tail))
            state.level = state.judged(before[i], self.config.limit, self.config.patience, len(self.grid) - 1)
            if state.failed == before[i] and self.doubling is not None:
                self._blame(i, before)
        moved = {i for i, (old, new) in enumerate(zip(before, self.levels, strict=True)) if old != new}
        for i in moved:
            self.bins[i].fade(0.0)
        return len(moved & seen)

    def _blame(self, i: int, before: list[int]) -> None:
        """A bin has failed: it goes no higher than twice what the bin before it has, or lifts that one."""
        assert self.doubling is not None
        earlier = [j for j in range(i) if self.bins[j].seen]
        if not earlier:
            return
        state, level = self.bins[i], before[earlier[-1]]
        if before[i] < level + self.doubling:
            state.level = min(state.level, level + self.doubling)
            return
        state.level, state.failed, state.passed, state.stride = before[i], -1, None, 1
        for steps, j in enumerate(reversed(earlier)):
            least = level + 1 - steps * self.doubling
            lower = self.bins[j]
            if lower.level < least:
                lower.keep(least)
                lower.wait = min(2 * lower.wait, LONGEST_WAIT) if lower.lifted else lower.wait
                lower.lifted = True

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"grid": list(self.grid), "bin": self.config.bin, "bins": [asdict(state) for state in self.bins]}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on as before, unless the grid or the bins are now others."""
        if not state:
            return
        if (state["grid"], state["bin"], len(state["bins"])) != (list(self.grid), self.config.bin, len(self.bins)):
            logger.warning("the grid of budgets is another than the checkpoint's: control.auto starts anew.")
            return
        self.bins = [BinState(**each) for each in state["bins"]]


def schedule_of(kv: KVPolicy) -> Schedule | None:
    """The policy's budget by context length, if it has a budget."""
    return getattr(kv, "schedule", None)


def measure(rollouts: list[Rollout], updated: Updated, config: ControlConfig) -> list[BinTail]:
    """The tail of a step's rollouts by context length, from what the update has scored."""
    if not updated.overlap:
        return []
    overlap, dense = torch.cat(updated.overlap), torch.cat(updated.dense_logprobs)
    sampler = torch.cat([rollout.sampler_logprobs for rollout in rollouts])
    contexts = torch.cat([torch.arange(len(r.token_ids)) + len(r.prompt.ids) for r in rollouts])
    lengths = torch.tensor([len(rollout.token_ids) for rollout in rollouts])
    chosen = torch.cat([rollout.completion_mask for rollout in rollouts]) & ~overlap.isnan()
    weights = updated.row_weights.repeat_interleave(lengths)
    return tails(
        *(values[chosen] for values in (overlap, dense - sampler, contexts, weights)),
        width=config.bin,
        target=config.target,
        quantile=config.quantile,
    )


def tail_metrics(measured: list[BinTail], kv: KVPolicy) -> dict[str, float]:
    """The `tail/*` metrics, and the budget of each bin that was seen."""
    metrics: dict[str, float] = {}
    schedule = schedule_of(kv)
    for tail in measured:
        metrics |= {
            f"tail/{tail.start}/overlap": tail.quantile,
            f"tail/{tail.start}/hazard": tail.hazard,
            f"tail/{tail.start}/tokens": tail.tokens,
        }
        if schedule is not None:
            metrics[f"kv/budget/{tail.start}"] = schedule.at(tail.start)
    if measured:
        metrics["tail/overlap_lowest"] = min(tail.quantile for tail in measured)
    return metrics
