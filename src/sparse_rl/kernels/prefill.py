# SPDX-License-Identifier: Apache-2.0
"""Dense causal attention over whole sequences, for prefill and for the learner's packed rows.

    out_t = sum_{s <= t, t - s < window} softmax_s(scale * q_t . k_s) v_s

No mask of size T x T is ever built: full layers use the kernel's own causal flag, the rest goes in query blocks.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention

QUERY_BLOCK = 256


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
