# SPDX-License-Identifier: Apache-2.0
"""Dense causal attention over whole sequences, for prefill and for the learner's packed rows.

    out_t = sum_{s <= t, t - s < window} softmax_s(scale * q_t . k_s) v_s

No mask of size T x T is ever built: full layers use the kernel's own causal flag, the rest goes in query blocks. Packed
rows go through flash attention where there is one; else sequences of about one length go side by side, padded behind.

No page is read or written: prompts' entries get into the cache in kv/cache.py.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from sparse_rl.kernels.backend import send

QUERY_BLOCK = 256
PADDED_TO = 32  # tokens


def packed_attention(
    q_1HTD: torch.Tensor,
    k_1KTD: torch.Tensor,
    v_1KTD: torch.Tensor,
    boundaries: list[int],
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention inside each packed sequence [boundaries[i], boundaries[i + 1]), as 1 H T D."""
    if q_1HTD.is_cuda and q_1HTD.dtype in (torch.bfloat16, torch.float16) and q_1HTD.shape[-1] <= 256:
        return packed_attention_flash(q_1HTD, k_1KTD, v_1KTD, boundaries, scale=scale, window=window)
    return packed_attention_padded(q_1HTD, k_1KTD, v_1KTD, boundaries, scale=scale, window=window)


def packed_attention_flash(
    q_1HTD: torch.Tensor,
    k_1KTD: torch.Tensor,
    v_1KTD: torch.Tensor,
    boundaries: list[int],
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """All sequences in one launch of torch's own variable-length flash attention."""
    from torch.nn.attention.varlen import varlen_attn

    ends, longest = _ends(tuple(boundaries), q_1HTD.device)
    q, k, v = (x[0].transpose(0, 1) for x in (q_1HTD, k_1KTD, v_1KTD))
    # Before torch 2.12 the kernel takes grouped heads without being told.
    told: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    reach = -1 if window is None or window >= longest else window - 1  # it counts the tokens before the query's own
    out = varlen_attn(q, k, v, ends, ends, longest, longest, scale=scale, window_size=(reach, 0), **told)
    assert isinstance(out, torch.Tensor)
    return out.transpose(0, 1)[None]


@lru_cache(maxsize=2)  # every layer asks
@torch.inference_mode(False)  # a learner asks too, whose backward pass takes no tensors made in that mode
def _ends(boundaries: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, int]:
    return send(torch.tensor(boundaries, dtype=torch.int32), device), max(b - a for a, b in pairwise(boundaries))


def packed_attention_padded(
    q_1HTD: torch.Tensor,
    k_1KTD: torch.Tensor,
    v_1KTD: torch.Tensor,
    boundaries: list[int],
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Sequences that round up to one length as one batch: no query sees the padding behind it.

    One call a length, not one a sequence, whose gradients would each be as large as the row.
    """
    batches, slots_T = _batches(tuple(boundaries), q_1HTD.device)
    group = q_1HTD.shape[1] // k_1KTD.shape[1] if q_1HTD.is_cuda else 1  # where only equal heads have a fast kernel
    outputs = []
    for tokens_BT in batches:
        q, k, v = (
            x[0].index_select(1, tokens_BT.flatten()).unflatten(1, tokens_BT.shape).transpose(0, 1)
            for x in (q_1HTD, k_1KTD, v_1KTD)
        )
        if group > 1:
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        outputs.append(causal_attention_ref(q, k, v, scale=scale, window=window).transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs).index_select(0, slots_T).transpose(0, 1)[None]


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


def causal_attention_ref(
    q_BHTD: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSD: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of the last T of S positions, as B H T D. A window counts the token itself."""
    num_queries, num_keys = q_BHTD.shape[2], k_BKSD.shape[2]
    reach = num_keys if window is None else min(window, num_keys)
    grouped = q_BHTD.shape[1] != k_BKSD.shape[1]
    if num_queries == num_keys == reach:
        return scaled_dot_product_attention(q_BHTD, k_BKSD, v_BKSD, is_causal=True, scale=scale, enable_gqa=grouped)

    blocks = []
    for start in range(0, num_queries, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, num_queries)
        q_position = torch.arange(start, stop, device=q_BHTD.device) + num_keys - num_queries
        first = max(0, num_keys - num_queries + start - reach + 1)
        last = num_keys - num_queries + stop
        age = q_position[:, None] - torch.arange(first, last, device=q_BHTD.device)[None, :]
        visible = (age >= 0) & (age < reach)
        blocks.append(
            scaled_dot_product_attention(
                q_BHTD[:, :, start:stop],
                k_BKSD[:, :, first:last],
                v_BKSD[:, :, first:last],
                attn_mask=visible,
                scale=scale,
                enable_gqa=grouped,
            )
        )
    return torch.cat(blocks, dim=2)


def packed_attention_ref(
    q_1HTD: torch.Tensor,
    k_1KTD: torch.Tensor,
    v_1KTD: torch.Tensor,
    boundaries: list[int],
    *,
    scale: float,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention inside each packed sequence, one after the other: what the others must give."""
    spans = pairwise(boundaries)
    return torch.cat(
        [
            causal_attention_ref(q_1HTD[:, :, a:b], k_1KTD[:, :, a:b], v_1KTD[:, :, a:b], scale=scale, window=window)
            for a, b in spans
        ],
        dim=2,
    )
