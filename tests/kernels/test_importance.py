# SPDX-License-Identifier: Apache-2.0
"""Importance kernels where the policies' own tests do not reach: dead entries, blocks, low precision, Triton."""

from __future__ import annotations

import pytest
import slow_policies
import torch

from sparse_rl.kernels import importance, keys, mass
from sparse_rl.kernels.decode import gather_pages_ref
from sparse_rl.kernels.importance import attention_importance_ref, redundancy_ref


def random(*size):
    return torch.randn(size, dtype=torch.float64)


def own_pages(k_BKSD):
    """A pool in which every row has one page of its own."""
    return k_BKSD, torch.arange(len(k_BKSD))[:, None]


@pytest.mark.parametrize("block", [8, 256])
def test_redundancy_of_live_entries_alone(block, monkeypatch):
    monkeypatch.setattr(importance, "SIMILARITY_BLOCK", block)
    k = random(1, 2, 30, 6)
    live = torch.rand(1, 2, 30) < 0.7
    live[..., :3] = False
    got = redundancy_ref(*own_pages(k), live, threshold=0.5)
    for head in range(2):
        alive = live[0, head]
        expected = slow_policies.redundancy(k[0, head][alive].numpy(), threshold=0.5)
        torch.testing.assert_close(got[0, head][alive], torch.from_numpy(expected))
        assert not got[0, head][~alive].any()


def test_every_row_has_its_own_scale():
    k, q, candidates = random(2, 2, 20, 6), random(2, 4, 3, 6), torch.ones(2, 2, 20, dtype=torch.bool)
    scale = torch.tensor([0.5, 3.0], dtype=torch.float64)
    both = attention_importance_ref(*own_pages(k), q, candidates, scale_B=scale, kernel=3)
    alone = attention_importance_ref(*own_pages(k[1:]), q[1:], candidates[1:], scale_B=scale[1:], kernel=3)
    torch.testing.assert_close(both[1:], alone)


def test_half_precision_keys_are_compared_in_fp32():
    k, q = random(1, 2, 20, 6).bfloat16(), random(1, 4, 3, 6).bfloat16()
    live, scale = torch.ones(1, 2, 20, dtype=torch.bool), torch.ones(1)
    attention = attention_importance_ref(*own_pages(k), q, live, scale_B=scale, kernel=3)
    exact = attention_importance_ref(*own_pages(k.double()), q.double(), live, scale_B=scale.double(), kernel=3)
    torch.testing.assert_close(attention.double(), exact, atol=1e-6, rtol=0)
    redundancy = redundancy_ref(*own_pages(k), live, threshold=0.5)
    exact = redundancy_ref(*own_pages(k.double()), live, threshold=0.5)
    torch.testing.assert_close(redundancy.double(), exact, atol=1e-6, rtol=0)


def paged(batch, heads, width, page, dim, dtype, device):
    """A pool of keys with near-duplicates in it, shuffled pages, and which slots are live: a window, and gaps."""
    num_pages, size = batch * width + 2, width * page
    directions = torch.randn(6, dim)
    choice = torch.randint(0, 6, (num_pages, heads, page))
    k = directions[choice] + 0.9 * torch.randn(num_pages, heads, page, dim)
    pages = torch.randperm(num_pages)[: batch * width].reshape(batch, width)
    lengths = torch.randint(size // 2, size + 1, (batch, 1, 1))
    lengths[0] = size
    slot = torch.arange(size)
    live = (slot < lengths) & (torch.rand(batch, heads, size) < 0.95)
    live[-1] &= slot > size // 4  # a window has passed by the first pages
    return k.to(device, dtype), pages.to(device), live.to(device)


SHAPES = [  # head dim, keys' type, KV heads, group, page, queries, pooling
    (64, torch.float16, 2, 6, 64, 8, 7),
    (96, torch.float32, 1, 1, 16, 3, 1),
    (128, torch.bfloat16, 2, 4, 64, 8, 7),
    (128, torch.float16, 1, 8, 16, 11, 5),  # more queries than one block takes
    (256, torch.float16, 1, 3, 32, 2, 7),
    (16, torch.float32, 2, 2, 16, 1, 31),
]
MORE = [
    (128, torch.bfloat16, 2, 7, 64, 8, 7),
    (96, torch.float16, 2, 1, 32, 8, 7),
    (96, torch.bfloat16, 1, 8, 16, 8, 7),
    (256, torch.bfloat16, 2, 1, 16, 8, 7),
]
SHAPES += [pytest.param(shape, marks=pytest.mark.gpu) for shape in MORE]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}-{s[1]}-{s[2]}x{s[3]}")
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.some(4)
def test_triton_attention_equals_the_reference(shape, index, device):
    pytest.importorskip("triton")
    from sparse_rl.kernels.importance_triton import attention_importance_triton

    dim, dtype, heads, group, page, num_queries, kernel = shape
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("Triton's interpreter has no bfloat16")
    batch, size = (40, 640) if device != "cpu" else (2, 192)
    k, pages, candidates = paged(batch, heads, size // page, page, dim, dtype, device)
    candidates[0, 0] = False  # a head without candidates
    q = random(batch, num_queries, heads * group, dim).to(device, dtype).transpose(1, 2)
    scale = torch.linspace(0.05, 0.3, batch, device=device)
    got = attention_importance_triton(k, pages.to(index), q, candidates, scale_B=scale, kernel=kernel)
    exact = attention_importance_ref(k.double(), pages, q.double(), candidates, scale_B=scale.double(), kernel=kernel)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), exact, atol=1e-6, rtol=1e-4)
    assert not got[~candidates].any()


def close_calls(k, pages, live, threshold):
    """Heads with two live entries whose cosine may round to either side of the threshold, B K."""
    unit = torch.nn.functional.normalize(gather_pages_ref(k.double(), pages), dim=-1)
    close = (unit @ unit.transpose(-1, -2) - threshold).abs() < 1e-6
    other = ~torch.eye(live.shape[-1], dtype=torch.bool, device=k.device)
    return (close & other & live[..., None] & live[..., None, :]).flatten(2).any(-1)


@pytest.mark.parametrize("threshold", [0.5, 0.2, -0.3, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}-{s[1]}-{s[2]}x{s[3]}")
@pytest.mark.some(5)
def test_triton_redundancy_equals_the_reference(shape, threshold, device):
    pytest.importorskip("triton")
    from sparse_rl.kernels.importance_triton import redundancy_triton

    dim, dtype, heads, _, page, _, _ = shape
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("Triton's interpreter has no bfloat16")
    batch, size = (40, 640) if device != "cpu" else (2, 128)
    k, pages, live = paged(batch, heads, size // page, page, dim, dtype, device)
    live[0, 0] = False  # a head without live entries
    got = redundancy_triton(k, pages.int(), live, threshold=threshold)
    exact = redundancy_ref(k.double(), pages, live, threshold=threshold)
    assert got.dtype == torch.float32
    clear = ~close_calls(k, pages, live, threshold)
    torch.testing.assert_close(got[clear].double(), exact[clear], atol=1e-8, rtol=1e-5)
    assert not got[~live].any()
    if device != "cpu":  # where the interpreter has but one order
        assert torch.equal(got, redundancy_triton(k, pages.int(), live, threshold=threshold))  # deterministic


def test_triton_redundancy_of_few_and_of_equal_entries(device):
    """One live entry, two equal ones, a key of zeros: the corners of the duplicate rule."""
    pytest.importorskip("triton")
    from sparse_rl.kernels.importance_triton import redundancy_triton

    k = random(3, 1, 16, 32).half().to(device)
    k[1, 0, 9] = k[1, 0, 4]
    k[2, 0, 3] = 0.0
    live = torch.zeros(3, 1, 16, dtype=torch.bool, device=device)
    live[0, 0, 7] = True
    live[1, 0, [4, 9]] = True
    live[2, 0, [1, 3, 8]] = True
    pages = torch.arange(3, device=device)[:, None]
    got = redundancy_triton(k, pages, live, threshold=0.5)
    exact = redundancy_ref(k.double(), pages, live, threshold=0.5)
    torch.testing.assert_close(got.double(), exact, atol=1e-6, rtol=1e-5)


def test_a_cosine_of_exactly_the_threshold_is_no_duplicate(device):
    triton = pytest.importorskip("sparse_rl.kernels.importance_triton")
    k = torch.zeros(1, 1, 16, 16, device=device)
    k[0, 0, 0, 0] = k[0, 0, 1, 1] = 1.0
    k[0, 0, 2, :4] = 0.5
    live = (torch.arange(16, device=device) < 3)[None, None]
    pages = torch.zeros(1, 1, dtype=torch.int64, device=device)
    got, expected = (f(k, pages, live, threshold=0.5) for f in (triton.redundancy_triton, redundancy_ref))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}-{s[1]}-{s[2]}x{s[3]}")
def test_triton_norms_and_likeness_equal_the_reference(shape, device):
    triton = pytest.importorskip("sparse_rl.kernels.keys_triton")
    dim, dtype, heads, _, page, _, _ = shape
    if dtype == torch.bfloat16 and device == "cpu":
        pytest.skip("Triton's interpreter has no bfloat16")
    batch, size = (40, 640) if device != "cpu" else (2, 192)
    k, pages, live = paged(batch, heads, size // page, page, dim, dtype, device)
    live[0, 0] = False  # a head without live entries
    k[pages[1, 0], 0, 3] = 0.0  # a key of zeros
    norms, exact = triton.key_norms_triton(k, pages.int()), keys.key_norms_ref(k.double(), pages)
    assert norms.dtype == torch.float32
    torch.testing.assert_close(norms.double(), exact, atol=0, rtol=1e-5)
    likeness = triton.key_likeness_triton(k, pages, live)
    torch.testing.assert_close(likeness.double(), keys.key_likeness_ref(k.double(), pages, live), atol=1e-5, rtol=0)
    assert not likeness[~live].any()


def test_attention_mass_in_blocks_of_rows(device, monkeypatch):
    """Every counted query gives a mass of 1, however few rows are held at a time, and in any precision."""
    k, q = random(3, 2, 32, 6).to(device), random(3, 8, 5, 6).to(device)
    pages, positions = torch.arange(3, device=device)[:, None], torch.arange(32, device=device).expand(3, 2, 32)
    lengths, counts = torch.tensor([20, 32, 9], device=device), torch.tensor([5, 2, 4], device=device)
    settings = {"lengths_B": lengths, "contexts_B": lengths, "counts_B": counts}
    settings |= {"windows_B": torch.tensor([1 << 30, 4, 7], device=device)}
    scale = torch.ones(3, dtype=torch.float64, device=device)
    whole = mass.attention_mass(k, pages, q, positions, **settings, scale_B=scale)
    torch.testing.assert_close(whole.sum(-1), counts.double()[:, None].expand(3, 2))
    assert not whole[0, :, 20:].any() and not whole[1, :, : 32 - 5].any() and whole[1, :, 32 - 5 :].all()
    monkeypatch.setattr(mass, "BLOCK", 1)
    torch.testing.assert_close(mass.attention_mass(k, pages, q, positions, **settings, scale_B=scale), whole)
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        low_k, low_q = k.to(dtype), q.to(dtype)
        exact = mass.attention_mass(low_k.double(), pages, low_q.double(), positions, **settings, scale_B=scale)
        got = mass.attention_mass(low_k, pages, low_q, positions, **settings, scale_B=scale.float())
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), exact, atol=1e-5, rtol=0)
