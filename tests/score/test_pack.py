# SPDX-License-Identifier: Apache-2.0
"""Packing loses nothing, keeps to its budget, and points at the right tokens."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_rl.score.pack import flatten, pack
from sparse_rl.types import KVStats, Prompt, Rollout

STATS = KVStats(held=(), full=0, hybrid=0.0, peak=0, peak_bytes=0, num_compressions=0)
CPU = torch.device("cpu")


def rollout(prompt_len: int, num_tokens: int, start: int = 0) -> Rollout:
    tokens = torch.arange(start, start + num_tokens)
    return Rollout(
        prompt=Prompt(ids=tuple(range(1000, 1000 + prompt_len))),
        sample=0,
        token_ids=tokens,
        sampler_logprobs=-tokens.float(),
        completion_mask=torch.ones(num_tokens, dtype=torch.bool),
        finish_reason="length",
        kv=STATS,
    )


def test_the_docstrings_example():
    rollouts = [rollout(2, 2), rollout(1, 1, start=7)]
    (microbatch,) = pack(rollouts, max_tokens=100)
    assert microbatch.ids.tolist() == [1000, 1001, 0, 1, 1000, 7]
    assert microbatch.boundaries == [0, 4, 6]
    assert microbatch.predicting.tolist() == [1, 2, 4]
    assert microbatch.tokens.tolist() == [0, 1, 2]
    completions = flatten(rollouts, CPU)
    assert completions.token_ids.tolist() == [0, 1, 7] and completions.rows.tolist() == [0, 0, 1]


@given(
    sizes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 30)), min_size=1, max_size=20),
    max_tokens=st.integers(1, 80),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_every_chosen_rollout_is_packed_once_within_the_budget(sizes, max_tokens, data):
    rollouts = [rollout(p, n, start=100 * i) for i, (p, n) in enumerate(sizes)]
    chosen = data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True))
    completions = flatten(rollouts, CPU)
    microbatches = pack(rollouts, max_tokens, chosen)
    assert sorted(i for m in microbatches for i in m.indices) == sorted(chosen)
    for m in microbatches:
        assert len(m.ids) <= max_tokens or len(m.indices) == 1
        assert (m.ids[m.predicting + 1] == completions.token_ids[m.tokens]).all()
        assert set(completions.rows[m.tokens].tolist()) == set(m.indices)
        assert len(m.tokens) == sum(len(rollouts[i].token_ids) for i in m.indices)
        assert m.boundaries[-1] == len(m.ids)


def test_the_longest_are_packed_first():
    """Two rows of 6 + 4; shortest first, it would be three."""
    packed = pack([rollout(1, n) for n in (3, 3, 5, 5)], max_tokens=10)
    assert [m.indices for m in packed] == [(0, 2), (1, 3)]
