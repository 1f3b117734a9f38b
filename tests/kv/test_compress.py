# SPDX-License-Identifier: Apache-2.0
"""Both implementations of the kernels cut alike."""

from __future__ import annotations

from contextlib import contextmanager
from copy import deepcopy

import pytest
import torch
from schedules import named

from sparse_rl.kv import GKV, H2O, RKV, TOVA, KeyDiff, Knorm, Random, SnapKV, Streaming
from sparse_rl.kv.cache import PagedCache
from sparse_rl.kv.compress import compress
from sparse_rl.model.dry_run import AttentionShape

DIM, PAGE = 12, 16


def random_keys(generator: torch.Generator, *size: int) -> torch.Tensor:
    """Keys with near-duplicates in them, as real ones have, so that the duplicate rule has something to do."""
    directions = torch.randn(*size[:-2], 4, size[-1], generator=generator, dtype=torch.float64)
    choice = torch.randint(0, 4, size[:-1], generator=generator)
    base = directions.gather(-2, choice[..., None].expand(*size))
    return base + 0.7 * torch.randn(size, generator=generator, dtype=torch.float64)


@contextmanager
def no_waiting():
    """Whatever waits for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "policy",
    [
        Streaming(budget=20, interval=9),
        SnapKV(budget=24, interval=9, sinks=2),
        RKV(budget=24, interval=9, protect_prompt=True),
        Streaming(budget=named((0, 30, 40), (16, 20, 26)), interval=9),
        Random(budget=20, interval=9),
        Knorm(budget=20, interval=9, recent=2),
        KeyDiff(budget=20, interval=9),
        TOVA(budget=20, interval=9),
        H2O(budget=20, interval=9, window=10),
        GKV(budget=24, interval=9, index="shared"),
    ],
    ids=lambda policy: f"{policy.name}-{policy.budget}",
)
@pytest.mark.some(2)
def test_both_implementations_of_the_kernels_compress_alike(policy, device, monkeypatch):
    """Layers with and without a window, rows of different lengths; on a GPU, without ever waiting for it."""
    pytest.importorskip("triton")
    shape = AttentionShape(
        num_heads=6,
        num_kv_heads=2,
        head_dim=DIM,
        value_dim=DIM,
        windows=(None, 30),
        scales=(0.3, 0.2),
        dtype=torch.float32,
        device=torch.device(device),
    )
    lengths, prompt_lens = [48, 37, 20], [5, 11, 2]
    counts = [min(n, policy.target(p, n)) for n, p in zip(lengths, prompt_lens, strict=True)]
    results = []
    for triton in (False, True):
        monkeypatch.setattr("sparse_rl.kernels.importance.use_triton", lambda _, triton=triton: triton)
        monkeypatch.setattr("sparse_rl.kernels.keys.use_triton", lambda _, triton=triton: triton)
        monkeypatch.setattr("sparse_rl.kernels.compact.use_triton", lambda _, triton=triton: triton)
        generator = torch.Generator().manual_seed(0)
        cache = PagedCache(
            shape,
            num_pages=12,
            page_size=PAGE,
            num_rows=3,
            num_queries=policy.num_queries,
            keeps_tally=policy.keeps_tally,
        )
        cache.tallies.copy_(torch.rand(cache.tallies.shape, generator=generator))
        cache.k.copy_(random_keys(generator, *cache.k.shape))
        cache.v.copy_(cache.k * 2)
        pages = torch.tensor([[3, 9, 1], [2, 11, 7], [5, 4, 0]], dtype=torch.int32)
        cache.positions[:, pages] = torch.arange(3 * PAGE, dtype=torch.int32).reshape(3, 1, PAGE).to(device)
        ints = torch.tensor([lengths, lengths, prompt_lens], device=device)
        queries = torch.randn(2, 3, policy.num_queries, 6, DIM, generator=generator).to(device)
        arguments = {
            "pages_BN": pages.to(device),
            "lengths_B": ints[0],
            "contexts_B": ints[1],
            "prompt_lens_B": ints[2],
            "queries_LBWHD": queries,
            "max_count": max(counts),
            "cut_B": ints[0] - 7,
        }
        if triton and device != "cpu":
            compress(deepcopy(cache), policy, **arguments)  # compiles
            clone = deepcopy(cache)
            with no_waiting():
                compress(clone, policy, **arguments)
        kept = compress(cache, policy, **arguments, record=True)
        results.append((kept, cache))
    (kept, cache), (kept_triton, cache_triton) = results
    for b, count in enumerate(counts):
        assert torch.equal(kept[:, b, :, :count], kept_triton[:, b, :, :count])
    for name in ("k", "v", "positions"):
        assert torch.equal(getattr(cache, name), getattr(cache_triton, name))
    torch.testing.assert_close(cache.tallies, cache_triton.tallies)
