# SPDX-License-Identifier: Apache-2.0
"""How many KV entries a token may use, by how long its context is.

    Schedule(starts=(0, 2000, 4000), budgets=(512, 1024, 1536)).at(2500)    # 1024
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TypeVar

import torch

N = TypeVar("N", int, torch.Tensor)  # one context, or a row of them


@dataclass(frozen=True, slots=True)
class Schedule:
    """Steps over context length: from `starts[i]` tokens on, the prompt included, `budgets[i]` entries."""

    starts: tuple[int, ...]  # ascending, the first is 0
    budgets: tuple[int, ...]

    @property
    def most(self) -> int:
        return max(self.budgets)

    def at(self, context: N) -> N:
        if isinstance(context, torch.Tensor):
            starts, budgets = (torch.tensor(values, device=context.device) for values in (self.starts, self.budgets))
            return budgets[torch.bucketize(context, starts, right=True) - 1]
        return self.budgets[bisect_right(self.starts, context) - 1]


def constant(budget: int) -> Schedule:
    return Schedule((0,), (budget,))
