# SPDX-License-Identifier: Apache-2.0
"""Choose the entries that stay, and move them to the front of their pages, where the row grows on from.

kept = the `count` greatest of a row's first `length` slots by (protected, importance, slot), in ascending order
slot t of the row becomes what slot kept_t was

How important an entry is comes from outside: policies say it (kv/policy.py).
"""

from __future__ import annotations

import torch

from sparse_rl.kernels.backend import use_triton
from sparse_rl.kernels.decode import gather_pages_ref


def select_and_compact(
    pools: tuple[torch.Tensor, ...],  # each (P, K, page, ...): keys, values, positions, per-entry state
    pages_BN: torch.Tensor,
    importance_BKS: torch.Tensor,
    protected_BKS: torch.Tensor,
    lengths_B: torch.Tensor,  # entries held
    counts_B: torch.Tensor,  # entries to keep
    *,
    max_count: int,
) -> torch.Tensor:
    """Cut every row and head to its count, in place; the slots that were kept, B K max_count, short rows padded."""
    if use_triton(importance_BKS):
        from sparse_rl.kernels.compact_triton import select_and_compact_triton as cut
    else:
        cut = select_and_compact_ref
    return cut(pools, pages_BN, importance_BKS, protected_BKS, lengths_B, counts_B, max_count=max_count)


def select_and_compact_ref(
    pools: tuple[torch.Tensor, ...],
    pages_BN: torch.Tensor,
    importance_BKS: torch.Tensor,
    protected_BKS: torch.Tensor,
    lengths_B: torch.Tensor,
    counts_B: torch.Tensor,
    *,
    max_count: int,
) -> torch.Tensor:
    kept_BKE = select_ref(importance_BKS, protected_BKS, lengths_B, counts_B, max_count=max_count)
    compact_ref(pools, pages_BN, kept_BKE, counts_B)
    return kept_BKE


def select_ref(
    importance_BKS: torch.Tensor,
    protected_BKS: torch.Tensor,
    lengths_B: torch.Tensor,
    counts_B: torch.Tensor,
    *,
    max_count: int,
) -> torch.Tensor:
    """Slots of the `counts` entries to keep of each row's `lengths`, ascending; B K max_count, short rows padded.

    Protected entries stay whatever their importance; the best of the others fill up the count. Of equal importance
    the later slot wins; nan counts as least.
    """
    size = importance_BKS.shape[-1]
    slot = torch.arange(size, device=importance_BKS.device)
    written_BKS = (slot < lengths_B[:, None])[:, None].expand_as(importance_BKS)
    if not importance_BKS.is_cuda:  # where it would wait
        assert bool((counts_B <= lengths_B.clamp(max=max_count)).all()), "more entries to keep than there are"
        assert bool((protected_BKS.sum(-1) <= counts_B[:, None]).all()), "more protected entries than can be kept"

    # Two stable sorts make one order: empty slots, then by importance, then protected entries last.
    by_importance = importance_BKS.nan_to_num(nan=float("-inf")).argsort(dim=-1, stable=True)
    rank = written_BKS.int() + (written_BKS & protected_BKS).int()
    by_rank = rank.gather(-1, by_importance).argsort(dim=-1, stable=True)
    worst_first = by_importance.gather(-1, by_rank)

    best = slot >= size - counts_B[:, None]
    kept_BKS = torch.zeros_like(written_BKS).scatter(-1, worst_first, best[:, None].expand_as(importance_BKS))
    ascending = kept_BKS.logical_not().int().argsort(dim=-1, stable=True)
    return ascending[..., :max_count]


def compact_ref(
    pools: tuple[torch.Tensor, ...],
    pages_BN: torch.Tensor,
    kept_BKE: torch.Tensor,  # slot in the sequence, in the order to store
    counts_B: torch.Tensor,  # how many of the E are real
) -> None:
    """In place: slot t of row b and head h becomes what slot kept[b, h, t] was."""
    page_size = pools[0].shape[2]
    # What is not real repeats the last that is, so that nothing has to be counted, which would wait for a GPU.
    last_B = (counts_B - 1).clamp(min=0)
    slot_BE = torch.minimum(torch.arange(kept_BKE.shape[2], device=kept_BKE.device), last_B[:, None])
    kept_BKE = kept_BKE.gather(-1, slot_BE[:, None].expand_as(kept_BKE))
    page_BE = pages_BN.gather(1, slot_BE // page_size)
    for pool in pools:
        entries = gather_pages_ref(pool, pages_BN)
        index = kept_BKE.reshape(*kept_BKE.shape, *[1] * (entries.ndim - 3)).expand(-1, -1, -1, *entries.shape[3:])
        pool[page_BE, :, slot_BE % page_size] = entries.gather(2, index).transpose(1, 2)
