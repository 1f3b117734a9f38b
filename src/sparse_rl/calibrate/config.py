# SPDX-License-Identifier: Apache-2.0
"""What a calibration tries, and what it asks of what it finds. What a budget costs is `cost.py`'s."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from sparse_rl.calibrate.search import MOST_BUDGETS, budget_grid, check_policy, possible, with_budget
from sparse_rl.calibrate.statistics import GROUPS, SCALES, TAILS
from sparse_rl.kv import KVPolicy, SelectPolicy
from sparse_rl.kv.schedule import MOST
from sparse_rl.specs import renamed

SPARROW = 0.86  # the tail from which on Sparrow's runs are stable, on the scale top20
SPARROW_SHARE = 0.915  # the same as a share of its dense cache's own, 0.94


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationConfig:
    """Which budgets are tried, and what is asked of them.

    budgets: to try; if none are given, num_budgets from lowest to highest
    num_budgets: how many, each the same factor above the one before; fewer where pages are too coarse
    lowest: smallest budget to try; a 64th of the longest context if not given, or what the policy can do
    highest: largest budget to try; the longest context that the dense cache came to, if not given
    page: budgets are multiples of this many entries, and of pages that are read whole
    target: overlap that the tail must reach; if not given, Sparrow's 0.86 (scale top20), with relative its 0.915
    relative: the target is a share of the dense cache's own tail; for models whose best 20 ids leave much out
    overlap: top20 (over tokens in both top 20, Sparrow's) or lower (over the sampler's best ids, exact up to 4096)
    tail: statistic of a bin that must meet the target: p05, p01 or mean
    sure: the lower end of its 95 % interval must meet the target, so that no budget does by luck
    tokens: over which tokens: all, or decision (dense entropy above the threshold)
    entropy: threshold of decision tokens in nats; 0.69 is a fair coin's
    bin: tokens of a bin of context length
    min_tokens: tokens a bin must have; one with fewer is pooled with the next
    bootstrap: resamples of the rollouts for 95 % intervals; 0 leaves them out
    verify: most runs of schedules, the grid's first, then what leads to the cheapest that holds; 0 takes the grid's
    """

    budgets: tuple[int, ...] = ()
    num_budgets: int = 18
    lowest: int | None = None
    highest: int | None = None
    page: int = 16
    target: float | None = None
    relative: bool = False
    overlap: Literal["top20", "lower"] = "top20"
    tail: Literal["p05", "p01", "mean"] = "p05"
    sure: bool = False
    tokens: Literal["all", "decision"] = "all"
    entropy: float = 0.69
    bin: int = 2000
    min_tokens: int = 2000
    bootstrap: int = 200
    verify: int = 16

    def __post_init__(self) -> None:
        for name, least, most in (
            ("num_budgets", 1, MOST_BUDGETS),
            ("page", 1, MOST),
            ("bin", 1, MOST),
            ("min_tokens", 20, math.inf),
            ("bootstrap", 0, 10_000),
            ("verify", 0, math.inf),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}.")
            if getattr(self, name) > most:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at most {most}.")
        for name in ("lowest", "highest"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise ValueError(f"{name} is {given}; it must be at least 1.")
        if self.lowest is not None and self.highest is not None and self.lowest > self.highest:
            raise ValueError(f"lowest is {self.lowest}, above highest, {self.highest}; exchange them.")
        if not 0.0 < self.goal < 1.0:
            raise ValueError(f"target is {self.target}; it must lie between 0 and 1, as 0.86 does.")
        if self.sure and not self.bootstrap:
            raise ValueError("sure needs the intervals that bootstrap 0 leaves out; give bootstrap 200.")
        if not 0 <= self.entropy < math.inf:
            raise ValueError(f"entropy is {self.entropy}; it must be at least 0 and finite.")
        for name, choices in (("overlap", SCALES), ("tail", tuple(TAILS)), ("tokens", GROUPS)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(choices)}.")
        if any(budget < 1 for budget in self.budgets) or len({*self.budgets}) < len(self.budgets):
            raise ValueError(f"budgets are {', '.join(map(str, self.budgets))}; give each once, from 1 on.")

    @property
    def goal(self) -> float:
        """The target, also where none was given."""
        if self.target is not None:
            return self.target
        return SPARROW_SHARE if self.relative else SPARROW

    @property
    def asks(self) -> str:
        """The target in words."""
        return f"{self.goal:g}{f' of the dense {self.tail}' * self.relative}"

    @property
    def statistic(self) -> str:
        """What must reach it, in words."""
        over = "" if self.tokens == "all" else ", decision tokens"
        return f"{'lower end of ' * self.sure}{self.tail} of {self.overlap} overlap{over}"

    def grid(self, policy: KVPolicy, longest: int, page_size: int) -> list[int]:
        """The budgets to try for contexts of at most `longest` tokens."""
        check_policy(policy)
        for budget in self.budgets:
            if not possible(policy, budget, page_size):
                with renamed("kv", ""):
                    with_budget(policy, budget)  # says why
                raise ValueError(
                    f"budget {budget} is less than the pages {policy.name} always reads; give a larger one."
                )
        return sorted(self.budgets) or budget_grid(
            policy,
            longest,
            count=self.num_budgets,
            page=math.lcm(self.page, page_size) if isinstance(policy, SelectPolicy) else self.page,
            page_size=page_size,
            lowest=self.lowest,
            highest=self.highest,
        )
