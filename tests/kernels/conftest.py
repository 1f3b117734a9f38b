# SPDX-License-Identifier: Apache-2.0
"""Other numbers every time: torch itself begins every process with the same ones."""

from __future__ import annotations

import random

import pytest
import torch


@pytest.fixture(autouse=True)
def seed() -> int:
    """What torch draws from in this test; printed when it fails."""
    seed = random.SystemRandom().randrange(1 << 63)
    print("seed", seed)
    torch.manual_seed(seed)
    return seed
