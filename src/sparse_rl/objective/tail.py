# SPDX-License-Identifier: Apache-2.0
"""The sampler's worst tokens by how long their context is: what a budget has to be measured by.

Most tokens agree with the dense model at any budget, so means say little; and the longer the context, the more a fixed
budget leaves out. A bin holds the tokens whose context, the prompt included, is within its width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sparse_rl.objective.mismatch import CATASTROPHIC, weighted_quantiles


@dataclass(frozen=True, slots=True, kw_only=True)
class BinTail:
    """The tokens of one bin.

    BinTail(start=2000, tokens=5000.0, quantile=0.83, under=0.071, hazard=2e-4)   # of a target of 0.86
    """

    start: int  # the shortest context of the bin
    tokens: float  # how many; where some stand for others, how many they are worth
    quantile: float  # of overlap
    under: float  # share with an overlap under the target; at most q if and only if the quantile q meets it
    hazard: float  # share with xi < 1e-4


def tails(
    overlap: torch.Tensor,  # (T,)
    log_xi: torch.Tensor,  # (T,)
    contexts: torch.Tensor,  # (T,) tokens before each
    weights: torch.Tensor,  # (T,) how many tokens each stands for
    *,
    width: int,
    target: float,
    quantile: float,
) -> list[BinTail]:
    """Every bin with enough tokens for the quantile to be one of them, in order."""
    bins = contexts // width
    found = []
    for i in torch.unique(bins).tolist():
        inside = bins == i
        w, shared = weights[inside].double(), overlap[inside].double()
        tokens = float(w.sum() ** 2 / (w * w).sum())
        if tokens * quantile < 1:
            continue
        (value,) = weighted_quantiles(shared, w, [quantile])
        found.append(
            BinTail(
                start=i * width,
                tokens=tokens,
                quantile=value,
                under=float((w * ~(shared >= target)).sum() / w.sum()),
                hazard=float((w * ~(log_xi[inside] >= math.log(CATASTROPHIC))).sum() / w.sum()),
            )
        )
    return found
