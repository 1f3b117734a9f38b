# SPDX-License-Identifier: Apache-2.0
"""The paged KV cache: tensors behind the page tables, and the two contexts that write and read them.

A page holds `page_size` entries of every layer and KV head. A sequence's page table is one list of pages for all of
them; which token sits in a slot may differ per layer and head, so each slot carries its logical position. Positions
are logical and never derived from how many entries the cache holds.

Who holds which page is in `pages.py`, what a cut keeps in `compress.py` and `policy.py`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sparse_rl.kernels.attention import AttentionCall, packed_attention
from sparse_rl.kernels.backend import send, use_triton
from sparse_rl.kernels.decode import LayerPool, decode_attention, write_entries
from sparse_rl.kernels.landmarks import write_landmarks
from sparse_rl.model.dry_run import AttentionShape

NO_WINDOW = 1 << 30
Saved = tuple[torch.Tensor, ...]  # pages in host memory, as `page_pools` has them: (L, n, K, page, ...)


class PagedCache:
    """Pages 1 to `num_pages`, and page 0 for rows without a sequence; a ring of queries for every decode row.

    With `keeps_tally` every entry has a number of its own that a policy keeps from one cut to the next. Decoding does
    not know of it: what the slot of a new entry holds was left there by another, and a cut takes it for 0.
    For policies that choose among pages, each has `num_landmarks` vectors that stand for its keys (landmarks.py).

    `release` gives the pages' memory back, `resume` makes them anew, as many as asked for. Decode kernels find them
    through `offsets` in device memory, so a captured graph stays good wherever they come to lie.
    """

    @torch.inference_mode(False)  # tensors made in that mode could not be written to outside of it
    def __init__(
        self,
        shape: AttentionShape,
        *,
        num_pages: int,
        page_size: int,
        num_rows: int,
        num_queries: int,
        keeps_tally: bool = False,
        num_landmarks: int = 0,
    ) -> None:
        self.shape = shape
        self.page_size = page_size
        self.num_queries = num_queries
        self.keeps_tally = keeps_tally
        self.num_landmarks = num_landmarks
        device = shape.device
        self.windows = torch.tensor([window or NO_WINDOW for window in shape.windows], device=device)
        self.scales = torch.tensor(shape.scales, dtype=shape.precise, device=device)
        self.queries = torch.zeros(
            (shape.num_layers, num_rows + 1, num_queries, shape.num_heads, shape.head_dim),  # the last is nobody's
            dtype=shape.dtype,
            device=device,
        )
        self.anchor = self._pages(1, 1)  # never moves: what offsets count from
        self.offsets = torch.zeros((shape.num_layers, 4), dtype=torch.int64, device=device)
        self.release()
        self.resume(num_pages)

    @property
    def pools(self) -> tuple[torch.Tensor, ...]:
        """All that an entry consists of: key, value, position, and its tally if it has one."""
        return (self.k, self.v, self.positions, *((self.tallies,) if self.keeps_tally else ()))

    @property
    def page_pools(self) -> tuple[torch.Tensor, ...]:
        """All that a page consists of: its entries and its landmarks."""
        return (*self.pools, self.landmarks)

    def release(self) -> None:
        """Give the pages' memory back."""
        self.num_pages = 0
        self._make(0)

    @torch.inference_mode(False)
    def resume(self, num_pages: int) -> None:
        """Make pages, empty ones, unless there are just as many."""
        if self.num_pages == num_pages:
            return
        self.release()  # before the new ones are made
        self._make(num_pages + 1)
        self.num_pages = num_pages
        self._locate()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._locate()  # what was unpickled lies elsewhere

    def _locate(self) -> None:
        pools = (self.k, self.v, self.positions, self.landmarks)
        self.offsets.copy_(
            torch.tensor(
                [
                    [
                        (pool[i].data_ptr() - a.data_ptr()) // a.itemsize
                        for pool, a in zip(pools, self.anchor, strict=True)
                    ]
                    for i in range(self.shape.num_layers)
                ]
            )
        )

    def layer(self, layer_idx: int) -> LayerPool:
        """The pages of one layer, as the decode kernels want them."""
        fixed = use_triton(self.k)
        pools = self.anchor if fixed else (self.k, self.v, self.positions, self.landmarks)
        k, v, positions, landmarks = (pool[0 if fixed else layer_idx] for pool in pools)
        return LayerPool(
            k_PKSD=k,
            v_PKSE=v,
            positions_PKS=positions,
            landmarks_PKCD=landmarks if self.num_landmarks else None,
            offsets=self.offsets[layer_idx] if fixed else None,
        )

    def fixed_tensors(self) -> tuple[torch.Tensor, ...]:
        """What a captured decode step reads at the address it was captured with."""
        return (*self.anchor, self.offsets, self.queries)

    def _make(self, num_pages: int) -> None:
        self.k, self.v, self.positions, self.landmarks = self._pages(self.shape.num_layers, num_pages)
        size = self.positions.shape if self.keeps_tally else (0,)
        self.tallies = torch.zeros(size, dtype=self.shape.precise, device=self.shape.device)

    def _pages(self, num_layers: int, num_pages: int) -> tuple[torch.Tensor, ...]:
        shape = self.shape
        size = (num_layers, num_pages, shape.num_kv_heads, self.page_size)
        # Zeros, not empty: masked slots are multiplied by a weight of 0, and 0 * nan is nan.
        k, v, landmarks = (
            torch.zeros(*size[:3], count, width, dtype=shape.dtype, device=shape.device)
            for count, width in (
                (self.page_size, shape.head_dim),
                (self.page_size, shape.value_dim),
                (self.num_landmarks, shape.head_dim),
            )
        )
        return k, v, torch.zeros(size, dtype=torch.int32, device=shape.device), landmarks

    def clear(self) -> None:
        """Forget everything, in case what was written is not finite."""
        for tensor in (*self.page_pools, self.queries):
            tensor.zero_()

    def copy_pages(self, sources: list[int], targets: list[int]) -> None:
        source, target = to_device([sources, targets], self.k.device)
        for pool in self.page_pools:
            for layer in pool:  # one at a time, since what is copied is held twice meanwhile
                layer[target] = layer[source]

    def save(self, pages: list[int]) -> Saved:
        """Copy pages to host memory."""
        index = to_device(pages, self.k.device)
        return tuple(pool[:, index].cpu() for pool in self.page_pools)

    def restore(self, saved: Saved, pages: list[int]) -> None:
        index = to_device(pages, self.k.device)
        for pool, tensor in zip(self.page_pools, saved, strict=True):
            pool[:, index] = tensor.to(pool.device)


def to_device(values: np.ndarray | list[int] | list[list[int]], device: torch.device) -> torch.Tensor:
    """Integers on the device, without waiting for what it is doing."""
    # Kernels count on rows without gaps.
    return send(torch.from_numpy(np.array(values, dtype=np.int64, order="C")), device)


class DecodeStep:
    """One new token for each row: write its entry, then attend to everything the row holds."""

    def __init__(
        self,
        cache: PagedCache,
        *,
        pages_BN: torch.Tensor,
        lengths_B: torch.Tensor,  # entries, the new one included
        positions_B: torch.Tensor,  # logical position of the new token
        rows_B: torch.Tensor,  # whose query ring
        max_length: int,
    ) -> None:
        self.cache = cache
        self.pages_BN = pages_BN
        self.lengths_B = lengths_B
        self.positions_B = positions_B
        self.rows_B = rows_B
        self.max_length = max_length

    def attend(self, layer_idx: int, call: AttentionCall) -> torch.Tensor:
        pool = self.cache.layer(layer_idx)
        q_BHD, k_BKD, v_BKE = call.q_BHTD[:, :, 0], call.k_BKTD[:, :, 0], call.v_BKTE[:, :, 0]
        where = (self.pages_BN, self.lengths_B, self.positions_B)
        ring = self.cache.queries[layer_idx] if self.cache.num_queries else None
        write_entries(pool, k_BKD, v_BKE, *where, q_BHD=q_BHD, ring_RWHD=ring, rows_B=self.rows_B)
        pages, lengths, max_length = self.pages_to_read(layer_idx, q_BHD, pool, call.window)
        out = decode_attention(
            q_BHD,
            pool,
            pages,
            lengths,
            self.positions_B,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            sinks_H=call.sinks_H,
            max_length=max_length,
        )
        return out[:, :, None]

    def pages_to_read(
        self, layer_idx: int, q_BHD: torch.Tensor, pool: LayerPool, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """The pages that attention reads, how many entries of them, and at most how many."""
        return self.pages_BN, self.lengths_B, self.max_length


class PrefillStep:
    """Whole prompts in one packed row: attend inside each, write every entry, remember the last queries."""

    def __init__(self, cache: PagedCache, *, boundaries: list[int], pages: list[list[int]]) -> None:
        self.cache = cache
        self.boundaries = boundaries
        device, num_queries, shape = cache.k.device, cache.num_queries, cache.shape
        lengths = np.diff(boundaries)
        slots = np.concatenate([np.arange(length) for length in lengths])
        owner = np.repeat(np.arange(len(lengths)), lengths)
        page = np.concatenate(
            [np.array(t)[np.arange(n) // cache.page_size] for t, n in zip(pages, lengths, strict=True)]
        )
        self.page_T, self.offset_T, slots_T = to_device(np.stack([page, slots % cache.page_size, slots]), device)
        cache.positions[:, self.page_T, :, self.offset_T] = slots_T.int()[:, None, None]
        self.pages_M, self.counts_M = to_device(np.stack(np.unique(page, return_counts=True)), device)

        # A prompt shorter than the ring leaves the rest of it zero; by the time a policy reads it, it is full, or the
        # policy counts how many of the queries there are.
        last = np.flatnonzero(slots >= lengths[owner] - num_queries)
        ring = np.stack([last, owner[last], slots[last] % max(num_queries, 1)])
        self.last_token, self.last_prompt, self.last_slot = to_device(ring, device)
        self.queries_LBWHD = torch.zeros(
            (shape.num_layers, len(lengths), num_queries, shape.num_heads, shape.head_dim),
            dtype=shape.dtype,
            device=device,
        )

    def attend(self, layer_idx: int, call: AttentionCall) -> torch.Tensor:
        cache = self.cache
        cache.k[layer_idx][self.page_T, :, self.offset_T] = call.k_BKTD[0].transpose(0, 1)
        cache.v[layer_idx][self.page_T, :, self.offset_T] = call.v_BKTE[0].transpose(0, 1)
        if cache.num_landmarks:
            write_landmarks(cache.k[layer_idx], cache.landmarks[layer_idx], self.pages_M, self.counts_M)
        if cache.num_queries:
            remembered_WHD = call.q_BHTD[0].transpose(0, 1)[self.last_token]
            self.queries_LBWHD[layer_idx, self.last_prompt, self.last_slot] = remembered_WHD
        return packed_attention(call, self.boundaries)
