# SPDX-License-Identifier: Apache-2.0
"""Writing an entry and attending to a row's pages: the reference against sums in fp64, Triton against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sparse_rl.kernels.decode import LayerPool, decode_attention_ref, gather_pages_ref, write_entries_ref

# (groups, head dim, page size, KV heads)
SHAPES = [
    (1, 64, 16, 3), (2, 64, 32, 2), (3, 96, 32, 1), (4, 64, 48, 1), (5, 128, 16, 1), (6, 128, 64, 2), (7, 16, 64, 2),
    (8, 256, 16, 2),
]  # fmt: skip
MORE = [(7, 128, 64, 2), (1, 96, 32, 2), (8, 96, 16, 1), (1, 256, 16, 2)]
SHAPES += [pytest.param(*shape, marks=pytest.mark.gpu) for shape in MORE]

ROUNDING = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def random_pool(num_pages, heads, page, dim, dtype, device, longest=200, value_dim=None):
    return LayerPool(
        k_PKSD=torch.randn(num_pages, heads, page, dim, device=device).to(dtype),
        v_PKSE=torch.randn(num_pages, heads, page, value_dim or dim, device=device).to(dtype),
        positions_PKS=torch.randint(0, longest, (num_pages, heads, page), dtype=torch.int32, device=device),
    )


def exact(pool: LayerPool) -> LayerPool:
    return replace(pool, k_PKSD=pool.k_PKSD.double(), v_PKSE=pool.v_PKSE.double())


def dtypes(device: str) -> list[torch.dtype]:
    return [torch.float32, torch.float16] + [torch.bfloat16] * (device != "cpu")  # which the interpreter does not know


def naive(q_GD, k_SD, v_SE, scale, softcap=None, sinks_G=None):
    """A sink is a key of its own, whose value is zero."""
    logits = q_GD @ k_SD.T * scale
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    if sinks_G is None:
        return logits.softmax(-1) @ v_SE
    return torch.cat([logits, sinks_G[:, None]], dim=-1).softmax(-1)[:, :-1] @ v_SE


@pytest.mark.parametrize("window", [None, 60])
@pytest.mark.parametrize(("group", "softcap", "sunk"), [(1, None, False), (3, None, True), (8, 2.0, True)])
def test_reference_equals_a_sum_over_visible_entries(group, softcap, sunk, window):
    heads, page, dim, longest = 2, 4, 8, 100
    pool = random_pool(20, heads, page, dim, torch.float64, "cpu", longest, value_dim=5)
    sinks = torch.randn(heads * group, dtype=torch.float64) if sunk else None
    pages = torch.tensor([[3, 7, 1], [1, 19, 2], [11, 5, 0]])
    lengths, positions = torch.tensor([12, 5, 9]), torch.tensor([longest, longest, longest])
    q = torch.randn(3, heads * group, dim, dtype=torch.float64)
    how = {"scale": 0.3, "window": window, "softcap": softcap, "sinks_H": sinks}
    out = decode_attention_ref(q, pool, pages, lengths, positions, **how)
    for b in range(3):
        for head in range(heads):
            k, v, p = (torch.cat([x[i, head] for i in pages[b]])[: lengths[b]] for x in
                       (pool.k_PKSD, pool.v_PKSE, pool.positions_PKS))  # fmt: skip
            seen = p > longest - window if window else torch.ones(len(p), dtype=torch.bool)
            if seen.any():
                heads_of = slice(head * group, (head + 1) * group)
                expected = naive(q[b, heads_of], k[seen], v[seen], 0.3, softcap, sinks[heads_of] if sunk else None)
                torch.testing.assert_close(out[b, heads_of], expected)


def test_a_window_counts_the_token_itself():
    positions = torch.tensor([[[0, 4, 5, 6, 7, 0]]], dtype=torch.int32)
    values = torch.eye(6, dtype=torch.float64)[None, None]
    pool = LayerPool(k_PKSD=torch.zeros_like(values), v_PKSE=values, positions_PKS=positions)
    q, page = torch.zeros(1, 1, 6, dtype=torch.float64), torch.tensor([[0]])
    out = decode_attention_ref(q, pool, page, torch.tensor([5]), torch.tensor([7]), scale=1.0, window=3)
    assert (out[0, 0] > 0).tolist() == [False, False, True, True, True, False]


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(("group", "dim", "page", "heads"), SHAPES)
@pytest.mark.parametrize("num_sms", [1, 64])  # whole rows, and rows split among programs
@pytest.mark.parametrize("kind", ["plain", "sinks", "softcap", "narrow"])
@pytest.mark.some(8)
def test_triton_attention(group, dim, page, heads, window, kind, num_sms, device, monkeypatch):
    triton = pytest.importorskip("sparse_rl.kernels.decode_triton")
    monkeypatch.setattr(triton, "num_sms", lambda device: num_sms)
    if device == "cpu":  # a quarter of the entries for the interpreter, in as many splits
        monkeypatch.setattr(triton, "MIN_SPLIT", triton.MIN_SPLIT // 4)
    width = (512 if device != "cpu" else 128) // page + 1
    assert triton.splits_of(3 * heads, width * page, num_sms) == (1 if num_sms == 1 else 4)
    drawn = int(torch.randint(2, ()))  # of the two types the interpreter knows, each case takes one
    for dtype in dtypes(device) if device != "cpu" else dtypes(device)[drawn : drawn + 1]:
        value_dim = dim * 2 // 3 if kind == "narrow" else dim
        pool = random_pool(3 * width + 1, heads, page, dim, dtype, device, value_dim=value_dim)
        pages = torch.randperm(3 * width, device=device).reshape(3, width) + 1
        lengths = torch.tensor([1, width * page, int(torch.randint(1, width * page, ()))], device=device)
        # The newest entry is the query's own and always visible; so is another few of those drawn.
        positions = torch.full((3,), 199, device=device)
        for row in range(3):
            slot = int(lengths[row]) - 1
            pool.positions_PKS[pages[row, slot // page], :, slot % page] = 199
        q = torch.randn(3, heads * group, dim, device=device).to(dtype)
        settings = {"scale": dim**-0.5, "window": window, "softcap": 1.5 if kind == "softcap" else None}
        if kind == "sinks":  # as large as a sum over many entries, so that it counts
            settings["sinks_H"] = torch.randn(heads * group, device=device).to(dtype) + 3
        expected = decode_attention_ref(q.double(), exact(pool), pages, lengths, positions, **settings)
        got = triton.decode_attention_triton(q, pool, pages, lengths, positions, **settings)
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), expected, atol=ROUNDING[dtype], rtol=ROUNDING[dtype])


@pytest.mark.parametrize(("group", "dim", "page", "heads"), SHAPES)
def test_triton_attention_over_listed_pages(group, dim, page, heads, device):
    """Every KV head reads pages of its own."""
    triton = pytest.importorskip("sparse_rl.kernels.decode_triton")
    for dtype in dtypes(device):
        pool = random_pool(12, heads, page, dim, dtype, device)
        pages = torch.stack([torch.randperm(12, device=device)[:4] for _ in range(2 * heads)]).reshape(2, heads, 4)
        lengths = torch.randint(1, 4 * page + 1, (2, heads), device=device)
        q, positions = torch.randn(2, heads * group, dim, device=device).to(dtype), torch.full((2,), 300, device=device)
        expected = decode_attention_ref(q.double(), exact(pool), pages, lengths, positions, scale=0.1)
        got = triton.decode_attention_triton(q, pool, pages.int(), lengths, positions, scale=0.1)
        torch.testing.assert_close(got.double(), expected, atol=ROUNDING[dtype], rtol=ROUNDING[dtype])
        for head in range(heads):  # as if each head were alone
            alone = LayerPool(
                k_PKSD=pool.k_PKSD[:, [head]].double(), v_PKSE=pool.v_PKSE[:, [head]].double(),
                positions_PKS=pool.positions_PKS[:, [head]],
            )  # fmt: skip
            heads_of = slice(group * head, group * head + group)
            out = decode_attention_ref(
                q[:, heads_of].double(), alone, pages[:, head], lengths[:, head], positions, scale=0.1
            )
            torch.testing.assert_close(expected[:, heads_of], out)


@pytest.mark.parametrize(("group", "dim", "page", "heads"), SHAPES)
@pytest.mark.parametrize("ring", [0, 4])
def test_triton_writes_what_the_reference_writes(group, dim, page, heads, ring, device):
    triton = pytest.importorskip("sparse_rl.kernels.write_triton")
    for dtype in dtypes(device):
        value_dim = int(torch.randint(1, 2 * dim, ()))
        pool = random_pool(13, heads, page, dim, dtype, device, value_dim=value_dim)
        twin = LayerPool(
            k_PKSD=pool.k_PKSD.clone(), v_PKSE=pool.v_PKSE.clone(), positions_PKS=pool.positions_PKS.clone()
        )
        pages = torch.randperm(12, device=device).reshape(3, 4) + 1
        lengths = torch.tensor([1, 4 * page, page + 3], device=device)
        positions = torch.tensor([7, 1000, 33], device=device)
        k, v = (torch.randn(3, heads, width, device=device).to(dtype) for width in (dim, value_dim))
        q = torch.randn(3, dim, heads * group, device=device).to(dtype).transpose(1, 2).contiguous()
        rings = [torch.zeros(6, ring, heads * group, dim, device=device, dtype=dtype) for _ in range(2)]
        rows = torch.tensor([5, 0, 2], device=device)
        more = [{"q_BHD": q, "ring_RWHD": r, "rows_B": rows} if ring else {} for r in rings]
        write_entries_ref(pool, k, v, pages, lengths, positions, **more[0])
        triton.write_entries_triton(twin, k, v, pages, lengths, positions, **more[1])
        for name in ("k_PKSD", "v_PKSE", "positions_PKS"):
            assert torch.equal(getattr(pool, name), getattr(twin, name)), name
        assert torch.equal(*rings)
        for row in range(3):
            slot = int(lengths[row]) - 1
            assert torch.equal(gather_pages_ref(pool.k_PKSD, pages)[row, :, slot], k[row])


def test_what_a_slot_held_before_does_not_matter(device):
    triton = pytest.importorskip("sparse_rl.kernels.decode_triton")
    pool = random_pool(3, 1, 16, 32, torch.float32, device)
    pages, lengths = torch.tensor([[1, 2]], device=device), torch.tensor([20], device=device)
    q = torch.randn(1, 2, 32, device=device)
    expected = triton.decode_attention_triton(q, pool, pages, lengths, lengths, scale=0.2)
    pool.v_PKSE[2, :, 4:] = float("nan")
    pool.k_PKSD[2, :, 4:] = float("nan")
    got = triton.decode_attention_triton(q, pool, pages, lengths, lengths, scale=0.2)
    assert torch.equal(got, expected)


def test_a_pool_that_moved_is_found_through_its_offsets(device):
    triton = pytest.importorskip("sparse_rl.kernels.decode_triton")
    pages, lengths = torch.tensor([[1, 2], [4, 3]], device=device), torch.tensor([20, 32], device=device)
    positions, q = torch.full((2,), 200, device=device), torch.randn(2, 4, 64, device=device)
    anchor = random_pool(1, 2, 16, 64, torch.float32, device)
    for _ in range(2):
        pool = random_pool(5, 2, 16, 64, torch.float32, device)
        tensors = [(getattr(pool, n), getattr(anchor, n)) for n in ("k_PKSD", "v_PKSE", "positions_PKS")]
        offsets = [(there.data_ptr() - here.data_ptr()) // here.itemsize for there, here in tensors]
        moved = replace(anchor, offsets=torch.tensor(offsets, device=device))
        expected = triton.decode_attention_triton(q, pool, pages, lengths, positions, scale=0.1)
        got = triton.decode_attention_triton(q, moved, pages, lengths, positions, scale=0.1)
        assert torch.equal(got, expected)


def test_rows_are_split_only_where_programs_are_few():
    triton = pytest.importorskip("sparse_rl.kernels.decode_triton")
    assert triton.splits_of(512, 640, 132) == 1
    assert triton.splits_of(8, 100_000, 132) == 32
    assert triton.splits_of(2, 640, 132) == 4, "pieces of at least 128 entries"


def test_entries_are_written_where_a_moved_pool_lies(device):
    triton = pytest.importorskip("sparse_rl.kernels.write_triton")
    anchor, pool = (random_pool(n, 2, 16, 64, torch.float32, device) for n in (1, 5))
    tensors = [(getattr(pool, n), getattr(anchor, n)) for n in ("k_PKSD", "v_PKSE", "positions_PKS")]
    offsets = [(there.data_ptr() - here.data_ptr()) // here.itemsize for there, here in tensors]
    k, v = (torch.randn(1, 2, 64, device=device) for _ in range(2))
    length, pages = torch.tensor([20], device=device), torch.tensor([[1, 3]], device=device)
    moved = replace(anchor, offsets=torch.tensor(offsets, device=device))
    triton.write_entries_triton(moved, k, v, pages, length, length)
    assert torch.equal(pool.k_PKSD[3, :, 3], k[0]) and torch.equal(pool.v_PKSE[3, :, 3], v[0])
    assert (pool.positions_PKS[3, :, 3] == 20).all()
