# SPDX-License-Identifier: Apache-2.0
"""A model whose plans several files make."""

from __future__ import annotations

import pytest
import torch

from sparse_rl.model.shapes import shape_config
from sparse_rl.plan import model_size


@pytest.fixture(scope="session")
def qwen():
    return model_size(shape_config("qwen2.5-7b"), "qwen2.5-7b", torch.bfloat16)
