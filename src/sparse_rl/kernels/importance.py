# SPDX-License-Identifier: Apache-2.0
"""What attention and redundancy say about cache entries; the pieces SnapKV and R-KV are made of.

    att_ij  = softmax_j max_g (scale * q_gi . k_j)      j over live entries before the window, i over last queries
    attn_j  = max_pool_kernel( mean_i att_ij )
    S_ij    = cos(k_i, k_j), S_ii = 0; each row i also zeroes its last j with S_ij > threshold (the first j if none)
    red_j   = softmax_j( mean_i S_ij )                   i and j over all live entries, the window included

Rows may be ragged: `live_BKS` marks the entries that count. Dead ones have no attention and no similarity, but stay
neighbours in the pooling where entries are stored out of order.
"""

from __future__ import annotations

import torch
from torch.nn.functional import max_pool1d

from sparse_rl.kernels.backend import upcast, use_triton
from sparse_rl.kernels.decode import gather_pages_ref

SIMILARITY_BLOCK = 256
NORM_EPS = 1e-8


def attention_importance(
    k_PKSD: torch.Tensor,
    pages_BN: torch.Tensor,
    queries_BHWD: torch.Tensor,
    candidates_BKS: torch.Tensor,
    *,
    scale_B: torch.Tensor,
    kernel: int,
) -> torch.Tensor:
    """Pooled mean attention of the last queries to each candidate, B K S; zero where there is none."""
    if use_triton(k_PKSD):
        from sparse_rl.kernels.importance_triton import attention_importance_triton as find
    else:
        find = attention_importance_ref
    return find(k_PKSD, pages_BN, queries_BHWD, candidates_BKS, scale_B=scale_B, kernel=kernel)


def attention_importance_ref(
    k_PKSD: torch.Tensor,
    pages_BN: torch.Tensor,
    queries_BHWD: torch.Tensor,
    candidates_BKS: torch.Tensor,
    *,
    scale_B: torch.Tensor,
    kernel: int,
) -> torch.Tensor:
    k_BKSD = gather_pages_ref(k_PKSD, pages_BN)
    batch, num_kv_heads = k_BKSD.shape[:2]
    q_BKGWD = queries_BHWD.reshape(batch, num_kv_heads, -1, *queries_BHWD.shape[2:])
    logits = torch.einsum("bkgwd,bksd->bkgws", upcast(q_BKGWD), upcast(k_BKSD)).amax(dim=2)
    logits = logits * scale_B[:, None, None, None]
    logits = logits.masked_fill(~candidates_BKS[:, :, None], float("-inf"))
    attention = torch.softmax(logits, dim=-1).nan_to_num(0.0)  # a row without candidates is all nan
    mean_BKS = attention.mean(dim=2).masked_fill(~candidates_BKS, float("-inf"))
    pooled = max_pool1d(mean_BKS, kernel, stride=1, padding=kernel // 2)
    return pooled.masked_fill(~candidates_BKS, 0.0)


def redundancy(
    k_PKSD: torch.Tensor, pages_BN: torch.Tensor, live_BKS: torch.Tensor, *, threshold: float
) -> torch.Tensor:
    """Softmax over live entries of each key's mean cosine to the others, B K S; zero where dead."""
    if use_triton(k_PKSD):
        from sparse_rl.kernels.importance_triton import redundancy_triton as find
    else:
        find = redundancy_ref
    return find(k_PKSD, pages_BN, live_BKS, threshold=threshold)


def redundancy_ref(
    k_PKSD: torch.Tensor, pages_BN: torch.Tensor, live_BKS: torch.Tensor, *, threshold: float
) -> torch.Tensor:
    """Works in blocks of rows, so nothing of size S x S is held."""
    unit = upcast(gather_pages_ref(k_PKSD, pages_BN))
    unit = unit / (unit.norm(dim=-1, keepdim=True) + NORM_EPS)
    size = unit.shape[2]
    column = torch.arange(size, dtype=torch.int32, device=unit.device)
    first_live = live_BKS.int().argmax(dim=-1, keepdim=True)  # where rows without a near-duplicate point
    total_BKS = torch.zeros_like(unit[..., 0])
    for start in range(0, size, SIMILARITY_BLOCK):
        rows = slice(start, start + SIMILARITY_BLOCK)
        cosine = unit[:, :, rows] @ unit.transpose(-1, -2)
        cosine.diagonal(start, -2, -1).zero_()
        near = (cosine > threshold) & live_BKS[:, :, None]
        newest = torch.where(near, column, -1).amax(dim=-1).long()
        spared = torch.where(newest < 0, first_live, newest)
        cosine.scatter_(-1, spared[..., None], 0.0)
        total_BKS += cosine.masked_fill_(~live_BKS[:, :, rows, None], 0.0).sum(dim=2)
    mean_BKS = total_BKS / live_BKS.sum(dim=-1, keepdim=True).clamp(min=1)
    return torch.softmax(mean_BKS.masked_fill(~live_BKS, float("-inf")), dim=-1).nan_to_num(0.0)
