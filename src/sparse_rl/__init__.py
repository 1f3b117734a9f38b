# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning of language models whose rollouts run on a sparse KV cache."""

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparse_rl.kv.sparse_cache import SparseCache

__version__ = "0.1.0"
__all__ = ["SparseCache", "__version__"]

for _name in ("torchao", "torch.utils._pytree"):  # they complain of each other when transformers imports them
    logging.getLogger(_name).setLevel(logging.ERROR)


def __getattr__(name: str) -> Any:
    """Imports torch and transformers only when it is asked for."""
    if name == "SparseCache":
        from sparse_rl.kv.sparse_cache import SparseCache

        return SparseCache
    raise AttributeError(f"module 'sparse_rl' has no attribute {name!r}")
