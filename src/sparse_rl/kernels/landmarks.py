# SPDX-License-Identifier: Apache-2.0
"""What stands for a page of keys, and the pages a query reads.

    landmarks of a page     mean of its keys (C = 1), or their elementwise minimum and maximum (C = 2)
    importance of a page    sum over the query heads of a KV head's group (which chooses as their mean does) of
                                q . mean                            C = 1
                                sum_d max(q_d min_d, q_d max_d)     C = 2, a bound on every q . k of the page
    pages of a row          its `first` first and `last` last ones, and of the others the most important

As q_d min_d is the greater of the two where q_d < 0, a bound is a product too: max(q, 0) . max + min(q, 0) . min.
Landmarks have the dtype of the keys and are always made of the page's keys, not of the landmark before: an entry more
costs one page, 16 entries or so beside the thousands that attention reads, and no rounding adds up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sparse_rl.kernels.backend import upcast, use_triton

if TYPE_CHECKING:
    from sparse_rl.kernels.decode import LayerPool


def write_landmarks(
    k_PKSD: torch.Tensor,
    landmarks_PKCD: torch.Tensor,
    pages_M: torch.Tensor,
    counts_M: torch.Tensor,  # entries the page holds; with none its landmarks stay
) -> None:
    """Make the landmarks of these pages anew."""
    if use_triton(k_PKSD):
        from sparse_rl.kernels.landmarks_triton import write_landmarks_triton as write
    else:
        write = write_landmarks_ref
    write(k_PKSD, landmarks_PKCD, pages_M, counts_M)


def write_landmarks_ref(
    k_PKSD: torch.Tensor, landmarks_PKCD: torch.Tensor, pages_M: torch.Tensor, counts_M: torch.Tensor
) -> None:
    pages_M, counts_M = pages_M[counts_M > 0], counts_M[counts_M > 0]
    k_MKSD = upcast(k_PKSD[pages_M])
    empty = (torch.arange(k_MKSD.shape[2], device=k_MKSD.device) >= counts_M[:, None])[:, None, :, None]
    if landmarks_PKCD.shape[2] == 1:
        made = [k_MKSD.masked_fill(empty, 0.0).sum(2) / counts_M[:, None, None]]
    else:
        made = [k_MKSD.masked_fill(empty, float("inf")).amin(2), k_MKSD.masked_fill(empty, float("-inf")).amax(2)]
    landmarks_PKCD[pages_M] = torch.stack(made, dim=2).to(landmarks_PKCD.dtype)


def choose_pages(
    q_BHD: torch.Tensor,
    pool: LayerPool,
    pages_BN: torch.Tensor,
    lengths_B: torch.Tensor,  # entries held
    counts_B: torch.Tensor,  # pages to read, at most those held and at most `width`
    *,
    first: int,
    last: int,
    width: int,
) -> torch.Tensor:
    """The pages each row and KV head reads, B K width, in the order of the row's table and filled up with page 0.

    The first and last pages are among them whatever their importance. Of equals the earlier wins; nan is least.
    """
    if use_triton(q_BHD):
        from sparse_rl.kernels.landmarks_triton import choose_pages_triton as choose
    else:
        choose = choose_pages_ref
    return choose(q_BHD, pool, pages_BN, lengths_B, counts_B, first=first, last=last, width=width)


def choose_pages_ref(
    q_BHD: torch.Tensor,
    pool: LayerPool,
    pages_BN: torch.Tensor,
    lengths_B: torch.Tensor,
    counts_B: torch.Tensor,
    *,
    first: int,
    last: int,
    width: int,
) -> torch.Tensor:
    importance_BKN = page_importance_ref(q_BHD, pool, pages_BN)
    page_size = pool.k_PKSD.shape[2]
    chosen_BKN = chosen_pages_ref(importance_BKN, lengths_B, counts_B, page_size=page_size, first=first, last=last)
    ascending = chosen_BKN.logical_not().int().argsort(dim=-1, stable=True)
    listed = pages_BN[:, None].expand_as(importance_BKN).gather(-1, ascending)[..., :width]
    place = torch.arange(width, device=pages_BN.device)
    return listed.masked_fill((place[: listed.shape[-1]] >= counts_B[:, None])[:, None], 0)


def chosen_pages_ref(
    importance_BKN: torch.Tensor,
    lengths_B: torch.Tensor,
    counts_B: torch.Tensor,
    *,
    page_size: int,
    first: int,
    last: int,
) -> torch.Tensor:
    """Which pages each row and KV head reads, B K N bool: the first and last ones, then the most important."""
    num_pages_B = -(-lengths_B // page_size)
    place = torch.arange(importance_BKN.shape[-1], device=importance_BKN.device)
    held_BN = place < num_pages_B[:, None]
    reserved_BN = held_BN & ((place < first) | (place >= num_pages_B[:, None] - last))

    # Two stable sorts make one order: reserved pages, then by falling importance, then places without a page.
    by_importance = importance_BKN.nan_to_num(nan=float("-inf")).argsort(dim=-1, descending=True, stable=True)
    rank_BKN = (1 - reserved_BN.int() + 2 * (~held_BN).int())[:, None].expand_as(importance_BKN)
    best_first = by_importance.gather(-1, rank_BKN.gather(-1, by_importance).argsort(dim=-1, stable=True))
    chosen = (place < counts_B[:, None])[:, None].expand_as(importance_BKN)
    return torch.zeros_like(chosen).scatter(-1, best_first, chosen)


def page_importance_ref(q_BHD: torch.Tensor, pool: LayerPool, pages_BN: torch.Tensor) -> torch.Tensor:
    """Importance of all pages of a table, B K N."""
    assert pool.landmarks_PKCD is not None
    landmarks_BNKCD = upcast(pool.landmarks_PKCD[pages_BN])
    parts_BKCD = query_parts_ref(q_BHD, *landmarks_BNKCD.shape[2:4])
    return torch.einsum("bkcd,bnkcd->bkn", parts_BKCD, landmarks_BNKCD)


def query_parts_ref(q_BHD: torch.Tensor, num_kv_heads: int, num_landmarks: int) -> torch.Tensor:
    """What a page's landmarks are multiplied with for its importance, B K C D: the sum over a group's query heads.

    It chooses what their mean would choose, and is exact where the queries are.
    """
    q_BKGD = upcast(q_BHD.unflatten(1, (num_kv_heads, -1)))
    parts = [q_BKGD] if num_landmarks == 1 else [q_BKGD.clamp(max=0.0), q_BKGD.clamp(min=0.0)]
    return torch.stack(parts, dim=3).sum(2)
