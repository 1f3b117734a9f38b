# SPDX-License-Identifier: Apache-2.0
"""One query a row against that row's pages.

    out_b = sum_{s < lengths_b} softmax_s(scale * q_b . k_s) v_s

The pool is head-major, (pages, K, page, D): one page of one head is one contiguous tile.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def gather_pages_ref(pool_PKSD: torch.Tensor, pages_BN: torch.Tensor) -> torch.Tensor:
    """The entries of each row's pages in order, B K (N * page) ..., for keys, values or positions."""
    num_pages, num_heads, page_size, *rest = pool_PKSD.shape
    heads = torch.arange(num_heads, device=pool_PKSD.device)
    tiles = pages_BN[:, None, :] * num_heads + heads[None, :, None]
    picked = pool_PKSD.reshape(num_pages * num_heads, -1).index_select(0, tiles.reshape(-1))
    return picked.reshape(pages_BN.shape[0], num_heads, pages_BN.shape[1] * page_size, *rest)


def visible_entries_ref(
    lengths_B: torch.Tensor, positions_BKS: torch.Tensor, query_positions_B: torch.Tensor, window_B: torch.Tensor
) -> torch.Tensor:
    """Which slots a query sees, B K S: written, and fewer than `window` (one for all, or one a row) tokens old."""
    written_BS = torch.arange(positions_BKS.shape[-1], device=lengths_B.device) < lengths_B[:, None]
    return written_BS[:, None] & (positions_BKS > (query_positions_B - window_B)[:, None, None])


def decode_attention_ref(
    q_BHD: torch.Tensor,
    k_PKSD: torch.Tensor,
    v_PKSD: torch.Tensor,
    pages_BN: torch.Tensor,
    visible_BKS: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """Attention output B H D over the visible entries of each row's pages (K of the mask may be 1).

    The query heads of a group become the query length of their KV head, so keys are never repeated.
    """
    batch, num_heads, dim = q_BHD.shape
    k_BKSD, v_BKSD = gather_pages_ref(k_PKSD, pages_BN), gather_pages_ref(v_PKSD, pages_BN)
    out = scaled_dot_product_attention(
        q_BHD.reshape(batch, k_BKSD.shape[1], -1, dim), k_BKSD, v_BKSD, attn_mask=visible_BKS[:, :, None], scale=scale
    )
    return out.reshape(batch, num_heads, dim)
