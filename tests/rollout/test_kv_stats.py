# SPDX-License-Identifier: Apache-2.0
"""What a rollout says of its cache, in entries and bytes: counted by hand, freed when evicted."""

from __future__ import annotations

import pytest
import torch
from small_engine import engine

from sparse_rl.kv import RKV, Full, Streaming
from sparse_rl.rollout import Sampling
from sparse_rl.rollout.rows import CAPACITY


@pytest.mark.parametrize("policy", [Full(), Streaming(budget=20, interval=7)], ids=lambda p: p.name)
def test_kv_statistics_by_hand(policy, tiny, prompts):
    loaded = tiny()
    (rollout,) = engine(loaded, policy).generate(prompts(15), Sampling(max_tokens=20, stop_ids=()))
    dense = list(range(16, 35))  # the first decode step holds 15 prompt entries and its own
    held = dense if policy.name == "full" else [*range(16, 28), *range(21, 28)]
    assert list(rollout.kv.held) == held and rollout.kv.full == rollout.kv.hybrid == sum(dense)
    assert rollout.kv.saved_frac == pytest.approx(1 - sum(held) / sum(dense))
    assert rollout.kv.peak == max(held) and rollout.kv.num_compressions == (0 if policy.name == "full" else 2)
    pages = -(-max(held) // 16)
    assert rollout.kv.peak_bytes == pages * 16 * loaded.shape.entry_bytes


def test_saved_fractions_of_window_layers(tiny, prompts):
    loaded = tiny("mistral")
    (rollout,) = engine(loaded, Streaming(budget=24, interval=8)).generate(
        prompts(30), Sampling(max_tokens=20, stop_ids=())
    )
    held = sum(rollout.kv.held)
    assert rollout.kv.hybrid == 24 * 19  # transformers keeps 24 entries in every layer
    assert rollout.kv.full == sum(range(31, 50))
    assert rollout.kv.saved_frac == pytest.approx(1 - held / sum(range(31, 50)))
    assert rollout.kv.hybrid_saved_frac == pytest.approx(1 - held / (24 * 19)) and rollout.kv.hybrid_saved_frac < 0


def test_bytes_count_pages_prefill_and_the_remembered_queries(tiny, prompts):
    loaded = tiny()
    page, ring = 16 * loaded.shape.entry_bytes, 2 * 8 * 4 * 32 * 4  # layers, window, heads, width, bytes
    sampler = engine(loaded, RKV(budget=16, interval=8))
    (rollout,) = sampler.generate(prompts(40), Sampling(max_tokens=10, stop_ids=()))
    assert rollout.kv.peak_bytes == 3 * page + ring
    # Rings of four rows and of nobody's; per row six integers, the table's two pages, its place in the order; a cursor;
    # and tokens and log-probs of the last steps.
    state = 8 * (6 * 5 + 2 * 5 + 4 + 1) + CAPACITY * 4 * (8 + 4)
    assert sampler.stats.peak_bytes == 3 * page + 5 * ring + state
    (rollout,) = engine(loaded, Streaming(budget=20, interval=10)).generate(prompts(100), Sampling(max_tokens=3))
    assert rollout.kv.peak_bytes == 7 * page


def test_evicting_really_frees_memory(tiny, prompts):
    """The pool a sparse call needs stays the same however long the responses are; the dense one grows."""
    loaded = tiny()
    peaks = {}
    for name, policy in (("full", Full()), ("rkv", RKV(budget=32, interval=16))):
        for max_tokens in (60, 240):
            sampler = engine(loaded, policy)
            sampler.generate(prompts(10, 10, 10, 10), Sampling(max_tokens=max_tokens, stop_ids=()))
            peaks[name, max_tokens] = sampler.stats.peak_pages
    assert peaks["rkv", 240] == peaks["rkv", 60] == 4 * 3
    assert peaks["full", 240] > 3 * peaks["full", 60]


def test_long_prompts_are_compressed_at_the_end_of_their_prefill(tiny, prompts):
    policy = RKV(budget=20, interval=10)
    sampler = engine(tiny(), policy)
    (rollout,) = sampler.generate(prompts(100), Sampling(max_tokens=4, stop_ids=()), record_kept=True)
    assert rollout.kv.held == (21, 22, 23) and rollout.kv.peak == 100
    assert rollout.kept_positions[0].shape == (2, 2, 20)
    assert (rollout.kept_positions[0][..., -8:] == torch.arange(92, 100)).all()
    (rollout,) = engine(tiny(), RKV(budget=20, interval=10, protect_prompt=True)).generate(
        prompts(100), Sampling(max_tokens=40, stop_ids=())
    )
    assert max(rollout.kv.held) == 130 and rollout.kv.num_compressions == 1


def test_a_prompt_of_exactly_the_budget_is_not_compressed(tiny, prompts):
    (rollout,) = engine(tiny(), Streaming(budget=20, interval=10)).generate(
        prompts(20), Sampling(max_tokens=2, stop_ids=())
    )
    assert rollout.kv.num_compressions == 0
