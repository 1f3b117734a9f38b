# SPDX-License-Identifier: Apache-2.0
"""What keys say of themselves, without any query; the pieces of knorm and keydiff.

norm_j  = |k_j|
alike_j = cos(k_j, mean_i k_i / |k_i|)        i over live entries
"""

from __future__ import annotations

import torch

from sparse_rl.kernels.backend import upcast, use_triton
from sparse_rl.kernels.decode import gather_pages_ref
from sparse_rl.kernels.importance import NORM_EPS


def key_norms(k_PKSD: torch.Tensor, pages_BN: torch.Tensor) -> torch.Tensor:
    """The length of each key of the rows' pages, B K S."""
    if use_triton(k_PKSD):
        from sparse_rl.kernels.keys_triton import key_norms_triton as norms
    else:
        norms = key_norms_ref
    return norms(k_PKSD, pages_BN)


def key_norms_ref(k_PKSD: torch.Tensor, pages_BN: torch.Tensor) -> torch.Tensor:
    norms: torch.Tensor = upcast(gather_pages_ref(k_PKSD, pages_BN)).norm(dim=-1)
    return norms


def key_likeness(k_PKSD: torch.Tensor, pages_BN: torch.Tensor, live_BKS: torch.Tensor) -> torch.Tensor:
    """Each live key's cosine to the mean direction of the live keys of its row and head, B K S; zero where dead."""
    if use_triton(k_PKSD):
        from sparse_rl.kernels.keys_triton import key_likeness_triton as likeness
    else:
        likeness = key_likeness_ref
    return likeness(k_PKSD, pages_BN, live_BKS)


def key_likeness_ref(k_PKSD: torch.Tensor, pages_BN: torch.Tensor, live_BKS: torch.Tensor) -> torch.Tensor:
    unit = upcast(gather_pages_ref(k_PKSD, pages_BN))
    unit = unit / (unit.norm(dim=-1, keepdim=True) + NORM_EPS)
    unit = unit.masked_fill(~live_BKS[..., None], 0.0)
    total_BKD = unit.sum(dim=2)  # its direction is the mean's
    direction_BKD = total_BKD / (total_BKD.norm(dim=-1, keepdim=True) + NORM_EPS)
    return torch.einsum("bksd,bkd->bks", unit, direction_BKD)
