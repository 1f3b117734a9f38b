# SPDX-License-Identifier: Apache-2.0
"""`write_entries` of decode.py on a GPU: one program a row and KV head, which also updates a page's landmarks."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from sparse_rl.kernels.decode import LayerPool


def write_entries_triton(
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
    batch, num_kv_heads, dim = k_BKD.shape
    assert (
        k_BKD.stride(2) == v_BKE.stride(2) == pages_BN.stride(-1) == lengths_B.stride(0) == positions_B.stride(0) == 1
    )
    assert rows_B is None or rows_B.stride(0) == 1
    remember = q_BHD is not None and ring_RWHD is not None and rows_B is not None
    q = q_BHD if q_BHD is not None else k_BKD
    _write_entries[(batch, num_kv_heads)](
        pool.k_PKSD,
        pool.v_PKSE,
        pool.positions_PKS,
        offsets_of(pool),
        k_BKD,
        v_BKE,
        q,
        ring_RWHD if ring_RWHD is not None else k_BKD,
        pool.landmarks_PKCD if pool.landmarks_PKCD is not None else k_BKD,
        pages_BN,
        lengths_B,
        positions_B,
        rows_B if rows_B is not None else lengths_B,
        k_BKD.stride(0),
        k_BKD.stride(1),
        v_BKE.stride(0),
        v_BKE.stride(1),
        q.stride(0),
        q.stride(1),
        pages_BN.stride(0),
        DIM=dim,
        BLOCK_D=triton.next_power_of_2(dim),
        VALUE_DIM=v_BKE.shape[2],
        BLOCK_E=triton.next_power_of_2(v_BKE.shape[2]),
        PAGE=pool.k_PKSD.shape[2],
        NUM_KV_HEADS=num_kv_heads,
        GROUP=q.shape[1] // num_kv_heads,
        BLOCK_G=triton.next_power_of_2(q.shape[1] // num_kv_heads),
        RING=ring_RWHD.shape[1] if remember and ring_RWHD is not None else 0,
        LANDMARKS=pool.landmarks_PKCD.shape[2] if pool.landmarks_PKCD is not None else 0,
        BLOCK_S=triton.next_power_of_2(pool.k_PKSD.shape[2]),
        num_warps=2,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _write_entries(  # type: ignore[no-untyped-def]
    pool_k,
    pool_v,
    pool_positions,
    offsets,
    k,
    v,
    q,
    ring,
    landmarks,
    pages,
    lengths,
    positions,
    rows,
    k_row,
    k_head,
    v_row,
    v_head,
    q_row,
    q_head,
    pages_row,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PAGE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    RING: tl.constexpr,
    LANDMARKS: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    slot = tl.load(lengths + row) - 1
    position = tl.load(positions + row)
    page = tl.load(pages + row * pages_row + slot // PAGE).to(tl.int64)
    entry = (page * NUM_KV_HEADS + head) * PAGE + slot % PAGE
    d = tl.arange(0, BLOCK_D)
    inside = d < DIM
    new_k = tl.load(k + row * k_row + head * k_head + d, mask=inside)
    e = tl.arange(0, BLOCK_E)
    new_v = tl.load(v + row * v_row + head * v_head + e, mask=e < VALUE_DIM)
    tl.store(pool_k + tl.load(offsets) + entry * DIM + d, new_k, inside)
    tl.store(pool_v + tl.load(offsets + 1) + entry * VALUE_DIM + e, new_v, e < VALUE_DIM)
    tl.store(pool_positions + tl.load(offsets + 2) + entry, position.to(tl.int32))
    if LANDMARKS > 0:
        s = tl.arange(0, BLOCK_S)
        newest = slot % PAGE
        start = pool_k + tl.multiple_of(tl.load(offsets), 16)
        earlier = start + ((page * NUM_KV_HEADS + head) * PAGE + s)[:, None] * DIM + d[None, :]
        keys = tl.load(earlier, mask=(s < newest)[:, None] & inside[None, :], other=0.0)
        keys = tl.where((s == newest)[:, None], new_k[None, :], keys)
        tile = (page * NUM_KV_HEADS + head) * LANDMARKS * DIM
        summarize(landmarks + tl.load(offsets + 3) + tile, keys, newest + 1, s, d, DIM, LANDMARKS)
    if RING > 0:
        g = tl.arange(0, BLOCK_G)
        query_heads = head * GROUP + g
        both = (g < GROUP)[:, None] & inside[None, :]
        queries = tl.load(q + row * q_row + query_heads[:, None] * q_head + d[None, :], mask=both)
        place = tl.load(rows + row).to(tl.int64) * RING + position % RING
        target = ring + (place * (NUM_KV_HEADS * GROUP) + query_heads[:, None]) * DIM + d[None, :]
        tl.store(target, queries, both)


@triton.jit  # type: ignore[untyped-decorator]
def summarize(target, keys, count, s, d, DIM: tl.constexpr, LANDMARKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Write the landmarks of a page: of its keys those with s < count, which are zeros elsewhere."""
    keys = keys.to(tl.float32)
    inside = d < DIM
    if LANDMARKS == 1:
        tl.store(target + d, (tl.sum(keys, axis=0) / count).to(target.dtype.element_ty), inside)
    else:
        held = (s < count)[:, None]
        least = tl.min(tl.where(held, keys, float("inf")), axis=0)
        most = tl.max(tl.where(held, keys, float("-inf")), axis=0)
        tl.store(target + d, least.to(target.dtype.element_ty), inside)
        tl.store(target + DIM + d, most.to(target.dtype.element_ty), inside)


@lru_cache
def _no_offsets(device: torch.device) -> torch.Tensor:
    return torch.zeros(4, dtype=torch.int64, device=device)


def offsets_of(pool: LayerPool) -> torch.Tensor:
    return pool.offsets if pool.offsets is not None else _no_offsets(pool.k_PKSD.device)
