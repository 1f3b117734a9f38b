# SPDX-License-Identifier: Apache-2.0
"""Where the pool lies, as decode kernels are told."""

from __future__ import annotations

from sparse_rl.kv.cache import PagedCache


def test_offsets_lead_from_the_anchor_to_every_layer(tiny):
    cache = PagedCache(tiny().shape, num_pages=3, page_size=16, num_rows=2, num_queries=0, num_landmarks=2)
    for num_pages in (3, 7):
        cache.resume(num_pages)
        for layer, offsets in enumerate(cache.offsets.tolist()):
            for pool, anchor, offset in zip((*cache.pools, cache.landmarks), cache.anchor, offsets, strict=True):
                assert anchor.data_ptr() + offset * anchor.itemsize == pool[layer].data_ptr()
