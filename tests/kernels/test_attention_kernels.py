# SPDX-License-Identifier: Apache-2.0
"""The reference kernels against sums written out in fp64."""

from __future__ import annotations

from itertools import accumulate, pairwise

import pytest
import torch

from sparse_rl.kernels import attention
from sparse_rl.kernels.attention import (
    AttentionCall,
    causal_attention_ref,
    packed_attention,
    packed_attention_padded,
    packed_attention_ref,
)
from sparse_rl.kernels.compact import compact_ref
from sparse_rl.kernels.decode import gather_pages_ref


def naive(q, k, v, visible, scale, softcap=None, sinks=None):
    """softmax(scale q k) v with keys repeated for each query head of their group; a sink is a key without a value."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    logits = q @ k.transpose(-1, -2) * scale
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    logits = logits.masked_fill(~visible, float("-inf"))
    if sinks is None:
        return logits.softmax(-1) @ v
    column = sinks[:, None, None].expand(*logits.shape[:3], 1)
    return torch.cat([logits, column], dim=-1).softmax(-1)[..., :-1] @ v


def random(*size):
    return torch.randn(size, dtype=torch.float64)


@pytest.mark.parametrize("window", [None, 1, 5, 40])
@pytest.mark.parametrize(("num_queries", "num_keys"), [(23, 23), (1, 23), (7, 23)])
def test_causal_attention(window, num_queries, num_keys, monkeypatch):
    monkeypatch.setattr(attention, "QUERY_BLOCK", 8)  # several blocks
    q, k, v = random(2, 6, num_queries, 8), random(2, 2, num_keys, 8), random(2, 2, num_keys, 8)
    age = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
    visible = (age >= 0) & (age < (window or num_keys))
    out = causal_attention_ref(AttentionCall(q, k, v, scale=0.3, window=window))
    torch.testing.assert_close(out, naive(q, k, v, visible, 0.3))


# What attention has beside queries, keys and values; (query heads, KV heads, their width, the values' width).
KINDS = {
    "plain": ({}, (4, 2, 16, 16)),
    "softcap": ({"softcap": 1.5}, (6, 2, 32, 32)),
    "sinks": ({"sinks": True}, (4, 4, 16, 16)),
    "narrow": ({}, (3, 3, 24, 16)),
    "wide": ({"sinks": True, "softcap": 3.0}, (5, 1, 16, 40)),
}


def inputs_of(kind, num_tokens, dtype=torch.float64, device="cpu"):
    """What needs a gradient (a sink too), and how to call with it; sinks are as large as a sum over many keys."""
    how, (heads, kv_heads, dim, value_dim) = KINDS[kind]
    sizes = ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
    tensors = [random(1, n, num_tokens, width) for n, width in sizes] + [random(heads) + 3] * how.get("sinks", False)
    return [x.to(device, dtype).requires_grad_() for x in tensors], {"scale": 0.4, "softcap": how.get("softcap")}


def attended(function, tensors, how, boundaries, direction):
    """The output and the gradients along a direction."""
    q, k, v, *sinks = tensors
    call = AttentionCall(q, k, v, sinks_H=sinks[0] if sinks else None, **how)
    out = function(call, boundaries)
    return [out, *torch.autograd.grad((out * direction).sum(), tensors)]


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_sinks_and_soft_caps_equal_autograd_through_the_definition(kind, window, monkeypatch):
    monkeypatch.setattr(attention, "QUERY_BLOCK", 16)
    boundaries = [0, 1, 34, 60]
    tensors, how = inputs_of(kind, 60)
    sequence = torch.tensor([0] + [1] * 33 + [2] * 26)
    age = torch.arange(60)[:, None] - torch.arange(60)
    visible = (sequence[:, None] == sequence) & (age >= 0) & (age < (window or 60))
    direction = random(1, len(tensors[0][0]), 60, tensors[2].shape[-1])
    expected = naive(*tensors[:3], visible, 0.4, how["softcap"], *tensors[3:])
    wanted = [expected, *torch.autograd.grad((expected * direction).sum(), tensors)]
    for function in (packed_attention_ref, packed_attention_padded):
        found = attended(function, tensors, how | {"window": window}, boundaries, direction)
        for ours, right in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("window", [None, 45])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.some(2)
def test_triton_attention_over_packed_sequences(kind, window, device):
    """Output and gradients, of sinks too; lengths of one token, of one block, of several."""
    triton = pytest.importorskip("sparse_rl.kernels.attention_triton")
    boundaries = [0, 1, 65, 230, 233]
    tensors, how = inputs_of(kind, 233, torch.float32, device)
    how["window"] = window
    direction = random(1, len(tensors[0][0]), 233, tensors[2].shape[-1]).to(device)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    wanted = attended(packed_attention_ref, exact, how, boundaries, direction)
    for ours, right in zip(
        attended(triton.packed_attention_triton, tensors, how, boundaries, direction.float()), wanted, strict=True
    ):
        torch.testing.assert_close(ours.double(), right, rtol=2e-5, atol=2e-5 * float(right.detach().abs().max()))


def test_the_log_sum_exp_has_a_gradient_of_its_own(device):
    """Along a direction of the output and one of the log-sum-exp, against autograd in fp64."""
    triton = pytest.importorskip("sparse_rl.kernels.attention_triton")
    tensors, how = inputs_of("softcap", 70, torch.float32, device)
    boundaries, directions = (0, 20, 70), [random(1, 6, 70, 32).to(device), random(1, 6, 70).to(device)]
    out, lse = triton.PackedAttention.apply(*tensors, boundaries, how["scale"], None, how["softcap"])
    got = torch.autograd.grad((out * directions[0].float()).sum() + (lse * directions[1].float()).sum(), tensors)
    q, k, v = exact = [x.detach().double().requires_grad_() for x in tensors]
    logits = q @ k.repeat_interleave(3, 1).transpose(-1, -2) * how["scale"]
    age, sequence = torch.arange(70)[:, None] - torch.arange(70), torch.arange(70) >= 20
    visible = ((age >= 0) & (sequence[:, None] == sequence)).to(device)
    logits = (1.5 * (logits / 1.5).tanh()).masked_fill(~visible, float("-inf"))
    right_lse = logits.logsumexp(-1)
    right = logits.softmax(-1) @ v.repeat_interleave(3, 1)
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=1e-5)
    wanted = torch.autograd.grad((right * directions[0]).sum() + (right_lse * directions[1]).sum(), exact)
    for ours, expected in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=2e-5, atol=1e-4)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize(("heads", "dim", "value_dim"), [((8, 1), 64, 64), ((6, 2), 256, 256), ((4, 4), 192, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.gpu
def test_triton_attention_of_real_widths(dtype, heads, dim, value_dim, window, device):
    """No further from fp64 than plain torch is in the same precision; the same bits twice."""
    triton = pytest.importorskip("sparse_rl.kernels.attention_triton")
    boundaries = [0, 5, 300, 301, 1713]
    sizes = ((heads[0], dim), (heads[1], dim), (heads[1], value_dim))
    tensors = [random(1, n, 1713, width) for n, width in sizes] + [random(heads[0])]
    how = {"scale": dim**-0.5, "window": window, "softcap": 2.0}
    direction = random(1, heads[0], 1713, value_dim)

    def run(function, precision):
        given = [x.to(dtype).to(device, precision).requires_grad_() for x in tensors]
        return attended(function, given, how, boundaries, direction.to(dtype).to(device, precision))

    wanted, plain = run(packed_attention_ref, torch.float64), run(packed_attention_ref, dtype)
    ours, again = (run(triton.packed_attention_triton, dtype) for _ in range(2))
    for i, right in enumerate(wanted):
        errors = [float(((x[i] - right).norm() / right.norm()).detach()) for x in (ours, plain)]
        assert errors[0] < max(2 * errors[1], 1e-2 if dtype == torch.bfloat16 else 1e-5), f"output {i}: {errors}"
        assert torch.equal(ours[i], again[i])


@pytest.mark.parametrize("window", [None, 4])
def test_packed_sequences_do_not_see_each_other(window):
    q, k, v = random(1, 4, 19, 8), random(1, 2, 19, 8), random(1, 2, 19, 8)
    out = packed_attention_ref(AttentionCall(q, k, v, scale=0.3, window=window), [0, 6, 7, 19])
    for a, b in ((0, 6), (6, 7), (7, 19)):
        parts = (x[:, :, a:b] for x in (q, k, v))
        alone = causal_attention_ref(AttentionCall(*parts, scale=0.3, window=window))
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
        for out in [f(AttentionCall(q, k, v, scale=0.3, window=window), boundaries)]
    )
    for ours, right in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, right)


def test_a_padded_sequence_does_not_feel_the_others():
    """To the bit: its batch's length is its own alone."""
    boundaries = [0, *accumulate([200, 207, 193, 223, 311, 12])]  # the kernel rounds otherwise at other lengths
    q, k, v = (random(1, heads, boundaries[-1], 8).float() for heads in (4, 2, 2))
    call = AttentionCall(q, k, v, scale=0.3)
    together = packed_attention_padded(call, boundaries)
    for a, b in pairwise(boundaries):
        alone = packed_attention_padded(call.each(lambda x, a=a, b=b: x[:, :, a:b]), [0, b - a])
        assert torch.equal(together[:, :, a:b], alone)


def test_what_is_kept_of_a_packing_serves_a_backward_pass(device):
    """Whoever asks first, a sampler in inference mode or the learner."""
    boundaries = [0, *accumulate(torch.randint(1, 80, (4,)).tolist())]
    q, k, v = (random(1, heads, boundaries[-1], 8).to(device) for heads in (4, 2, 2))
    with torch.inference_mode():
        expected = packed_attention_padded(AttentionCall(q, k, v, scale=0.3), boundaries)
        ends, longest = attention._ends(tuple(boundaries), q.device)
    out = packed_attention_padded(AttentionCall(q.requires_grad_(), k, v, scale=0.3), boundaries)
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    assert q.grad is not None and not ends.is_inference()
    assert ends.tolist() == boundaries and longest == max(b - a for a, b in pairwise(boundaries))


def test_no_quadratic_mask_is_built(monkeypatch):
    """A prompt of 5,000 tokens in a window layer never needs a mask larger than one block of queries."""
    largest = 0
    attend = attention.scaled_dot_product_attention

    def spy(*args, attn_mask=None, **kwargs):
        nonlocal largest
        largest = max(largest, 0 if attn_mask is None else attn_mask.numel())
        return attend(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", spy)
    x = random(1, 1, 5000, 2).float()
    causal_attention_ref(AttentionCall(x, x, x, scale=1.0))
    assert largest == 0
    causal_attention_ref(AttentionCall(x, x, x, scale=1.0, window=64))
    assert 0 < largest <= attention.QUERY_BLOCK * (attention.QUERY_BLOCK + 64)


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize(("dim", "group"), [(64, 3), (96, 1), (96, 3), (96, 8), (128, 3), (128, 7), (256, 1), (256, 3)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.gpu
def test_flash_attention_over_packed_sequences(dtype, dim, group, window, device):
    boundaries = [0, 1, 130, 500]
    q, k, v = (random(1, heads, 500, dim).to(device, dtype) for heads in (2 * group, 2, 2))
    call = AttentionCall(q, k, v, scale=dim**-0.5, window=window)
    with torch.no_grad():
        out = packed_attention(call, boundaries)
    expected = packed_attention_ref(call.each(torch.Tensor.double), boundaries)
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
