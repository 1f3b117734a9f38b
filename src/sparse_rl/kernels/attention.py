# SPDX-License-Identifier: Apache-2.0
"""Dense causal attention over whole sequences, for prefill and for the learner's packed rows.

    x_ts  = scale * q_t . k_s                             or softcap * tanh(that / softcap)
    out_t = sum_{s <= t, t - s < window} exp(x_ts - lse_t) v_s
    lse_t = log(sum_{the same s} exp(x_ts) + exp(sink))   where a head has a sink

No mask of size T x T is ever built: full layers use the kernel's own causal flag, the rest goes in query blocks. Packed
rows go through flash attention where there is one; sinks, soft-caps and values of another width than keys go through
attention_triton.py on a GPU. Elsewhere sequences of about one length go side by side, padded behind.

No page is read or written: prompts' entries get into the cache in kv/cache.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from functools import lru_cache
from itertools import pairwise
from operator import itemgetter
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from sparse_rl.kernels.backend import send, upcast, use_triton

QUERY_BLOCK = 256
PADDED_TO = 32  # tokens
FLASH_WIDTH = 256  # the widest heads that flash attention takes


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One layer's queries, keys and values after rotation, and how they attend."""

    q_BHTD: torch.Tensor
    k_BKTD: torch.Tensor
    v_BKTE: torch.Tensor
    _: KW_ONLY
    scale: float
    window: int | None = None  # tokens a query sees, its own included
    softcap: float | None = None
    sinks_H: torch.Tensor | None = None  # a logit that takes part in each head's softmax and has no value

    @property
    def is_plain(self) -> bool:
        """Whether any attention kernel computes it."""
        return self.softcap is None and self.sinks_H is None and self.q_BHTD.shape[-1] == self.v_BKTE.shape[-1]

    def each(self, part: Callable[[torch.Tensor], torch.Tensor]) -> AttentionCall:
        """The same call on a part of its queries, keys and values."""
        return replace(self, q_BHTD=part(self.q_BHTD), k_BKTD=part(self.k_BKTD), v_BKTE=part(self.v_BKTE))


def packed_attention(call: AttentionCall, boundaries: list[int]) -> torch.Tensor:
    """Causal attention inside each packed sequence [boundaries[i], boundaries[i + 1]), as 1 H T E."""
    q = call.q_BHTD
    if use_triton(q) and not call.is_plain:
        from sparse_rl.kernels.attention_triton import packed_attention_triton

        return packed_attention_triton(call, boundaries)
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] <= FLASH_WIDTH:
        return packed_attention_flash(call, boundaries)
    return packed_attention_padded(call, boundaries)


def packed_attention_flash(call: AttentionCall, boundaries: list[int]) -> torch.Tensor:
    """All sequences in one launch of torch's own variable-length flash attention."""
    from torch.nn.attention.varlen import varlen_attn

    ends, longest = _ends(tuple(boundaries), call.q_BHTD.device)
    q, k, v = (x[0].transpose(0, 1) for x in (call.q_BHTD, call.k_BKTD, call.v_BKTE))
    # Before torch 2.12 the kernel takes grouped heads without being told.
    told: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    # It counts the tokens before the query's own.
    reach = -1 if call.window is None or call.window >= longest else call.window - 1
    out = varlen_attn(q, k, v, ends, ends, longest, longest, scale=call.scale, window_size=(reach, 0), **told)
    assert isinstance(out, torch.Tensor)
    return out.transpose(0, 1)[None]


@lru_cache(maxsize=2)  # every layer asks
@torch.inference_mode(False)  # a learner asks too, whose backward pass takes no tensors made in that mode
def _ends(boundaries: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, int]:
    return send(torch.tensor(boundaries, dtype=torch.int32), device), max(b - a for a, b in pairwise(boundaries))


def packed_attention_padded(call: AttentionCall, boundaries: list[int]) -> torch.Tensor:
    """Sequences that round up to one length as one batch: no query sees the padding behind it.

    One call a length, not one a sequence, whose gradients would each be as large as the row.
    """
    device = call.q_BHTD.device
    batches, slots_T = _batches(tuple(boundaries), device)
    group = (
        call.q_BHTD.shape[1] // call.k_BKTD.shape[1] if device.type == "cuda" else 1
    )  # where only equal heads have a fast kernel
    outputs = []
    for tokens_BT in batches:
        part = call.each(_taken(tokens_BT))
        if group > 1:
            k, v = (x.repeat_interleave(group, dim=1) for x in (part.k_BKTD, part.v_BKTE))
            part = replace(part, k_BKTD=k, v_BKTE=v)
        outputs.append(causal_attention_ref(part).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, slots_T).transpose(0, 1)[None]


def _taken(tokens_BT: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: x[0].index_select(1, tokens_BT.flatten()).unflatten(1, tokens_BT.shape).transpose(0, 1)


@lru_cache(maxsize=2)
@torch.inference_mode(False)  # both as above
def _batches(boundaries: tuple[int, ...], device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Of each batch the tokens, B x T, a sequence's last one for its padding; then where each token's output lies."""
    by_length: dict[int, list[tuple[int, int]]] = {}
    for a, b in pairwise(boundaries):
        by_length.setdefault(-(-(b - a) // PADDED_TO) * PADDED_TO, []).append((a, b))
    batches, used = [], 0
    slots_T = torch.empty(boundaries[-1], dtype=torch.long)
    for length, spans in by_length.items():
        first, end = torch.tensor(spans).split(1, dim=1)
        tokens_BT = first + torch.arange(length)
        real_BT = tokens_BT < end
        slots_T[tokens_BT[real_BT]] = used + real_BT.flatten().nonzero()[:, 0]
        used += real_BT.numel()
        batches.append(send(torch.minimum(tokens_BT, end - 1), device))
    return batches, send(slots_T, device)


def causal_attention_ref(call: AttentionCall) -> torch.Tensor:
    """Causal attention of the last T of S positions, as B H T E."""
    q, k, v = call.q_BHTD, call.k_BKTD, call.v_BKTE
    num_queries, num_keys = q.shape[2], k.shape[2]
    reach = num_keys if call.window is None else min(call.window, num_keys)
    sinks_H1 = None if call.sinks_H is None else call.sinks_H[:, None]
    if num_queries == num_keys == reach and call.softcap is None and sinks_H1 is None:
        return masked_attention(q, k, v, None, scale=call.scale)

    blocks = []
    for start in range(0, num_queries, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, num_queries)
        q_position = torch.arange(start, stop, device=q.device) + num_keys - num_queries
        first = max(0, num_keys - num_queries + start - reach + 1)
        last = num_keys - num_queries + stop
        age = q_position[:, None] - torch.arange(first, last, device=q.device)[None, :]
        visible = (age >= 0) & (age < reach)
        parts = (q[:, :, start:stop], k[:, :, first:last], v[:, :, first:last], visible)
        blocks.append(masked_attention(*parts, scale=call.scale, softcap=call.softcap, sinks_HQ=sinks_H1))
    return torch.cat(blocks, dim=2)


def masked_attention(
    q_BHQD: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSE: torch.Tensor,
    visible_BHQS: torch.Tensor | None,  # or what broadcasts to it; None: causal
    *,
    scale: float,
    softcap: float | None = None,
    sinks_HQ: torch.Tensor | None = None,
) -> torch.Tensor:
    """The definition, for any mask: as B H Q E."""
    width, value_width, group = q_BHQD.shape[-1], v_BKSE.shape[-1], q_BHQD.shape[1] // k_BKSD.shape[1]
    if softcap is None and sinks_HQ is None:  # fused where widths are equal, so narrow ones get zeros for the call
        q, k, v = (pad(x, (0, max(width, value_width) - x.shape[-1])) for x in (q_BHQD, k_BKSD, v_BKSE))
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=visible_BHQS, is_causal=visible_BHQS is None, scale=scale, enable_gqa=group > 1
        )
        return out[..., :value_width]
    assert visible_BHQS is not None
    k, v = (x if group == 1 else x.repeat_interleave(group, dim=1) for x in (k_BKSD, v_BKSE))
    logits = upcast(q_BHQD) @ upcast(k).transpose(-1, -2) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~visible_BHQS, float("-inf"))
    lse = logits.logsumexp(dim=-1, keepdim=True)
    if sinks_HQ is not None:
        lse = torch.logaddexp(lse, sinks_HQ[..., None].to(lse.dtype))
    return ((logits - lse).exp() @ upcast(v)).to(v.dtype)


def packed_attention_ref(call: AttentionCall, boundaries: list[int]) -> torch.Tensor:
    """Causal attention inside each packed sequence, one after the other: what the others must give."""
    spans = (slice(a, b) for a, b in pairwise(boundaries))
    return torch.cat([causal_attention_ref(call.each(itemgetter((..., span, slice(None))))) for span in spans], dim=2)
