# SPDX-License-Identifier: Apache-2.0
"""`keys.py` on a GPU: keys are read where they lie, norms once, likeness twice."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sparse_rl.kernels.importance_triton import EPS, load_keys, tiles_of


def key_norms_triton(k_PKSD: torch.Tensor, pages_BN: torch.Tensor) -> torch.Tensor:
    out_BKS = _like_slots(k_PKSD, pages_BN)
    units, size = out_BKS.shape[0] * out_BKS.shape[1], out_BKS.shape[2]
    tiles = tiles_of(k_PKSD, 64)
    grid = (units * triton.cdiv(size, tiles["BLOCK_S"]),)
    _key_norms[grid](k_PKSD, pages_BN, out_BKS.shape[1], size, pages_BN.stride(0), out_BKS, **tiles, num_warps=4)
    return out_BKS


def key_likeness_triton(k_PKSD: torch.Tensor, pages_BN: torch.Tensor, live_BKS: torch.Tensor) -> torch.Tensor:
    out_BKS = _like_slots(k_PKSD, pages_BN)
    batch, num_heads, size = out_BKS.shape
    keys = (k_PKSD, pages_BN, num_heads, size, pages_BN.stride(0))
    _key_likeness[(batch * num_heads,)](*keys, live_BKS.contiguous(), out_BKS, **tiles_of(k_PKSD, 64), num_warps=8)
    return out_BKS


def _like_slots(k_PKSD: torch.Tensor, pages_BN: torch.Tensor) -> torch.Tensor:
    assert k_PKSD.is_contiguous() and pages_BN.stride(1) == 1
    _, num_heads, page_size, _ = k_PKSD.shape
    size = (pages_BN.shape[0], num_heads, pages_BN.shape[1] * page_size)
    return torch.empty(size, dtype=torch.float32, device=k_PKSD.device)


@triton.jit(do_not_specialize=["pages_row"])  # type: ignore[untyped-decorator]
def _key_norms(  # type: ignore[no-untyped-def]
    k,
    pages,
    num_heads,
    size,
    pages_row,
    out,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    num_blocks = tl.cdiv(size, BLOCK_S)
    unit = (tl.program_id(0) // num_blocks).to(tl.int64)
    slot = tl.program_id(0) % num_blocks * BLOCK_S + tl.arange(0, BLOCK_S)
    table = pages + unit // num_heads * pages_row
    keys = load_keys(k, table, unit % num_heads, num_heads, size, slot, slot < size, PAGE, DIM, BLOCK_D)
    keys = keys.to(tl.float32)
    tl.store(out + unit * size + slot, tl.sqrt(tl.sum(keys * keys, axis=1)), mask=slot < size)


@triton.jit(do_not_specialize=["pages_row"])  # type: ignore[untyped-decorator]
def _key_likeness(  # type: ignore[no-untyped-def]
    k,
    pages,
    num_heads,
    size,
    pages_row,
    live,
    out,
    PAGE: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    unit = tl.program_id(0).to(tl.int64)
    head = unit % num_heads
    table = pages + unit // num_heads * pages_row
    live += unit * size
    acc = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    for start in tl.range(0, size, BLOCK_S, num_stages=3):
        slot = start + tl.arange(0, BLOCK_S)
        alive = tl.load(live + slot, mask=slot < size, other=0).to(tl.int1)
        keys = load_keys(k, table, head, num_heads, size, slot, alive, PAGE, DIM, BLOCK_D).to(tl.float32)
        acc += keys / (tl.sqrt(tl.sum(keys * keys, axis=1)) + EPS)[:, None]

    total = tl.sum(acc, axis=0)
    direction = total / (tl.sqrt(tl.sum(total * total, axis=0)) + EPS)
    for start in tl.range(0, size, BLOCK_S, num_stages=3):
        slot = start + tl.arange(0, BLOCK_S)
        alive = tl.load(live + slot, mask=slot < size, other=0).to(tl.int1)
        keys = load_keys(k, table, head, num_heads, size, slot, alive, PAGE, DIM, BLOCK_D).to(tl.float32)
        along = tl.sum(keys * direction[None, :], axis=1)
        tl.store(out + unit * size + slot, along / (tl.sqrt(tl.sum(keys * keys, axis=1)) + EPS), mask=slot < size)
