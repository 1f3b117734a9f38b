# SPDX-License-Identifier: Apache-2.0
"""Selection against its words, and the Triton kernel against the reference: the same slots, the same pools."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_rl.kernels.compact import select_and_compact_ref, select_ref


@st.composite
def selections(draw, max_size):
    batch, heads, size = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, max_size))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    lengths = torch.randint(1, size + 1, (batch,), generator=generator)
    counts = (lengths * torch.rand(batch, generator=generator)).ceil().long().clamp(min=1)
    counts = draw(st.sampled_from([counts, lengths]))
    importance = torch.randint(-2, 3, (batch, heads, size), generator=generator).float()  # many ties
    importance *= torch.randint(0, 2, importance.shape, generator=generator) * 2 - 1  # zeros of either sign
    importance *= draw(st.sampled_from([1.0, 1e-40]))  # denormals
    importance[torch.rand(importance.shape, generator=generator) < 0.1] = float("nan")
    importance[torch.rand(importance.shape, generator=generator) < 0.1] = float(
        draw(st.sampled_from(["nan", "inf", "-inf"]))
    )
    order = torch.rand(batch, heads, size, generator=generator).argsort(-1).argsort(-1)
    num_protected = draw(st.sampled_from([(counts * torch.rand(batch, generator=generator)).long(), counts]))
    inside = torch.arange(size) < lengths[:, None]
    rank = order.masked_fill(~inside[:, None], size).argsort(-1).argsort(-1)
    protected = (rank < num_protected[:, None, None]) & inside[:, None]
    return importance, protected, lengths, counts


@given(selections(12))
@settings(max_examples=150, deadline=None)
def test_select_keeps_protected_and_the_best_of_the_rest(case):
    importance, protected, lengths, counts = case
    kept = select_ref(*case, max_count=int(counts.max()))
    for b in range(len(lengths)):
        count = int(counts[b])
        for h in range(importance.shape[1]):
            chosen = kept[b, h, :count].tolist()
            assert chosen == sorted(set(chosen)) and len(chosen) == count and chosen[-1] < lengths[b]
            assert set(protected[b, h].nonzero()[:, 0].tolist()) <= set(chosen)
            value = importance[b, h].nan_to_num(nan=float("-inf")).tolist()
            free = [i for i in range(int(lengths[b])) if not protected[b, h, i]]
            best = sorted(free, key=lambda i: (value[i], i), reverse=True)
            expected = best[: count - int(protected[b, h].sum())]
            assert set(chosen) == set(expected) | set(protected[b, h].nonzero()[:, 0].tolist())


def test_select_by_hand():
    importance = torch.tensor([[[5.0, 1.0, 3.0, 3.0, 0.0, 9.0]]])
    protected = torch.tensor([[[False, False, False, False, True, False]]])
    # Slot 5 is empty (length 5). Protected 4 stays, 0 is best, of the equal 2 and 3 the later wins.
    kept = select_ref(importance, protected, torch.tensor([5]), torch.tensor([3]), max_count=3)
    assert kept.tolist() == [[[0, 3, 4]]]


def test_select_refuses_more_protected_entries_than_it_keeps():
    protected = torch.ones(1, 1, 4, dtype=torch.bool)
    with pytest.raises(AssertionError, match="protected"):
        select_ref(torch.zeros(1, 1, 4), protected, torch.tensor([4]), torch.tensor([3]), max_count=3)


def pools_of(num_pages, heads, page, dim, dtype, device, seed):
    """Keys, values, positions and a per-entry number: every entry different from every other."""
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(num_pages, heads, page, dim, generator=generator).to(dtype) for _ in range(2))
    positions = torch.arange(num_pages * heads * page, dtype=torch.int32).reshape(num_pages, heads, page)
    return tuple(pool.to(device) for pool in (keys, values, positions, -positions.double()))


def check(case, page, dim, dtype, device, seed=None, index=torch.int64):
    """The kernel keeps the reference's slots and leaves the reference's pools."""
    seed = int(torch.randint(1 << 40, ())) if seed is None else seed
    from sparse_rl.kernels.compact_triton import select_and_compact_triton

    importance, protected, lengths, counts = (tensor.to(device) for tensor in case)
    batch, heads, size = importance.shape
    width = -(-size // page)
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randperm(batch * width + 3, generator=generator)[: batch * width].reshape(batch, width)
    padded = [torch.nn.functional.pad(x, (0, width * page - size)) for x in (importance, protected)]
    results = []
    for cut in (select_and_compact_ref, select_and_compact_triton):
        pools = pools_of(batch * width + 3, heads, page, dim, dtype, device, seed)
        kept = cut(pools, pages.to(device, index), *padded, lengths, counts, max_count=int(counts.max()))
        assert kept.shape == (batch, heads, int(counts.max())) and kept.dtype == torch.int64
        assert bool(((kept >= 0) & (kept < width * page)).all())
        kept = kept.masked_fill(torch.arange(kept.shape[2], device=device) >= counts[:, None, None], 0)
        results.append((kept, *pools))
    for expected, got in zip(*results, strict=True):
        assert torch.equal(expected, got)


@given(selections(40), st.sampled_from([16, 32]), st.integers(0, 1000))
@settings(max_examples=6, deadline=None)
def test_triton_equals_the_reference(device, case, page, seed):
    pytest.importorskip("triton")
    check(case, page, 8, torch.float16, device, seed)


def test_triton_knows_no_order_of_zeros_and_of_infinities(device):
    """Zeros of either sign are equal, so the later slot wins; so are numbers beyond the largest."""
    pytest.importorskip("triton")
    importance = torch.tensor([0.0, -0.0] * 8).repeat(1, 2, 1)
    importance[:, 1] = torch.tensor([float("inf"), torch.finfo(torch.float32).max, 0.0, float("nan")]).repeat(4)
    protected = torch.zeros(importance.shape, dtype=torch.bool)
    for count in (5, 8, 15):
        check((importance, protected, torch.tensor([16]), torch.tensor([count])), 16, 8, torch.float16, device)


@pytest.mark.parametrize(
    ("dim", "dtype"),
    [
        (64, torch.float16),
        (96, torch.float32),
        (256, torch.bfloat16),
        pytest.param(128, torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_triton_moves_every_kind_of_entry(device, dim, dtype, index):
    pytest.importorskip("triton")
    batch, heads, size = (64, 4, 640) if device != "cpu" else (2, 2, 160)
    importance = torch.randn(batch, heads, size)
    protected = torch.arange(size).expand_as(importance) < 3
    lengths = torch.randint(size // 2, size + 1, (batch,))
    counts = torch.minimum(lengths, torch.tensor(size * 4 // 5))
    check((importance, protected, lengths, counts), 64 if dim == 96 else 16, dim, dtype, device, index=index)


@pytest.mark.parametrize("size", [1024, 2048, 32768])
def test_triton_cuts_long_prompts(device, size):
    pytest.importorskip("triton")
    importance = torch.randint(0, 50, (1, 2, size)).float()
    protected = torch.rand(importance.shape) < 0.01
    lengths = torch.tensor([size - 5])
    protected[..., size - 5 :] = False
    check((importance, protected, lengths, torch.tensor([size // 3])), 64, 16, torch.float16, device)
