# SPDX-License-Identifier: Apache-2.0
"""TRL's own step runs on the rows it is handed and says what it held."""

from __future__ import annotations

import random
import sys
from types import SimpleNamespace

import pytest
import torch

from sparse_rl.bench import trl_step

GROUP = 4


def rows(seed: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    draw = random.Random(seed)

    def text(longest: int) -> tuple[int, ...]:
        return tuple(draw.randrange(256) for _ in range(draw.randint(1, longest)))

    return [prompt for prompt in (text(6), text(6)) for _ in range(GROUP)], [text(40) for _ in range(2 * GROUP)]


def measure(prompts, completions, **changes):
    settings = {"group": GROUP, "microbatch": 2, "recompute": True, "steps": 2, "seed": 0, **changes}
    return trl_step.time_trl("tiny", "cpu", torch.float32, prompts, completions, **settings)


def test_a_step_on_given_rows(monkeypatch):
    trl = pytest.importorskip("trl")
    prompts, completions = rows(random.randrange(2**32))
    built, seen = [], []
    now = 0.0  # of a clock that only the calls below move
    random_module, generate = trl_step.random_module, trl.GRPOTrainer._generate
    compute_loss, adam = trl.GRPOTrainer._compute_loss, torch.optim.AdamW.step

    def keep(*args, **kwargs):
        built.append(random_module(*args, **kwargs))
        return built[0]

    def sample(self, prompts):
        nonlocal now
        now += 1000
        return generate(self, prompts)

    def watch(self, model, inputs):
        nonlocal now
        now += 1 if len(seen) >= 4 else 50  # warming up is slow
        seen.append(inputs)
        return compute_loss(self, model, inputs)

    def step(self, *args, **kwargs):
        nonlocal now
        now += 10
        return adam(self, *args, **kwargs)

    monkeypatch.setattr(trl_step, "random_module", keep)
    monkeypatch.setattr(trl_step, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(trl.GRPOTrainer, "_generate", sample)
    monkeypatch.setattr(trl.GRPOTrainer, "_compute_loss", watch)
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    result = measure(prompts, completions)

    longest = max(map(len, prompts)) + max(map(len, completions))
    assert result["tokens"] == sum(map(len, prompts + completions))
    assert result["padded_tokens"] == 8 * longest
    assert result["seconds"] == 4 * 1 + 10  # four micro-batches and the optimizer, nothing of the sampling
    assert result["tokens_per_s"] == pytest.approx(result["tokens"] / 14)
    assert result["peak_bytes"] is None
    assert "float32" in result["note"] and "no pass for old log-probs" in result["note"]

    # Three steps of four micro-batches of two, none trimmed, each row of the input once a step.
    assert len(seen) == 12
    for first in (0, 4, 8):
        batches = seen[first : first + 4]
        trained = []
        for batch in batches:
            assert batch["prompt_ids"].shape[1] + batch["completion_ids"].shape[1] == longest
            assert (batch["advantages"] != 0).all()
            for ids, mask in zip(batch["completion_ids"], batch["completion_mask"], strict=True):
                trained.append(tuple(ids[mask.bool()].tolist()))
        assert sorted(trained) == sorted(completions)

    start = random_module("tiny", "cpu", torch.float32, 0, attn_implementation="sdpa").state_dict()
    moved = built[0].state_dict()
    assert all((moved[name] != start[name]).any() for name in start)


def test_what_does_not_fit(monkeypatch):
    prompts, completions = rows(0)
    with pytest.raises(RuntimeError, match="3 does not divide 8"):
        measure(prompts, completions, microbatch=3)
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(RuntimeError, match="trl cannot be imported"):
        measure(prompts, completions)


def test_trl_refuses_a_group_of_one():
    pytest.importorskip("trl")
    with pytest.raises(RuntimeError, match="at least 2 generations"):
        measure(*rows(0), group=1)
