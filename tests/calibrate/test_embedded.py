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
from sparse_rl.kv import RKV, Quest
from sparse_rl.kv.schedule import Schedule
from sparse_rl.model.load import load
from sparse_rl.rollout import EngineConfig, Sampling
from sparse_rl.tasks import Chain
from sparse_rl.train import OptimizerConfig, Trainer, TrainerConfig, UpdateConfig

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # far less where the processor is its own
SLACK = 0.03  # below the target
P05 = CalibrationConfig(page=8, lowest=16, highest=96, num_budgets=9, bin=60, min_tokens=600, bootstrap=50)
SURE = replace(P05, sure=True)
EVICTS = RKV(interval=8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("calibration") / "c"


def calibrated(folder, config, policy=EVICTS):
    """What is found, the tails of budgets x bins, and each bin's place in the grid."""
    asked = Calibration(
        loaded=load("embedded"),
        policy=policy,
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
    assert (tails[0] < config.goal).all() and (tails[-1] > 0.95).all(), "every bin's curve crosses the target"
    assert min(tail_row(results["floor"], config)) > 0.999, "the dense cache is as dense as it gets"
    assert min(tail_row(results["verified"], config)) >= config.goal - SLACK
    places = [results["budgets"].index(budget) for budget in own_of(results["schedule"], results)]
    for place, column in zip(places, tails.T, strict=True):
        assert column[place] >= config.goal - SLACK
    return results, tails, places


def own_of(schedule, results):
    """A budget a bin."""
    steps = Schedule(tuple(schedule["starts"]), tuple(schedule["budgets"]))
    return [steps.at(start) for start, _ in results["bins"]]


def check_cheapest(results, tails, places, config):
    """In no bin is there a cheaper budget: it does not hold the bin by itself, or a run that has it here holds less."""
    tried = {tuple(own_of(each, results)): each["tails"] for each in results["tried"]}
    for i, place in enumerate(places):
        if place == 0 or tails[place - 1, i] < config.goal or (i and place == places[i - 1]):
            continue  # the last: it would fall, and the bin before cannot be smaller either
        cheaper = [results["budgets"][each - (j == i)] for j, each in enumerate(places)]
        assert min(tried[tuple(cheaper)]) < config.goal - SLACK, cheaper


def test_the_schedule_holds_its_target(folder):
    """The tail by budget is a curve that rises, and the schedule sits where it crosses the target."""
    check_cheapest(*calibrated(folder, P05), P05)


def test_where_nothing_is_evicted_the_next_cheaper_budget_of_every_bin_is_below_the_target(tmp_path):
    config = replace(P05, budgets=(32, 48, 64, 80, 112))
    _, tails, places = calibrated(tmp_path / "c", config, Quest(first=1, last=1, dense_layers=1))
    for i, place in enumerate(places):
        assert place > 0 and tails[place - 1, i] < config.goal


def test_a_training_run_keeps_what_the_schedule_holds(folder, tmp_path):
    """P05 falls from 0.9 to 0.1 in one step of the grid, and 48 rollouts do not tell on which side of it a budget is.

    So the lower end of their interval must meet the target (docs/calibrate.md).
    """
    results, tails, places = calibrated(folder, SURE)
    check_cheapest(results, tails, places, SURE)
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
    assert min(tails) >= SURE.goal - SLACK
