# SPDX-License-Identifier: Apache-2.0
"""Rewards on held-out prompts while a run trains: means and standard errors by hand, failures and refusals counted."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
from small_run import CHAIN, TEMPERATURE, digits

from sparse_rl.evaluate import EvalConfig, evaluate
from sparse_rl.grading import Failed
from sparse_rl.kv import RKV
from sparse_rl.model.load import load
from sparse_rl.rollout import Engine, EngineConfig, Sampling
from sparse_rl.tasks import Rewards


def test_evaluation_equals_the_mean_over_prompts_by_hand():
    loaded = load("embedded")
    engine = Engine(loaded, RKV(budget=12, interval=4, window=4), EngineConfig(rows=8))
    prompts, sampling = CHAIN.held_out(5), Sampling(n=3, max_tokens=24, seed=3, temperature=TEMPERATURE)
    got = evaluate(engine, prompts, sampling, Rewards((digits,)))
    rollouts = engine.generate(prompts, sampling)
    texts = [loaded.tokenizer.decode(rollout.token_ids) for rollout in rollouts]
    means = [sum(digits(texts[3 * i : 3 * i + 3])) / 3 for i in range(5)]
    assert len(set(means)) == 5
    assert got["reward"] == pytest.approx(statistics.mean(means))
    assert got["reward_se"] == pytest.approx(statistics.stdev(means) / math.sqrt(5))
    held, full = (sum(x) for x in zip(*[(sum(r.kv.held), r.kv.full) for r in rollouts], strict=True))
    assert got["kv_saved_frac"] == pytest.approx(1 - held / full)
    assert got["failed"] == 0


def test_evaluation_leaves_out_and_counts_what_graders_failed_at():
    def fails_at_zero(completions, **columns):
        return [Failed("hung") if i % 5 == 0 else float(i) for i in range(len(completions))]

    engine = Engine(load("embedded"), config=EngineConfig(rows=8))
    got = evaluate(engine, CHAIN.held_out(3), Sampling(n=2, max_tokens=4), Rewards((fails_at_zero,)))
    assert got["failed"] == 2 and got["reward"] == pytest.approx((1 + 2.5 + 4) / 3)  # of (-, 1), (2, 3), (4, -)


def test_a_declined_sample_does_not_take_its_prompt_with_it():
    engine = Engine(load("embedded"), RKV(budget=12, interval=4, window=4), EngineConfig(rows=8))
    grades = [1.0, None, 2.0, 5.0, 5.0, 5.0]
    sampling = Sampling(n=3, max_tokens=24, temperature=TEMPERATURE)
    got = evaluate(engine, CHAIN.held_out(2), sampling, Rewards((lambda **_: grades,)))
    assert got["reward"] == pytest.approx((1.5 + 5.0) / 2)
    rollouts = engine.generate(CHAIN.held_out(2), sampling)
    assert got["clipped_ratio"] == sum(r.finish_reason == "length" for r in rollouts) / 6
    assert got["mean_length"] == pytest.approx(sum(len(r.token_ids) for r in rollouts) / 6)


def test_evaluation_settings_are_checked():
    with pytest.raises(ValueError, match=r"eval.n is 0"):
        EvalConfig(n=0)
    assert replace(EvalConfig(), prompts=0).prompts == 0
