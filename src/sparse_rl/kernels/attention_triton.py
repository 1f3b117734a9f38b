# SPDX-License-Identifier: Apache-2.0
"""`attention.py` over packed rows on a GPU, with a soft-cap, values of another width, and the log-sum-exp.

    dv_s = sum_t p_ts do_t                                 p_ts = exp(x_ts - lse_t)
    dx_ts = p_ts (do_t . v_s - delta_t)                    delta_t = do_t . out_t - dlse_t
    dq_t = scale sum_s x'_ts dx_ts k_s,   dk_s alike       x' = 1, or 1 - (x / softcap)^2

The log-sum-exp has a gradient of its own, so that what changes the sum alone needs no kernel: a sink is such a thing.
One program takes a block of queries of one head, or, for the gradients of keys and values, a block of keys of one KV
head and all of its query heads; no two programs write to one place, so the same inputs give the same bits.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl

from sparse_rl.kernels.attention import AttentionCall
from sparse_rl.kernels.backend import send
from sparse_rl.kernels.decode_triton import LOG2_E, capped

LARGE_SM = 160 << 10  # bytes of shared memory a program may have on an A100, an H100 and their like
LN_2 = tl.constexpr(0.6931471805599453)


def packed_attention_triton(call: AttentionCall, boundaries: list[int]) -> torch.Tensor:
    """As 1 H T E."""
    how = (tuple(boundaries), call.scale, call.window, call.softcap)
    out, lse_1HT = PackedAttention.apply(call.q_BHTD, call.k_BKTD, call.v_BKTE, *how)  # type: ignore[no-untyped-call]
    if call.sinks_H is not None:
        out = (out * torch.sigmoid(lse_1HT - call.sinks_H.float()[:, None])[..., None]).to(out.dtype)
    result: torch.Tensor = out
    return result


class PackedAttention(torch.autograd.Function):
    """Output without sinks, 1 H T E, and log-sum-exp, 1 H T."""

    @staticmethod
    def forward(
        ctx: Any,
        q_1HTD: torch.Tensor,
        k_1KTD: torch.Tensor,
        v_1KTE: torch.Tensor,
        boundaries: tuple[int, ...],
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = (x[0] if x.stride(-1) == 1 else x[0].contiguous() for x in (q_1HTD, k_1KTD, v_1KTE))
        out_THE = q.new_empty((q.shape[1], q.shape[0], v.shape[2]))
        lse_HT = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        ctx.how = _settings(q, k, v, scale, window, softcap)
        ctx.boundaries = boundaries
        block = _blocks(ctx.how["BLOCK_D"] * q.itemsize, q.device)["forward"]
        tiles = _tiles(boundaries, block["BLOCK_M"], q.device)
        _packed_attention[(len(tiles), q.shape[0])](
            q, k, v, out_THE, lse_HT, tiles, *_strides(q, k, v), **ctx.how, **block
        )
        ctx.save_for_backward(q, k, v, out_THE, lse_HT)
        return out_THE.transpose(0, 1)[None], lse_HT[None]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout_1HTE: torch.Tensor, dlse_1HT: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out_THE, lse_HT = ctx.saved_tensors
        dout = dout_1HTE[0] if dout_1HTE.stride(-1) == 1 else dout_1HTE[0].contiguous()
        dq, dk, dv = (torch.empty_like(x.transpose(0, 1), memory_format=torch.contiguous_format) for x in (q, k, v))
        delta_HT = torch.empty_like(lse_HT)
        strides = (*_strides(q, k, v), dout.stride(1), dout.stride(0))
        blocks = _blocks(ctx.how["BLOCK_D"] * q.itemsize, q.device)
        block = blocks["queries"]
        tiles = _tiles(ctx.boundaries, block["BLOCK_M"], q.device)
        read = (q, k, v, dout, lse_HT)
        _packed_attention_dq[(len(tiles), q.shape[0])](
            *read, out_THE, dlse_1HT[0].contiguous(), delta_HT, dq, tiles, *strides, **ctx.how, **block
        )
        block = blocks["keys"]
        tiles = _tiles(ctx.boundaries, block["BLOCK_N"], q.device)
        _packed_attention_dkv[(len(tiles), k.shape[0])](*read, delta_HT, dk, dv, tiles, *strides, **ctx.how, **block)
        return *(x.transpose(0, 1)[None] for x in (dq, dk, dv)), None, None, None, None


def _settings(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None, softcap: float | None
) -> dict[str, Any]:
    return {
        "num_tokens": q.shape[1],
        "scale": scale,
        "window": window or 0,
        "softcap": softcap or 0.0,
        "DIM": q.shape[2],
        "BLOCK_D": max(16, triton.next_power_of_2(q.shape[2])),
        "VALUE_DIM": v.shape[2],
        "BLOCK_E": max(16, triton.next_power_of_2(v.shape[2])),
        "GROUP": len(q) // len(k),
        "HAS_WINDOW": window is not None,
        "HAS_SOFTCAP": bool(softcap),
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
    }


def _strides(*tensors: torch.Tensor) -> tuple[int, ...]:
    """Of tokens and heads."""
    return tuple(stride for x in tensors for stride in (x.stride(1), x.stride(0)))


@lru_cache
def _blocks(row_bytes: int, device: torch.device) -> dict[str, dict[str, int]]:
    """How many queries and keys at once, by the bytes of one padded key: timed on an H200, smaller on smaller GPUs."""
    if device.type == "cuda":
        properties = triton.runtime.driver.active.utils.get_device_properties(torch.cuda.current_device())
        row_bytes *= 1 if properties["max_shared_mem"] >= LARGE_SM else 2
    if row_bytes <= 128:
        sizes = ((128, 64, 4, 3), (128, 32, 4, 3), (32, 128, 4, 3))
    elif row_bytes <= 256:
        sizes = ((128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 2))
    elif row_bytes <= 512:
        sizes = ((128, 32, 8, 3), (128, 32, 8, 2), (64, 64, 8, 2))
    else:
        sizes = ((32, 16, 4, 1), (32, 16, 4, 1), (16, 32, 4, 1))
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    return {
        part: dict(zip(names, size, strict=True))
        for part, size in zip(("forward", "queries", "keys"), sizes, strict=True)
    }


@lru_cache(maxsize=4)  # every layer asks, forwards and backwards
@torch.inference_mode(False)
def _tiles(boundaries: tuple[int, ...], size: int, device: torch.device) -> torch.Tensor:
    """Blocks of tokens that lie in one sequence: where the sequence begins and ends, and the block's first token."""
    tiles = [(a, b, first) for a, b in pairwise(boundaries) for first in range(a, b, size)]
    return send(torch.tensor(tiles, dtype=torch.int64), device)


@triton.jit  # type: ignore[untyped-decorator]
def _packed_attention(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    out,
    lse,
    tiles,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    num_tokens,
    scale,
    window,
    softcap,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_E: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    begin, length, first = _tile(tiles)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    m = first + tl.arange(0, BLOCK_M)
    queries = _rows(q + head * q_head + begin * q_row, first, q_row, length, BLOCK_M, DIM, BLOCK_D)
    k += head // GROUP * k_head + begin * k_row
    v += head // GROUP * v_head + begin * v_row
    best = tl.full([BLOCK_M], -1e30, tl.float32)  # finite: a block may be hidden whole
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    oldest = tl.maximum(first - window + 1, 0) if HAS_WINDOW else 0
    for start in range(oldest, tl.minimum(first + BLOCK_M, length), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        keys = _rows(k, start, k_row, length, BLOCK_N, DIM, BLOCK_D)
        values = _rows(v, start, v_row, length, BLOCK_N, VALUE_DIM, BLOCK_E)
        logits = _logits(queries, keys, scale, softcap, HAS_SOFTCAP, PRECISION)
        seen = _seen(m[:, None], n[None, :], length, window, HAS_WINDOW)
        logits = tl.where(seen, logits * LOG2_E, -1e30)
        new_best = tl.maximum(best, tl.max(logits, axis=1))
        shrink = tl.exp2(best - new_best)
        weights = tl.exp2(logits - new_best[:, None])
        total = total * shrink + tl.sum(weights, axis=1)
        acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        best = new_best
    out += (begin * num_heads + head) * VALUE_DIM
    _store(out, acc / total[:, None], first, num_heads * VALUE_DIM, length, BLOCK_M, VALUE_DIM, BLOCK_E)
    tl.store(lse + head.to(tl.int64) * num_tokens + begin + m, (best + tl.log2(total)) * LN_2, mask=m < length)


@triton.jit  # type: ignore[untyped-decorator]
def _packed_attention_dq(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    dout,
    lse,
    out,
    dlse,
    delta,
    dq,
    tiles,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    dout_row,
    dout_head,
    num_tokens,
    scale,
    window,
    softcap,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_E: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    begin, length, first = _tile(tiles)
    head = tl.program_id(1)
    num_heads = tl.num_programs(1)
    m = first + tl.arange(0, BLOCK_M)
    queries = _rows(q + head * q_head + begin * q_row, first, q_row, length, BLOCK_M, DIM, BLOCK_D)
    dout += head * dout_head + begin * dout_row
    directions = _rows(dout, first, dout_row, length, BLOCK_M, VALUE_DIM, BLOCK_E)
    out += (begin * num_heads + head) * VALUE_DIM
    outputs = _rows(out, first, num_heads * VALUE_DIM, length, BLOCK_M, VALUE_DIM, BLOCK_E)
    place = head.to(tl.int64) * num_tokens + begin + m
    lse_M = tl.load(lse + place, mask=m < length, other=0.0)
    delta_M = tl.sum(directions.to(tl.float32) * outputs.to(tl.float32), axis=1)
    delta_M -= tl.load(dlse + place, mask=m < length, other=0.0)
    tl.store(delta + place, delta_M, mask=m < length)

    k += head // GROUP * k_head + begin * k_row
    v += head // GROUP * v_head + begin * v_row
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    oldest = tl.maximum(first - window + 1, 0) if HAS_WINDOW else 0
    for start in range(oldest, tl.minimum(first + BLOCK_M, length), BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        keys = _rows(k, start, k_row, length, BLOCK_N, DIM, BLOCK_D)
        values = _rows(v, start, v_row, length, BLOCK_N, VALUE_DIM, BLOCK_E)
        logits = _logits(queries, keys, scale, softcap, HAS_SOFTCAP, PRECISION)
        seen = _seen(m[:, None], n[None, :], length, window, HAS_WINDOW)
        weights = tl.exp2(tl.where(seen, (logits - lse_M[:, None]) * LOG2_E, -1e30))
        slope = weights * (tl.dot(directions, tl.trans(values), input_precision=PRECISION) - delta_M[:, None])
        if HAS_SOFTCAP:
            slope *= 1 - (logits / softcap) * (logits / softcap)
        acc += tl.dot(slope.to(keys.dtype), keys, input_precision=PRECISION)
    dq += (begin * num_heads + head) * DIM
    _store(dq, acc * scale, first, num_heads * DIM, length, BLOCK_M, DIM, BLOCK_D)


@triton.jit  # type: ignore[untyped-decorator]
def _packed_attention_dkv(  # type: ignore[no-untyped-def]
    q,
    k,
    v,
    dout,
    lse,
    delta,
    dk,
    dv,
    tiles,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    dout_row,
    dout_head,
    num_tokens,
    scale,
    window,
    softcap,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_E: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    begin, length, first = _tile(tiles)
    kv_head = tl.program_id(1)
    num_kv_heads = tl.num_programs(1)
    n = first + tl.arange(0, BLOCK_N)
    keys = _rows(k + kv_head * k_head + begin * k_row, first, k_row, length, BLOCK_N, DIM, BLOCK_D)
    values = _rows(v + kv_head * v_head + begin * v_row, first, v_row, length, BLOCK_N, VALUE_DIM, BLOCK_E)
    dk_ND = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_NE = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    last = tl.minimum(first + BLOCK_N + window - 1, length) if HAS_WINDOW else length
    for g in range(GROUP):
        head = kv_head * GROUP + g
        place = head.to(tl.int64) * num_tokens + begin
        for start in range(first, last, BLOCK_M):
            m = start + tl.arange(0, BLOCK_M)
            queries = _rows(q + head * q_head + begin * q_row, start, q_row, length, BLOCK_M, DIM, BLOCK_D)
            at = dout + head * dout_head + begin * dout_row
            directions = _rows(at, start, dout_row, length, BLOCK_M, VALUE_DIM, BLOCK_E)
            lse_M = tl.load(lse + place + m, mask=m < length, other=0.0)
            delta_M = tl.load(delta + place + m, mask=m < length, other=0.0)
            logits = _logits(keys, queries, scale, softcap, HAS_SOFTCAP, PRECISION)
            seen = _seen(m[None, :], n[:, None], length, window, HAS_WINDOW)
            weights = tl.exp2(tl.where(seen, (logits - lse_M[None, :]) * LOG2_E, -1e30))
            dv_NE += tl.dot(weights.to(directions.dtype), directions, input_precision=PRECISION)
            slope = weights * (tl.dot(values, tl.trans(directions), input_precision=PRECISION) - delta_M[None, :])
            if HAS_SOFTCAP:
                slope *= 1 - (logits / softcap) * (logits / softcap)
            dk_ND += tl.dot(slope.to(queries.dtype), queries, input_precision=PRECISION)
    dk += (begin * num_kv_heads + kv_head) * DIM
    dv += (begin * num_kv_heads + kv_head) * VALUE_DIM
    _store(dk, dk_ND * scale, first, num_kv_heads * DIM, length, BLOCK_N, DIM, BLOCK_D)
    _store(dv, dv_NE, first, num_kv_heads * VALUE_DIM, length, BLOCK_N, VALUE_DIM, BLOCK_E)


@triton.jit
def _tile(tiles):  # type: ignore[no-untyped-def]
    """Where this program's sequence begins; its length, and the first of the program's tokens, counted from there."""
    tile = tiles + 3 * tl.program_id(0)
    begin = tl.load(tile)
    return begin, (tl.load(tile + 1) - begin).to(tl.int32), (tl.load(tile + 2) - begin).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _logits(a, b, scale, softcap, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Products of all rows of a with all rows of b, as the softmax takes them."""
    logits = tl.dot(a, tl.trans(b), input_precision=PRECISION) * scale
    return capped(logits, softcap) if HAS_SOFTCAP else logits


@triton.jit  # type: ignore[untyped-decorator]
def _seen(query, key, length, window, HAS_WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which keys a query sees, by their places in the sequence."""
    seen = (key <= query) & (query < length)
    return seen & (query - key < window) if HAS_WINDOW else seen


@triton.jit  # type: ignore[untyped-decorator]
def _rows(start, first, stride, end, COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rows from the first on; zeros from row `end` on and right of the width."""
    row = first + tl.arange(0, COUNT)
    column = tl.arange(0, BLOCK)
    inside = (row < end)[:, None] & (column < WIDTH)[None, :]
    return tl.load(start + row.to(tl.int64)[:, None] * stride + column[None, :], mask=inside, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _store(start, block, first, stride, end, COUNT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = first + tl.arange(0, COUNT)
    column = tl.arange(0, BLOCK)
    inside = (row < end)[:, None] & (column < WIDTH)[None, :]
    place = start + row.to(tl.int64)[:, None] * stride + column[None, :]
    tl.store(place, block.to(start.dtype.element_ty), mask=inside)
