# SPDX-License-Identifier: Apache-2.0
"""The sampler's worst tokens by how long their context is: what a budget has to be measured by.

Most tokens agree with the dense model at any budget, so means say little; and the longer the context, the more a fixed
budget leaves out. A bin holds the tokens whose context, the prompt included, is within its width.

What is done about such tokens is in train/control.py and train/alarms.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sparse_rl.objective.correction import sum_rows
from sparse_rl.objective.mismatch import CATASTROPHIC, weighted_quantiles

FAR = 0.06  # this much under the target is far under it


@dataclass(frozen=True, slots=True, kw_only=True)
class BinTail:
    """The tokens of one bin, counted for each rollout that has some there.

    BinTail(start=2000, quantile=0.83, tokens=(900.0, 1100.0), under=(5.0, 137.0), far=(0.0, 61.0), hazard=(0.0, 1.0))
    """

    start: int  # the shortest context of the bin
    quantile: float | None  # of overlap; None with too few tokens for it to be one of them
    tokens: tuple[float, ...]  # how many; where some stand for others, how many they are worth
    under: tuple[float, ...]  # overlap under the target: a share of at most q if and only if the quantile q meets it
    far: tuple[float, ...]  # overlap far under it
    hazard: tuple[float, ...]  # xi < 1e-4

    def share(self, bad: tuple[float, ...]) -> float:
        return sum(bad) / sum(self.tokens)


@dataclass(slots=True)
class Evidence:
    """How many tokens were bad of how many, against the share of them that may be.

    Tokens of a rollout share their fate, so it is rollouts that count: each has so many bad tokens above its due, and
    their sum is known to the root of the sum of their squares. It is known no better than if tokens were independent.
    """

    tokens: float = 0.0
    bad: float = 0.0
    squares: float = 0.0  # of what each rollout has above its due

    def add(self, tokens: tuple[float, ...], bad: tuple[float, ...], limit: float) -> None:
        """Both of each rollout."""
        self.tokens += sum(tokens)
        self.bad += sum(bad)
        self.squares += sum((some - limit * many) ** 2 for some, many in zip(bad, tokens, strict=True))

    def fade(self, keep: float) -> None:
        self.tokens, self.bad, self.squares = keep * self.tokens, keep * self.bad, keep * self.squares

    def error(self, limit: float) -> float:
        """Standard error of the number of bad tokens."""
        return math.sqrt(max(self.squares, limit * (1.0 - limit) * self.tokens))

    def above(self, limit: float) -> float:
        """By how many standard errors there are more of them than the limit allows."""
        return (self.bad - limit * self.tokens) / self.error(limit)


def tails(
    overlap: torch.Tensor,  # (T,)
    log_xi: torch.Tensor,  # (T,)
    contexts: torch.Tensor,  # (T,) tokens before each
    rows: torch.Tensor,  # (T,) the rollout each is of
    weights: torch.Tensor,  # (T,) how many tokens each stands for
    *,
    width: int,
    target: float,
    quantile: float,
) -> list[BinTail]:
    """Every bin that has tokens, in order."""
    bins = contexts // width
    found = []
    for i in torch.unique(bins).tolist():
        inside = bins == i
        w, shared = weights[inside].double(), overlap[inside].double()
        members, row = torch.unique(rows[inside], return_inverse=True)
        worth = w * w.sum() / (w * w).sum()
        flags = (
            torch.ones_like(shared),
            ~(shared >= target),
            ~(shared >= target - FAR),
            ~(log_xi[inside] >= math.log(CATASTROPHIC)),
        )
        tokens, under, far, hazard = (tuple(sum_rows(worth * flag, row, len(members)).tolist()) for flag in flags)
        enough = sum(tokens) * quantile >= 1 - 1e-9
        found.append(
            BinTail(
                start=i * width,
                quantile=weighted_quantiles(shared, w, [quantile])[0] if enough else None,
                tokens=tokens,
                under=under,
                far=far,
                hazard=hazard,
            )
        )
    return found
