# SPDX-License-Identifier: Apache-2.0
"""`landmarks.py` on a GPU.

Importance is bound by reading landmarks, 1 / (2 page) of the keys' and values' bytes for each of the C, so blocks of
pages are spread over the whole GPU. One program a row and KV head then finds the importance of the last page chosen bit
by bit and lists the pages; nothing is sorted. For rows that read all they hold it is not computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparse_rl.kernels.compact_triton import PROTECTED, UNWRITTEN, nth_greatest, ordered
from sparse_rl.kernels.decode import LayerPool
from sparse_rl.kernels.write_triton import offsets_of, summarize

LOADED = 8192  # numbers of landmarks a program reads


def write_landmarks_triton(
    k_PKSD: torch.Tensor, landmarks_PKCD: torch.Tensor, pages_M: torch.Tensor, counts_M: torch.Tensor
) -> None:
    num_kv_heads, page_size, dim = k_PKSD.shape[1:]
    assert k_PKSD.is_contiguous() and landmarks_PKCD.is_contiguous()
    if pages_M.numel() == 0:
        return
    _write_landmarks[(pages_M.shape[0], num_kv_heads)](
        k_PKSD,
        landmarks_PKCD,
        pages_M.contiguous(),
        counts_M.contiguous(),
        DIM=dim,
        BLOCK_D=triton.next_power_of_2(dim),
        PAGE=page_size,
        BLOCK_S=triton.next_power_of_2(page_size),
        NUM_KV_HEADS=num_kv_heads,
        LANDMARKS=landmarks_PKCD.shape[2],
    )


@triton.jit  # type: ignore[untyped-decorator]
def _write_landmarks(  # type: ignore[no-untyped-def]
    keys,
    landmarks,
    pages,
    counts,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_S: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    LANDMARKS: tl.constexpr,
):
    tile = tl.load(pages + tl.program_id(0)).to(tl.int64) * NUM_KV_HEADS + tl.program_id(1)
    count = tl.load(counts + tl.program_id(0))
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, BLOCK_D)
    real = (s < count)[:, None] & (d < DIM)[None, :]
    k = tl.load(keys + (tile * PAGE + s)[:, None] * DIM + d[None, :], mask=real, other=0.0)
    if count > 0:
        summarize(landmarks + tile * LANDMARKS * DIM, k, count, s, d, DIM, LANDMARKS)


def choose_pages_triton(
    q_BHD: torch.Tensor,
    pool: LayerPool,
    pages_BN: torch.Tensor,
    lengths_B: torch.Tensor,
    counts_B: torch.Tensor,
    *,
    first: int,
    last: int,
    width: int,
) -> torch.Tensor:
    assert pool.landmarks_PKCD is not None and q_BHD.stride(2) == pages_BN.stride(1) == 1
    (batch, num_heads, dim), size = q_BHD.shape, pages_BN.shape[1]
    num_kv_heads, page_size = pool.k_PKSD.shape[1:3]
    num_landmarks = pool.landmarks_PKCD.shape[2]
    lengths_B, counts_B = lengths_B.contiguous(), counts_B.contiguous()
    importance_BKN = torch.empty((batch, num_kv_heads, size), dtype=torch.float32, device=q_BHD.device)
    dim_p = triton.next_power_of_2(dim)
    block = min(max(LOADED // (dim_p * num_landmarks), 1), triton.next_power_of_2(size))
    _page_importance[(num_kv_heads, batch, triton.cdiv(size, block))](
        q_BHD,
        pool.landmarks_PKCD,
        offsets_of(pool),
        pages_BN,
        lengths_B,
        counts_B,
        importance_BKN,
        size,
        q_BHD.stride(0),
        q_BHD.stride(1),
        pages_BN.stride(0),
        DIM=dim,
        BLOCK_D=dim_p,
        PAGE=page_size,
        BLOCK_P=block,
        GROUP=num_heads // num_kv_heads,
        NUM_KV_HEADS=num_kv_heads,
        LANDMARKS=num_landmarks,
        ALIGNED=min(dim & -dim, 16),  # elements: a layer begins at a multiple of the head dim
    )
    listed_BKM = torch.empty((batch, num_kv_heads, width), dtype=torch.int32, device=q_BHD.device)
    size_p = triton.next_power_of_2(size)
    _top_pages[(num_kv_heads, batch)](
        importance_BKN,
        pages_BN,
        lengths_B,
        counts_B,
        listed_BKM,
        size,
        pages_BN.stride(0),
        width,
        first,
        last,
        PAGE=page_size,
        BLOCK_N=size_p,
        BLOCK_M=triton.next_power_of_2(width),
        num_warps=4 if size_p <= 2048 else 8 if size_p <= 8192 else 16,
    )
    return listed_BKM


@triton.jit  # type: ignore[untyped-decorator]
def _page_importance(  # type: ignore[no-untyped-def]
    q,
    pool_landmarks,
    offsets,
    pages,
    lengths,
    counts,
    importance,
    size,
    q_row,
    q_head,
    pages_row,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    LANDMARKS: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1)
    start = tl.program_id(2) * BLOCK_P
    num_pages = tl.cdiv(tl.load(lengths + row), PAGE)
    if (start < num_pages) & (tl.load(counts + row) < num_pages):
        d = tl.arange(0, BLOCK_D)
        inside = d < DIM
        low = tl.zeros([BLOCK_D], tl.float32)
        high = tl.zeros([BLOCK_D], tl.float32)
        for g in tl.static_range(GROUP):
            query = tl.load(q + row * q_row + (head * GROUP + g) * q_head + d, mask=inside, other=0.0).to(tl.float32)
            if LANDMARKS == 1:
                low += query
            else:
                low += tl.minimum(query, 0.0)
                high += tl.maximum(query, 0.0)

        place = start + tl.arange(0, BLOCK_P)
        page = tl.load(pages + row * pages_row + place, mask=place < num_pages, other=0).to(tl.int64)
        landmarks = pool_landmarks + tl.multiple_of(tl.load(offsets + 3), ALIGNED)
        tile = ((page * NUM_KV_HEADS + head) * (LANDMARKS * DIM))[:, None] + d[None, :]
        real = (place < num_pages)[:, None] & inside[None, :]
        product = tl.load(landmarks + tile, mask=real, other=0.0).to(tl.float32) * low[None, :]
        if LANDMARKS == 2:
            product += tl.load(landmarks + tile + DIM, mask=real, other=0.0).to(tl.float32) * high[None, :]
        target = importance + (row * NUM_KV_HEADS + head).to(tl.int64) * size + place
        tl.store(target, tl.sum(product, axis=1), mask=place < num_pages)


@triton.jit(do_not_specialize=["first", "last"])  # type: ignore[untyped-decorator]
def _top_pages(  # type: ignore[no-untyped-def]
    importance,
    pages,
    lengths,
    counts,
    listed,
    size,
    pages_row,
    width,
    first,
    last,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    row = tl.program_id(1)
    unit = (row * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
    num_pages = tl.cdiv(tl.load(lengths + row), PAGE).to(tl.int32)
    count = tl.load(counts + row).to(tl.int32)
    place = tl.arange(0, BLOCK_N)
    chosen = place < num_pages
    if count < num_pages:
        order = ordered(tl.load(importance + unit * size + place, mask=chosen, other=0.0))
        order = tl.where((place < first) | (place >= num_pages - last), PROTECTED, order)
        order = tl.where(chosen, order, UNWRITTEN)
        cut = nth_greatest(order, count)
        ties = (order == cut).to(tl.int32)
        spare = count - tl.sum((order > cut).to(tl.int32), axis=0)  # of the ties, the earliest that many stay
        chosen = (order > cut) | ((ties == 1) & (tl.cumsum(ties, axis=0) <= spare))
    page = tl.load(pages + row * pages_row + place, mask=chosen, other=0).to(tl.int32)
    listed += unit * width
    tl.store(listed + tl.cumsum(chosen.to(tl.int32), axis=0) - 1, page, mask=chosen)
    m = tl.arange(0, BLOCK_M)
    tl.store(listed + m, 0, mask=(m >= count) & (m < width))
