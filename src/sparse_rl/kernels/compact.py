# SPDX-License-Identifier: Apache-2.0
"""Move kept entries to the front of a sequence's pages, so that the pages behind them can be given back."""

from __future__ import annotations

import torch

from sparse_rl.kernels.decode import gather_pages_ref


def compact_ref(
    pools: tuple[torch.Tensor, ...],  # each (P, K, page, ...): keys, values, positions, per-entry state
    pages_BN: torch.Tensor,
    kept_BKT: torch.Tensor,  # slot in the sequence, in the order to store
    counts_B: torch.Tensor,  # how many of the T are real
) -> None:
    """In place: slot t of row b and head h becomes what slot kept[b, h, t] was."""
    num_heads, page_size = pools[0].shape[1:3]
    device = kept_BKT.device
    row, slot = (torch.arange(kept_BKT.shape[2], device=device)[None, :] < counts_B[:, None]).nonzero(as_tuple=True)
    page = pages_BN[row, slot // page_size]
    for pool in pools:
        entries = gather_pages_ref(pool, pages_BN)
        index = kept_BKT.reshape(*kept_BKT.shape, *[1] * (entries.ndim - 3)).expand(-1, -1, -1, *entries.shape[3:])
        pool[page, :, slot % page_size] = entries.gather(2, index)[row, :, slot].reshape(-1, num_heads, *pool.shape[3:])
