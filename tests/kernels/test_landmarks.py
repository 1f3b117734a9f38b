# SPDX-License-Identifier: Apache-2.0
"""Landmarks and the pages chosen by them: the reference against loops in fp64, Triton against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_policies import chosen_pages, page_importance

from sparse_rl.kernels.decode import LayerPool, write_entries_ref
from sparse_rl.kernels.landmarks import choose_pages_ref, page_importance_ref, write_landmarks_ref

# (group, head dim, page size, KV heads)
SHAPES = [(1, 64, 16, 3), (2, 128, 32, 2), (8, 64, 16, 1), (3, 96, 48, 2)]
MORE = [(7, 128, 64, 2), (1, 96, 32, 2), (8, 96, 16, 1), (1, 256, 16, 2)]
SHAPES += [pytest.param(*shape, marks=pytest.mark.gpu) for shape in MORE]


def random_pool(num_pages, heads, page, dim, landmarks, dtype=torch.float32, device="cpu"):
    k, v = (torch.randn(num_pages, heads, page, dim, device=device).to(dtype) for _ in range(2))
    return LayerPool(
        k_PKSD=k,
        v_PKSE=v,
        positions_PKS=torch.zeros(num_pages, heads, page, dtype=torch.int32, device=device),
        landmarks_PKCD=torch.randn(num_pages, heads, landmarks, dim, device=device).to(dtype),
    )


def twin(pool: LayerPool) -> LayerPool:
    names = ("k_PKSD", "v_PKSE", "positions_PKS", "landmarks_PKCD")
    return replace(pool, **{name: getattr(pool, name).clone() for name in names})


def dtypes(device: str) -> list[torch.dtype]:
    return [torch.float32, torch.float16] + [torch.bfloat16] * (device != "cpu")  # which the interpreter does not know


def ragged(rows, width, page, device="cpu"):
    """Tables and lengths: one row of a single entry, one whole, the others in between."""
    pages = (torch.randperm(rows * width, device=device) + 1).reshape(rows, width)
    lengths = torch.randint(1, width * page + 1, (rows,), device=device)
    lengths[0], lengths[-1] = 1, width * page
    return pages, lengths


@pytest.mark.parametrize("landmarks", [1, 2])
def test_landmarks_are_the_mean_or_the_bounds_of_the_keys_held(landmarks):
    pool = random_pool(6, 2, 16, 8, landmarks, torch.float64)
    before = pool.landmarks_PKCD.clone()
    write_landmarks_ref(pool.k_PKSD, pool.landmarks_PKCD, torch.tensor([4, 1, 3]), torch.tensor([16, 5, 0]))
    for page, count in ((4, 16), (1, 5)):
        for head in range(2):
            keys = pool.k_PKSD[page, head, :count]
            made = [keys.mean(0)] if landmarks == 1 else [keys.min(0).values, keys.max(0).values]
            torch.testing.assert_close(pool.landmarks_PKCD[page, head], torch.stack(made))
    others = [0, 2, 3, 5]
    assert torch.equal(pool.landmarks_PKCD[others], before[others])


@pytest.mark.parametrize("landmarks", [1, 2])
@pytest.mark.parametrize(("group", "dim", "page", "heads"), SHAPES)
@pytest.mark.some(3)
def test_triton_makes_the_landmarks_of_the_reference(group, dim, page, heads, landmarks, device):
    """Of pages at once, and entry by entry into pages that held something else."""
    triton = pytest.importorskip("sparse_rl.kernels.landmarks_triton")
    writing = pytest.importorskip("sparse_rl.kernels.write_triton")
    for dtype in dtypes(device):
        pool = random_pool(9, heads, page, dim, landmarks, dtype, device)
        other = twin(pool)
        pages, counts = torch.tensor([3, 8, 1, 5], device=device), torch.tensor([page, 1, 0, page - 3], device=device)
        write_landmarks_ref(pool.k_PKSD, pool.landmarks_PKCD, pages, counts)
        triton.write_landmarks_triton(other.k_PKSD, other.landmarks_PKCD, pages, counts)
        rounding = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]
        torch.testing.assert_close(pool.landmarks_PKCD, other.landmarks_PKCD, atol=rounding, rtol=rounding)
        tables = torch.tensor([[2, 4], [7, 6]], device=device)
        for length in (1, 2, page - 1, page, page + 1):
            lengths = torch.tensor([length, length + 3], device=device)
            k, v = (torch.randn(2, heads, dim, device=device).to(dtype) for _ in range(2))
            for write, into in ((write_entries_ref, pool), (writing.write_entries_triton, other)):
                write(into, k, v, tables, lengths, lengths)
            torch.testing.assert_close(pool.landmarks_PKCD, other.landmarks_PKCD, atol=rounding, rtol=rounding)
        expected = pool.k_PKSD[4, :, :1].repeat(1, landmarks, 1)  # a page of one entry
        torch.testing.assert_close(other.landmarks_PKCD[4], expected, atol=rounding, rtol=rounding)


@pytest.mark.parametrize("landmarks", [1, 2])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_importance_equals_loops(landmarks, group):
    pool = random_pool(12, 2, 4, 8, landmarks, torch.float64)
    pages = torch.randperm(12).reshape(2, 6)
    q = torch.randn(2, 2 * group, 8, dtype=torch.float64)
    write_landmarks_ref(pool.k_PKSD, pool.landmarks_PKCD, pages.flatten(), torch.full((12,), 4))
    importance = page_importance_ref(q, pool, pages) / group
    for b in range(2):
        for head in range(2):
            for n in range(6):
                keys = pool.k_PKSD[pages[b, n], head].numpy()
                own = q[b, head * group : (head + 1) * group].numpy()
                assert float(importance[b, head, n]) == pytest.approx(page_importance(own, keys, landmarks), abs=1e-12)
                if landmarks == 2:  # no key of the page is worth more to the mean query
                    assert (keys @ own.mean(0)).max() <= float(importance[b, head, n]) + 1e-12


@given(
    rows=st.integers(2, 5),
    width=st.integers(1, 12),
    first=st.integers(0, 2),
    last=st.integers(1, 3),
    more=st.integers(0, 8),
    landmarks=st.sampled_from([1, 2]),
    ties=st.booleans(),
    number=st.integers(0, 1 << 30),
)
@settings(max_examples=60, deadline=None)
def test_chosen_pages_equal_loops(rows, width, first, last, more, landmarks, ties, number):
    """Exactly as many as asked for, the reserved among them, in order; rows do not matter to each other."""
    torch.manual_seed(number)
    pool = random_pool(rows * width + 1, 2, 4, 8, landmarks, torch.float64)
    if ties:
        pool.landmarks_PKCD.copy_(pool.landmarks_PKCD.sign())
    pages, lengths = ragged(rows, width, 4)
    held = -(-lengths // 4)
    counts = torch.minimum(held, torch.tensor(first + last + more))
    q = torch.ones(rows, 4, 8, dtype=torch.float64) if ties else torch.randn(rows, 4, 8, dtype=torch.float64)
    options = {"first": first, "last": last, "width": min(first + last + more, width)}
    got = choose_pages_ref(q, pool, pages, lengths, counts, **options)
    importance = page_importance_ref(q, pool, pages)
    assert got.shape == (rows, 2, options["width"])
    for b in range(rows):
        for head in range(2):
            expected = chosen_pages(importance[b, head, : held[b]].tolist(), int(counts[b]), first, last)
            listed = got[b, head, : counts[b]].tolist()
            assert listed == [int(pages[b, n]) for n in expected]
            assert set(pages[b, : held[b]][:first].tolist()) <= set(listed) and int(pages[b, held[b] - 1]) == listed[-1]
            assert (got[b, head, counts[b] :] == 0).all()
    order = torch.randperm(rows)
    again = choose_pages_ref(q[order], pool, pages[order], lengths[order], counts[order], **options)
    assert torch.equal(again, got[order])


@pytest.mark.parametrize("landmarks", [1, 2])
@pytest.mark.parametrize(("group", "dim", "page", "heads"), SHAPES)
@pytest.mark.some(3)
def test_triton_chooses_what_the_reference_chooses(group, dim, page, heads, landmarks, device):
    """Integers as landmarks and queries: sums are exact and ties are many. Budgets above and below the lengths."""
    triton = pytest.importorskip("sparse_rl.kernels.landmarks_triton")
    rows, width, first, last, most = 4, 37, 1, 2, 9
    for dtype in dtypes(device):
        pool = random_pool(rows * width + 1, heads, page, dim, landmarks, dtype, device)
        pool.landmarks_PKCD.copy_(torch.randint(-2, 3, pool.landmarks_PKCD.shape, device=device))
        pages, lengths = ragged(rows, width, page, device)
        budgets = torch.tensor([9, 6, 3, 9], device=device)
        counts = torch.minimum(-(-lengths // page), budgets)
        q = torch.randint(-1, 2, (rows, heads * group, dim), device=device).to(dtype)
        options = {"first": first, "last": last, "width": most}
        expected = choose_pages_ref(q, pool, pages, lengths, counts, **options)
        got = triton.choose_pages_triton(q, pool, pages, lengths, counts, **options)
        assert torch.equal(got.long(), expected)


def test_triton_with_importance_that_is_no_number(device):
    triton = pytest.importorskip("sparse_rl.kernels.landmarks_triton")
    pool = random_pool(21, 1, 16, 64, 1, torch.float32, device)
    pages = torch.arange(1, 21, device=device)[None]
    lengths, counts = torch.tensor([320], device=device), torch.tensor([6], device=device)
    q = torch.ones(1, 2, 64, device=device)
    pool.landmarks_PKCD.fill_(float("nan"))
    pool.landmarks_PKCD[8] = -1e30
    options = {"first": 1, "last": 2, "width": 8}
    got = triton.choose_pages_triton(q, pool, pages, lengths, counts, **options)
    assert got.flatten().tolist() == [1, 2, 3, 8, 19, 20, 0, 0]
    assert torch.equal(got.long(), choose_pages_ref(q, pool, pages, lengths, counts, **options))


def test_landmarks_are_found_where_a_moved_pool_lies(device):
    triton = pytest.importorskip("sparse_rl.kernels.landmarks_triton")
    writing = pytest.importorskip("sparse_rl.kernels.write_triton")
    anchor, pool = (random_pool(n, 2, 16, 64, 2, torch.float32, device) for n in (1, 9))
    names = ("k_PKSD", "v_PKSE", "positions_PKS", "landmarks_PKCD")
    tensors = [(getattr(pool, n), getattr(anchor, n)) for n in names]
    offsets = [(there.data_ptr() - here.data_ptr()) // here.itemsize for there, here in tensors]
    moved = replace(anchor, offsets=torch.tensor(offsets, device=device))
    pages, length = torch.tensor([[1, 7, 2, 5, 3, 4]], device=device), torch.tensor([90], device=device)
    k, v = (torch.randn(1, 2, 64, device=device) for _ in range(2))
    expected = twin(pool)
    write_entries_ref(expected, k, v, pages, length, length)
    writing.write_entries_triton(moved, k, v, pages, length, length)
    torch.testing.assert_close(pool.landmarks_PKCD, expected.landmarks_PKCD)
    q, counts = torch.randn(1, 4, 64, device=device), torch.tensor([4], device=device)
    options = {"first": 1, "last": 1, "width": 4}
    got = triton.choose_pages_triton(q, moved, pages, length, counts, **options)
    assert torch.equal(got.long(), choose_pages_ref(q, expected, pages, length, counts, **options))
