# SPDX-License-Identifier: Apache-2.0
"""`compact.py` on a GPU: one program cuts one head of one row, in one launch.

Every slot gets an integer whose order is that of (written, protected, importance). The count-th greatest of them is
found bit by bit; of the slots equal to it the latest fill up the count. Entries then move in blocks from the front: a
kept entry never moves back, so no block overwrites what a later one has still to read.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

UNWRITTEN = tl.constexpr(-(1 << 31))
NAN = tl.constexpr(-(1 << 31) + 1)
PROTECTED = tl.constexpr((1 << 31) - 1)
GREATEST = tl.constexpr(torch.finfo(torch.float32).max)  # the reference orders infinities as this
MOVED = (16384, 512)  # at most that many elements of a pool, and entries, are moved at a time


def select_and_compact_triton(
    pools: tuple[torch.Tensor, ...],
    pages_BN: torch.Tensor,
    importance_BKS: torch.Tensor,
    protected_BKS: torch.Tensor,
    lengths_B: torch.Tensor,
    counts_B: torch.Tensor,
    *,
    max_count: int,
) -> torch.Tensor:
    batch, num_heads, size = importance_BKS.shape
    assert all(pool.is_contiguous() for pool in pools) and pages_BN.stride(1) == 1
    widths = tuple(pool[0, 0, 0].numel() for pool in pools)
    widths_p = tuple(triton.next_power_of_2(width) for width in widths)
    size_p = triton.next_power_of_2(size)
    kept_BKE = torch.empty((batch, num_heads, min(max_count, size)), dtype=torch.int64, device=importance_BKS.device)
    _select_and_compact[(batch * num_heads,)](
        pools,
        pages_BN,
        importance_BKS.contiguous(),
        protected_BKS.contiguous(),
        lengths_B.contiguous(),
        counts_B.contiguous(),
        kept_BKE,
        num_heads,
        size,
        pages_BN.stride(0),
        kept_BKE.shape[2],
        WIDTHS=widths,
        BLOCKS_X=widths_p,
        BLOCKS_E=tuple(min(max(MOVED[0] // width, 1), MOVED[1]) for width in widths_p),
        BLOCK_S=size_p,
        PAGE=pools[0].shape[2],
        num_warps=8 if size_p <= 4096 else 16,
    )
    return kept_BKE


@triton.jit(do_not_specialize=["pages_row", "max_count"])  # type: ignore[untyped-decorator]
def _select_and_compact(  # type: ignore[no-untyped-def]
    pools,
    pages,
    importance,
    protected,
    lengths,
    counts,
    kept,
    num_heads,
    size,
    pages_row,
    max_count,
    WIDTHS: tl.constexpr,
    BLOCKS_X: tl.constexpr,
    BLOCKS_E: tl.constexpr,
    BLOCK_S: tl.constexpr,
    PAGE: tl.constexpr,
):
    unit = tl.program_id(0).to(tl.int64)
    row = unit // num_heads
    head = unit % num_heads
    count = tl.load(counts + row).to(tl.int32)
    slot = tl.arange(0, BLOCK_S)
    written = slot < tl.load(lengths + row)
    value = tl.load(importance + unit * size + slot, mask=written, other=0.0)
    stays = tl.load(protected + unit * size + slot, mask=written, other=0).to(tl.int1)
    order = tl.where(stays, PROTECTED, ordered(value))
    order = tl.where(written, order, UNWRITTEN)

    cut = nth_greatest(order, count)
    ties = (order == cut).to(tl.int32)
    spare = tl.sum((order >= cut).to(tl.int32), axis=0) - count  # of the ties, the earliest that many go
    chosen = (order > cut) | ((ties == 1) & (tl.cumsum(ties, axis=0) > spare))
    kept += unit * max_count
    tl.store(kept + tl.cumsum(chosen.to(tl.int32), axis=0) - 1, slot.to(tl.int64), mask=chosen)
    tl.store(kept + slot, 0, mask=(slot >= count) & (slot < max_count))
    tl.debug_barrier()  # every thread reads what all of them wrote

    table = pages + row * pages_row
    for i in tl.static_range(len(pools)):
        _move(pools[i], kept, count, table, head, num_heads, size, WIDTHS[i], BLOCKS_X[i], BLOCKS_E[i], PAGE)


@triton.jit
def ordered(value):  # type: ignore[no-untyped-def]
    """Integers in the order of floats: nan least, both zeros equal."""
    finite = tl.minimum(tl.maximum(value, -GREATEST), GREATEST)
    bits = tl.where(finite == 0.0, 0.0, finite).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(value == value, bits, NAN)


@triton.jit
def nth_greatest(order, count):  # type: ignore[no-untyped-def]
    """The greatest integer that at least `count` of them reach."""
    cut = tl.where(tl.sum((order >= 0).to(tl.int32), axis=0) >= count, 0, UNWRITTEN)
    step = 1 << 30
    for _ in range(31):
        reached = tl.sum((order >= cut + step).to(tl.int32), axis=0)
        cut = tl.where(reached >= count, cut + step, cut)
        step = step // 2
    return cut


@triton.jit  # type: ignore[untyped-decorator]
def _move(  # type: ignore[no-untyped-def]
    pool,
    kept,
    count,
    table,
    head,
    num_heads,
    size,
    WIDTH: tl.constexpr,
    BLOCK_X: tl.constexpr,
    BLOCK_E: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Slot t of one row and head becomes what slot kept[t] was."""
    x = tl.arange(0, BLOCK_X)
    for start in range(0, count, BLOCK_E):
        target = start + tl.arange(0, BLOCK_E)
        source = tl.load(kept + target, mask=target < count, other=0).to(tl.int32)
        moves = (target < count) & (source != target)
        mask = moves[:, None] & (x < WIDTH)[None, :]
        place = entry_of(table, head, num_heads, source, size, PAGE)
        block = tl.load(pool + place[:, None] * WIDTH + x[None, :], mask=mask)
        tl.debug_barrier()  # all of the block is read before any of it is overwritten
        place = entry_of(table, head, num_heads, target, size, PAGE)
        tl.store(pool + place[:, None] * WIDTH + x[None, :], block, mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def entry_of(table, head, num_heads, slot, size, PAGE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Where in a pool the slots of one row and head lie, counted in entries; `size` is how many the table has."""
    page = tl.load(table + slot // PAGE, mask=slot < size, other=0).to(tl.int64)
    return (page * num_heads + head) * PAGE + slot % PAGE
