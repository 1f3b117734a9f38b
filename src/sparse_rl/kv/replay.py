# SPDX-License-Identifier: Apache-2.0
"""The sampler's sparse attention again, over whole completions at once and with a gradient.

Prompts attend as in a prefill. From one cut of a sequence's cache to the next, its tokens see what the cut kept and
what came since, of that, under a policy that chooses, the pages that their own queries choose. Slots are laid out as
the sampler had them, so pages are the same pages. Plain torch, a block of queries at a time; the backward pass computes
each block again, so that nothing of the size tokens x entries is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from sparse_rl.kernels.landmarks import chosen_pages_ref, query_parts_ref
from sparse_rl.kernels.prefill import packed_attention
from sparse_rl.kv.select import SelectPolicy
from sparse_rl.types import Rollout

BLOCK = 1 << 25  # query heads x queries x entries at once


@dataclass(frozen=True, slots=True)
class Block:
    """Some queries of a sequence between two cuts."""

    fresh: int  # position of the first token that came since the cut
    start: int  # positions of the queries
    stop: int
    kept_LKS: torch.Tensor | None  # positions that the cut kept; all before `fresh` if there was none


class ReplayedRows:
    """Rollouts side by side in one row, as `PackedRows`, each attending to what its sampler read."""

    def __init__(
        self, boundaries: list[int], rollouts: list[Rollout], selection: SelectPolicy | None, page_size: int
    ) -> None:
        self.boundaries, self.rollouts = boundaries, rollouts
        self.selection, self.page_size = selection, page_size
        self.evicts = any(rollout.kept_positions for rollout in rollouts)

    def attend(
        self,
        layer_idx: int,
        q_BHTD: torch.Tensor,
        k_BKTD: torch.Tensor,
        v_BKTD: torch.Tensor,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        selects = self.selection is not None and self.selection.selects(layer_idx, window)
        if not selects and not self.evicts:
            return packed_attention(q_BHTD, k_BKTD, v_BKTD, self.boundaries, scale=scale, window=window)
        outputs = []
        for (a, b), rollout in zip(pairwise(self.boundaries), self.rollouts, strict=True):
            q_HTD, k_KTD, v_KTD = (x[0, :, a:b] for x in (q_BHTD, k_BKTD, v_BKTD))
            first = len(rollout.prompt.ids)
            q, k, v = (x[None, :, :first] for x in (q_HTD, k_KTD, v_KTD))
            outputs.append(packed_attention(q, k, v, [0, first], scale=scale, window=window)[0])
            for block in _blocks(rollout, b - a, len(q_HTD)):
                kept_KS = None if block.kept_LKS is None else block.kept_LKS[layer_idx].to(q_HTD.device, torch.long)
                outputs.append(
                    checkpoint(
                        self._attend,
                        *(q_HTD[:, block.start : block.stop], k_KTD[:, : block.stop], v_KTD[:, : block.stop]),
                        *(block, kept_KS, scale, window, self.selection if selects else None),
                        use_reentrant=False,
                        preserve_rng_state=False,
                    )
                )
        return torch.cat(outputs, dim=1)[None]

    def _attend(
        self,
        q_HnD: torch.Tensor,
        k_KTD: torch.Tensor,
        v_KTD: torch.Tensor,
        block: Block,
        kept_KS: torch.Tensor | None,
        scale: float,
        window: int | None,
        selection: SelectPolicy | None,
    ) -> torch.Tensor:
        """The output of a block's queries, H n D."""
        num_heads, num_queries, _ = q_HnD.shape
        num_kv_heads, num_tokens, dim = k_KTD.shape
        positions_KS = torch.arange(num_tokens, device=k_KTD.device).expand(num_kv_heads, -1)
        if kept_KS is not None:  # slots as the cut left them, then what came since
            positions_KS = torch.cat([kept_KS, positions_KS[:, block.fresh :]], dim=1)
            k_KTD, v_KTD = (x.gather(1, positions_KS[..., None].expand(-1, -1, dim)) for x in (k_KTD, v_KTD))
        num_slots = positions_KS.shape[1]
        queries_n = torch.arange(block.start, block.stop, device=k_KTD.device)
        lengths_n = queries_n + 1 - (num_tokens - num_slots)  # entries a query has at hand, its own included
        visible_nKS = (torch.arange(num_slots, device=k_KTD.device) < lengths_n[:, None])[:, None]
        if window is not None:
            visible_nKS = visible_nKS & (positions_KS > (queries_n - window)[:, None, None])
        if selection is not None:
            chosen_nKN = self._chosen(q_HnD, k_KTD, lengths_n, queries_n + 1, selection)
            visible_nKS = visible_nKS & chosen_nKN.repeat_interleave(self.page_size, dim=-1)[..., :num_slots]
        # The query heads of a group become the query length of their KV head.
        q_KnD = q_HnD.reshape(num_kv_heads, -1, dim)
        visible_nKS = visible_nKS.expand(-1, num_kv_heads, -1)
        mask_KnS = visible_nKS.transpose(0, 1).repeat(1, num_heads // num_kv_heads, 1)
        out = scaled_dot_product_attention(q_KnD[None], k_KTD[None], v_KTD[None], attn_mask=mask_KnS[None], scale=scale)
        return out[0].reshape(num_heads, num_queries, dim)

    @torch.no_grad()
    def _chosen(
        self,
        q_HnD: torch.Tensor,
        k_KSD: torch.Tensor,
        lengths_n: torch.Tensor,
        contexts_n: torch.Tensor,
        policy: SelectPolicy,
    ) -> torch.Tensor:
        """The pages that each query reads, n K N bool.

        A page that is not full yet is a query's last one and read whatever its landmarks are.
        """
        size = self.page_size
        exact = torch.float64 if k_KSD.dtype == torch.float64 else torch.float32
        k_KNSD = pad(k_KSD, (0, 0, 0, -k_KSD.shape[1] % size)).unflatten(1, (-1, size)).to(exact)
        made = [k_KNSD.sum(2) / size] if policy.landmarks == 1 else [k_KNSD.amin(2), k_KNSD.amax(2)]
        landmarks_KNCD = torch.stack(made, dim=2).to(k_KSD.dtype).to(exact)
        parts_nKCD = query_parts_ref(q_HnD.transpose(0, 1), len(k_KSD), policy.landmarks, exact)
        scores_nKN = torch.einsum("bkcd,kncd->bkn", parts_nKCD, landmarks_KNCD)
        counts_n, _ = policy.pages_read(lengths_n, contexts_n, size)
        return chosen_pages_ref(scores_nKN, lengths_n, counts_n, page_size=size, first=policy.first, last=policy.last)


def _blocks(rollout: Rollout, num_tokens: int, num_heads: int) -> list[Block]:
    """A rollout's decode steps in order, cut where its cache was cut and where a block is large enough."""
    first = len(rollout.prompt.ids)
    cuts: list[tuple[int, torch.Tensor | None]] = [(first, None)]
    if rollout.kept_positions:
        assert rollout.kept_at is not None
        cuts += zip(rollout.kept_at, rollout.kept_positions, strict=True)
    blocks = []
    for (fresh, kept), (end, _) in pairwise([*cuts, (num_tokens, None)]):
        start = fresh
        while start < end:
            entries = start if kept is None else kept.shape[-1] + start - fresh
            stop = min(end, start + max(1, BLOCK // (num_heads * (entries + 256))), start + 4096)
            blocks.append(Block(fresh, start, stop, kept))
            start = stop
    return blocks
