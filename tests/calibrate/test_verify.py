# SPDX-License-Identifier: Apache-2.0
"""Schedules run as they are, in a made-up world whose every answer is known: the cheapest that holds, and the notes."""

from __future__ import annotations

import importlib
from dataclasses import replace

import numpy as np
import pytest

from sparse_rl.calibrate import Calibration, CalibrationConfig, CalibrationObserver, calibrate
from sparse_rl.calibrate.tokens import Tokens
from sparse_rl.kv import RKV, Full, Quest
from sparse_rl.kv.schedule import Schedule
from sparse_rl.model.load import load
from sparse_rl.rollout import EngineConfig, Sampling
from sparse_rl.tasks import Chain

BIN, ROLLOUTS = 10, 20
STARTS = (0, BIN, 2 * BIN)
GRID = tuple(range(32, 132, 4))
CONFIG = CalibrationConfig(budgets=GRID, bin=BIN, min_tokens=100, bootstrap=10)
HALF = np.array([10, 14, 22])  # entries at which a bin's overlap is 1 - 1/e
GIVES = np.array([[0, 0, 0], [8, 0, 0], [21, 10, 0]])  # bin j keeps at most GIVES[j, i] more than bin i < j had


FORGIVES = np.array([[0, 0, 0], [50, 0, 0], [60, 4, 0]])  # of the second bin alone


def evicting(own, gives=GIVES):
    """The tails of a cache that evicts: what it held before limits what it has now."""
    kept = np.array([min(own[i] + gives[j, i] for i in range(j + 1)) for j in range(3)])
    return 1 - np.exp(-kept / HALF)


class World(CalibrationObserver):
    """Instead of a model: an overlap for each bin from its budgets, and how many tokens the answers have."""

    def __init__(self, tails, length=lambda own: 3 * BIN):
        self.tails, self.length, self.runs = tails, length, []

    def probe(self, loaded, policy, *_, **__):
        own = None if isinstance(policy, Full) else [policy.schedule.at(start) for start in STARTS]
        tails, length = (np.ones(3), 3 * BIN) if own is None else (np.asarray(self.tails(own)), self.length(own))
        contexts = np.tile(np.arange(length), ROLLOUTS)
        overlap = tails[contexts // BIN].astype(np.float32)
        zero = np.zeros_like(overlap)
        return Tokens(
            rollouts=np.repeat(np.arange(ROLLOUTS), length), contexts=contexts, lower=overlap, upper=overlap,
            top20=overlap, entropy=zero, log_xi=zero, num_rollouts=ROLLOUTS, held=1.0, read=1.0, full=2.0,
        )  # fmt: skip

    def on_run(self, run, seconds, left_s):
        self.runs.append(run)


@pytest.fixture(scope="module")
def asked():
    return Calibration(
        loaded=load("embedded"),
        policy=RKV(interval=4, window=4),
        prompts=Chain(letters=3, steps=2, filler=0).stream(0, 2, 0),
        sampling=Sampling(n=1, max_tokens=100),
        engine=EngineConfig(rows=2),
        config=CONFIG,
    )


@pytest.fixture
def found(asked, tmp_path, monkeypatch):
    """The results of a calibration in a world, in one folder."""

    def found(world, policy=asked.policy, **settings):
        monkeypatch.setattr(importlib.import_module("sparse_rl.calibrate.calibrate"), "probe", world.probe)
        config = replace(CONFIG, **settings)
        given = replace(asked, policy=policy, config=config)
        return calibrate(given, tmp_path / "c", resume=(tmp_path / "c").exists(), observer=world)

    return found


def own_of(results):
    schedule = Schedule(*(tuple(results["schedule"][key]) for key in ("starts", "budgets")))
    return [schedule.at(start) for start in STARTS]


@pytest.mark.parametrize("gives", [GIVES, FORGIVES])
@pytest.mark.some(1)
def test_no_bin_of_the_schedule_can_be_cheaper_and_a_lower_target_is_never_dearer(found, gives):
    """One schedule is the smallest in this world: what a bin needs is a least budget of each bin before it."""
    before = [0, 0, 0]

    def tails(own):
        return evicting(own, gives)

    for target in (0.8, 0.86, 0.9, 0.93, 0.96, 0.98, 0.99):
        world = World(tails)
        results = found(world, target=target, verify=16)
        own = own_of(results)
        assert (tails(own) >= target - 0.03).all()
        for i, budget in enumerate(own):
            cheaper = [*own[:i], max((b for b in GRID if b < budget), default=0), *own[i + 1 :]]
            alone = 1 - np.exp(-cheaper[i] / HALF[i])
            falls = i > 0 and cheaper[i] < own[i - 1]
            assert alone < target or falls or (tails(cheaper) < target - 0.03).any(), (target, own, i)
        assert all(a >= b for a, b in zip(own, before, strict=True)), (target, before, own)
        before = own
        assert sum("@" in run for run in world.runs) <= 16


def test_runs_on_the_way_down_are_shown_and_not_done_twice(found):
    world = World(evicting)
    first = found(world, target=0.96)
    shown = [run for run in world.runs if "@" in run]
    assert 2 < len(shown) <= 16 and "40@0+52@10+72@20" in shown and own_of(first) == [40, 52, 72]
    tried = [Schedule(tuple(t["starts"]), tuple(t["budgets"])).text for t in first["tried"]]
    assert [text for text in tried if "+" in text] == shown, "constant budgets are the grid's own runs"
    (note,) = (note for note in first["notes"] if note.startswith("the cheapest budgets bin by bin, "))
    least = first["tried"][0]
    assert Schedule(tuple(least["starts"]), tuple(least["budgets"])).text in note
    low = least["tails"][2]
    assert low < 0.93 and f"they hold too little in the contexts 20-30 ({low:.3f})." in note
    again = World(evicting)
    assert found(again, target=0.96)["schedule"] == first["schedule"] and again.runs == []


def test_without_rounds_a_constant_budget_holds_and_a_note_says_that_less_may(found):
    results = found(World(evicting), target=0.96, verify=1)
    own = own_of(results)
    assert len(set(own)) == 1 and (evicting(own) >= 0.93).all()
    assert any("cheaper ones left to try" in note and "--verify 2 --resume" in note for note in results["notes"])
    more = found(World(evicting), target=0.96, verify=20)
    assert own_of(more) < own and not any("cheaper" in note for note in more["notes"])


def test_a_cache_that_loses_nothing_keeps_the_grids_budgets(found):
    def tails(own):
        """Each bin by itself; as a schedule the second holds less than alone."""
        return 1 - np.exp(-np.array(own) / HALF) - [0, 0.1 * (own[0] != own[1] < 52), 0]

    quest = Quest(first=1, last=1, dense_layers=0)
    results = found(World(tails), quest, target=0.96)
    least = [next(b for b in GRID if 1 - np.exp(-b / half) >= 0.96) for half in HALF]
    assert own_of(results) == [least[0], 52, least[2]] and least[1] == 48


def test_where_no_budget_meets_the_target_the_others_are_lowered_all_the_same(found):
    def tails(own):
        return np.minimum(evicting(own), [1, 1, 0.7])

    results = found(World(tails), target=0.9)
    assert own_of(results)[0] < own_of(results)[2] == GRID[-1]
    assert tails(own_of(results))[2] > 0.67
    assert "no budget meets the target in the contexts 20-30" in " ".join(results["notes"])


def test_contexts_that_a_schedule_does_not_reach_are_not_verified(found):
    """The schedule's answers end early, so that its own run says nothing of the last bin."""

    def short(own):
        return 3 * BIN if len(set(own)) == 1 else 2 * BIN + 2

    results = found(World(lambda own: 1 - np.exp(-np.array(own) / HALF), short), target=0.96)
    assert results["tried"][0]["tails"][2] is None
    assert len(set(own_of(results))) == 1, "only what was measured is taken"
    said = " ".join(results["notes"])
    assert "too few tokens in the contexts 20-30, and answers that get shorter are a warning sign" in said


def test_contexts_that_nothing_reaches_are_named(found):
    """No sparse run reaches the last bin; the schedule is taken for the others, and says so."""
    world = World(evicting, lambda own: 2 * BIN + 2)
    for verify in (0, 16):
        said = " ".join(found(world, target=0.96, verify=verify)["notes"])
        assert "its answers have too few tokens in the contexts 20-30, so nothing is verified there" in said
