# SPDX-License-Identifier: Apache-2.0
"""How many pages the engine takes of the memory that is free, and which it keeps."""

from __future__ import annotations

import pytest
import torch
from schedules import named

from sparse_rl.kv import H2O, Full, Streaming
from sparse_rl.rollout import Engine, EngineConfig, Sampling


def free_for(spare: int, device: str) -> int:
    """Memory of which so much is left once the reserve is off."""
    if device == "cpu":
        return 2 * spare
    return spare + int(0.1 * torch.cuda.get_device_properties(device).total_memory)


@pytest.mark.parametrize("policy", [Full(), H2O(budget=24, interval=24)], ids=lambda p: p.name)
def test_a_pool_is_sized_from_what_is_free_less_a_reserve_and_the_rows(policy, tiny, prompts, device, monkeypatch):
    """H2O remembers an interval of queries, which takes as much as half the pool."""
    loaded = tiny()
    engine = Engine(loaded, policy, EngineConfig(rows=8, page_size=16))
    sampling = Sampling(max_tokens=50, n=8, stop_ids=(), top_logprobs=3)
    page = policy.page_bytes(loaded.shape, 16)
    rows = 9 * loaded.shape.query_bytes(policy.num_queries)
    assert (rows > 10 * page) == (policy.name == "h2o")
    width = {"full": 64 // 16, "h2o": 48 // 16}[policy.name]
    rows += 8 * (6 * 9 + 9 * width + 8 + 1) + 64 * 8 * (8 + 4) * (1 + 3)  # integers, tables, order; 64 steps' tokens
    free = free_for(20 * page + page // 2, device) + rows
    monkeypatch.setattr("sparse_rl.rollout.engine.free_bytes", lambda device: free)
    engine.generate(prompts(5), sampling)
    assert engine.stats.num_pages == 20
    assert rows == engine.cache.queries.nbytes + engine.decoders[1.0, 1.0, None, 3].rows.num_bytes
    assert (engine.stats.num_preemptions > 0) == (policy.name == "full")

    free -= rows + 20 * page  # by now they are there
    engine.generate(prompts(5), sampling)
    assert engine.stats.num_pages == 20


def test_a_pool_that_follows_a_schedule_stays(tiny, prompts):
    """However long answers get, it is no larger than the schedule's last step asks for."""
    policy = Streaming(budget=named((0, 20, 40), (8, 16, 24)), interval=8)
    engine = Engine(tiny(), policy, EngineConfig(rows=2, page_size=16))
    assert engine.bounded
    pages = []
    for max_tokens in (10, 60, 10, 80):
        engine.generate(prompts(5), Sampling(max_tokens=max_tokens, n=2, stop_ids=()))
        pages.append(engine.stats.num_pages)
    assert pages == [3, 6, 6, 6], "a page a row and one more, then two"
    assert len(engine.decoders) == 1 and next(iter(engine.decoders.values())).max_entries == 32
