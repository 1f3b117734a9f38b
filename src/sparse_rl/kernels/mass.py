# SPDX-License-Identifier: Apache-2.0
"""The attention that entries have received; the piece H2O and TOVA are made of.

    mass_j = mean_g sum_i softmax_j(scale * q_gi . k_j)      i over the last queries, g over the heads of a group

The softmax of query i is over what that query attended to in its own step: the entries up to its own position, inside
the layer's window. So with no cut in between, these are the weights that the model's attention had.
"""

from __future__ import annotations

import torch

from sparse_rl.kernels.backend import upcast
from sparse_rl.kernels.decode import gather_pages_ref

BLOCK = 1 << 24  # logits, or elements of keys, that are held at a time


def attention_mass(
    k_PKSD: torch.Tensor,
    pages_BN: torch.Tensor,
    queries_BHWD: torch.Tensor,  # that of position p at p % W
    positions_BKS: torch.Tensor,
    *,
    lengths_B: torch.Tensor,
    contexts_B: torch.Tensor,  # tokens seen: the newest query's position is one less
    counts_B: torch.Tensor,  # how many of the newest queries count, at most W
    windows_B: torch.Tensor,
    scale_B: torch.Tensor,
) -> torch.Tensor:
    """What the newest `counts` queries gave each entry, B K S. Works on a few rows at a time."""
    batch, num_kv_heads, size = positions_BKS.shape
    num_queries, device = queries_BHWD.shape[2], k_PKSD.device
    age_BW = (contexts_B[:, None] - 1 - torch.arange(num_queries, device=device)) % num_queries
    asked_BW = contexts_B[:, None] - 1 - age_BW  # positions of the queries
    counted_BW = age_BW < counts_B[:, None]
    written_BS = torch.arange(size, device=device) < lengths_B[:, None]
    mass_BKS = torch.empty((batch, num_kv_heads, size), dtype=scale_B.dtype, device=device)
    row_elements = size * max(queries_BHWD.shape[1] * num_queries, num_kv_heads * k_PKSD.shape[3])
    step = max(1, BLOCK // row_elements)
    for start in range(0, batch, step):
        rows = slice(start, start + step)
        k_BKSD = upcast(gather_pages_ref(k_PKSD, pages_BN[rows]))
        q_BKGWD = upcast(queries_BHWD[rows].unflatten(1, (num_kv_heads, -1)))
        behind_BKWS = asked_BW[rows, None, :, None] - positions_BKS[rows, :, None]
        seen = written_BS[rows, None, None] & (behind_BKWS >= 0) & (behind_BKWS < windows_B[rows, None, None, None])
        logits = torch.einsum("bkgwd,bksd->bkgws", q_BKGWD, k_BKSD) * scale_B[rows, None, None, None, None]
        weights = torch.softmax(logits.masked_fill(~seen[:, :, None], float("-inf")), dim=-1)
        # Where by mask, not by product: a query that is not there has weights that may be nan.
        weights = weights.masked_fill(~counted_BW[rows, None, None, :, None], 0.0)
        mass_BKS[rows] = weights.sum(dim=3).mean(dim=2)
    return mass_BKS
