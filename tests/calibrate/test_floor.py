# SPDX-License-Identifier: Apache-2.0
"""A dense cache that is itself below the target: said after its own run, with what to do, which works."""

from __future__ import annotations

import importlib
import json
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import run
from jsonargparse import Namespace

from sparse_rl.calibrate import Calibration, CalibrationConfig, CalibrationObserver, calibrate
from sparse_rl.calibrate.analysis import tail_row, targets
from sparse_rl.calibrate.floor import judge_dense
from sparse_rl.calibrate.search import cheapest
from sparse_rl.calibrate.tokens import Tokens
from sparse_rl.cli.calibrate import _to_train
from sparse_rl.kv import RKV, Full
from sparse_rl.model.load import load
from sparse_rl.rollout import EngineConfig, Sampling
from sparse_rl.tasks import Chain

BIN, ROLLOUTS, BUDGETS = 10, 20, (32, 48, 64)
CONFIG = CalibrationConfig(budgets=BUDGETS, bin=BIN, min_tokens=100, bootstrap=20)


class World(CalibrationObserver):
    """Instead of a model: each bin's overlap with the dense cache, and the share of it that a budget has."""

    def __init__(self, dense, shares=(0.8, 0.95, 1.0)):
        self.dense, self.events = np.array(dense), []
        self.shares = dict(zip(("full", *BUDGETS), (1.0, *shares), strict=True))

    def probe(self, loaded, policy, *_, **__):
        contexts = np.tile(np.arange(BIN * len(self.dense)), ROLLOUTS)
        budgets = ["full" if isinstance(policy, Full) else policy.schedule.at(context) for context in contexts]
        overlap = (self.dense[contexts // BIN] * [self.shares[budget] for budget in budgets]).astype(np.float32)
        zero, rollouts = np.zeros_like(overlap), np.repeat(np.arange(ROLLOUTS), BIN * len(self.dense))
        return Tokens(
            rollouts=rollouts, contexts=contexts, lower=overlap, upper=overlap, top20=overlap, entropy=zero,
            log_xi=zero, num_rollouts=ROLLOUTS, held=1.0, read=1.0, full=2.0,
        )  # fmt: skip

    def on_begin(self, budgets, done):
        self.events.append(f"{len(budgets)} budgets, {done} done")

    def on_run(self, run, seconds, left_s):
        self.events.append(run)

    def on_note(self, note):
        self.events.append(note)


@pytest.fixture
def found(tmp_path, monkeypatch):
    """The results of a calibration in a world, in one folder."""
    asked = Calibration(
        loaded=load("embedded"),
        policy=RKV(interval=4, window=4),
        prompts=Chain(letters=3, steps=2, filler=0).stream(0, 2, 0),
        sampling=Sampling(n=1, max_tokens=100),
        engine=EngineConfig(rows=2),
        config=CONFIG,
    )

    def found(world, **settings):
        monkeypatch.setattr(importlib.import_module("sparse_rl.calibrate.calibrate"), "probe", world.probe)
        given = replace(asked, config=replace(CONFIG, **settings))
        return calibrate(given, tmp_path / "c", resume=(tmp_path / "c").exists(), observer=world)

    return found


@pytest.mark.parametrize("sure", [False, True])
def test_a_target_that_the_dense_cache_does_not_meet_anywhere_is_refused_before_the_grid(found, tmp_path, sure):
    world = World([0.5, 0.3, 0.4])
    with pytest.raises(ValueError, match=r"the dense cache itself is below the target, 0.86, in every bin") as refused:
        found(world, sure=sure)
    said = str(refused.value)
    assert f"its {'lower end of ' * sure}p05 of top20 overlap is 0.300 (contexts 10-20) to 0.500 (0-10)" in said
    assert "the same command with --relative --resume: the target is then 0.915 of the dense cache's own p05" in said
    assert world.events == ["full"] and [path.name for path in (tmp_path / "c" / "runs").iterdir()] == ["full.npz"]
    with pytest.raises(ValueError, match=r"with --relative --target 0.915 --resume: the target is then 0.915"):
        found(world, sure=sure, target=0.9)


def test_what_it_says_to_do_goes_on_without_another_dense_run(found):
    with pytest.raises(ValueError, match="--relative --resume"):
        found(World([0.5, 0.3, 0.4]))
    world = World([0.5, 0.3, 0.4])
    results = found(world, relative=True)
    assert "full" not in world.events and "00032" in world.events
    assert results["targets"] == pytest.approx([0.915 * floor for floor in (0.5, 0.3, 0.4)])
    assert results["schedule"]["budgets"] == (48,) and all(results["schedule"]["met"]) and results["notes"] == []
    assert (results["settings"]["target"], results["settings"]["relative"]) == (0.915, True)
    assert found(World([0.5, 0.3, 0.4]), relative=True, target=0.75)["schedule"]["budgets"] == (32,)


@pytest.mark.parametrize("verify", [0, 4])
def test_where_it_does_not_meet_it_in_some_bins_that_is_said_first_and_no_larger_budget_is_asked_for(found, verify):
    world = World([1.0, 0.5, 0.9])
    results = found(world, verify=verify, sure=True)
    early = world.events[: world.events.index("3 budgets, 0 done")]
    assert early[0] == "full" and len(early) == 2
    assert early[1].startswith("the dense cache itself is below the target in the contexts 10-20: its lower end of p05")
    assert "as low as 0.500, and 0.86 is asked for" in early[1] and "--relative --resume" in early[1]
    assert results["notes"] == [early[1]] and world.events[-1] == early[1], "and again at the end"
    assert results["schedule"]["budgets"] == (48, 64)


def test_where_the_dense_cache_meets_it_and_no_budget_does_larger_ones_are_to_be_tried(found):
    said = " ".join(found(World([1.0, 0.5, 0.95], shares=(0.7, 0.8, 0.85)))["notes"])
    assert "no budget meets the target in the contexts 0-10, 20-30, where the largest is taken" in said
    assert "the dense cache itself has 0.950 or more there. Try larger budgets, or lower the target." in said


def measured(tail, low):
    return {"top20": {"all": {"p05": tail, "p05_interval": [low, 1.0]}}}


def test_too_few_samples_to_be_sure_of_a_share():
    """The tail is all of itself, but its interval begins lower than the share that is asked for."""
    config = CalibrationConfig(sure=True, relative=True)
    bins, floor = [(0, 60), (60, 120)], {"bins": [measured(0.6, 0.5), measured(0.4, 0.35)]}
    dense = {"bins": bins, "floor": floor, "targets": [0.915 * 0.6, 0.915 * 0.4]}
    with pytest.raises(ValueError, match=r"below the target, 0.915 of the dense p05, in every bin") as refused:
        judge_dense(dense, config)
    assert "is 0.350 (contexts 60-120) to 0.500 (0-60)" in str(refused.value)
    assert "more of them (--num-prompts, --n) and another --output" in str(refused.value)
    assert "with --resume and --target 0.83 or less" in str(refused.value), "0.5 is 0.83 of 0.6"
    assert judge_dense(dense, replace(config, sure=False)) == []
    floor["bins"][1] = measured(0.4, 0.39)
    (note,) = judge_dense(dense, config)
    assert "in the contexts 0-60: its lower end of p05 of top20 overlap is as low as 0.500" in note, "not 0.390"
    floor["bins"][1] = measured(0.4, 0.35)
    met = replace(config, target=0.83)
    assert judge_dense(dense | {"targets": [0.83 * 0.6, 0.83 * 0.4]}, met) == []


def test_too_few_samples_to_be_sure_of_a_target_that_the_dense_tail_meets():
    config, bins = CalibrationConfig(sure=True, target=0.98), [(0, 60), (60, 120)]
    dense = {"bins": bins, "floor": {"bins": [measured(0.99, 0.97), measured(0.985, 0.94)]}, "targets": [0.98, 0.98]}
    with pytest.raises(ValueError, match="in every bin") as refused:
        judge_dense(dense, config)
    assert "samples are too few" in str(refused.value) and "--resume and --target 0.94 or less" in str(refused.value)
    dense["floor"]["bins"][1] = measured(0.97, 0.94)  # more samples would not help there
    with pytest.raises(ValueError, match=r"--relative --target 0\.915 --resume"):
        judge_dense(dense, config)


@pytest.mark.parametrize(("smallest", "notes"), [(0.93, 1), (0.9, 0)])
def test_budgets_that_all_meet_their_share_are_not_told_apart_however_low_a_floor(found, smallest, notes):
    said = found(World([0.9, 0.3], shares=(smallest, 0.95, 1.0)), relative=True, verify=0)["notes"]
    assert len(said) == notes and all(note.startswith("every budget meets the target") for note in said)


@pytest.mark.parametrize(
    ("settings", "targets", "floors", "said"),
    [
        ({}, [0.86, 0.86], [0.99, 0.9], ""),
        ({}, [0.86, 0.86], [0.99, 0.5], "--control.target 0.5"),  # what the dense cache has
        ({"relative": True}, [0.55, 0.3666], [0.6, 0.4], "--control.target 0.366"),
        ({"tail": "p01"}, [0.8, 0.8], [0.9, 0.9], "--control.target 0.8 --control.quantile 0.01"),
        ({"relative": True}, [2e-4, 0.3], [2e-4, 0.4], "--control.target 0.001"),
        ({"tail": "mean"}, [0.8, 0.8], [0.9, 0.9], ""),  # training measures neither of these
        ({"overlap": "lower"}, [0.8, 0.8], [0.9, 0.9], ""),
        ({"tokens": "decision"}, [0.8, 0.8], [0.9, 0.9], ""),
    ],
)
def test_training_is_told_what_to_warn_of_where_that_is_less_than_usual(settings, targets, floors, said):
    config = CalibrationConfig(**settings)
    floor = {"bins": [{config.overlap: {config.tokens: {config.tail: each}}} for each in floors]}
    given = Namespace(model="embedded", kv="snapkv:interval=16", output="cal", max_tokens=99)
    flags, *note = _to_train(given, config, {"targets": targets, "floor": floor})
    start = "to train on it: sparse-rl train --kv.policy snapkv --kv.interval 16 --kv.budget cal/schedule.json"
    start += " --sampling.max_tokens 99 --correction.preset sparse_rl"
    assert flags == f"{start}{' ' * bool(said)}{said} ..." and len(note) == 1 + bool(said)


def test_training_is_told_the_model():
    given = Namespace(model="my model", kv="rkv", output="cal", max_tokens=99)
    floor = {"bins": [{"top20": {"all": {"p05": 0.9}}}]}
    line, *_ = _to_train(given, CalibrationConfig(), {"targets": [0.9], "floor": floor})
    assert "sparse-rl train --model 'my model' --kv.policy rkv --kv.budget cal/schedule.json" in line


def test_the_target_is_sparrows_on_the_scale_that_is_asked_for():
    assert CalibrationConfig().goal == 0.86 and replace(CalibrationConfig(), relative=True).goal == 0.915
    assert CalibrationConfig(relative=True, target=0.8).goal == 0.8
    code, out, _ = run("calibrate", "--dry-run", "--sure")
    assert code == 0 and "target: lower end of p05 of top20 overlap, 0.86\n" in out
    code, out, _ = run("calibrate", "--dry-run", "--relative")
    assert code == 0 and "target: p05 of top20 overlap, 0.915 of the dense p05\n" in out


@pytest.mark.some(0)
def test_the_command(tmp_path):
    """At such a temperature 20 of 35 ids hold two thirds."""
    flags = ["--num-prompts", "4", "--n", "2", "--max-tokens", "16", "--task.letters", "3", "--temperature", "8"]
    flags += ["--kv", "rkv:window=4,interval=4", "--budgets", "12", "--bin", "32", "--min-tokens", "30"]
    flags += ["--output", str(tmp_path / "a b")]
    code, _, err = run("calibrate", *flags)
    assert code == 2 and "error: the dense cache itself is below the target" in err and "00012" not in err
    code, out, err = run("calibrate", *flags, "--relative", "--resume")
    assert code == 0, err
    assert "full" not in err and "00012: done in" in err and "target 0.915 of the dense p05" in out
    results = json.loads((tmp_path / "a b" / "results.json").read_text())
    said = json.loads((tmp_path / "a b" / "schedule.json").read_text())
    assert (said["target"], said["relative"]) == (0.915, True)
    floors = tail_row(results["floor"], CalibrationConfig())
    (given,) = (line for line in out.splitlines() if line.startswith("to train on it"))
    target = float(given.split("--control.target ")[1].split()[0])
    assert 0.915 * min(floors) - 1e-3 <= target <= 0.915 * min(floors) < 0.86, "what training can hold"
    code, _, err = run("train", *shlex.split(given.split("sparse-rl train ")[1].removesuffix(" ...")), "--dry-run")
    assert code == 0, err


@pytest.mark.parametrize("policy", ["snapkv", "pages_mean"])
def test_the_page_has_the_schedule_of_a_real_model_and_what_it_holds(policy):
    root = Path(__file__).parents[2]
    results = json.loads((root / "benchmarks" / "results" / "calibrate_smollm2" / f"{policy}.json").read_text())
    config = CalibrationConfig(**(results["settings"] | {"budgets": ()}))
    floors = [each["top20"]["all"]["p05"] for each in results["floor"]["bins"]]
    tails = np.array([tail_row(run, config) for run in results["runs"]])
    found = cheapest(tails, results["budgets"], [start for start, _ in results["bins"]], targets(config, floors))
    assert all(found.met)
    rows = (root / "docs" / "calibrate.md").read_text(encoding="utf-8").splitlines()
    name = {"snapkv": "SnapKV: entries", "pages_mean": "`pages_mean`: entries read"}[policy]
    at = rows.index("| " + " | ".join([name, *(str(found.schedule.at(start)) for start, _ in results["bins"])]) + " |")
    held = [each["top20"]["all"]["p05"] for each in results["verified"]["bins"]]
    assert rows[at + 1] == "| " + " | ".join(["P05 as run", *(f"{tail:.3f}" for tail in held)]) + " |"
    assert "| " + " | ".join(["asked for", *(f"{each:.3f}" for each in results["targets"])]) + " |" in rows
