# SPDX-License-Identifier: Apache-2.0
"""Keep everything, read everything: the dense cache every other policy is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sparse_rl.kv.policy import KVPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Full(KVPolicy):
    """Dense cache."""

    name: ClassVar[str] = "full"
