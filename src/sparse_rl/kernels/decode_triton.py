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
from sparse_rl.kernels.write_triton import offsets_of

LOG2_E = tl.constexpr(1.4426950408889634)
PROGRAMS_PER_SM = 4  # as many as it takes to keep the memory busy
MIN_SPLIT = 128  # entries worth a program of their own
MAX_SPLITS = 32


def decode_attention_triton(
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
    batch, num_heads, dim = q_BHD.shape
    num_kv_heads, page_size, value_dim = pool.v_PKSE.shape[1:]
    assert q_BHD.stride(2) == pages_BN.stride(-1) == positions_B.stride(0) == 1
    longest = max_length or pages_BN.shape[-1] * page_size
    num_splits = splits_of(batch * num_kv_heads, longest, num_sms(q_BHD.device))
    out_BHE = torch.empty((batch, num_heads, value_dim), dtype=q_BHD.dtype, device=q_BHD.device)
    sinks = q_BHD if sinks_H is None else sinks_H
    if num_splits > 1:
        partial = torch.empty((batch, num_heads, num_splits, value_dim), dtype=torch.float32, device=q_BHD.device)
        statistics = torch.empty((batch, num_heads, num_splits, 2), dtype=torch.float32, device=q_BHD.device)
    else:
        partial, statistics = out_BHE, out_BHE
    crowded = batch * num_kv_heads * num_splits > PROGRAMS_PER_SM * num_sms(q_BHD.device)
    per_head = pages_BN.ndim == 3
    group = num_heads // num_kv_heads
    _decode_attention[(num_kv_heads, batch, num_splits)](
        q_BHD,
        pool.k_PKSD,
        pool.v_PKSE,
        pool.positions_PKS,
        offsets_of(pool),
        pages_BN,
        lengths_B,
        positions_B,
        partial,
        statistics,
        sinks,
        scale if softcap else scale * LOG2_E.value,
        window or 0,
        softcap or 0.0,
        q_BHD.stride(0),
        q_BHD.stride(1),
        pages_BN.stride(0),
        pages_BN.stride(1) if per_head else 0,
        lengths_B.stride(0),
        lengths_B.stride(1) if lengths_B.ndim == 2 else 0,
        DIM=dim,
        BLOCK_D=max(16, triton.next_power_of_2(dim)),
        VALUE_DIM=value_dim,
        BLOCK_E=max(16, triton.next_power_of_2(value_dim)),
        PAGE=page_size,
        BLOCK_N=block_of(page_size, dim * q_BHD.itemsize, crowded),
        GROUP=group,
        BLOCK_G=max(16, triton.next_power_of_2(group)),
        NUM_KV_HEADS=num_kv_heads,
        NUM_SPLITS=num_splits,
        HAS_WINDOW=window is not None,
        HAS_SOFTCAP=bool(softcap),
        HAS_SINKS=sinks_H is not None,
        PRECISION="ieee" if q_BHD.dtype == torch.float32 else "tf32",
        num_warps=2 if dim <= 128 else 4,
        num_stages=3 if q_BHD.itemsize == 2 else 2,
    )
    if num_splits > 1:
        _decode_combine[(batch, num_heads)](
            partial,
            statistics,
            sinks,
            out_BHE,
            DIM=value_dim,
            BLOCK_D=triton.next_power_of_2(value_dim),
            NUM_SPLITS=num_splits,
            BLOCK_SPLITS=triton.next_power_of_2(num_splits),
            HAS_SINKS=sinks_H is not None,
        )
    return out_BHE


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
    sinks,
    scale,
    window,
    softcap,
    q_row,
    q_head,
    pages_row,
    pages_head,
    lengths_row,
    lengths_head,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
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
    acc = tl.zeros([BLOCK_G, BLOCK_E], tl.float32)
    for start in range(first, last, BLOCK_N):
        if BLOCK_N > PAGE:
            page = tl.load(table + (start + n) // PAGE, mask=start + n < last, other=0).to(tl.int64)
            entry = (page * NUM_KV_HEADS + head) * PAGE + (start + n) % PAGE
        else:
            page = tl.load(table + start // PAGE).to(tl.int64)
            entry = (page * NUM_KV_HEADS + head) * PAGE + start % PAGE + n
        tile = keys + entry[:, None] * DIM + d[None, :]
        k = tl.load(tile) if BLOCK_D == DIM else tl.load(tile, mask=(d < DIM)[None, :], other=0.0)
        tile = values + entry[:, None] * VALUE_DIM + e[None, :]
        v = tl.load(tile) if BLOCK_E == VALUE_DIM else tl.load(tile, mask=(e < VALUE_DIM)[None, :], other=0.0)
        logits = tl.dot(queries, tl.trans(k), input_precision=PRECISION) * scale
        if HAS_SOFTCAP:
            logits = capped(logits, softcap) * LOG2_E
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

    real = (g < GROUP)[:, None] & (e < VALUE_DIM)[None, :]
    if NUM_SPLITS == 1:
        if HAS_SINKS:
            total += tl.exp2(tl.load(sinks + heads, mask=g < GROUP, other=0.0).to(tl.float32) * LOG2_E - best)
        place = out + (row * NUM_KV_HEADS * GROUP + heads[:, None]) * VALUE_DIM + e[None, :]
        tl.store(place, (acc / total[:, None]).to(out.dtype.element_ty), real)
    else:
        part = (row * NUM_KV_HEADS * GROUP + heads) * NUM_SPLITS + split
        tl.store(out + part[:, None] * VALUE_DIM + e[None, :], acc, real)
        tl.store(statistics + part * 2, best, g < GROUP)
        tl.store(statistics + part * 2 + 1, total, g < GROUP)


@triton.jit
def capped(logits, softcap):  # type: ignore[no-untyped-def]
    """softcap * tanh(logits / softcap)"""
    return softcap * (2 * tl.sigmoid(2 * logits / softcap) - 1)


@triton.jit  # type: ignore[untyped-decorator]
def _decode_combine(  # type: ignore[no-untyped-def]
    partial,
    statistics,
    sinks,
    out,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    row_head = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    s = tl.arange(0, BLOCK_SPLITS)
    part = row_head * NUM_SPLITS + s
    best = tl.load(statistics + part * 2, mask=s < NUM_SPLITS, other=-1e30)
    total = tl.load(statistics + part * 2 + 1, mask=s < NUM_SPLITS, other=0.0)
    greatest = tl.max(best, axis=0)
    weight = tl.exp2(best - greatest)
    total = tl.sum(total * weight, axis=0)
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks + tl.program_id(1)).to(tl.float32) * LOG2_E - greatest)
    real = (s < NUM_SPLITS)[:, None] & (d < DIM)[None, :]
    acc = tl.load(partial + part[:, None] * DIM + d[None, :], mask=real, other=0.0)
    mixed = tl.sum(acc * weight[:, None], axis=0) / total
    tl.store(out + row_head * DIM + d, mixed.to(out.dtype.element_ty), d < DIM)
