# SPDX-License-Identifier: Apache-2.0
"""An engine of a few rows and small pages."""

from __future__ import annotations

from sparse_rl.rollout import Engine, EngineConfig


def engine(loaded, policy=None, **config) -> Engine:
    return Engine(loaded, policy, EngineConfig(**{"rows": 4, "page_size": 16, **config}))
