# SPDX-License-Identifier: Apache-2.0
"""The reference kernels against sums written out in fp64."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch

from sparse_rl.kernels import prefill
from sparse_rl.kernels.compact import compact_ref
from sparse_rl.kernels.decode import gather_pages_ref
from sparse_rl.kernels.prefill import (
    causal_attention_ref,
    packed_attention,
    packed_attention_padded,
    packed_attention_ref,
)


def naive(q, k, v, visible, scale):
    """softmax(scale q k) v with keys repeated for each query head of their group."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return (q @ k.transpose(-1, -2) * scale).masked_fill(~visible, float("-inf")).softmax(-1) @ v


def random(*size):
    return torch.randn(size, dtype=torch.float64)


@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(23, 23), (1, 23), (7, 23)])
def test_causal_attention(window, num_queries, num_keys, monkeypatch):
    monkeypatch.setattr(prefill, "QUERY_BLOCK", 8)  # several blocks
    q, k, v = random(2, 6, num_queries, 8), random(2, 2, num_keys, 8), random(2, 2, num_keys, 8)
    age = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
    visible = (age >= 0) & (age < (window or num_keys))
    out = causal_attention_ref(q, k, v, scale=0.3, window=window)
    torch.testing.assert_close(out, naive(q, k, v, visible, 0.3))


@pytest.mark.parametrize("window", [None, 4])
def test_packed_sequences_do_not_see_each_other(window):
    q, k, v = random(1, 4, 19, 8), random(1, 2, 19, 8), random(1, 2, 19, 8)
    out = packed_attention_ref(q, k, v, [0, 6, 7, 19], scale=0.3, window=window)
    for a, b in ((0, 6), (6, 7), (7, 19)):
        alone = causal_attention_ref(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], scale=0.3, window=window)
        torch.testing.assert_close(out[:, :, a:b], alone)


@pytest.mark.parametrize("window", [None, 3, 50])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)])
def test_padded_sequences_give_what_single_ones_give(window, heads, device):
    """Values and gradients, whatever the lengths: of one token, of a whole batch's length, many of one length."""
    lengths = [1, 32, 33, 70, 31, 64, 70, *torch.randint(1, 80, (5,)).tolist()]
    boundaries = [0, *accumulate(lengths)]
    shapes = [(1, n, boundaries[-1], 8) for n in (heads[0], heads[1], heads[1])]
    q, k, v = (random(*shape).to(device).requires_grad_() for shape in shapes)
    direction = random(*shapes[0]).to(device)
    found, wanted = (
        (out, *torch.autograd.grad((out * direction).sum(), (q, k, v)))
        for f in (packed_attention_padded, packed_attention_ref)
        for out in [f(q, k, v, boundaries, scale=0.3, window=window)]
    )
    for ours, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, right)


def test_a_padded_sequence_does_not_feel_the_others():
    """To the bit: its batch's length is its own alone."""
    boundaries = [0, *accumulate([200, 207, 193, 223, 311, 12])]  # the kernel rounds otherwise at other lengths
    q, k, v = (random(1, heads, boundaries[-1], 8).float() for heads in (4, 2, 2))
    together = packed_attention_padded(q, k, v, boundaries, scale=0.3)
    for a, b in pairwise(boundaries):
        alone = packed_attention_padded(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], [0, b - a], scale=0.3)
        assert torch.equal(together[:, :, a:b], alone)


def test_what_is_kept_of_a_packing_serves_a_backward_pass(device):
    """Whoever asks first, a sampler in inference mode or the learner."""
    boundaries = [0, *accumulate(torch.randint(1, 80, (4,)).tolist())]
    q, k, v = (random(1, heads, boundaries[-1], 8).to(device) for heads in (4, 2, 2))
    with torch.inference_mode():
        expected = packed_attention_padded(q, k, v, boundaries, scale=0.3)
        ends, longest = prefill._ends(tuple(boundaries), q.device)
    out = packed_attention_padded(q.requires_grad_(), k, v, boundaries, scale=0.3)
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert q.grad is not None and not ends.is_inference()
    assert ends.tolist() == boundaries and longest == max(b - a for a, b in pairwise(boundaries))


def test_no_quadratic_mask_is_built(monkeypatch):
    """A prompt of 5,000 tokens in a window layer never needs a mask larger than one block of queries."""
    largest = 0
    attend = prefill.scaled_dot_product_attention

    def spy(*args, attn_mask=None, **kwargs):
        nonlocal largest
        largest = max(largest, 0 if attn_mask is None else attn_mask.numel())
        return attend(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(prefill, "scaled_dot_product_attention", spy)
    x = random(1, 1, 5000, 2).float()
    causal_attention_ref(x, x, x, scale=1.0)
    assert largest == 0
    causal_attention_ref(x, x, x, scale=1.0, window=64)
    assert 0 < largest <= prefill.QUERY_BLOCK * (prefill.QUERY_BLOCK + 64)


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize(("dim", "group"), [(64, 3), (96, 1), (96, 3), (96, 8), (128, 3), (128, 7), (256, 1), (256, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.gpu
def test_flash_attention_over_packed_sequences(dtype, dim, group, window, device):
    boundaries = [0, 1, 130, 500]
    q, k, v = (random(1, heads, 500, dim).to(device, dtype) for heads in (2 * group, 2, 2))
    with torch.no_grad():
        out = packed_attention(q, k, v, boundaries, scale=dim**-0.5, window=window)
    expected = packed_attention_ref(q.double(), k.double(), v.double(), boundaries, scale=dim**-0.5, window=window)
    torch.testing.assert_close(out.double(), expected, atol=2e-2, rtol=2e-2)


def test_compact_moves_each_head_by_itself():
    heads, page = 2, 4
    pool = torch.arange(6 * heads * page, dtype=torch.float64).reshape(6, heads, page)
    pages = torch.tensor([[4, 1], [0, 5]])
    before = gather_pages_ref(pool, pages)
    kept = torch.tensor([[[0, 3, 6, 0, 0], [1, 2, 7, 0, 0]], [[0, 1, 4, 5, 7], [2, 3, 4, 5, 6]]])
    untouched = pool[[2, 3]].clone()
    compact_ref((pool,), pages, kept, torch.tensor([3, 5]))
    after = gather_pages_ref(pool, pages)
    for b, count in enumerate((3, 5)):
        for h in range(heads):
            assert after[b, h, :count].tolist() == before[b, h][kept[b, h, :count]].tolist()
    assert (after[0, :, 3:] == before[0, :, 3:]).all()
    assert (pool[[2, 3]] == untouched).all()
