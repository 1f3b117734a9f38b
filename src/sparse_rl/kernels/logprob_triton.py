# SPDX-License-Identifier: Apache-2.0
"""The log-probs' passes over the logits; `logprob.py` has the specification."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 4096
WARPS = 8


def logsumexp_triton(logits_TV: torch.Tensor, temperature: float) -> torch.Tensor:
    """See `logsumexp_ref`."""
    num_tokens, size = logits_TV.shape
    lse = torch.empty(num_tokens, dtype=torch.float32, device=logits_TV.device)
    _head_logsumexp[(num_tokens,)](
        logits_TV, lse, logits_TV.stride(0), size, 1.0 / temperature, BLOCK=BLOCK, num_warps=WARPS
    )
    return lse


def logprob_gradient_triton(
    logits_TV: torch.Tensor, lse_T: torch.Tensor, ids_T: torch.Tensor, grad_T: torch.Tensor, temperature: float
) -> torch.Tensor:
    """See `logprob_gradient_ref`; overwrites the logits."""
    num_tokens, size = logits_TV.shape
    grid = (num_tokens, triton.cdiv(size, BLOCK))
    _head_gradient[grid](
        logits_TV,
        lse_T,
        ids_T,
        grad_T.contiguous(),
        logits_TV.stride(0),
        size,
        1.0 / temperature,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return logits_TV


@triton.jit  # type: ignore[untyped-decorator]
def _head_logsumexp(logits, lse, row_stride, size, inverse, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * row_stride
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(row + column, mask=column < size, other=float("-inf")).to(tl.float32) * inverse
        new = tl.maximum(largest, x)
        shift = tl.where(new == float("-inf"), 0.0, new)  # -inf - -inf would be nan
        total = total * tl.exp(largest - shift) + tl.exp(x - shift)
        largest = new
    top = tl.max(largest, axis=0)
    tl.store(lse + token, top + tl.log(tl.sum(total * tl.exp(largest - top), axis=0)))


@triton.jit  # type: ignore[untyped-decorator]
def _head_gradient(  # type: ignore[no-untyped-def]
    logits, lse, ids, grad, row_stride, size, inverse, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place = logits + token * row_stride + column
    x = tl.load(place, mask=column < size, other=0.0).to(tl.float32) * inverse
    hit = (column == tl.load(ids + token)).to(tl.float32)
    value = tl.load(grad + token).to(tl.float32) * inverse * (hit - tl.exp(x - tl.load(lse + token)))
    tl.store(place, value.to(logits.dtype.element_ty), mask=column < size)
