# SPDX-License-Identifier: Apache-2.0
"""The engine's pool: how much of the free memory it takes, what it keeps, gives back and never leaves in disorder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from schedules import named
from small_engine import engine

from sparse_rl.kv import H2O, RKV, Full, SnapKV, Streaming
from sparse_rl.rollout import Sampling
from sparse_rl.rollout.engine import free_bytes


def free_for(spare: int, device: str) -> int:
    """Memory of which so much is left once the reserve is off."""
    if device == "cpu":
        return 2 * spare
    return spare + int(0.1 * torch.cuda.get_device_properties(device).total_memory)


@pytest.mark.parametrize("policy", [Full(), H2O(budget=24, interval=24)], ids=lambda p: p.name)
def test_a_pool_is_sized_from_what_is_free_less_a_reserve_and_the_rows(policy, tiny, prompts, device, monkeypatch):
    """H2O remembers an interval of queries, which takes as much as half the pool."""
    loaded = tiny()
    sampler = engine(loaded, policy, rows=8)
    sampling = Sampling(max_tokens=50, n=8, stop_ids=(), top_logprobs=3)
    page = policy.page_bytes(loaded.shape, 16)
    rows = 9 * loaded.shape.query_bytes(policy.num_queries)
    assert (rows > 10 * page) == (policy.name == "h2o")
    width = {"full": 64 // 16, "h2o": 48 // 16}[policy.name]
    rows += 8 * (6 * 9 + 9 * width + 8 + 1) + 64 * 8 * (8 + 4) * (1 + 3)  # integers, tables, order; 64 steps' tokens
    free = free_for(20 * page + page // 2, device) + rows
    monkeypatch.setattr("sparse_rl.rollout.engine.free_bytes", lambda device: free)
    sampler.generate(prompts(5), sampling)
    assert sampler.stats.num_pages == 20
    assert rows == sampler.cache.queries.nbytes + sampler.decoders[1.0, 1.0, None, 3].rows.num_bytes
    assert (sampler.stats.num_preemptions > 0) == (policy.name == "full")

    free -= rows + 20 * page  # by now they are there
    sampler.generate(prompts(5), sampling)
    assert sampler.stats.num_pages == 20


@pytest.mark.parametrize("known", ["SC_AVPHYS_PAGES", "SC_PHYS_PAGES"])
def test_free_memory_is_known_without_linux(known, monkeypatch):
    def no_file(self, *args, **kwargs):
        raise FileNotFoundError(self)

    pages = {known: 3, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(Path, "read_text", no_file)
    monkeypatch.setattr("os.sysconf_names", dict.fromkeys(pages, 0))
    monkeypatch.setattr("os.sysconf", pages.__getitem__)
    assert free_bytes(torch.device("cpu")) == 3 * 4096


def test_a_pool_that_follows_a_schedule_stays(tiny, prompts):
    """However long answers get, it is no larger than the schedule's last step asks for."""
    policy = Streaming(budget=named((0, 20, 40), (8, 16, 24)), interval=8)
    sampler = engine(tiny(), policy, rows=2)
    assert sampler.bounded
    pages = []
    for max_tokens in (10, 60, 10, 80):
        sampler.generate(prompts(5), Sampling(max_tokens=max_tokens, n=2, stop_ids=()))
        pages.append(sampler.stats.num_pages)
    assert pages == [3, 6, 6, 6], "a page a row and one more, then two"
    assert len(sampler.decoders) == 1 and next(iter(sampler.decoders.values())).max_entries == 32


def test_a_bounded_pool_is_kept_from_call_to_call(tiny, prompts):
    """Whatever their size: ReMax, say, samples many and then one of each prompt."""
    sampler = engine(tiny(), RKV(budget=16, interval=8), rows=8)
    pools = []
    for n in (8, 1, 8, 1):
        sampler.generate(prompts(5), Sampling(max_tokens=30, n=n, stop_ids=()))
        pools.append((sampler.cache.k.data_ptr(), sampler.stats.num_pages))
    assert len(set(pools)) == 1


def test_a_dense_pool_shrinks_with_the_work(tiny, prompts):
    sampler = engine(tiny(), rows=8)
    pages = []
    for n, max_tokens in ((8, 200), (1, 5)):
        sampler.generate(prompts(5), Sampling(max_tokens=max_tokens, n=n, stop_ids=()))
        pages.append(sampler.stats.num_pages)
    assert pages[1] < pages[0] // 2


def test_a_call_that_raises_leaves_the_pool_whole(tiny, prompts):
    loaded = tiny()
    for policy in (Full(), SnapKV(budget=16, interval=8)):
        sampler = engine(loaded, policy)
        sampling = Sampling(max_tokens=40, n=3, seed=4, stop_ids=())
        expected = [r.token_ids.tolist() for r in sampler.generate(prompts(5, 9), sampling)]

        def interrupt(progress):
            if progress.num_tokens > 40:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            sampler.generate(prompts(5, 9), sampling, on_step=interrupt)
        cache = sampler.cache
        for tensor in (cache.k, cache.v, cache.positions, cache.queries):
            assert not tensor.any(), "what was written is forgotten"
        assert [r.token_ids.tolist() for r in sampler.generate(prompts(5, 9), sampling)] == expected


@pytest.mark.parametrize("method", ["release", "resume"])
def test_memory_is_not_taken_from_a_call_that_runs(method, tiny, prompts):
    sampler = engine(tiny())
    with pytest.raises(RuntimeError, match="in the middle of a call"):
        sampler.generate(prompts(5), Sampling(max_tokens=5), on_step=lambda progress: getattr(sampler, method)())


def test_released_memory_comes_back_when_asked_for_or_needed(tiny, prompts):
    sampler = engine(tiny(), Full())
    sampling = Sampling(max_tokens=20, stop_ids=())
    expected = [r.token_ids.tolist() for r in sampler.generate(prompts(5, 9), sampling)]
    pages = sampler.cache.k.shape[1]
    for resume in (True, False):
        sampler.release()
        assert sampler.cache.k.numel() == sampler.cache.v.numel() == sampler.cache.positions.numel() == 0
        if resume:
            sampler.resume()
            assert sampler.cache.k.shape[1] == pages
        assert [r.token_ids.tolist() for r in sampler.generate(prompts(5, 9), sampling)] == expected


def test_resuming_in_inference_mode_makes_ordinary_memory(tiny, prompts):
    sampler = engine(tiny())
    sampler.generate(prompts(5), Sampling(max_tokens=5))
    sampler.release()
    with torch.inference_mode():
        sampler.resume()
    assert not sampler.cache.k.is_inference()
