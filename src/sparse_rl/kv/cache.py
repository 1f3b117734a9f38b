# SPDX-License-Identifier: Apache-2.0
"""The paged KV cache: tensors behind the page tables, and the two contexts that write and read them.

A page holds `page_size` entries of every layer and KV head. A sequence's page table is one list of pages for all of
them; which token sits in a slot may differ per layer and head, so each slot carries its logical position. Positions
are logical and never derived from how many entries the cache holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch

from sparse_rl.kernels.compact import compact_ref
from sparse_rl.kernels.decode import decode_attention_ref, gather_pages_ref, visible_entries_ref
from sparse_rl.kernels.prefill import packed_attention_ref
from sparse_rl.kv.policy import Entries, EvictPolicy
from sparse_rl.model.dry_run import AttentionShape

NO_WINDOW = 1 << 30


@dataclass(slots=True)
class Saved:
    """A sequence's cache outside the pool, in host memory."""

    k: torch.Tensor  # (L, n, K, page, D)
    v: torch.Tensor
    positions: torch.Tensor  # (L, n, K, page)


class PagedCache:
    def __init__(
        self, shape: AttentionShape, *, num_pages: int, page_size: int, num_rows: int, num_queries: int
    ) -> None:
        self.shape = shape
        self.page_size = page_size
        self.num_queries = num_queries
        size = (shape.num_layers, num_pages, shape.num_kv_heads, page_size)
        # Zeros, not empty: masked slots are multiplied by a weight of 0, and 0 * nan is nan.
        self.k = torch.zeros(*size, shape.head_dim, dtype=shape.dtype, device=shape.device)
        self.v = torch.zeros_like(self.k)
        self.positions = torch.zeros(size, dtype=torch.int32, device=shape.device)
        self.windows = torch.tensor([window or NO_WINDOW for window in shape.windows], device=shape.device)
        precise = torch.float64 if shape.dtype == torch.float64 else torch.float32
        self.scales = torch.tensor(shape.scales, dtype=precise, device=shape.device)
        self.queries = torch.zeros(
            (shape.num_layers, num_rows, num_queries, shape.num_heads, shape.head_dim),
            dtype=shape.dtype,
            device=shape.device,
        )

    def clear(self) -> None:
        """Forget everything, in case what was written is not finite."""
        for tensor in (self.k, self.v, self.positions, self.queries):
            tensor.zero_()

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        source = torch.tensor(sources, device=self.k.device)
        target = torch.tensor(targets, device=self.k.device)
        for pool in (self.k, self.v, self.positions):
            pool[:, target] = pool[:, source]

    def save(self, pages: list[int]) -> Saved:
        """Copy a sequence's pages to host memory."""
        index = torch.tensor(pages, device=self.k.device)
        return Saved(*(pool[:, index].cpu() for pool in (self.k, self.v, self.positions)))

    def restore(self, saved: Saved, pages: list[int]) -> None:
        index = torch.tensor(pages, device=self.k.device)
        for pool, tensor in zip((self.k, self.v, self.positions), (saved.k, saved.v, saved.positions), strict=True):
            pool[:, index] = tensor.to(pool.device)

    def compress(
        self,
        policy: EvictPolicy,
        *,
        pages_BN: torch.Tensor,
        lengths_B: torch.Tensor,  # entries held
        contexts_B: torch.Tensor,  # tokens seen, so the next token's position
        prompt_lens_B: torch.Tensor,
        queries_LBWHD: torch.Tensor,
        record: bool = False,
    ) -> torch.Tensor | None:
        """Cut each row to the policy's target, in place. Returns the kept positions, L B K T, if asked to."""
        # Layers are independent, so they join the rows: page p of layer l is page l * P + p of one long pool.
        num_layers, num_pages = self.k.shape[:2]
        batch, device = pages_BN.shape[0], pages_BN.device
        layer_L11 = torch.arange(num_layers, device=device)[:, None, None]
        pages_BN = (pages_BN + layer_L11 * num_pages).flatten(0, 1)
        lengths_B, contexts_B, prompt_lens_B = (x.repeat(num_layers) for x in (lengths_B, contexts_B, prompt_lens_B))
        pools = tuple(pool.flatten(0, 1) for pool in (self.k, self.v, self.positions))
        k_BKSD, v_BKSD, positions_BKS = (gather_pages_ref(pool, pages_BN) for pool in pools)

        size = positions_BKS.shape[-1]
        slot = torch.arange(size, device=device)
        recent_BS = (slot < lengths_B[:, None]) & (slot >= lengths_B[:, None] - policy.num_queries)
        entries = Entries(
            k_BKSD=k_BKSD,
            v_BKSD=v_BKSD,
            positions_BKS=positions_BKS,
            live_BKS=visible_entries_ref(lengths_B, positions_BKS, contexts_B, self.windows.repeat_interleave(batch)),
            recent_BS=recent_BS,
            queries_BHWD=queries_LBWHD.flatten(0, 1).transpose(1, 2),
            scale_B=self.scales.repeat_interleave(batch),
        )
        kept_BKT = policy.kept(entries, lengths_B, prompt_lens_B)
        compact_ref(pools, pages_BN, kept_BKT, torch.minimum(lengths_B, policy.target(prompt_lens_B)))
        if not record:
            return None
        return positions_BKS.gather(-1, kept_BKT).unflatten(0, (num_layers, batch)).cpu()


class DecodeStep:
    """One new token for each row: write its entry, then attend to everything the row holds."""

    def __init__(
        self,
        cache: PagedCache,
        *,
        pages_BN: torch.Tensor,
        slots_B: torch.Tensor,  # where the new entry goes, counted in the sequence
        positions_B: torch.Tensor,  # logical position of the new token
        rows_B: torch.Tensor,  # whose query ring
    ) -> None:
        self.cache = cache
        self.pages_BN = pages_BN
        self.positions_B = positions_B
        self.rows_B = rows_B
        self.lengths_B = slots_B + 1
        self.page_B = pages_BN.gather(1, (slots_B // cache.page_size)[:, None])[:, 0]
        self.offset_B = slots_B % cache.page_size
        slot = torch.arange(pages_BN.shape[1] * cache.page_size, device=slots_B.device)
        self.written_B1S = (slot < self.lengths_B[:, None])[:, None]
        cache.positions[:, self.page_B, :, self.offset_B] = positions_B.int()[:, None, None]

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
        cache = self.cache
        k_PKSD, v_PKSD = cache.k[layer_idx], cache.v[layer_idx]
        k_PKSD[self.page_B, :, self.offset_B] = k_BKTD[:, :, 0]
        v_PKSD[self.page_B, :, self.offset_B] = v_BKTD[:, :, 0]
        if cache.num_queries:
            cache.queries[layer_idx, self.rows_B, self.positions_B % cache.num_queries] = q_BHTD[:, :, 0]
        visible = self.written_B1S
        if window is not None:
            positions_BKS = gather_pages_ref(cache.positions[layer_idx], self.pages_BN)
            visible = visible_entries_ref(self.lengths_B, positions_BKS, self.positions_B, cache.windows[layer_idx])
        return decode_attention_ref(q_BHTD[:, :, 0], k_PKSD, v_PKSD, self.pages_BN, visible, scale=scale)[:, :, None]


class PrefillStep:
    """Whole prompts in one packed row: attend inside each, write every entry, remember the last queries."""

    def __init__(self, cache: PagedCache, *, boundaries: list[int], pages: list[list[int]]) -> None:
        self.cache = cache
        self.boundaries = boundaries
        device = cache.k.device
        spans = list(pairwise(boundaries))
        slots = [torch.arange(b - a, device=device) for a, b in spans]
        tables = [torch.tensor(table, device=device) for table in pages]
        self.page_T = torch.cat([t[slot // cache.page_size] for t, slot in zip(tables, slots, strict=True)])
        self.offset_T = torch.cat(slots) % cache.page_size
        cache.positions[:, self.page_T, :, self.offset_T] = torch.cat(slots).int()[:, None, None]

        # A prompt shorter than the ring leaves the rest of it zero; by the time a policy reads it, it is full.
        num_queries, shape = cache.num_queries, cache.shape
        last = [torch.arange(max(a, b - num_queries), b, device=device) for a, b in spans]
        self.last_token = torch.cat(last)
        self.last_prompt = torch.cat([torch.full_like(tokens, i) for i, tokens in enumerate(last)])
        self.last_slot = torch.cat([(t - a) for t, (a, _) in zip(last, spans, strict=True)]) % max(num_queries, 1)
        self.queries_LBWHD = torch.zeros(
            (shape.num_layers, len(spans), num_queries, shape.num_heads, shape.head_dim),
            dtype=shape.dtype,
            device=device,
        )

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
        cache = self.cache
        cache.k[layer_idx][self.page_T, :, self.offset_T] = k_BKTD[0].transpose(0, 1)
        cache.v[layer_idx][self.page_T, :, self.offset_T] = v_BKTD[0].transpose(0, 1)
        if cache.num_queries:
            self.queries_LBWHD[layer_idx, self.last_prompt, self.last_slot] = q_BHTD[0].transpose(0, 1)[self.last_token]
        return packed_attention_ref(q_BHTD, k_BKTD, v_BKTD, self.boundaries, scale=scale, window=window)
