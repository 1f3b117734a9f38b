# SPDX-License-Identifier: Apache-2.0
"""Made-up models whose right budget is known, for what moves budgets."""

from __future__ import annotations

import math
import random
from itertools import combinations_with_replacement

from sparse_rl.kv import RKV
from sparse_rl.objective.tail import BinTail
from sparse_rl.train.control import ControlConfig, Controller, control_grid

CONFIG = ControlConfig(auto=True, bin=1000)
ROLLOUTS, LONGEST = 8, 16384 + 128


def grid_of(config=CONFIG, kv=None, *, prompt=20, longest=LONGEST, page_size=64):
    return control_grid(config, kv or RKV(window=8), prompt=prompt, longest=longest, page_size=page_size)


GRID = grid_of()
FINE_CONFIG = ControlConfig(auto=True, smallest=22, largest=67, budgets=12, multiple=1)
FINE = grid_of(FINE_CONFIG, RKV(window=8, interval=8), longest=240)


def tail(share, *, tokens=4000.0, start=0, hazard=0.0, quantile=0.9, rollouts=ROLLOUTS):
    """A bin in which every rollout has this share of bad tokens, or each its own."""
    shares = share if isinstance(share, list) else [share] * rollouts
    each = tokens / len(shares)
    return BinTail(
        start=start,
        quantile=quantile,
        tokens=(each,) * len(shares),
        under=tuple(each * x for x in shares),
        far=(0.0,) * len(shares),
        hazard=(each * hazard,) * len(shares),
    )


class Plant:
    """A model whose share of bad tokens falls with the budget, and rises with length: logistic in its logarithm.

    With `loss`, a bin suffers from budgets below its own need in those before it, as where entries are evicted: from
    each by its part of the context.
    With `spread`, the share of a step varies as if it were that of so many tokens, since rollouts have shares of
    their own.
    """

    def __init__(self, levels, slope=1.5, tokens=4000, spread=None, loss=0.0, rollouts=ROLLOUTS, grid=GRID):
        # The cheapest that passes is `level`: the share is the limit a little below it.
        self.needs = [math.log(grid[level]) - 0.3 * math.log(grid[1] / grid[0]) for level in levels]
        self.slope, self.tokens, self.spread, self.loss, self.rollouts = slope, tokens, spread, loss, rollouts
        self.grid = grid

    def share(self, i, levels):
        spare, *before = [math.log(self.grid[levels[j]]) - self.needs[i] for j in (i, *range(i))]
        lost = sum(min(0.0, each) for each in before) / max(1, i)
        at_limit = math.log(0.05 / 0.95)
        return 1 / (1 + math.exp(self.slope * (spare + self.loss * lost) - at_limit))

    def worst(self, levels):
        """The largest share of any bin."""
        return max(self.share(i, levels) for i in range(len(self.needs)))

    def cost(self, levels):
        """The mean budget, in grid steps above the smallest."""
        mean = sum(self.grid[level] for level in levels) / len(levels)
        return math.log(mean / self.grid[0]) / math.log(self.grid[-1] / self.grid[0]) * (len(self.grid) - 1)

    def cheapest(self):
        """Of all schedules that hold the limit."""
        rising = combinations_with_replacement(range(len(self.grid)), len(self.needs))
        return min((levels for levels in rising if self.worst(levels) <= 0.05), key=self.cost)

    def measured(self, controller):
        found = []
        levels = controller.levels
        for i in range(len(self.needs)):
            share = self.share(i, levels)
            shares = [share] * self.rollouts
            if self.spread is not None:
                each = self.spread / self.rollouts
                mean = min(share, 1 - 1e-9)  # which may be rounded to 1
                shares = [random.betavariate(mean * each, (1 - mean) * each) for _ in shares]
            found.append(tail(shares, tokens=self.tokens, start=1000 * i))
        return found

    def run(self, controller, steps):
        """The levels after each step."""
        history = []
        for _ in range(steps):
            controller.observe(self.measured(controller))
            history.append(controller.levels[: len(self.needs)])
        return history


def controller(budget=GRID[0], bins=1, config=CONFIG, grid=GRID):
    return Controller(config, RKV(budget=budget, window=8), grid, bins * config.bin)
