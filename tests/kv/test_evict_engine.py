# SPDX-License-Identifier: Apache-2.0
"""Evicting policies in the engine: whose queries and keys decide, and tallies that go where their entries go."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from evict_bench import TOLERANCE, name_of
from replay import firing_times, replay_logprobs, rollout_visibility
from slow_evict import SlowSequence

from sparse_rl.kv import GKV, H2O, TOVA, SnapKV
from sparse_rl.kv.cache import PagedCache
from sparse_rl.rollout import Engine, EngineConfig, Sampling

STATEFUL = [H2O(budget=16, interval=9, window=9), GKV(budget=16, interval=9, window=5)]


@pytest.mark.parametrize("policy", STATEFUL, ids=lambda p: p.name)
def test_tallies_travel_with_copied_saved_and_restored_pages(policy, tiny):
    loaded = tiny()
    cache = PagedCache(loaded.shape, num_pages=6, page_size=16, num_rows=2, num_queries=4, keeps_tally=True)
    cache.tallies.copy_(torch.rand(cache.tallies.shape))
    before = cache.tallies.clone()
    cache.copy_pages([1, 2], [5, 3])
    assert torch.equal(cache.tallies[:, [5, 3]], before[:, [1, 2]])
    saved = cache.save([5, 3])
    cache.tallies.zero_()
    cache.restore(saved, [2, 6])
    assert torch.equal(cache.tallies[:, [2, 6]], before[:, [1, 2]])
    cache.clear()
    assert not cache.tallies.any()
    held = sum(pool.nbytes for pool in cache.pools)
    assert held == 7 * 16 * policy.entry_bytes(loaded.shape) > 7 * 16 * loaded.shape.entry_bytes
    cache.release()
    assert cache.tallies.numel() == 0


@pytest.mark.parametrize("policy", STATEFUL, ids=lambda p: p.name)
def test_tallies_of_a_full_engine_do_not_leak(policy, tiny, prompts):
    """A small pool whose pages go round, refills, samples of one prompt, a second call: what one row alone draws."""
    loaded = tiny("gemma3", dtype=torch.float64)
    sampling = Sampling(max_tokens=30, n=2, seed=3, stop_ids=(0, 1, 2, 3))
    batch = prompts(3, 40, 25)
    alone = Engine(loaded, policy, EngineConfig(rows=1, page_size=16)).generate(batch, sampling)
    engine = Engine(loaded, policy, EngineConfig(rows=3, page_size=16, pool_pages=8))
    engine.generate(prompts(40, 40, seed=9), sampling)
    assert engine.cache.tallies.any()
    together = engine.generate(batch, sampling)
    assert [r.token_ids.tolist() for r in together] == [r.token_ids.tolist() for r in alone]
    assert max(rollout.kv.num_compressions for rollout in together) >= 3
    page = 16 * policy.entry_bytes(loaded.shape)
    for rollout in together:
        assert rollout.kv.peak_bytes == -(-rollout.kv.peak // 16) * page + loaded.shape.query_bytes(policy.num_queries)


@pytest.mark.parametrize(
    "policy",
    [*STATEFUL, H2O(budget=16, interval=9, window=12, index="shared"), TOVA(budget=16, interval=9)],
    ids=name_of,
)
def test_the_engines_own_queries_and_keys_decide_what_is_kept(policy, tiny, reference, prompts):
    """Every firing, by a slow sequence that is fed the queries and keys of the masked dense model."""
    loaded, model = tiny("gemma3", dtype=torch.float64), reference("gemma3", dtype=torch.float64)
    engine = Engine(loaded, policy, EngineConfig(rows=2, page_size=16))
    for rollout in engine.generate(prompts(3, 24), Sampling(max_tokens=50, n=1, stop_ids=()), record_kept=True):
        prompt_len = len(rollout.prompt.ids)
        ids = torch.tensor([[*rollout.prompt.ids, *rollout.token_ids.tolist()]], device=model.device)
        seen: dict = {}
        replay_logprobs(model, ids, rollout_visibility(rollout, policy, loaded.shape), seen)
        layers = sorted(seen)
        queries, keys = (np.stack([seen[layer][i].cpu().numpy() for layer in layers]) for i in (0, 1))
        none = keys[:, :, :0], queries[:, :, :0]
        slow = SlowSequence(policy, prompt_len, loaded.shape.windows, loaded.shape.scales, *none)
        times = firing_times(prompt_len, len(rollout.token_ids), policy.target(0, 0), policy.trigger(0, 0))
        assert len(times) >= 3
        for time, kept in zip(times, rollout.kept_positions, strict=True):
            slow.grow(keys[:, :, slow.seen : time], queries[:, :, slow.seen : time])
            importance = slow.fire()
            chosen = {place: kept[place].tolist() for place in slow.places}
            for place in slow.places:
                assert slow.protected(*place) <= set(chosen[place])
                dropped = [importance[place][p] for p in slow.live(*place) if p not in chosen[place]]
                free = [p for p in chosen[place] if p not in slow.protected(*place)]
                stayed = [importance[place].get(p, -np.inf) for p in free]
                if policy.index == "per_head" and dropped and stayed:
                    assert max(dropped) <= min(stayed) + TOLERANCE
                elif dropped and stayed:
                    assert max(dropped) <= min(x for x in stayed if x > -np.inf) + TOLERANCE
            slow.keep(chosen)


def test_one_set_for_all_layers_and_heads(tiny, prompts):
    engine = Engine(tiny(), SnapKV(budget=16, interval=8, index="shared"), EngineConfig(rows=2, page_size=16))
    for rollout in engine.generate(prompts(40, 5), Sampling(max_tokens=40, stop_ids=()), record_kept=True):
        assert len(rollout.kept_positions) >= 3
        for kept in rollout.kept_positions:
            assert (kept == kept[:1, :1]).all()
