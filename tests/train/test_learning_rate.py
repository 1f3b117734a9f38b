# SPDX-License-Identifier: Apache-2.0
"""The optimiser's settings: rates by hand, counted by update, weight decay for matrices."""

from __future__ import annotations

import math

import pytest
from small_run import small_trainer

from sparse_rl.metrics import read_log
from sparse_rl.model.load import load
from sparse_rl.train import OptimizerConfig, UpdateConfig
from sparse_rl.train.master import MasterWeights


def test_learning_rates_by_hand():
    linear = OptimizerConfig(learning_rate=1.0, schedule="linear", warmup=2)
    assert [linear.rate(i, 6) for i in range(6)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    cosine = OptimizerConfig(learning_rate=2.0, schedule="cosine")
    assert [cosine.rate(i, 4) for i in range(4)] == pytest.approx([2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5)])
    assert OptimizerConfig(learning_rate=3.0).rate(10**9, 10) == 3.0


def test_the_schedule_reaches_the_optimizer(tmp_path):
    optimizer = OptimizerConfig(learning_rate=1e-3, schedule="linear")
    small_trainer(tmp_path / "run", steps=2, parts={"optimizer": optimizer}).train()
    rates = [line["learning_rate"] for line in read_log(tmp_path / "run" / "metrics.jsonl")[1:]]
    assert rates == pytest.approx([1e-3 * (1.0 + 0.75) / 2, 1e-3 * (0.5 + 0.25) / 2])  # two updates a step


def test_the_schedule_counts_every_pass(tmp_path):
    parts = {
        "optimizer": OptimizerConfig(learning_rate=1e-3, schedule="linear"),
        "update": UpdateConfig(num_iterations=2),
    }
    small_trainer(tmp_path / "run", steps=2, parts=parts).train()
    rates = [line["learning_rate"] for line in read_log(tmp_path / "run" / "metrics.jsonl")[1:]]
    assert rates == pytest.approx([1e-3 * (1.0 + 0.75) / 2, 1e-3 * (0.5 + 0.25) / 2])


def test_the_optimizer_gets_its_settings():
    optimizer = OptimizerConfig(beta1=0.8, beta2=0.95, eps=1e-5).build(MasterWeights(load("embedded").model))
    assert optimizer.defaults["betas"] == (0.8, 0.95) and optimizer.defaults["eps"] == 1e-5


def test_weight_decay_spares_vectors():
    masters = MasterWeights(load("embedded").model)
    matrices, vectors = OptimizerConfig(weight_decay=0.1).build(masters).param_groups
    assert matrices["weight_decay"] == 0.1 and all(p.dim() == 2 for p in matrices["params"])
    assert vectors["weight_decay"] == 0.0 and all(p.dim() == 1 for p in vectors["params"])
    assert len(matrices["params"]) + len(vectors["params"]) == len(masters.masters)
