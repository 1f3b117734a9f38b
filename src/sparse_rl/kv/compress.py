# SPDX-License-Identifier: Apache-2.0
"""Cut sequences' caches to a policy's target: weigh, select and compact, all layers and heads at once.

Layers are independent, so they join the rows: page p of layer l is page l * P + p of one long pool. On a GPU nothing
here waits for the device, unless what was kept is asked for.

Which rows are due is found in rollout/loop.py, and in `sparse_cache.py` under `generate`.
"""

from __future__ import annotations

import torch

from sparse_rl.kernels.backend import use_triton
from sparse_rl.kernels.decode import gather_pages_ref
from sparse_rl.kernels.landmarks import write_landmarks
from sparse_rl.kv.cache import PagedCache
from sparse_rl.kv.policy import Entries, EvictPolicy

COPIED_ENTRIES = 1 << 19  # slots of all layers cut at once where copies of them are made, as the references do


def rows_at_once(cache: PagedCache, policy: EvictPolicy, lengths: list[int]) -> int:
    """How many of the rows to cut in one call, so that copies stay small."""
    if lengths and (policy.copies or not use_triton(cache.k)):
        return max(1, COPIED_ENTRIES // (max(lengths) * cache.shape.num_layers))
    return max(1, len(lengths))


@torch.profiler.record_function("compaction")
def compress(
    cache: PagedCache,
    policy: EvictPolicy,
    *,
    pages_BN: torch.Tensor,
    lengths_B: torch.Tensor,  # entries held
    contexts_B: torch.Tensor,  # tokens seen, so the next token's position
    prompt_lens_B: torch.Tensor,
    queries_LBWHD: torch.Tensor,
    max_count: int,  # the most entries a row keeps
    cut_B: torch.Tensor,  # entries that the row's last cut left, 0 before its first
    record: bool = False,
) -> torch.Tensor | None:
    """Cut each row to the policy's target, in place. Returns the kept positions, L B K max_count, if asked to."""
    num_layers, num_pages = cache.k.shape[:2]
    batch, device = pages_BN.shape[0], pages_BN.device
    base_L = torch.arange(0, num_layers * num_pages, num_pages, device=device)
    pages_BN = (pages_BN + base_L[:, None, None]).flatten(0, 1)
    counted = torch.stack([lengths_B, contexts_B, prompt_lens_B, cut_B]).repeat(1, num_layers)
    lengths_B, contexts_B, prompt_lens_B, cut_B = counted
    pools = tuple(pool.flatten(0, 1) for pool in cache.pools)
    positions_BKS = gather_pages_ref(pools[2], pages_BN)

    # How far a slot lies behind the newest one: 0 is the newest, below 0 are slots not written yet.
    slot = torch.arange(positions_BKS.shape[-1], device=device)
    age_BS = lengths_B[:, None] - 1 - slot
    written_BS = age_BS >= 0
    windows_B = cache.windows.repeat_interleave(batch)
    oldest_B = contexts_B - windows_B  # out of the layer's window
    tally_BKS = None
    if policy.keeps_tally:  # a fresh entry's slot has what others left there
        tallied_BS = slot < cut_B[:, None]
        tally_BKS = gather_pages_ref(pools[3], pages_BN).masked_fill(~tallied_BS[:, None], 0.0)
    entries = Entries(
        k_PKSD=pools[0],
        pages_BN=pages_BN,
        lengths_B=lengths_B,
        fresh_B=lengths_B - cut_B,
        contexts_B=contexts_B,
        prompt_lens_B=prompt_lens_B,
        positions_BKS=positions_BKS,
        live_BKS=written_BS[:, None] & (positions_BKS > oldest_B[:, None, None]),
        recent_BS=written_BS & (age_BS < policy.num_recent),
        queries_BHWD=queries_LBWHD.flatten(0, 1).transpose(1, 2),
        scale_B=cache.scales.repeat_interleave(batch),
        windows_B=windows_B,
        num_layers=num_layers,
        tally_BKS=tally_BKS,
    )
    kept_BKE = policy.evict(entries, pools, max_count=max_count)
    if cache.num_landmarks:
        # A page that is no longer full gets its own with the next entry, before it is read.
        place = torch.arange(0, positions_BKS.shape[-1], cache.page_size, device=device)
        counts_BN = (lengths_B[:, None] - place).clamp(0, cache.page_size)
        write_landmarks(pools[0], cache.landmarks.flatten(0, 1), pages_BN.flatten(), counts_BN.flatten())
    if not record:
        return None
    kept_LBKE: torch.Tensor = positions_BKS.gather(-1, kept_BKE).unflatten(0, (num_layers, batch))
    return kept_LBKE.cpu()
