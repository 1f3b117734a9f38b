# SPDX-License-Identifier: Apache-2.0
"""Choosing pages inside an evicting policy: few entries are kept, and a decode step reads fewer still.

rkv:budget=8192,select=pages_mean,select_budget=1024
"""

from __future__ import annotations

from functools import lru_cache

from sparse_rl.kv.pages_mean import PagesMean
from sparse_rl.kv.policy import EvictPolicy
from sparse_rl.kv.quest import Quest
from sparse_rl.kv.select import SelectPolicy

INSIDE: dict[str, type[SelectPolicy]] = {policy.name: policy for policy in (PagesMean, Quest)}


@lru_cache(maxsize=None, typed=True)  # True is no 1
def inside(select: str, budget: int | str | None) -> SelectPolicy | None:
    """The select policy that these settings of an evicting one ask for."""
    if select == "none":
        if budget is not None:
            raise ValueError(
                f"kv.select_budget is {budget}, but kv.select is none and everything held is read; set kv.select to "
                f"{' or '.join(INSIDE)}, or leave kv.select_budget out."
            )
        return None
    if budget is None:
        raise ValueError(f"kv.select is {select}, but kv.select_budget is missing; say how many entries it reads.")
    try:
        return INSIDE[select](budget=budget)
    except ValueError as error:
        raise ValueError(str(error).replace("kv.budget", "kv.select_budget")) from error  # its name out here


def check_some_unread(policy: EvictPolicy) -> None:
    """Raise if a policy inside this one reads whatever is held; a prompt that is protected may be of any length."""
    most = policy.schedule.most + policy.interval
    if policy.selection is not None and not policy.protect_prompt and policy.selection.schedule.budgets[0] >= most:
        raise ValueError(
            f"kv.select_budget is {policy.select_budget}, but no more than {most} entries are ever held (budget "
            f"{policy.schedule.most} + interval {policy.interval}), and all would be read; lower it, or leave "
            "kv.select out."
        )
