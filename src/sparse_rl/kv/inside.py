# SPDX-License-Identifier: Apache-2.0
"""Choosing pages inside an evicting policy: few entries are kept, and a decode step reads fewer still.

rkv:budget=8192,select=pages_mean,select_budget=1024
"""

from __future__ import annotations

from functools import cache

from sparse_rl.kv.pages_mean import PagesMean
from sparse_rl.kv.quest import Quest
from sparse_rl.kv.select import SelectPolicy

INSIDE: dict[str, type[SelectPolicy]] = {policy.name: policy for policy in (PagesMean, Quest)}


@cache
def inside(select: str, budget: int | str | None) -> SelectPolicy | None:
    """The select policy that these settings of an evicting one ask for."""
    if select == "none":
        if budget is not None:
            raise ValueError(
                f"kv.select_budget is {budget}, but kv.select is none and everything held is read; set kv.select to "
                f"{' or '.join(INSIDE)}, or leave kv.select_budget out."
            )
        return None
    if select not in INSIDE:
        raise ValueError(f"kv.select is {select!r}; choose one of none, {', '.join(INSIDE)}.")
    if isinstance(budget, int) and budget < 1:
        raise ValueError(f"kv.select_budget is {budget}; it must be at least 1.")
    return INSIDE[select]() if budget is None else INSIDE[select](budget=budget)
