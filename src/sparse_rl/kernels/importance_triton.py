# SPDX-License-Identifier: Apache-2.0
"""`importance.py` on a GPU.

Attention reads the keys twice, for the softmax's sum and for its values: logits are never stored. Redundancy needs no
S x S matrix, since a column's sum over all rows is a product with the sum of all unit keys u:

    n * mean_i S_ij = u_j . sum_i u_i - u_j . u_j - sum_{i : r(i) = j, i != j} S_ij

r(i) is what row i zeroes. It is searched from the newest column back, until all rows of a block have theirs. Rows
subtract from their column in fixed point, so that the order in which they come does not matter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparse_rl.kernels.compact_triton import entry_of
from sparse_rl.kernels.importance import NORM_EPS

FIXED = tl.constexpr(float(1 << 32))  # what 1.0 is in fixed point
EPS = tl.constexpr(NORM_EPS)
POOLED = 512  # slots pooled at a time, and brought into the softmax over redundancies


def attention_importance_triton(
    k_PKSD: torch.Tensor,
    pages_BN: torch.Tensor,
    queries_BHWD: torch.Tensor,
    candidates_BKS: torch.Tensor,
    *,
    scale_B: torch.Tensor,
    kernel: int,
) -> torch.Tensor:
    batch, num_kv_heads, size = candidates_BKS.shape
    num_heads, num_queries = queries_BHWD.shape[1:3]
    assert k_PKSD.is_contiguous() and pages_BN.stride(1) == queries_BHWD.stride(3) == 1
    group = num_heads // num_kv_heads
    group_p = triton.next_power_of_2(group)
    columns = max(16, group_p, min(64, group_p * triton.next_power_of_2(num_queries)))
    mean_BKS = torch.empty((batch, num_kv_heads, size), dtype=torch.float32, device=k_PKSD.device)
    out_BKS = torch.empty_like(mean_BKS)
    _attention_importance[(batch * num_kv_heads,)](
        k_PKSD,
        pages_BN,
        queries_BHWD,
        candidates_BKS.contiguous(),
        scale_B.contiguous(),
        mean_BKS,
        out_BKS,
        num_kv_heads,
        size,
        pages_BN.stride(0),
        *queries_BHWD.stride()[:3],
        NUM_QUERIES=num_queries,
        BLOCK_W=columns // group_p,
        GROUP=group,
        BLOCK_G=group_p,
        KERNEL=kernel,
        POOLED=POOLED,
        **tiles_of(k_PKSD, 64),
        num_warps=4,
        num_stages=3,
    )
    return out_BKS


def redundancy_triton(
    k_PKSD: torch.Tensor, pages_BN: torch.Tensor, live_BKS: torch.Tensor, *, threshold: float
) -> torch.Tensor:
    batch, num_heads, size = live_BKS.shape
    assert k_PKSD.is_contiguous() and pages_BN.stride(1) == 1
    units, device = batch * num_heads, k_PKSD.device
    live_BKS = live_BKS.contiguous()
    inverse_norms = torch.empty((units, size), dtype=torch.float32, device=device)  # nan where dead
    totals = torch.empty((units, size), dtype=torch.int64, device=device)  # fixed point
    bounds = torch.empty((units, 3), dtype=torch.int32, device=device)  # first and last live slot, their number
    out_BKS = torch.empty((batch, num_heads, size), dtype=torch.float32, device=device)
    keys = (k_PKSD, pages_BN, num_heads, size, pages_BN.stride(0))
    tiles = tiles_of(k_PKSD, 128)
    rows = tiles.pop("BLOCK_S")
    _sum_cosines[(units,)](*keys, live_BKS, inverse_norms, totals, bounds, **tiles, BLOCK_S=rows // 2, num_warps=8)
    _spare_duplicates[(units * triton.cdiv(size, rows),)](
        *keys, inverse_norms, totals, bounds, threshold, **tiles, BLOCK_I=rows, BLOCK_J=rows // 2, num_warps=8
    )
    _softmax_totals[(units,)](inverse_norms, totals, bounds, out_BKS, size, BLOCK_S=POOLED, num_warps=4)
    return out_BKS


def tiles_of(k_PKSD: torch.Tensor, block: int) -> dict[str, int]:
    """A block of slots, smaller where keys are wider than two bytes, and what addresses its keys."""
    page_size, dim = k_PKSD.shape[2:]
    return {
        "PAGE": page_size,
        "DIM": dim,
        "BLOCK_D": max(16, triton.next_power_of_2(dim)),
        "BLOCK_S": block if k_PKSD.element_size() == 2 else block // 2,
    }


@triton.jit  # type: ignore[untyped-decorator]
def load_keys(  # type: ignore[no-untyped-def]
    k,
    table,
    head,
    num_heads,
    size,
    slot,
    mask,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The keys at these slots of one row and head; zero where masked."""
    d = tl.arange(0, BLOCK_D)
    place = entry_of(table, head, num_heads, slot, size, PAGE)
    return tl.load(k + place[:, None] * DIM + d[None, :], mask=mask[:, None] & (d < DIM)[None, :], other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _logits_of(keys, queries, scale, candidate, GROUP: tl.constexpr, BLOCK_G: tl.constexpr):  # type: ignore[no-untyped-def]
    """Each query's logit of each key, the greatest of its group; -inf where the key is no candidate."""
    dots = tl.dot(keys, tl.trans(queries), input_precision="ieee")
    dots = tl.reshape(dots, (dots.shape[0], dots.shape[1] // BLOCK_G, BLOCK_G))
    if GROUP < BLOCK_G:
        dots = tl.where((tl.arange(0, BLOCK_G) < GROUP)[None, None, :], dots, float("-inf"))
    return tl.where(candidate[:, None], tl.max(dots, axis=2) * scale, float("-inf"))


@triton.jit(do_not_specialize=["pages_row"])  # type: ignore[untyped-decorator]
def _attention_importance(  # type: ignore[no-untyped-def]
    k,
    pages,
    queries,
    candidates,
    scales,
    mean,
    out,
    num_heads,
    size,
    pages_row,
    queries_row,
    queries_head,
    queries_query,
    NUM_QUERIES: tl.constexpr,
    BLOCK_W: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    KERNEL: tl.constexpr,
    POOLED: tl.constexpr,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    unit = tl.program_id(0).to(tl.int64)
    row = unit // num_heads
    head = unit % num_heads
    table = pages + row * pages_row
    candidates += unit * size
    mean += unit * size
    scale = tl.load(scales + row)
    d = tl.arange(0, BLOCK_D)
    column = tl.arange(0, BLOCK_W * BLOCK_G)
    member = column % BLOCK_G
    for first in range(0, NUM_QUERIES, BLOCK_W):
        query = first + column // BLOCK_G
        place = row * queries_row + (head * GROUP + member) * queries_head + query * queries_query
        real = (query < NUM_QUERIES) & (member < GROUP)
        q = tl.load(queries + place[:, None] + d[None, :], mask=real[:, None] & (d < DIM)[None, :], other=0.0)

        best = tl.full([BLOCK_W], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_W], tl.float32)
        for start in range(0, size, BLOCK_S):
            slot = start + tl.arange(0, BLOCK_S)
            candidate = tl.load(candidates + slot, mask=slot < size, other=0).to(tl.int1)
            keys = load_keys(k, table, head, num_heads, size, slot, slot < size, PAGE, DIM, BLOCK_D)
            logits = _logits_of(keys, q, scale, candidate, GROUP, BLOCK_G)
            new_best = tl.maximum(best, tl.max(logits, axis=0))
            base = tl.where(new_best == float("-inf"), 0.0, new_best)  # no candidate so far
            total = total * tl.exp(best - base) + tl.sum(tl.exp(logits - base[None, :]), axis=0)
            best = new_best

        base = tl.where(best == float("-inf"), 0.0, best)
        asked = first + tl.arange(0, BLOCK_W) < NUM_QUERIES
        for start in range(0, size, BLOCK_S):
            slot = start + tl.arange(0, BLOCK_S)
            candidate = tl.load(candidates + slot, mask=slot < size, other=0).to(tl.int1)
            keys = load_keys(k, table, head, num_heads, size, slot, slot < size, PAGE, DIM, BLOCK_D)
            logits = _logits_of(keys, q, scale, candidate, GROUP, BLOCK_G)
            attention = tl.exp(logits - base[None, :]) / total[None, :]
            attention = tl.where((attention == attention) & asked[None, :], attention, 0.0)
            part = tl.sum(attention, axis=1) / NUM_QUERIES
            part += tl.load(mean + slot, mask=(slot < size) & (first > 0), other=0.0)
            tl.store(mean + slot, tl.where(candidate, part, float("-inf")), mask=slot < size)
        tl.debug_barrier()  # threads read what others wrote: the next queries' sums, the pooling

    for start in range(0, size, POOLED):
        slot = start + tl.arange(0, POOLED)
        pooled = tl.full([POOLED], float("-inf"), tl.float32)
        for shift in range(KERNEL):
            near = slot + shift - KERNEL // 2
            value = tl.load(mean + near, mask=(near >= 0) & (near < size), other=float("-inf"))
            pooled = tl.maximum(pooled, value)
        candidate = tl.load(candidates + slot, mask=slot < size, other=0).to(tl.int1)
        tl.store(out + unit * size + slot, tl.where(candidate, pooled, 0.0), mask=slot < size)


@triton.jit(do_not_specialize=["pages_row"])  # type: ignore[untyped-decorator]
def _sum_cosines(  # type: ignore[no-untyped-def]
    k,
    pages,
    num_heads,
    size,
    pages_row,
    live,
    inverse_norms,
    totals,
    bounds,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Each live key's norm, and its cosines to all other live keys in sum."""
    unit = tl.program_id(0).to(tl.int64)
    head = unit % num_heads
    table = pages + unit // num_heads * pages_row
    live += unit * size
    inverse_norms += unit * size
    first = size
    last = -1
    number = 0
    acc = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    for start in tl.range(0, size, BLOCK_S, num_stages=3):
        slot = start + tl.arange(0, BLOCK_S)
        alive = tl.load(live + slot, mask=slot < size, other=0).to(tl.int1)
        keys = load_keys(k, table, head, num_heads, size, slot, alive, PAGE, DIM, BLOCK_D).to(tl.float32)
        inverse = 1.0 / (tl.sqrt(tl.sum(keys * keys, axis=1)) + EPS)
        tl.store(inverse_norms + slot, tl.where(alive, inverse, float("nan")), mask=slot < size)
        acc += keys * inverse[:, None]
        first = tl.minimum(first, tl.min(tl.where(alive, slot, size), axis=0))
        last = tl.maximum(last, tl.max(tl.where(alive, slot, -1), axis=0))
        number += tl.sum(alive.to(tl.int32), axis=0)
    tl.store(bounds + unit * 3, first)
    tl.store(bounds + unit * 3 + 1, last)
    tl.store(bounds + unit * 3 + 2, number)

    every = tl.sum(acc, axis=0)
    for start in tl.range(0, size, BLOCK_S, num_stages=3):
        slot = start + tl.arange(0, BLOCK_S)
        alive = tl.load(live + slot, mask=slot < size, other=0).to(tl.int1)
        keys = load_keys(k, table, head, num_heads, size, slot, alive, PAGE, DIM, BLOCK_D).to(tl.float32)
        inverse = 1.0 / (tl.sqrt(tl.sum(keys * keys, axis=1)) + EPS)
        units = keys * inverse[:, None]
        others = tl.sum(units * (every[None, :] - units), axis=1)
        tl.store(totals + unit * size + slot, (others * FIXED).to(tl.int64), mask=slot < size)


@triton.jit(do_not_specialize=["pages_row"])  # type: ignore[untyped-decorator]
def _spare_duplicates(  # type: ignore[no-untyped-def]
    k,
    pages,
    num_heads,
    size,
    pages_row,
    inverse_norms,
    totals,
    bounds,
    threshold,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """For a block of rows: take the cosine each of them zeroes off its column's sum."""
    num_blocks = tl.cdiv(size, BLOCK_I)
    unit = (tl.program_id(0) // num_blocks).to(tl.int64)
    head = unit % num_heads
    table = pages + unit // num_heads * pages_row
    inverse_norms += unit * size
    first = tl.load(bounds + unit * 3)
    last = tl.load(bounds + unit * 3 + 1)

    i = tl.program_id(0) % num_blocks * BLOCK_I + tl.arange(0, BLOCK_I)
    inverse_i = tl.load(inverse_norms + i, mask=i < size, other=float("nan"))
    alive = inverse_i == inverse_i
    keys_i = load_keys(k, table, head, num_heads, size, i, i < size, PAGE, DIM, BLOCK_D)
    bound = threshold / inverse_i  # what the product with a unit key must exceed
    newest = tl.where(alive, -1, 0)  # dead rows look for nothing
    column = tl.arange(0, BLOCK_J)
    start = last // BLOCK_J * BLOCK_J
    ahead = load_keys(k, table, head, num_heads, size, start + column, start + column < size, PAGE, DIM, BLOCK_D)
    while (start + BLOCK_J > first) & (tl.min(newest, axis=0) < 0):
        j = start + column
        keys_j = ahead
        start -= BLOCK_J
        next_j = tl.maximum(start, 0) + column  # loaded while this block is searched
        ahead = load_keys(k, table, head, num_heads, size, next_j, next_j < size, PAGE, DIM, BLOCK_D)
        inverse_j = tl.load(inverse_norms + j, mask=j < size, other=float("nan"))
        product = tl.dot(keys_i, tl.trans(keys_j), input_precision="ieee") * inverse_j[None, :]
        product = tl.where(i[:, None] == j[None, :], 0.0, product)
        found = tl.max(tl.where(product > bound[:, None], j[None, :], -1), axis=1)  # nan is not greater
        newest = tl.where(newest < 0, found, newest)

    spared = tl.where(newest < 0, first, newest)
    alive = alive & (spared != i)
    inverse_j = tl.load(inverse_norms + spared, mask=alive, other=0.0)
    place_i = entry_of(table, head, num_heads, i, size, PAGE)
    place_j = entry_of(table, head, num_heads, spared, size, PAGE)
    dots = tl.zeros([BLOCK_I], tl.float32)
    for part in range(0, DIM, 32):  # in parts, since whole keys would fill the registers
        d = part + tl.arange(0, 32)
        mask = alive[:, None] & (d < DIM)[None, :]
        part_i = tl.load(k + place_i[:, None] * DIM + d[None, :], mask=mask, other=0.0).to(tl.float32)
        part_j = tl.load(k + place_j[:, None] * DIM + d[None, :], mask=mask, other=0.0).to(tl.float32)
        dots += tl.sum(part_i * part_j, axis=1)
    cosine = dots * inverse_i * inverse_j
    spent = tl.where(alive, cosine * FIXED, 0.0).to(tl.int64)
    tl.atomic_add(totals + unit * size + spared, -spent, mask=alive, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def _softmax_totals(inverse_norms, totals, bounds, out, size, BLOCK_S: tl.constexpr):  # type: ignore[no-untyped-def]
    """Softmax of the mean cosines. They are at most 1 in size, so no maximum need be taken off."""
    unit = tl.program_id(0).to(tl.int64)
    scale = 1.0 / (tl.load(bounds + unit * 3 + 2).to(tl.float32) * FIXED)
    weight = tl.zeros([BLOCK_S], tl.float32)
    for start in range(0, size, BLOCK_S):
        slot = start + tl.arange(0, BLOCK_S)
        inverse = tl.load(inverse_norms + unit * size + slot, mask=slot < size, other=float("nan"))
        total = tl.load(totals + unit * size + slot, mask=slot < size, other=0)
        weight += tl.where(inverse == inverse, tl.exp(total.to(tl.float32) * scale), 0.0)
    whole = tl.sum(weight, axis=0)
    for start in range(0, size, BLOCK_S):
        slot = start + tl.arange(0, BLOCK_S)
        inverse = tl.load(inverse_norms + unit * size + slot, mask=slot < size, other=float("nan"))
        total = tl.load(totals + unit * size + slot, mask=slot < size, other=0)
        share = tl.where(inverse == inverse, tl.exp(total.to(tl.float32) * scale) / whole, 0.0)
        tl.store(out + unit * size + slot, share, mask=slot < size)
