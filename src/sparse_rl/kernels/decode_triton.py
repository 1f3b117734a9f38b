# SPDX-License-Identifier: Apache-2.0
"""`decode.py` on a GPU.

Attention is bound by reading keys and values, so one program reads one KV head of one row once, for all its query
heads. Few rows leave the GPU idle: the entries of a row are then split among programs and their results combined.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl

from sparse_rl.kernels.decode import LayerPool

LOG2_E = 1.4426950408889634
PROGRAMS_PER_SM = 4  # as many as it takes to keep the memory busy
MIN_SPLIT = 128  # entries worth a program of their own
MAX_SPLITS = 32


def write_entries_triton(
    pool: LayerPool,
    k_BKD: torch.Tensor,
    v_BKD: torch.Tensor,
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
        k_BKD.stride(2) == v_BKD.stride(2) == pages_BN.stride(-1) == lengths_B.stride(0) == positions_B.stride(0) == 1
    )
    assert rows_B is None or rows_B.stride(0) == 1
    remember = q_BHD is not None and ring_RWHD is not None and rows_B is not None
    q = q_BHD if q_BHD is not None else k_BKD
    _write_entries[(batch, num_kv_heads)](
        pool.k_PKSD,
        pool.v_PKSD,
        pool.positions_PKS,
        offsets_of(pool),
        k_BKD,
        v_BKD,
        q,
        ring_RWHD if ring_RWHD is not None else k_BKD,
        pool.landmarks_PKCD if pool.landmarks_PKCD is not None else k_BKD,
        pages_BN,
        lengths_B,
        positions_B,
        rows_B if rows_B is not None else lengths_B,
        k_BKD.stride(0),
        k_BKD.stride(1),
        v_BKD.stride(0),
        v_BKD.stride(1),
        q.stride(0),
        q.stride(1),
        pages_BN.stride(0),
        DIM=dim,
        BLOCK_D=triton.next_power_of_2(dim),
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
    new_v = tl.load(v + row * v_row + head * v_head + d, mask=inside)
    tl.store(pool_k + tl.load(offsets) + entry * DIM + d, new_k, inside)
    tl.store(pool_v + tl.load(offsets + 1) + entry * DIM + d, new_v, inside)
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


def decode_attention_triton(
    q_BHD: torch.Tensor,
    pool: LayerPool,
    pages_BN: torch.Tensor,
    lengths_B: torch.Tensor,
    positions_B: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    max_length: int | None = None,
) -> torch.Tensor:
    batch, num_heads, dim = q_BHD.shape
    num_kv_heads, page_size = pool.k_PKSD.shape[1:3]
    assert q_BHD.stride(2) == pages_BN.stride(-1) == positions_B.stride(0) == 1
    longest = max_length or pages_BN.shape[-1] * page_size
    num_splits = splits_of(batch * num_kv_heads, longest, num_sms(q_BHD.device))
    out_BHD = torch.empty(q_BHD.shape, dtype=q_BHD.dtype, device=q_BHD.device)
    if num_splits > 1:
        partial = torch.empty((batch, num_heads, num_splits, dim), dtype=torch.float32, device=q_BHD.device)
        statistics = torch.empty((batch, num_heads, num_splits, 2), dtype=torch.float32, device=q_BHD.device)
    else:
        partial, statistics = out_BHD, out_BHD
    crowded = batch * num_kv_heads * num_splits > PROGRAMS_PER_SM * num_sms(q_BHD.device)
    per_head = pages_BN.ndim == 3
    group = num_heads // num_kv_heads
    _decode_attention[(num_kv_heads, batch, num_splits)](
        q_BHD,
        pool.k_PKSD,
        pool.v_PKSD,
        pool.positions_PKS,
        offsets_of(pool),
        pages_BN,
        lengths_B,
        positions_B,
        partial,
        statistics,
        scale * LOG2_E,
        window or 0,
        q_BHD.stride(0),
        q_BHD.stride(1),
        pages_BN.stride(0),
        pages_BN.stride(1) if per_head else 0,
        lengths_B.stride(0),
        lengths_B.stride(1) if lengths_B.ndim == 2 else 0,
        DIM=dim,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        PAGE=page_size,
        BLOCK_N=block_of(page_size, dim * q_BHD.itemsize, crowded),
        GROUP=group,
        BLOCK_G=max(16, triton.next_power_of_2(group)),
        NUM_KV_HEADS=num_kv_heads,
        NUM_SPLITS=num_splits,
        HAS_WINDOW=window is not None,
        PRECISION="ieee" if q_BHD.dtype == torch.float32 else "tf32",
        num_warps=2 if dim <= 128 else 4,
        num_stages=3 if q_BHD.itemsize == 2 else 2,
    )
    if num_splits > 1:
        _decode_combine[(batch, num_heads)](
            partial,
            statistics,
            out_BHD,
            DIM=dim,
            BLOCK_D=triton.next_power_of_2(dim),
            NUM_SPLITS=num_splits,
            BLOCK_SPLITS=triton.next_power_of_2(num_splits),
        )
    return out_BHD


def block_of(page_size: int, row_bytes: int, crowded: bool) -> int:
    """Entries read at a time: a power of two, smaller where entries are wide or programs many.

    It divides the page, or a small page divides it.
    """
    block = 64 if row_bytes <= 256 and not crowded else 32
    return block if block % page_size == 0 else min(page_size & -page_size, block)


def splits_of(num_programs: int, longest: int, num_sms: int) -> int:
    """Programs a row's entries are split among: a power of two, so that few variants exist."""
    wanted = -(-PROGRAMS_PER_SM * num_sms // (2 * num_programs))
    splits = 1
    while splits < wanted and splits < MAX_SPLITS and longest // (2 * splits) >= MIN_SPLIT:
        splits *= 2
    return splits


@lru_cache
def num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@lru_cache
def _no_offsets(device: torch.device) -> torch.Tensor:
    return torch.zeros(4, dtype=torch.int64, device=device)


def offsets_of(pool: LayerPool) -> torch.Tensor:
    return pool.offsets if pool.offsets is not None else _no_offsets(pool.k_PKSD.device)


# In one piece: thirty of its lines name arguments, and the loop reads most of what comes before it.
@triton.jit  # type: ignore[untyped-decorator]
def _decode_attention(  # type: ignore[no-untyped-def]
    q,
    pool_k,
    pool_v,
    pool_positions,
    offsets,
    pages,
    lengths,
    positions,
    out,
    statistics,
    scale,
    window,
    q_row,
    q_head,
    pages_row,
    pages_head,
    lengths_row,
    lengths_head,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    d = tl.arange(0, BLOCK_D)
    g = tl.arange(0, BLOCK_G)
    n = tl.arange(0, BLOCK_N)
    heads = head * GROUP + g
    real = (g < GROUP)[:, None] & (d < DIM)[None, :]
    queries = tl.load(q + row * q_row + heads[:, None] * q_head + d[None, :], mask=real, other=0.0)
    length = tl.load(lengths + row * lengths_row + head * lengths_head)
    oldest = tl.load(positions + row) - window  # not seen any more

    # The pool's address, told by a number in memory; a pool lies at multiples of 16 elements.
    keys = pool_k + tl.multiple_of(tl.load(offsets), 16)
    values = pool_v + tl.multiple_of(tl.load(offsets + 1), 16)
    entry_positions = pool_positions + tl.multiple_of(tl.load(offsets + 2), 16)
    table = pages + row * pages_row + head * pages_head

    share = tl.cdiv(tl.cdiv(length, BLOCK_N), NUM_SPLITS) * BLOCK_N
    first = split * share
    last = tl.minimum(first + share, length)
    best = tl.full([BLOCK_G], -1e30, tl.float32)  # finite: a block may be hidden whole
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_D], tl.float32)
    for start in range(first, last, BLOCK_N):
        if BLOCK_N > PAGE:
            page = tl.load(table + (start + n) // PAGE, mask=start + n < last, other=0).to(tl.int64)
            entry = (page * NUM_KV_HEADS + head) * PAGE + (start + n) % PAGE
        else:
            page = tl.load(table + start // PAGE).to(tl.int64)
            entry = (page * NUM_KV_HEADS + head) * PAGE + start % PAGE + n
        tile = entry[:, None] * DIM + d[None, :]
        if BLOCK_D == DIM:
            k = tl.load(keys + tile)
            v = tl.load(values + tile)
        else:
            k = tl.load(keys + tile, mask=(d < DIM)[None, :], other=0.0)
            v = tl.load(values + tile, mask=(d < DIM)[None, :], other=0.0)
        logits = tl.dot(queries, tl.trans(k), input_precision=PRECISION) * scale
        seen = start + n < last
        if HAS_WINDOW:
            seen = seen & (tl.load(entry_positions + entry) > oldest)
        logits = tl.where(seen[None, :], logits, -1e30)
        new_best = tl.maximum(best, tl.max(logits, axis=1))
        shrink = tl.exp2(best - new_best)
        weights = tl.exp2(logits - new_best[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        v = tl.where(seen[:, None], v, 0.0)  # 0 * nan is nan, and what a slot held before may be anything
        acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        best = new_best

    if NUM_SPLITS == 1:
        place = out + (row * NUM_KV_HEADS * GROUP + heads[:, None]) * DIM + d[None, :]
        tl.store(place, (acc / total[:, None]).to(out.dtype.element_ty), real)
    else:
        part = (row * NUM_KV_HEADS * GROUP + heads) * NUM_SPLITS + split
        tl.store(out + part[:, None] * DIM + d[None, :], acc, real)
        tl.store(statistics + part * 2, best, g < GROUP)
        tl.store(statistics + part * 2 + 1, total, g < GROUP)


@triton.jit  # type: ignore[untyped-decorator]
def _decode_combine(  # type: ignore[no-untyped-def]
    partial,
    statistics,
    out,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
):
    row_head = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    s = tl.arange(0, BLOCK_SPLITS)
    part = row_head * NUM_SPLITS + s
    best = tl.load(statistics + part * 2, mask=s < NUM_SPLITS, other=-1e30)
    total = tl.load(statistics + part * 2 + 1, mask=s < NUM_SPLITS, other=0.0)
    weight = tl.exp2(best - tl.max(best, axis=0))
    real = (s < NUM_SPLITS)[:, None] & (d < DIM)[None, :]
    acc = tl.load(partial + part[:, None] * DIM + d[None, :], mask=real, other=0.0)
    mixed = tl.sum(acc * weight[:, None], axis=0) / tl.sum(total * weight, axis=0)
    tl.store(out + row_head * DIM + d, mixed.to(out.dtype.element_ty), d < DIM)
