# SPDX-License-Identifier: Apache-2.0
"""Which budgets to try, which contexts to pool, and the cheapest budgets that hold a tail. Nothing is measured here."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from sparse_rl.kv import KVPolicy
from sparse_rl.kv.schedule import Schedule

MOST_BUDGETS = 1000  # of a grid
SPAN = 64  # the longest context over the smallest budget that is tried by itself


def budget_grid(
    policy: KVPolicy,
    longest: int,
    *,
    count: int,
    page: int,
    page_size: int,
    lowest: int | None = None,
    highest: int | None = None,
) -> list[int]:
    """About `count` budgets from the smallest the policy can do to the longest context, multiples of `page`.

    They are geometric; where pages are too coarse for that many, there are fewer. None is above `highest`.
    """
    top = highest // page * page if highest and highest < longest else page * -(-longest // page)
    bottom = page * max(1, -(-(lowest or min(top, longest // SPAN)) // page))
    if lowest and lowest > longest:
        raise ValueError(f"lowest is {lowest}, above the longest context, {longest}; give a smaller --lowest.")
    if bottom > top:
        raise ValueError(f"there is no multiple of {page} from {lowest or 1} to {highest}; give a smaller --page.")
    while bottom < top and not possible(policy, bottom, page_size):
        bottom += page
    if not possible(policy, top, page_size):
        raise ValueError(
            f"no budget up to {top} is possible with {policy.name}: protected entries or pages alone take more; "
            "protect less, give longer samples (--max-tokens), or a larger --highest."
        )
    steps = np.geomspace(bottom, top, count) if count > 1 else np.array([top])
    return sorted({page * round(step / page) for step in steps} - {0})


def possible(policy: KVPolicy, budget: int, page_size: int) -> bool:
    """Whether the policy accepts the budget, with the engine's pages."""
    try:
        with_budget(policy, budget).check_page_size(page_size)
    except ValueError:
        return False
    return True


def check_policy(policy: KVPolicy) -> None:
    if not hasattr(policy, "budget"):
        raise ValueError(f"{policy.name!r} has no budget to calibrate; choose a policy that has one, such as rkv.")


def with_budget(policy: KVPolicy, budget: int | str) -> KVPolicy:
    check_policy(policy)
    settings: dict[str, Any] = {"budget": budget}
    return replace(policy, **settings)


def pool_bins(counts: Sequence[int], width: int, least: int) -> list[tuple[int, int]]:
    """Bins of context length, [from, to), of `width` tokens or more, pooled until each has `least` tokens.

    counts: tokens of each bin of `width`, from context 0 on. What is left at the end goes to the last bin.
    """
    found: list[tuple[int, int]] = []
    start = total = 0
    for i, count in enumerate(counts):
        total += count
        if total >= least:
            found.append((start, (i + 1) * width))
            start, total = (i + 1) * width, 0
    end = max((i + 1 for i, count in enumerate(counts) if count), default=1) * width
    if start < end:
        if found:
            found[-1] = (found[-1][0], end)
        else:
            found.append((0, end))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A schedule, in which bins its budget's tail meets the target, and which were measured at all."""

    schedule: Schedule
    met: tuple[bool, ...]
    measured: tuple[bool, ...]


def cheapest(
    tails_BN: np.ndarray,  # budgets x bins, nan where there are too few tokens
    budgets: Sequence[int],  # ascending
    starts: Sequence[int],  # of the bins
    targets: Sequence[float],  # of the bins
) -> Found:
    """Per bin the smallest budget whose tail meets the target, never smaller than in the bin before.

    Each choice being the smallest possible leaves the next bin all its choices, so no schedule that meets the targets
    and never falls is smaller anywhere. Where none meets its target, the largest budget is as near as it gets; a bin
    without a measurement keeps the budget before it.
    """
    least, chosen, met, measured = 0, [], [], []
    for column, target in zip(tails_BN.T, targets, strict=True):
        known = [i for i in range(least, len(budgets)) if not math.isnan(column[i])]
        holding = [i for i in known if column[i] >= target]
        least = holding[0] if holding else len(budgets) - 1 if known else least
        chosen.append(budgets[least])
        met.append(bool(holding))
        measured.append(bool(known))
    return Found(schedule=steps(starts, chosen), met=tuple(met), measured=tuple(measured))


def raised(own: Sequence[int], short: Sequence[int], budgets: Sequence[int]) -> list[int]:
    """One step of the grid more in the bins `short`; what follows is never smaller."""
    more = [next((each for each in budgets if each > budget), budget) for budget in own]
    return list(accumulate((more[i] if i in short else own[i] for i in range(len(own))), max))


def lowered(
    own: Sequence[int], least: Sequence[int], budgets: Sequence[int], holds: Callable[[list[int]], bool]
) -> list[int]:
    """Each bin's budget as small as `holds` lets it be, the first bin's first; never below `least`, never falling.

    own: a budget a bin, which hold. One step down is tried first, and if it holds, the rest is halved. It ends when no
    bin can go one step down by itself.
    """
    own, before = list(own), None
    while own != before:
        before = own
        for i in range(len(own)):
            bottom = max(least[i], own[i - 1] if i else 0)
            down = [budget for budget in budgets if bottom <= budget < own[i]]
            place = len(down) - 1
            while down:
                tried = [*own[:i], down[place], *own[i + 1 :]]
                if holds(tried):
                    own, down = tried, down[:place]
                else:
                    down = down[place + 1 :]
                place = len(down) // 2
    return own


def as_schedule(found: dict[str, Any]) -> Schedule:
    """The schedule that results hold."""
    return Schedule(tuple(found["starts"]), tuple(found["budgets"]))


def steps(starts: Sequence[int], chosen: Sequence[int]) -> Schedule:
    """A budget a bin as a schedule, its equal neighbours as one step; it begins at context 0."""
    firsts = [i for i in range(len(chosen)) if i == 0 or chosen[i] != chosen[i - 1]]
    return Schedule(tuple(0 if i == 0 else starts[i] for i in firsts), tuple(chosen[i] for i in firsts))
