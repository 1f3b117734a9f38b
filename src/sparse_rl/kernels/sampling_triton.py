# SPDX-License-Identifier: Apache-2.0
"""Sampling in one pass over the logits; `sampling.sample_ref` is the specification.

    block of a row:  max, sum exp(logit - max), argmax of logit + Gumbel noise
    row:             logsumexp of the blocks, the best of their argmaxes

A list of the most likely tokens takes a second look at the blocks whose maxima are large enough, and a merge.

A value and its id travel as one integer that orders by value, then by lower id: one maximum gives both, and ties do
not depend on how a GPU reduces. The cost is that of the 64-bit mixing, so the rest is kept to few instructions: logits
are multiplied by 1 / T (within a rounding of the quotient), and logarithms are the hardware's.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparse_rl.kernels import sampling
from sparse_rl.kernels.sampling import Sampled, scale_ref, truncate_ref

BLOCK = 4096
WARPS = 8
SMALLEST_NORMAL = 2.0**-126
LONGEST_LIST = 64  # of most likely tokens found one by one; beyond, torch sorts

GOLDEN = tl.constexpr(sampling.GOLDEN)
MIX_1 = tl.constexpr(sampling.MIX_1)
MIX_2 = tl.constexpr(sampling.MIX_2)
LN_2 = tl.constexpr(0.6931471805599453)
WORD_UNIT = tl.constexpr(2.0**-32)
LARGEST_UNIFORM = tl.constexpr(1.0 - 2.0**-24)
SERIES_BELOW = tl.constexpr(1.0 / 64.0)  # 1 - u would lose digits, and most tokens drawn have such a u
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
HALF_WORD = tl.constexpr(0x7FFFFFFF)
LOWEST = tl.constexpr(-(1 << 63))  # below every packed value


def sample_triton(
    logits_BV: torch.Tensor,
    keys_B: torch.Tensor,
    index_B: torch.Tensor,
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float = 1.0,
    num_top: int = 0,
) -> Sampled:
    """See `sample_ref`. Only launches kernels, so a CUDA graph can hold it; rows may be strided."""
    inverse = max(1.0 / temperature, SMALLEST_NORMAL) if temperature > 0 else 1.0  # 0 * -inf would be nan
    if top_k is not None or top_p < 1.0:
        logits_BV, inverse = truncate_ref(scale_ref(logits_BV, temperature), top_k, top_p), 1.0
    logits_BV = logits_BV if logits_BV.stride(1) == 1 else logits_BV.contiguous()
    if num_top > LONGEST_LIST:
        tokens, logprobs, _, _ = sample_triton(
            logits_BV, keys_B, index_B, temperature=1 / inverse if temperature else 0.0
        )
        top = torch.log_softmax(logits_BV.float() * inverse, dim=-1).topk(num_top, dim=-1)
        return tokens, logprobs, top.indices, top.values
    batch, size = logits_BV.shape
    num_blocks = triton.cdiv(size, BLOCK)

    maxima = logits_BV.new_empty(batch, num_blocks, dtype=torch.float32)
    sums = torch.empty_like(maxima)
    best = keys_B.new_empty(batch, num_blocks)
    block_top = keys_B.new_empty(batch, num_blocks, num_top)
    tokens, logprobs = keys_B.new_empty(batch), maxima.new_empty(batch)
    top_ids, top_logprobs = keys_B.new_empty(batch, num_top), maxima.new_empty(batch, num_top)
    shared = {"row_stride": logits_BV.stride(0), "size": size, "inverse": inverse}
    blocks_p = max(16, triton.next_power_of_2(num_blocks))
    with torch.cuda.device_of(logits_BV):
        _sample_block[(batch, num_blocks)](
            logits_BV,
            keys_B.contiguous(),
            index_B.contiguous(),
            maxima,
            sums,
            best,
            **shared,
            NOISE=temperature > 0,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
        if num_top:
            _sample_top[(batch, num_blocks)](
                logits_BV,
                maxima,
                block_top,
                **shared,
                num_blocks=num_blocks,
                num_top=num_top,
                BLOCK=BLOCK,
                BLOCKS=blocks_p,
                LIST=triton.next_power_of_2(num_top),
                num_warps=WARPS,
            )
        _sample_row[(batch,)](
            logits_BV,
            maxima,
            sums,
            best,
            block_top,
            tokens,
            logprobs,
            top_ids,
            top_logprobs,
            **shared,
            num_blocks=num_blocks,
            num_top=num_top,
            BLOCKS=blocks_p,
            num_warps=1,
        )
    return (tokens, logprobs, top_ids, top_logprobs) if num_top else (tokens, logprobs, None, None)


@triton.jit  # type: ignore[untyped-decorator]
def _sample_block(  # type: ignore[no-untyped-def]
    logits_ptr,
    keys_ptr,
    index_ptr,
    maxima_ptr,
    sums_ptr,
    best_ptr,
    row_stride,
    size,
    inverse,
    NOISE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + row * row_stride + ids, mask=ids < size, other=float("-inf"))
    scaled = logits.to(tl.float32) * inverse + 0.0  # -0 becomes 0, its equal
    maximum = tl.max(scaled, axis=0)
    total = tl.sum(tl.exp(scaled - _finite(maximum)), axis=0)

    perturbed = scaled
    if NOISE:
        key = tl.load(keys_ptr + row).to(tl.uint64, bitcast=True)
        index = tl.load(index_ptr + row).to(tl.uint64, bitcast=True)
        perturbed -= _log_exponential(_mix(key + (index + 1) * GOLDEN), ids)
    at = row * tl.num_programs(1) + block
    tl.store(maxima_ptr + at, maximum)
    tl.store(sums_ptr + at, total)
    tl.store(best_ptr + at, tl.max(_pack(perturbed, ids), axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def _sample_top(  # type: ignore[no-untyped-def]
    logits_ptr,
    maxima_ptr,
    top_ptr,
    row_stride,
    size,
    inverse,
    num_blocks,
    num_top: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    LIST: tl.constexpr,
):
    """A block's candidates for its row's list, sorted. Few blocks have any: `num_top` maxima stand above all others.

    Those that have none are not read again.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    others = tl.arange(0, BLOCKS)
    maxima = tl.load(maxima_ptr + row * num_blocks + others, mask=others < num_blocks, other=float("-inf"))
    above = tl.sum((maxima[None, :] > maxima[:, None]).to(tl.int32), axis=1)
    bound = tl.min(tl.where(above < num_top, maxima, float("inf")), axis=0)
    bound = tl.where(num_blocks < num_top, float("-inf"), bound)

    ids = block * BLOCK + tl.arange(0, BLOCK)
    end = tl.where(tl.load(maxima_ptr + row * num_blocks + block) < bound, 0, size)
    logits = tl.load(logits_ptr + row * row_stride + ids, mask=ids < end, other=float("-inf"))
    scaled = logits.to(tl.float32) * inverse + 0.0
    packed = tl.where(scaled < bound, LOWEST, _pack(scaled, ids))
    top_ptr += (row * num_blocks + block) * num_top
    largest = tl.max(packed, axis=0)
    rank = 0
    while (rank < num_top) & (largest > LOWEST):
        tl.store(top_ptr + rank, largest)
        packed = tl.where(packed == largest, LOWEST, packed)
        largest = tl.max(packed, axis=0)
        rank += 1
    place = tl.arange(0, LIST)
    tl.store(top_ptr + place, LOWEST, mask=(place >= rank) & (place < num_top))


@triton.jit  # type: ignore[untyped-decorator]
def _sample_row(  # type: ignore[no-untyped-def]
    logits_ptr,
    maxima_ptr,
    sums_ptr,
    best_ptr,
    top_ptr,
    tokens_ptr,
    logprobs_ptr,
    top_ids_ptr,
    top_logprobs_ptr,
    row_stride,
    size,
    inverse,
    num_blocks,
    num_top: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row, block = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCKS)
    at, real = row * num_blocks + block, block < num_blocks
    maxima = tl.load(maxima_ptr + at, mask=real, other=float("-inf"))
    sums = tl.load(sums_ptr + at, mask=real, other=0.0)
    shift = _finite(tl.max(maxima, axis=0))
    log_total = tl.log(tl.sum(sums * tl.exp(maxima - shift), axis=0))

    best = tl.max(tl.load(best_ptr + at, mask=real, other=LOWEST), axis=0)
    token = _unpack_id(best, size)
    chosen = tl.load(logits_ptr + row * row_stride + token).to(tl.float32) * inverse
    tl.store(tokens_ptr + row, token)
    tl.store(logprobs_ptr + row, chosen - shift - log_total)

    cursor = tl.zeros((BLOCKS,), tl.int32)  # the blocks' lists are sorted: only their heads compete
    for rank in range(num_top):
        heads = tl.load(top_ptr + at * num_top + cursor, mask=real, other=LOWEST)
        largest = tl.max(heads, axis=0)
        cursor += (heads == largest).to(tl.int32)
        tl.store(top_ids_ptr + row * num_top + rank, _unpack_id(largest, size))
        tl.store(top_logprobs_ptr + row * num_top + rank, _unpack_value(largest) - shift - log_total)


@triton.jit
def _log_exponential(key, ids):  # type: ignore[no-untyped-def]
    """log(-log(1 - u)) of each id's uniform."""
    word = (_mix(key + (ids + 1).to(tl.uint64) * GOLDEN) >> 32).to(tl.uint32)
    u = tl.minimum(word.to(tl.float32) * WORD_UNIT + 0.5 * WORD_UNIT, LARGEST_UNIFORM)
    series = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * (0.25 + u * 0.2))))
    return LN_2 * _log2(tl.where(u < SERIES_BELOW, series, -LN_2 * _log2(1.0 - u)))


@triton.jit
def _log2(x):  # type: ignore[no-untyped-def]
    """One instruction, good to 2^-22 (absolute near 1, else relative); tl.log2 takes two dozen."""
    if INTERPRETED:
        return tl.log2(x)
    return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def _mix(word):  # type: ignore[no-untyped-def]
    word = (word ^ (word >> 30)) * MIX_1
    word = (word ^ (word >> 27)) * MIX_2
    return word ^ (word >> 31)


@triton.jit
def _finite(maximum):  # type: ignore[no-untyped-def]
    """What to subtract before exp: where everything is -inf, anything finite."""
    return tl.where(maximum == float("-inf"), 0.0, maximum)


@triton.jit
def _pack(value, ids):  # type: ignore[no-untyped-def]
    """fp32 and int32 as one int64 that orders by value, then by lower id."""
    return (_flip(value.to(tl.int32, bitcast=True)).to(tl.int64) << 32) | (HALF_WORD - ids)


@triton.jit
def _unpack_value(packed):  # type: ignore[no-untyped-def]
    return _flip((packed >> 32).to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _unpack_id(packed, size):  # type: ignore[no-untyped-def]
    """Inside the vocabulary even where nan compares below what pads the last block.

    ^ undoes HALF_WORD - id; Triton 3.7's interpreter has no constexpr minus a tensor.
    """
    return tl.minimum((packed & HALF_WORD) ^ HALF_WORD, size - 1)


@triton.jit
def _flip(bits):  # type: ignore[no-untyped-def]
    """The bits of a float as an integer of the same order, and back."""
    return bits ^ ((bits >> 31) & HALF_WORD)
