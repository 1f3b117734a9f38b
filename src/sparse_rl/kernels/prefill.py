# SPDX-License-Identifier: Apache-2.0
"""Dense causal attention over whole sequences, for prefill and for the learner's packed rows.

    out_t = sum_{s <= t, t - s < window} softmax_s(scale * q_t . k_s) v_s

No mask of size T x T is ever built: full layers use the kernel's own causal flag, the rest goes in query blocks.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

QUERY_BLOCK = 256


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
    return packed_attention_ref(q_1HTD, k_1KTD, v_1KTD, boundaries, scale=scale, window=window)


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
def _ends(boundaries: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, int]:
    ends = torch.tensor(boundaries, dtype=torch.int32, pin_memory=True).to(device, non_blocking=True)
    return ends, max(b - a for a, b in pairwise(boundaries))


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
    if num_queries == num_keys == reach:
        return scaled_dot_product_attention(q_BHTD, k_BKSD, v_BKSD, is_causal=True, scale=scale, enable_gqa=True)

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
                enable_gqa=True,
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
    """Causal attention inside each packed sequence [boundaries[i], boundaries[i + 1]), as 1 H T D."""
    spans = pairwise(boundaries)
    return torch.cat(
        [
            causal_attention_ref(q_1HTD[:, :, a:b], k_1KTD[:, :, a:b], v_1KTD[:, :, a:b], scale=scale, window=window)
            for a, b in spans
        ],
        dim=2,
    )
