# SPDX-License-Identifier: Apache-2.0
"""Quest (arXiv 2406.10774): pages by a bound on what any of their keys can be worth to the query.

    importance(page) = mean_g sum_d max(q_gd min_s k_sd, q_gd max_s k_sd)        k after rotation

Departure: one list of pages a KV head, by the mean of its query heads' bounds, where the paper has one a query head.
Query heads of a group share their keys, so lists of their own would read most pages of the group's anyway, each once
for every head that wants it. First and last pages are reserved as in `pages_mean`; the paper keeps the last one alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sparse_rl.kv.select import SelectPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Quest(SelectPolicy):
    """The pages whose keys may be worth most to the query."""

    name: ClassVar[str] = "quest"
    landmarks: ClassVar[int] = 2
