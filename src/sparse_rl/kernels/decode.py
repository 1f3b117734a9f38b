# SPDX-License-Identifier: Apache-2.0
"""One new token a row: write its entry into the row's pages, then attend to what they hold.

    k, v at slot lengths_b - 1 of row b become the token's own; its query goes into the row's ring
    the landmarks of that slot's page, if pages have any, follow (landmarks.py)
    out_b = sum_{s < lengths_b, age_s < window} softmax_s(scale * q_b . k_s) v_s      soft-caps, sinks: attention.py

The pool is head-major, (pages, K, page, D): one page of one head is one contiguous tile. Values have a width of their
own, E.

Whole prompts are in attention.py; a policy that reads fewer pages hands in a table of those.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparse_rl.kernels.attention import masked_attention
from sparse_rl.kernels.backend import use_triton
from sparse_rl.kernels.landmarks import write_landmarks_ref


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPool:
    """One layer's share of the pool.

    A CUDA graph bakes in the addresses it was captured with, and the pool may move. Where `offsets` is given (Triton
    alone), the tensors are a page that never moves, and the pool lies `offsets` elements behind each of them.
    """

    k_PKSD: torch.Tensor
    v_PKSE: torch.Tensor
    positions_PKS: torch.Tensor
    landmarks_PKCD: torch.Tensor | None = None
    offsets: torch.Tensor | None = None  # (4,) int64


def write_entries(
    pool: LayerPool,
    k_BKD: torch.Tensor,
    v_BKE: torch.Tensor,
    pages_BN: torch.Tensor,
    lengths_B: torch.Tensor,  # entries after the write
    positions_B: torch.Tensor,
    *,
    q_BHD: torch.Tensor | None = None,
    ring_RWHD: torch.Tensor | None = None,
    rows_B: torch.Tensor | None = None,  # whose ring
) -> None:
    """Store each row's new key, value and position, and its query in slot `position % W` of its ring, if it has one."""
    if use_triton(k_BKD):
        from sparse_rl.kernels.write_triton import write_entries_triton as write
    else:
        write = write_entries_ref
    more = {"q_BHD": q_BHD, "ring_RWHD": ring_RWHD, "rows_B": rows_B}
    write(pool, k_BKD, v_BKE, pages_BN, lengths_B, positions_B, **more)


def write_entries_ref(
    pool: LayerPool,
    k_BKD: torch.Tensor,
    v_BKE: torch.Tensor,
    pages_BN: torch.Tensor,
    lengths_B: torch.Tensor,
    positions_B: torch.Tensor,
    *,
    q_BHD: torch.Tensor | None = None,
    ring_RWHD: torch.Tensor | None = None,
    rows_B: torch.Tensor | None = None,
) -> None:
    page_size = pool.k_PKSD.shape[2]
    slots_B = lengths_B - 1
    page_B = pages_BN.gather(1, (slots_B // page_size)[:, None])[:, 0]
    offset_B = slots_B % page_size
    pool.k_PKSD[page_B, :, offset_B] = k_BKD
    pool.v_PKSE[page_B, :, offset_B] = v_BKE
    pool.positions_PKS[page_B, :, offset_B] = positions_B.int()[:, None]
    if pool.landmarks_PKCD is not None:
        write_landmarks_ref(pool.k_PKSD, pool.landmarks_PKCD, page_B, offset_B + 1)
    if ring_RWHD is not None and rows_B is not None and q_BHD is not None:
        ring_RWHD[rows_B, positions_B % ring_RWHD.shape[1]] = q_BHD


def decode_attention(
    q_BHD: torch.Tensor,
    pool: LayerPool,
    pages_BN: torch.Tensor,
    lengths_B: torch.Tensor,
    positions_B: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    max_length: int | None = None,
) -> torch.Tensor:
    """Attention output B H E of one query a row over the first `lengths` entries of its pages.

    Pages may be listed per KV head, B K N, with lengths B K: the list then says which pages are read. A window hides
    entries that many positions old and older. `max_length` bounds the lengths, where the caller knows better than the
    width of the table.
    """
    if use_triton(q_BHD):
        from sparse_rl.kernels.decode_triton import decode_attention_triton as attend
    else:
        attend = decode_attention_ref
    how = {"scale": scale, "window": window, "softcap": softcap, "sinks_H": sinks_H, "max_length": max_length}
    return attend(q_BHD, pool, pages_BN, lengths_B, positions_B, **how)  # type: ignore[arg-type]


def decode_attention_ref(
    q_BHD: torch.Tensor,
    pool: LayerPool,
    pages_BN: torch.Tensor,
    lengths_B: torch.Tensor,
    positions_B: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: torch.Tensor | None = None,
    max_length: int | None = None,
) -> torch.Tensor:
    """The query heads of a group become the query length of their KV head, so keys are never repeated."""
    batch, num_heads, dim = q_BHD.shape
    pages_BN = pages_BN[..., : -(-int(lengths_B.max()) // pool.k_PKSD.shape[2])]
    k_BKSD, v_BKSE = gather_pages_ref(pool.k_PKSD, pages_BN), gather_pages_ref(pool.v_PKSE, pages_BN)
    slot = torch.arange(k_BKSD.shape[2], device=q_BHD.device)
    lengths_BK = lengths_B if lengths_B.ndim == 2 else lengths_B[:, None]
    visible_BKS = slot < lengths_BK[..., None]
    if window is not None:
        entry_positions_BKS = gather_pages_ref(pool.positions_PKS, pages_BN)
        visible_BKS = visible_BKS & (entry_positions_BKS > (positions_B - window)[:, None, None])
    q_BKGD, visible = q_BHD.reshape(batch, k_BKSD.shape[1], -1, dim), visible_BKS[:, :, None]
    sinks_KG = None if sinks_H is None else sinks_H.reshape(k_BKSD.shape[1], -1)
    out = masked_attention(q_BKGD, k_BKSD, v_BKSE, visible, scale=scale, softcap=softcap, sinks_HQ=sinks_KG)
    return out.reshape(batch, num_heads, -1)


def gather_pages_ref(pool_PKSD: torch.Tensor, pages_BN: torch.Tensor) -> torch.Tensor:
    """The entries of each row's pages in order, B K (N * page) ..., for keys, values or positions."""
    num_pages, num_heads, page_size, *rest = pool_PKSD.shape
    pages_BKN = pages_BN if pages_BN.ndim == 3 else pages_BN[:, None, :]
    tiles = pages_BKN * num_heads + torch.arange(num_heads, device=pool_PKSD.device)[None, :, None]
    picked = pool_PKSD.reshape(num_pages * num_heads, -1).index_select(0, tiles.reshape(-1))
    return picked.reshape(tiles.shape[0], num_heads, tiles.shape[2] * page_size, *rest)
