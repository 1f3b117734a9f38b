# SPDX-License-Identifier: Apache-2.0
"""Pages by the mean of their keys, as Sparrow reads them: one landmark a page, weighed by the mean query of the group.

importance(page) = mean_g q_g . mean_s k_s        k after rotation
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sparse_rl.kv.select import SelectPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesMean(SelectPolicy):
    """The pages whose mean key the query points to."""

    name: ClassVar[str] = "pages_mean"
    landmarks: ClassVar[int] = 1
