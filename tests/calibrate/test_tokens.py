# SPDX-License-Identifier: Apache-2.0
"""Overlap, entropy and xi of sampled tokens against distributions computed one token at a time."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from sparse_rl.calibrate.tokens import Tokens, entropy, probe
from sparse_rl.kv import RKV, Full
from sparse_rl.kv.sparse_cache import SparseCache
from sparse_rl.model.load import load
from sparse_rl.objective import mismatch
from sparse_rl.rollout import Engine, EngineConfig, Sampling
from sparse_rl.rollout.memory import Memory
from sparse_rl.types import Prompt

POLICY = RKV(budget=12, interval=4, window=4)
SAMPLING = Sampling(n=2, max_tokens=20, temperature=0.7, seed=3, stop_ids=())


@pytest.fixture(scope="module")
def loaded():
    """A tiny model whose distributions are far from flat, so that what is evicted matters."""
    found = load("tiny", dtype=torch.float64)
    with torch.no_grad():
        for parameter in found.model.parameters():
            parameter.mul_(3.0 if parameter.ndim > 1 else 1.0)
    return found


@pytest.fixture(scope="module")
def prompts(loaded, pytestconfig):
    seed = random.Random(pytestconfig.getoption("--seed")).randrange(1 << 31)
    generator = torch.Generator().manual_seed(seed)
    return [
        Prompt(ids=tuple(torch.randint(3, loaded.vocab_size, (length,), generator=generator).tolist()))
        for length in (9, 14, 5)
    ]


def sampled(loaded, policy, prompts, rows=4):
    return probe(loaded, policy, prompts, SAMPLING, EngineConfig(rows=rows, page_size=16), Memory())


@torch.no_grad()
def brute_force(loaded, policy, prompts):
    """(dense, sparse) distributions and the token, of every token the engine samples, by transformers' own loop."""
    rollouts = Engine(loaded, policy, EngineConfig(rows=4, page_size=16)).generate(prompts, SAMPLING)
    for rollout in rollouts:
        ids = torch.tensor([[*rollout.prompt.ids, *rollout.token_ids.tolist()]])
        dense = loaded.model(ids, use_cache=False).logits[0]
        cache, first = SparseCache(policy), len(rollout.prompt.ids)
        for i in range(len(rollout.token_ids)):
            part = ids[:, :first] if i == 0 else ids[:, first + i - 1 : first + i]
            sparse = loaded.model(part, past_key_values=cache).logits[0, -1]
            p, q = ((logits / SAMPLING.temperature).softmax(-1) for logits in (dense[first + i - 1], sparse))
            yield p, q, int(rollout.token_ids[i])


def test_against_brute_force(loaded, prompts, monkeypatch):
    exact = sampled(loaded, POLICY, prompts)
    monkeypatch.setattr(mismatch, "EXACT_VOCABULARY", 1)  # as if the vocabulary were large: the best 20 are known
    bracketed = sampled(loaded, POLICY, prompts, rows=1)  # in blocks of two prompts
    want: dict[str, list[float]] = {"overlap": [], "top20": [], "entropy": [], "log_xi": []}
    for p, q, token in brute_force(loaded, POLICY, prompts):
        both = set(p.topk(20).indices.tolist()) & set(q.topk(20).indices.tolist())
        want["overlap"].append(float(sum(min(a, b) for a, b in zip(p.tolist(), q.tolist(), strict=True))))
        want["top20"].append(sum(min(float(p[v]), float(q[v])) for v in both))
        want["entropy"].append(float(-(p * p.log()).sum()))
        want["log_xi"].append(float((p[token] / q[token]).log()))
    assert bracketed.rollouts.tolist() == exact.rollouts.tolist(), "numbered on from block to block"
    overlap = np.array(want["overlap"])
    assert overlap.min() < 0.9 < overlap.max(), "something to measure"
    for name in ("lower", "upper"):
        np.testing.assert_allclose(getattr(exact, name), overlap, atol=1e-5)
    for each in (exact, bracketed):
        np.testing.assert_allclose(each.top20, want["top20"], atol=1e-5)
        np.testing.assert_allclose(each.log_xi, want["log_xi"], atol=1e-4)
    np.testing.assert_allclose(exact.entropy, want["entropy"], atol=1e-4)
    assert (bracketed.lower <= overlap + 1e-5).all() and (overlap <= bracketed.upper + 1e-5).all()
    assert (bracketed.top20 <= bracketed.lower + 1e-6).all(), "a token of both lists is one of the sampler's"
    assert (bracketed.upper - bracketed.lower).max() > 1e-3, "a bracket, not the exact value again"
    assert (bracketed.entropy <= exact.entropy + 1e-5).all()


def test_where_tokens_stand(loaded, prompts, tmp_path):
    found = sampled(loaded, POLICY, prompts)
    assert found.num_rollouts == 6 and found.lengths.tolist() == [20] * 6
    assert found.contexts.reshape(6, 20)[:, 0].tolist() == [9, 9, 14, 14, 5, 5]
    assert found.contexts.reshape(6, 20)[4].tolist() == list(range(5, 25))
    assert 0 < found.held < found.full
    found.save(tmp_path / "run.npz")
    again = Tokens.load(tmp_path / "run.npz")
    assert again is not None and np.array_equal(again.top20, found.top20)
    assert (again.num_rollouts, again.full) == (6, found.full)
    (tmp_path / "run.npz").write_bytes((tmp_path / "run.npz").read_bytes()[:500])
    assert Tokens.load(tmp_path / "run.npz") is None and Tokens.load(tmp_path / "none.npz") is None
    with open(tmp_path / "run.npz", "wb") as file:
        np.save(file, found.top20)  # one array is no archive
    assert Tokens.load(tmp_path / "run.npz") is None


def test_the_dense_cache_is_the_floor(loaded, prompts):
    found = sampled(loaded, Full(), prompts)
    assert found.lower.min() > 1 - 1e-5 and np.abs(found.log_xi).max() < 1e-4 and found.held == found.full


def test_entropy_by_hand():
    half = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]]).log()
    assert entropy(half).tolist() == pytest.approx([1.5 * np.log(2), 0.0])
    assert float(entropy(half[:1, :1])) == pytest.approx(np.log(2)), "the others as one"
