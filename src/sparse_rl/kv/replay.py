# SPDX-License-Identifier: Apache-2.0
"""The sampler's sparse attention again, over whole completions at once and with a gradient.

Prompts attend as in a prefill. From one cut of a sequence's cache to the next, its tokens see what the cut kept and
what came since, of that, under a policy that chooses, the pages that their own queries choose. Slots are laid out as
the sampler had them, so pages are the same pages. Plain torch, a block of queries at a time, and the same block of all
sequences that were cut at the same tokens, as samples of one prompt are; the backward pass computes each block again,
so that nothing of the size tokens x entries is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from sparse_rl.kernels.attention import AttentionCall, masked_attention, packed_attention
from sparse_rl.kernels.backend import upcast
from sparse_rl.kernels.landmarks import chosen_pages_ref, query_parts_ref
from sparse_rl.kv.select import SelectPolicy
from sparse_rl.types import Rollout

BLOCK = 1 << 25  # sequences x query heads x queries x entries at once


@dataclass(frozen=True, slots=True)
class Span:
    """Some queries of a sequence between two cuts."""

    fresh: int  # position of the first token that came since the cut
    start: int  # positions of the queries
    stop: int
    kept: int | None  # entries that the cut kept; all before `fresh` if there was none

    @property
    def slots(self) -> int:
        """Entries at hand for the last query."""
        return self.stop if self.kept is None else self.kept + self.stop - self.fresh


@dataclass(frozen=True, slots=True)
class Block:
    """The span of R sequences."""

    span: Span
    offsets_R: torch.Tensor  # where the sequences begin
    kept_RLKE: torch.Tensor | None  # positions that the cut kept

    @property
    def places(self) -> torch.Tensor:
        """Of its queries in the row, R Q one after the other."""
        within = torch.arange(self.span.start, self.span.stop, device=self.offsets_R.device)
        return (self.offsets_R[:, None] + within).flatten()


class ReplayedRows:
    """Rollouts side by side in one row, as `PackedRows`, each attending to what its sampler read."""

    def __init__(
        self, boundaries: list[int], rollouts: list[Rollout], selection: SelectPolicy | None, page_size: int
    ) -> None:
        self.boundaries, self.rollouts = boundaries, rollouts
        self.selection, self.page_size = selection, page_size
        self.evicts = any(rollout.kept_positions for rollout in rollouts)
        self.firsts = [len(rollout.prompt.ids) for rollout in rollouts]
        begins = zip(boundaries, self.firsts, strict=False)
        self.prompts_T = torch.cat([torch.arange(a, a + first) for a, first in begins])
        self.blocks: list[Block] = []  # the same for all layers, as is where each output belongs
        self.order_T = torch.empty(0, dtype=torch.long)

    def attend(self, layer_idx: int, call: AttentionCall) -> torch.Tensor:
        selects = self.selection is not None and self.selection.selects(layer_idx, call.window)
        if not selects and not self.evicts:
            return packed_attention(call, self.boundaries)
        device = call.q_BHTD.device
        if not len(self.order_T):
            self.prompts_T, self.blocks = self.prompts_T.to(device), self._blocks(call.q_BHTD.shape[1], device)
            self.order_T = torch.cat([self.prompts_T, *(block.places for block in self.blocks)]).argsort()
        prompts = call.each(lambda x: x.index_select(2, self.prompts_T))
        outputs = [packed_attention(prompts, [0, *accumulate(self.firsts)])[0]]
        for block in self.blocks:
            kept = None if block.kept_RLKE is None else block.kept_RLKE[:, layer_idx].to(device, torch.long)
            outputs.append(
                checkpoint(
                    self._attend,
                    *(call.q_BHTD[0], call.k_BKTD[0], call.v_BKTE[0]),
                    block,
                    kept,
                    call,
                    self.selection if selects else None,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            )
        return torch.cat(outputs, dim=1).index_select(1, self.order_T)[None]

    def _attend(
        self,
        q_HTD: torch.Tensor,
        k_KTD: torch.Tensor,
        v_KTE: torch.Tensor,
        block: Block,
        kept_RKE: torch.Tensor | None,
        call: AttentionCall,
        selection: SelectPolicy | None,
    ) -> torch.Tensor:
        """The output of a block's queries, H (R Q) D."""
        span, device, window = block.span, q_HTD.device, call.window
        num_kv_heads, num_rows = len(k_KTD), len(block.offsets_R)
        q_RHQD = q_HTD.index_select(1, block.places).unflatten(1, (num_rows, -1)).transpose(0, 1)
        positions_RKS = torch.arange(span.stop, device=device).expand(num_rows, num_kv_heads, -1)
        if kept_RKE is not None:  # slots as the cut left them, then what came since
            positions_RKS = torch.cat([kept_RKE, positions_RKS[..., span.fresh :]], dim=-1)
        places = (positions_RKS + block.offsets_R[:, None, None]).transpose(0, 1).flatten(1)  # K (R S)
        k_RKSD, v_RKSE = (
            x.gather(1, places[..., None].expand(-1, -1, x.shape[-1])).unflatten(1, (num_rows, -1)).transpose(0, 1)
            for x in (k_KTD, v_KTE)
        )
        queries_Q = torch.arange(span.start, span.stop, device=device)
        lengths_Q = queries_Q + 1 - (span.stop - span.slots)  # entries a query has at hand, its own included
        visible = (torch.arange(span.slots, device=device) < lengths_Q[:, None])[None, None]  # R K Q S, or 1 for R, K
        if window is not None:
            visible = visible & (positions_RKS[:, :, None] > (queries_Q - window)[:, None])
        if selection is not None:
            chosen_RKQN = self._chosen(q_RHQD, k_RKSD, lengths_Q, queries_Q + 1, selection)
            visible = visible & chosen_RKQN.repeat_interleave(self.page_size, dim=-1)[..., : span.slots]
        # The query heads of a group become the query length of their KV head.
        group = len(q_HTD) // num_kv_heads
        q_RKQD, visible = q_RHQD.unflatten(1, (num_kv_heads, group)).flatten(2, 3), visible.repeat(1, 1, group, 1)
        sinks = call.sinks_H
        if sinks is not None:
            sinks = sinks.reshape(num_kv_heads, group).repeat_interleave(q_RHQD.shape[2], dim=1)
        out = masked_attention(q_RKQD, k_RKSD, v_RKSE, visible, scale=call.scale, softcap=call.softcap, sinks_HQ=sinks)
        out_RHQE: torch.Tensor = out.unflatten(2, (group, -1)).flatten(1, 2)
        return out_RHQE.transpose(0, 1).flatten(1, 2)

    @torch.no_grad()
    def _chosen(
        self,
        q_RHQD: torch.Tensor,
        k_RKSD: torch.Tensor,
        lengths_Q: torch.Tensor,
        contexts_Q: torch.Tensor,
        policy: SelectPolicy,
    ) -> torch.Tensor:
        """The pages that each query reads, R K Q N bool.

        A page that is not full yet is a query's last one and read whatever its landmarks are.
        """
        size, (num_rows, num_kv_heads, num_slots, _) = self.page_size, k_RKSD.shape
        k_RKNSD = upcast(pad(k_RKSD, (0, 0, 0, -num_slots % size)).unflatten(2, (-1, size)))
        made = [k_RKNSD.sum(3) / size] if policy.landmarks == 1 else [k_RKNSD.amin(3), k_RKNSD.amax(3)]
        landmarks_RKNCD = upcast(torch.stack(made, dim=3).to(k_RKSD.dtype))  # rounded, as a cache holds them
        q_BHD = q_RHQD.transpose(1, 2).flatten(0, 1)
        parts_RQKCD = query_parts_ref(q_BHD, num_kv_heads, policy.landmarks).unflatten(0, (num_rows, -1))
        importance_BKN = torch.einsum("rqkcd,rkncd->rqkn", parts_RQKCD, landmarks_RKNCD).flatten(0, 1)
        counts_Q, _ = policy.pages_read(lengths_Q, contexts_Q, size)
        lengths_B, counts_B = lengths_Q.repeat(num_rows), counts_Q.repeat(num_rows)
        ends = {"page_size": size, "first": policy.first, "last": policy.last}
        chosen_BKN = chosen_pages_ref(importance_BKN, lengths_B, counts_B, **ends)
        chosen: torch.Tensor = chosen_BKN.unflatten(0, (num_rows, -1))
        return chosen.transpose(1, 2)

    def _blocks(self, num_heads: int, device: torch.device) -> list[Block]:
        """The decode steps of all rollouts, those with the same span together as far as a block goes."""
        found: dict[Span, list[tuple[int, torch.Tensor | None]]] = {}
        for (a, b), rollout in zip(pairwise(self.boundaries), self.rollouts, strict=True):
            for span, kept in _spans(rollout, b - a, num_heads):
                found.setdefault(span, []).append((a, kept))
        blocks = []
        for span, rows in found.items():
            most = max(1, BLOCK // (num_heads * (span.stop - span.start) * span.slots))
            for i in range(0, len(rows), most):
                some = rows[i : i + most]
                positions = [kept for _, kept in some if kept is not None]
                stacked = torch.stack(positions) if positions else None
                blocks.append(Block(span, torch.tensor([a for a, _ in some], device=device), stacked))
        return blocks


def _spans(rollout: Rollout, num_tokens: int, num_heads: int) -> list[tuple[Span, torch.Tensor | None]]:
    """A rollout's decode steps in order, cut where its cache was cut and where a span is large enough."""
    first = len(rollout.prompt.ids)
    cuts: list[tuple[int, torch.Tensor | None]] = [(first, None)]
    if rollout.kept_positions:
        assert rollout.kept_at is not None
        cuts += zip(rollout.kept_at, rollout.kept_positions, strict=True)
    spans = []
    for (fresh, kept), (end, _) in pairwise([*cuts, (num_tokens, None)]):
        start = fresh
        while start < end:
            entries = start if kept is None else kept.shape[-1] + start - fresh
            stop = min(end, start + max(1, BLOCK // (num_heads * (entries + 256))), start + 4096)
            spans.append((Span(fresh, start, stop, None if kept is None else kept.shape[-1]), kept))
            start = stop
    return spans
