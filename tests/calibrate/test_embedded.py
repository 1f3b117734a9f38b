# SPDX-License-Identifier: Apache-2.0
"""The embedded model calibrated for real, and a training run on what that gives: two minutes together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sparse_rl.calibrate import Calibration, CalibrationConfig, calibrate
from sparse_rl.calibrate.analysis import tail_row
from sparse_rl.evaluate import EvalConfig
from sparse_rl.kv import RKV
from sparse_rl.kv.schedule import Schedule
from sparse_rl.model.load import load
from sparse_rl.rollout import EngineConfig, Sampling
from sparse_rl.tasks import Chain
from sparse_rl.train import OptimizerConfig, Trainer, TrainerConfig, UpdateConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # far less where the processor is its own
SLACK = 0.03  # below the target
P05 = CalibrationConfig(page=8, lowest=16, highest=96, num_budgets=9, bin=60, min_tokens=600, bootstrap=50)
SURE = replace(P05, sure=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("calibration") / "c"


def calibrated(folder, config):
    """What is found, the tails of budgets x bins, and each bin's place in the grid."""
    asked = Calibration(
        loaded=load("embedded"),
        policy=RKV(interval=8),
        prompts=Chain().stream(0, 48, 0),
        sampling=Sampling(n=1, max_tokens=195),
        engine=EngineConfig(rows=48),
        config=config,
    )
    results = calibrate(asked, folder, resume=folder.exists())
    tails = np.array([tail_row(run, config) for run in results["runs"]])
    print(f"{config.tail}{', lower end' * config.sure} by budget, contexts {results['bins']}")
    print("\n".join(f"{budget:4} {row.round(3)}" for budget, row in zip(results["budgets"], tails, strict=True)))
    print(results["schedule"], [(tried["budgets"], np.round(tried["tails"], 3)) for tried in results["tried"]])
    assert len(results["bins"]) >= 3
    assert (tails[0] < config.target).all() and (tails[-1] > 0.95).all(), "every bin's curve crosses the target"
    assert min(tail_row(results["floor"], config)) > 0.999, "the dense cache is as dense as it gets"
    assert min(tail_row(results["verified"], config)) >= config.target - SLACK
    schedule = Schedule(tuple(results["schedule"]["starts"]), tuple(results["schedule"]["budgets"]))
    places = [results["budgets"].index(schedule.at(start)) for start, _ in results["bins"]]
    for place, column in zip(places, tails.T, strict=True):
        assert column[place] >= config.target - SLACK
    return results, tails, places


def test_the_schedule_holds_its_target(folder):
    """The tail by budget is a curve that rises, and the schedule sits where it crosses the target."""
    results, tails, places = calibrated(folder, P05)
    # The next cheaper budget is below the target: in the bin itself, or, where the bin alone would do with less, in a
    # later one, which misses what was evicted here. That was measured, before the budget was raised.
    for i, place in enumerate(places):
        alone = place == 0 or tails[place - 1, i] < P05.target
        cheaper = [t for t in results["tried"][:-1] if _at(t, results["bins"][i][0]) < results["budgets"][place]]
        assert alone or (cheaper and min(cheaper[-1]["tails"]) < P05.target), (i, place)


def _at(tried, context):
    return Schedule(tuple(tried["starts"]), tuple(tried["budgets"])).at(context)


def test_a_training_run_keeps_what_the_schedule_holds(folder, tmp_path):
    """P05 falls from 0.9 to 0.1 in one step of the grid, and 48 rollouts do not tell on which side of it a budget is.

    So the lower end of their interval must meet the target (docs/calibrate.md).
    """
    results, _, _ = calibrated(folder, SURE)
    trainer = Trainer(
        load("embedded"),
        Chain(),
        config=TrainerConfig(output_dir=str(tmp_path / "run"), steps=6, prompts_per_step=24, save_every=0),
        kv=RKV(interval=8, budget=str(folder / "schedule.json")),
        sampling=Sampling(n=2, max_tokens=195),
        engine=EngineConfig(rows=48),
        update=UpdateConfig(skip_zero_rows=False),
        optimizer=OptimizerConfig(learning_rate=2e-5),
        eval=EvalConfig(prompts=0),
    )
    steps, learn = [], trainer._learn

    def watched(rollouts, advantages):
        updated = learn(rollouts, advantages)
        contexts = torch.cat([len(r.prompt.ids) + torch.arange(len(r.token_ids)) for r in rollouts])
        overlap = torch.cat(updated.overlap)
        spans = [(contexts >= start) & (contexts < end) for start, end in results["bins"]]
        steps.append([overlap[span] for span in spans])
        return updated

    trainer._learn = watched
    trainer.train()
    tails = [float(torch.cat(of_bin).quantile(0.05)) for of_bin in zip(*steps, strict=True)]
    print("P05 in training, by bin:", np.round(tails, 3))
    assert min(tails) >= SURE.target - SLACK
