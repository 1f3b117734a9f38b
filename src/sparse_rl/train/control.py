# SPDX-License-Identifier: Apache-2.0
"""Holding the sampler as close to the dense model as asked for, by moving the budget while training.

Each bin of context lengths has a budget of its own on a geometric grid. A step says which share of the bin's tokens is
bad: overlap under the target (a share of 5 % is a 5th percentile at the target), or xi under 1e-4. From that each bin
searches for its cheapest budget (`control_bin`). Budgets do not fall with length: a bin uses no less than those before.

Where a policy evicts, what a shorter context lost a longer one cannot get back, so bins answer for those behind them:
- none goes down unless those behind it pass;
- one that fails with no less than it had passed with blames the bins before it that were higher then: what they have
  now counts as failed, and they go back towards what they had;
- one that was held and has none to blame lifts the one before it by a grid step, up to its own;
- else it goes up itself, and if that was not enough, takes those before it along; what they do not need of it they give
  back on their own.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, Literal

import torch

from sparse_rl.calibrate.config import SPARROW, SPARROW_SHARE
from sparse_rl.calibrate.search import MOST_BUDGETS, SPAN, budget_grid, with_budget
from sparse_rl.kv import EvictPolicy, KVPolicy, SelectPolicy
from sparse_rl.kv.schedule import MOST, Schedule
from sparse_rl.objective.tail import BinTail, tails
from sparse_rl.specs import check_choices, refuse_unused
from sparse_rl.train.control_bin import BinState
from sparse_rl.train.update import Updated
from sparse_rl.types import Rollout

logger = logging.getLogger(__name__)

# Settings of a budget that moves; the others also say what is measured and warned of where it does not.
OF_AUTO = ("statistic", "hazard", "patience", "smallest", "largest", "budgets", "multiple")
PAGE = 16  # budgets are multiples of it, unless they are too small for that


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
    smallest: smallest budget of the grid; if not given, a 64th of the longest context, or kv.budget where that is less
    largest: largest budget of the grid; if not given, the one from which on nothing is left out of the longest context
    budgets: how many there are at most, each the same factor above the one before
    multiple: they are multiples of this (16, or 1 if contexts are under 1,024 tokens), and of pages that are read whole
    """

    auto: bool = False
    statistic: Literal["tail", "hazard"] = "tail"
    target: float = SPARROW
    quantile: float = 0.05
    hazard: float = 1e-4
    bin: int = 2000
    every: int = 1
    patience: int = 2
    smallest: int | None = None
    largest: int | None = None
    budgets: int = 18
    multiple: int | None = None

    def __post_init__(self) -> None:
        check_choices(self, "control")
        for field in ("target", "quantile", "hazard"):
            if not 0.0 < getattr(self, field) < 1.0:
                raise ValueError(f"control.{field} is {getattr(self, field)}; it must be above 0 and below 1.")
        for field in ("bin", "patience", "smallest", "largest", "multiple"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"control.{field} is {value}; it must be at least 1.")
            if value is not None and value > MOST:
                raise ValueError(f"control.{field} is {value}; it must be at most {MOST}.")
        if self.every < 0 or (self.auto and not self.every):
            raise ValueError(f"control.every is {self.every}; it must be at least 0, and with control.auto at least 1.")
        if not 2 <= self.budgets <= MOST_BUDGETS:
            raise ValueError(f"control.budgets is {self.budgets}; it must be from 2 to {MOST_BUDGETS}.")
        if self.smallest is not None and self.largest is not None and self.largest <= self.smallest:
            raise ValueError(
                f"control.largest is {self.largest} and control.smallest {self.smallest}; it must be larger than that."
            )
        if not self.auto:
            refuse_unused(self, "control", "the budget does not move; set kv.budget auto, or leave it out", *OF_AUTO)
        if self.statistic != "hazard":
            why = f"control.statistic is {self.statistic!r}; set it to hazard, or leave it out"
            refuse_unused(self, "control", why, "hazard")

    @property
    def limit(self) -> float:
        """The share of tokens that may be bad."""
        return self.quantile if self.statistic == "tail" else self.hazard

    @property
    def asked(self) -> list[Any]:
        """What budgets pass or fail by."""
        return ["hazard", self.hazard] if self.statistic == "hazard" else ["tail", self.target, self.quantile]

    def bad(self, tail: BinTail) -> tuple[float, ...]:
        """How many tokens of each rollout are."""
        return tail.under if self.statistic == "tail" else tail.hazard


class Controller:
    """The budget of every bin, from a policy that says where they start."""

    def __init__(self, config: ControlConfig, kv: KVPolicy, grid: tuple[int, ...], longest: int) -> None:
        self.config, self.kv, self.grid, self.longest = config, kv, grid, longest
        schedule, believed = schedule_of(kv), is_believed(kv)
        if believed:
            _check_ends(config, schedule.budgets[0], schedule.at(longest))
            _check_steps(config, [start for start in schedule.starts if start < longest])
        self.bins = []
        for start in range(0, longest, config.bin):
            self.bins.append(BinState(level=self._level(schedule.at(start))))
            if believed:  # it is taken to be the cheapest that passes
                self.bins[-1].keep(self.bins[-1].level)
        self.evicts = isinstance(kv, EvictPolicy)
        self.warned = False  # that no budget holds the target

    def _level(self, budget: int) -> int:
        return min(bisect_left(self.grid, budget), len(self.grid) - 1)

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
    def schedule(self) -> Schedule:
        """The budgets of now."""
        starts = tuple(i * self.config.bin for i in range(len(self.bins)))
        return Schedule(starts, tuple(self.grid[level] for level in self.levels))

    @property
    def policy(self) -> KVPolicy:
        """The policy with them."""
        return with_budget(self.kv, self.schedule.text)

    def observe(self, measured: list[BinTail]) -> int:
        """Take up what a step measured; returns how many of its bins have another budget now."""
        before, judged, seen = self.levels, set[int](), set[int]()
        for tail in measured:
            i = min(tail.start // self.config.bin, len(self.bins) - 1)
            seen.add(i)
            self.bins[i].add(tail.tokens, self.config.bad(tail), self.config.limit)
            if self.bins[i].judge(before[i], self.config.limit, self.config.patience):
                judged.add(i)
        failed = {i for i in judged if self.bins[i].share > 1.0}
        for i in judged - failed:
            behind = [self.bins[j].share for j in seen if j > i] if self.evicts else []
            self._pass(i, before, max(behind, default=0.0))
        for i in sorted(failed):
            self._fail(i, before)
        if beyond := [i for i in sorted(failed) if self._at_top(i, before)]:
            self._warn(beyond[0], measured)
        moved = {i for i, (old, new) in enumerate(zip(before, self.levels, strict=True)) if old != new}
        stale = {i for i in judged if self.evicts and i > min(moved, default=i)}
        for i in moved | stale:
            self.bins[i].fade(0.0)
        return len(moved & seen)

    def _at_top(self, i: int, before: list[int]) -> bool:
        """Whether a bin's tokens had the largest budget, and where entries are evicted always had."""
        counted = [j for j in range(i + 1) if j == i or (self.evicts and self.bins[j].seen)]
        return all(before[j] == len(self.grid) - 1 for j in counted)

    def _warn(self, i: int, measured: list[BinTail]) -> None:
        """Once: a bin fails with the largest budget, so that it would stay there for ever."""
        if self.warned:
            return
        self.warned, config, start = True, self.config, i * self.config.bin
        bad = f"an overlap under control.target {config.target:g}" if config.statistic == "tail" else "xi < 1e-4"
        sign = f"from {start} tokens of context on, more than {100 * config.limit:g}% of the tokens have {bad}"
        sign += f" with {self.grid[-1]} entries"
        other = "a lower control.target" if config.statistic == "tail" else "a higher control.hazard"
        largest, select = config.largest, getattr(self.kv, "select_budget", None)
        if largest is not None and largest >= dense_from(self.kv, 0, self.longest):
            largest = None  # it bounds nothing
        for name, limit in (("control.largest", largest), ("kv.select_budget", select)):
            if limit is not None:
                logger.warning("%s, and %s is %s; raise that, or resume with %s.", sign, name, limit, other)
                return
        if config.statistic == "tail":  # those of shorter contexts may not have the largest budget
            known = [tail.quantile for tail in measured if tail.start >= start and tail.quantile is not None]
            tail = min([config.target, *known])
            other += f", such as {SPARROW_SHARE * tail:.2f} ({SPARROW_SHARE} of the tail of now)" if known else ""
            other += ", or with control.statistic hazard"
        logger.warning(
            "%s, which leave nothing out: no budget holds it, and kv.budget stays there. Resume with %s.", sign, other
        )

    def _pass(self, i: int, before: list[int], behind: float) -> None:
        """Go on searching. behind: the worst share of the bins behind it"""
        state = self.bins[i]
        if state.share < 1.0:
            state.proof = before[: i + 1]
        level = state.passes(before[i], max(state.share, behind))
        state.level = max(level, state.level) if behind >= 1.0 else level

    def _fail(self, i: int, before: list[int]) -> None:
        """Raise the bins that are to blame: those before it, itself, or both."""
        state, at, top = self.bins[i], before[i], len(self.grid) - 1
        earlier = [j for j in range(i) if self.bins[j].seen] if self.evicts else []
        if state.proof and at >= state.proof[i]:
            lowered = [j for j in earlier if before[j] < state.proof[j]]
            for j in lowered:
                blamed = self.bins[j]
                blamed.passed, blamed.lifted = state.proof[j], True
                blamed.level = max(blamed.level, blamed.fails(before[j], top))
            if lowered:
                return
            state.proof = []
        step, below = state.stride, before[earlier[-1]] if earlier else at
        if state.holds(at) and below < at and step == 1:
            for j in earlier:
                if before[j] == below:
                    self.bins[j].keep(below + 1)
                    self.bins[j].lifted = True
            state.stride = 2  # if that is not enough
            return
        state.level = state.fails(at, top)
        if state.passed is None and (step > 1 or at == top):
            for j in earlier:
                self.bins[j].level = max(self.bins[j].level, min(before[j] + step, state.level))

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        bins = [asdict(state) for state in self.bins]
        asked = {"bin": self.config.bin, "asked": self.config.asked, "warned": self.warned}
        return {"grid": list(self.grid), "bins": bins, **asked}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on as before; where the grid, the bins or what is asked for are now others, from the budgets of then."""
        if not state:  # the budget stood still
            return
        grid, width, bins = state["grid"], state["bin"], [BinState(**each) for each in state["bins"]]
        same = (grid, width, len(bins)) == (list(self.grid), self.config.bin, len(self.bins))
        if same and state["asked"] == self.config.asked:
            self.bins, self.warned = bins, state["warned"]
            return
        logger.warning(
            "control.auto has other budgets, bins or targets than in the checkpoint: it searches from where it was."
        )
        at = [min(i * self.config.bin // width, len(bins) - 1) for i in range(len(self.bins))]
        levels = accumulate((self._level(grid[bins[i].level]) for i in at), max)  # a schedule does not fall
        self.bins = [BinState(level=level) for level in levels]


def control_grid(config: ControlConfig, kv: KVPolicy, *, prompt: int, longest: int, page_size: int) -> tuple[int, ...]:
    """The budgets to choose among, ascending: those that the policy and the pages allow, up to what drops nothing.

    prompt, longest: tokens of the longest prompt, and of the longest context there can be
    """
    schedule = schedule_of(kv)
    top = dense_from(kv, prompt, longest)
    page = config.multiple or (PAGE if top >= PAGE * SPAN else 1)
    page = math.lcm(page, page_size) if isinstance(kv, SelectPolicy) else page
    lowest = config.smallest or min(top // SPAN, schedule.budgets[0]) // page * page
    try:
        grid = budget_grid(
            kv,
            max(top, 1),
            count=config.budgets,
            page=page,
            page_size=page_size,
            lowest=max(lowest, 1),
            highest=config.largest,
        )
    except ValueError:
        grid = []
    if len(grid) < 2:  # the smaller of two leaves something out
        ends = (("smallest", config.smallest), ("largest", config.largest))
        given = "".join(f", control.{name} {value}" for name, value in ends if value is not None)
        interval = f" (kv.interval {kv.interval})" if isinstance(kv, EvictPolicy) else ""
        raise ValueError(
            f"control.auto has {'only ' + str(grid[0]) if grid else 'no budget'} to choose from: {kv.name} on pages of "
            f"{page_size}{given}; and contexts end at {longest} tokens, which lose nothing from {max(top, 0)} on"
            f"{interval}. Lower control.smallest, kv.interval or what is protected, or raise sampling.max_tokens."
        )
    if not is_believed(kv):
        return tuple(grid)
    most = max(grid[-1], min(config.largest or 0, top))
    return with_own(grid, [own for start in schedule.starts if start < longest and (own := schedule.at(start)) <= most])


def with_own(grid: list[int], budgets: list[int]) -> tuple[int, ...]:
    """The grid with these budgets in it, each in the place of one that is nearly as large."""
    own = set(budgets)
    kept, step = set(grid) - own, math.log(grid[-1] / grid[0]) / (len(grid) - 1)
    for budget in sorted(own - set(grid)):
        apart = {other: abs(math.log(other / budget)) for other in kept if other != grid[-1]}
        nearest = min(apart, key=lambda other: apart[other], default=0)
        if nearest and apart[nearest] < step:
            kept.remove(nearest)
    return tuple(sorted(kept | own))


def is_believed(kv: KVPolicy) -> bool:
    """Whether the budget is a schedule, which is taken to hold, not a number to search from."""
    return isinstance(getattr(kv, "budget", None), str)


def dense_from(kv: KVPolicy, prompt: int, longest: int) -> int:
    """The smallest budget that leaves nothing out of a context of that length."""
    if not isinstance(kv, EvictPolicy):
        return longest
    return longest - kv.interval - prompt if kv.protect_prompt else max(longest - kv.interval, prompt)


def _check_ends(config: ControlConfig, least: int, most: int) -> None:
    """A schedule is kept as it is, or refused."""
    if config.largest is not None and most > config.largest:
        raise ValueError(f"kv.budget goes up to {most}, above control.largest {config.largest}; raise control.largest.")
    if config.smallest is not None and least < config.smallest:
        raise ValueError(
            f"kv.budget begins with {least}, below control.smallest {config.smallest}; lower control.smallest."
        )


def _check_steps(config: ControlConfig, starts: list[int]) -> None:
    """A bin has one budget, so a schedule that steps inside one could not be kept."""
    inside = [start for start in starts if start % config.bin]
    if inside:
        raise ValueError(
            f"kv.budget steps at {inside[0]} tokens, inside a bin of control.bin {config.bin}, which has one budget; "
            f"set control.bin to {math.gcd(*starts)}."
        )


def schedule_of(kv: KVPolicy) -> Schedule:
    """The policy's budget by context length."""
    schedule: Schedule | None = getattr(kv, "schedule", None)
    if schedule is None:
        raise ValueError(f"control.auto moves kv.budget, but kv.policy {kv.name} has none; choose another policy.")
    return schedule


def measure(rollouts: list[Rollout], updated: Updated, config: ControlConfig) -> list[BinTail]:
    """The tail of a step's rollouts by context length, from what the update has scored."""
    if not updated.overlap:
        return []
    overlap, dense = torch.cat(updated.overlap), torch.cat(updated.dense_logprobs)
    sampler = torch.cat([rollout.sampler_logprobs for rollout in rollouts])
    contexts = torch.cat([torch.arange(len(r.token_ids)) + len(r.prompt.ids) for r in rollouts])
    lengths = torch.tensor([len(rollout.token_ids) for rollout in rollouts])
    rows = torch.arange(len(rollouts)).repeat_interleave(lengths)
    chosen = torch.cat([rollout.completion_mask for rollout in rollouts]) & ~overlap.isnan()
    return tails(
        *(values[chosen] for values in (overlap, dense - sampler, contexts, rows, updated.row_weights[rows])),
        width=config.bin,
        target=config.target,
        quantile=config.quantile,
    )


def tail_metrics(measured: list[BinTail], kv: KVPolicy) -> dict[str, float]:
    """The `tail/*` metrics, and the budget of each bin that was seen."""
    metrics: dict[str, float] = {}
    schedule: Schedule | None = getattr(kv, "schedule", None)
    for tail in measured:
        metrics[f"tail/{tail.start}/hazard"] = tail.share(tail.hazard)
        metrics[f"tail/{tail.start}/tokens"] = sum(tail.tokens)
        if tail.quantile is not None:
            metrics[f"tail/{tail.start}/overlap"] = tail.quantile
        if schedule is not None:
            metrics[f"kv/budget/{tail.start}"] = schedule.at(tail.start)
    known = [tail.quantile for tail in measured if tail.quantile is not None]
    return metrics | ({"tail/overlap_lowest": min(known)} if known else {})
