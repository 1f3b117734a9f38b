# SPDX-License-Identifier: Apache-2.0
"""How far the sampler is from the dense model. Pure functions of log-probs."""

from __future__ import annotations

import torch


def overlap_bounds(
    sampler_logprobs_Tk: torch.Tensor, dense_logprobs_Tk: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lower and upper bound of sum_v min(p, q) a token, from both log-probs at the sampler's top k ids.

    The rest of the vocabulary adds at most the smaller of the two masses left over. With k = V both are exact.
    """
    q, p = sampler_logprobs_Tk.exp(), dense_logprobs_Tk.exp()
    lower = torch.minimum(p, q).sum(dim=-1)
    left_over = torch.minimum(1.0 - q.sum(dim=-1), 1.0 - p.sum(dim=-1)).clamp(min=0.0)
    return lower.clamp(max=1.0), (lower + left_over).clamp(max=1.0)
