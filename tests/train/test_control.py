# SPDX-License-Identifier: Apache-2.0
"""The budget that follows the tail: against made-up models whose right budget is known, and in a run."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import accumulate, pairwise
from types import SimpleNamespace

import pytest
import torch
from control_plant import CONFIG, FINE, GRID, Plant, controller, grid_of, tail
from small_run import small_trainer, without_times

from sparse_rl.evaluate import EvalConfig
from sparse_rl.kv import RKV
from sparse_rl.kv.schedule import Schedule, load, save
from sparse_rl.metrics import read_log
from sparse_rl.model.load import load as load_model
from sparse_rl.objective.correction import PRESETS
from sparse_rl.objective.tail import tails
from sparse_rl.rollout import EngineConfig, Sampling
from sparse_rl.tasks import Chain
from sparse_rl.train import OptimizerConfig, UpdateConfig
from sparse_rl.train.control import ControlConfig, Controller, measure
from sparse_rl.train.update import Updated
from sparse_rl.types import Prompt


@pytest.mark.parametrize("start", range(18))
@pytest.mark.some(8)
def test_from_every_start_to_every_right_budget_within_30_steps_and_it_stays(start):
    for right in range(18):
        levels = [level for (level,) in Plant([right]).run(controller(GRID[start]), 200)]
        assert levels[29] == right
        away = [level for level in levels[29:] if level != right]
        assert set(away) <= {right - 1}, "tries of the next cheaper one"
        assert len(away) < 0.1 * len(levels), "ever fewer of them"


@pytest.mark.parametrize("start", [0, 17])
@pytest.mark.some(1)
def test_with_noise_it_is_within_a_grid_step_and_stays(start):
    """Many random models of several bins: from far too small and far too large."""
    late = []
    for _ in range(50):
        right = list(accumulate([random.randrange(1, 8), *random.choices(range(3), k=4)]))
        plant = Plant(right, slope=random.uniform(1.0, 4.0), tokens=random.choice([500, 5000, 50000]), spread=1000)
        history = plant.run(controller(GRID[start], bins=5), 90)
        late += [abs(got - want) for levels in history[29:] for got, want in zip(levels, right, strict=True)]
    assert sum(distance <= 1 for distance in late) > 0.96 * len(late), "about one model in 250 ends further off"
    assert sum(distance == 0 for distance in late) > 0.6 * len(late)


@pytest.mark.parametrize(("spread", "tokens", "rollouts"), [(60, 300, 4), (200, 1000, 8), (1000, 5000, 64)])
def test_rollouts_that_differ_do_not_drive_it_up(spread, tokens, rollouts):
    """A step's share is no better known than that of `spread` tokens, fewer than there are: it stays within a step."""
    apart = []
    for run in range(12):
        right = random.randrange(4, 14)
        plant = Plant([right], tokens=tokens, spread=spread, rollouts=rollouts)
        history = plant.run(controller(GRID[(0, 3, 17)[run % 3]]), 400)[100:]
        apart.append(sum(abs(level - right) > 1 for (level,) in history) / len(history))
    # One run in a hundred is apart for a while, one in two hundred stays so: four of twelve are no chance.
    assert sum(share < 0.05 for share in apart) >= 9, apart
    assert sum(apart) / len(apart) < 0.26, apart


def evicting(bins=3, **settings):
    """A random model whose later bins suffer from what the earlier ones evicted."""
    right = list(accumulate([random.randrange(1, 6), *random.choices(range(4), k=bins - 1)]))
    return Plant(right, slope=random.uniform(1.0, 4.0), loss=random.uniform(0.5, 4.0), **settings)


def like_rkv(**settings):
    """As R-KV was measured on the look-up chain: a constant budget passes from 27, 40 and 40 on."""
    return Plant([2, 6, 6], slope=3.0, loss=1.5, grid=FINE, **settings)


@pytest.mark.parametrize("noise", [{}, {"spread": 1000}])
@pytest.mark.parametrize("start", [0, -1])
def test_where_entries_are_evicted_it_holds_at_nearly_the_cheapest_and_harms_little_on_the_way(start, noise):
    """Far too small is bad until it has come up; from far too large it is soon seen that a step went too far."""
    held = 0.06 if noise else 0.055  # the limit is 0.05, and a share is known to a fifth of that
    early, late, extra = [], [], []
    for plant in [like_rkv(**noise), *(evicting(**noise) for _ in range(12))]:
        history = plant.run(controller(plant.grid[start], bins=3, grid=plant.grid), 120)
        worst, cheapest = [plant.worst(levels) for levels in history], plant.cost(plant.cheapest())
        early += [share > 0.15 for share in worst[0 if start else 12 : 30]]
        late.append(sum(share <= held for share in worst[30:]) / len(worst[30:]))
        extra.append(sum(plant.cost(levels) - cheapest for levels in history[30:]) / len(history[30:]))
    assert sum(early) < 0.12 * len(early)
    assert sum(share > 0.9 for share in late) >= 11 and sum(late) > 0.95 * len(late), late
    assert max(extra) < 1.5 and sum(extra) < 0.5 * len(extra), extra


def test_no_bin_goes_down_while_a_later_one_fails():
    for plant in [like_rkv(), *(evicting(bins=4) for _ in range(20))]:
        history = plant.run(controller(plant.grid[-1], bins=len(plant.needs), grid=plant.grid), 60)
        for before, after in pairwise(history):
            fallen = min((i for i in range(len(before)) if after[i] < before[i]), default=len(before))
            assert all(plant.share(i, before) <= 0.055 for i in range(fallen + 1, len(before))), (before, after)


def test_a_bin_that_fails_where_it_had_passed_puts_back_those_before_it():
    """What R-KV needs is the same for all: the first could be cheaper by its own tokens, not by those behind it."""
    history = like_rkv().run(controller(FINE[-1], bins=3, grid=FINE), 60)
    assert min(level for levels in history for level in levels) == FINE.index(36)
    assert history[29:] == [[FINE.index(40)] * 3] * 31


def test_a_held_bin_that_fails_lifts_the_one_before_it():
    """A schedule put together from constant budgets: each is enough for its own bin, but the second lacks entries."""
    plant = Plant([5, 6], slope=2.0, loss=3.0)
    assert plant.share(1, [6, 6]) < 0.05 < plant.share(1, [5, 6])
    history = plant.run(controller(f"{GRID[5]}@0+{GRID[6]}@1000", bins=2), 60)
    assert history[5:] == [[6, 6]] * 55


def test_what_earlier_bins_evicted_is_put_right_there():
    """The third bin cannot be mended by its own budget while the second's is small: that one is lifted, no further."""
    for start in (0, 17):
        plant = Plant([3, 4, 9], loss=3.0)
        late = plant.run(controller(GRID[start], bins=3), 400)[30:]
        assert sum(plant.share(2, levels) <= 0.055 for levels in late) > 0.9 * len(late)
        assert all(4 < levels[1] <= levels[2] <= 11 for levels in late)


def test_without_eviction_a_bin_may_need_any_number_of_times_more():
    control = controller(GRID[0], bins=3)
    control.evicts = False  # as for a policy that keeps everything
    assert Plant([1, 2, 16]).run(control, 30)[-1] == [1, 2, 16]


def test_budgets_never_fall_with_length_and_unseen_bins_follow():
    control = controller(GRID[4], bins=4)
    Plant([9, 3]).run(control, 40)
    assert control.levels == [9, 9, 9, 9]
    Plant([2, 3]).run(control, 400)  # the model has changed
    assert control.levels[:2] in ([2, 3], [3, 3]) and control.levels[2:] == [4, 4]
    schedule = control.policy.schedule
    assert [schedule.at(context) for context in (0, 999, 1000, 5000)] == [
        GRID[control.levels[i]] for i in (0, 0, 1, 3)
    ]  # fmt: skip


def test_a_bin_without_tokens_does_not_hold_up_the_others():
    """Prompts are longer than the first bin: nothing is ever measured there, nor in the last two."""
    control = controller(GRID[17], bins=6)
    for _ in range(40):
        measured = Plant([0, 4, 0, 7]).measured(control)
        control.observe([measured[1], measured[3]])
    assert control.levels == [4, 4, 7, 7, 17, 17]
    assert control.policy.schedule.budgets == (GRID[4], GRID[7], GRID[17])


def test_a_bin_that_failed_at_the_top_comes_down_again():
    held = controller(GRID[-1])
    bad, good = tail(0.2), tail(0.0)
    for _ in range(4):
        held.observe([bad])
    assert held.levels[0] == len(GRID) - 1
    for _ in range(60):
        held.observe([good])
    assert held.levels[0] < len(GRID) - 1


def test_it_follows_a_model_that_gets_worse():
    control = controller(GRID[10])
    Plant([5]).run(control, 60)
    assert [level for (level,) in Plant([8]).run(control, 30)][-1] == 8


def test_too_few_tokens_decide_nothing():
    control = controller(GRID[8])
    plant = Plant([3], tokens=20)  # one bad token expected at the limit
    assert plant.run(control, 9)[-1] == [8] and plant.run(control, 1)[-1] == [7]


def test_the_hazard_is_held_as_well():
    config = ControlConfig(auto=True, bin=1000, statistic="hazard", hazard=1e-3)
    control = controller(GRID[0], config=config)
    for _ in range(40):
        bad = 1e-3 * (GRID[6] / GRID[control.levels[0]]) ** 2
        control.observe([tail(1.0, tokens=1e5, hazard=bad)])
    assert control.levels == [6]


def test_a_calibration_is_believed_and_a_number_is_searched_from(tmp_path):
    save(Schedule((0, 1000), (GRID[3], GRID[7])), tmp_path / "schedule.json")
    calibrated = controller(str(tmp_path / "schedule.json"), bins=3)
    assert calibrated.levels == [3, 7, 7]
    assert Plant([3, 7, 7]).run(calibrated, 19) == [[3, 7, 7]] * 19
    assert Plant([3, 7, 7]).run(controller(GRID[3], bins=3), 2)[-1] != [3, 3, 3]


def test_a_calibrations_own_budgets_are_kept():
    """Off the grid they take the place of their neighbours; a step inside a bin could not be kept."""
    kv, config = RKV(budget="270@0+700@500+2100@1000+2200@1500", window=8), ControlConfig(auto=True, bin=500)
    grid = grid_of(config, kv)
    calibrated = Controller(config, kv, grid, 2000)
    assert calibrated.schedule.text == kv.budget and len(grid) == len(GRID)
    with pytest.raises(ValueError, match=r"steps at 500 tokens, inside a bin of control.bin 2000.* control.bin to 500"):
        Controller(ControlConfig(auto=True), kv, grid, 2000)


def test_a_calibration_with_one_step_is_believed_too(tmp_path):
    save(Schedule((0,), (GRID[3],)), tmp_path / "schedule.json")
    for budget in (str(tmp_path / "schedule.json"), f"{GRID[3]}@0"):
        assert Plant([3, 3]).run(controller(budget, bins=2), 19) == [[3, 3]] * 19


def test_a_number_above_the_grid_starts_at_its_top():
    assert controller(1 << 20).levels == [17]


def test_its_state_survives_a_checkpoint():
    one, two = controller(GRID[2], bins=3), controller(GRID[9], bins=3)
    plant = Plant([5, 8, 11])
    plant.run(one, 7)
    one.warned = True
    two.restore(json.loads(json.dumps(one.state())))
    assert two.policy == one.policy and two.warned
    assert plant.run(one, 30) == plant.run(two, 30)


def test_with_another_grid_it_goes_on_from_its_budgets(caplog):
    """Half as wide bins, and twice the contexts."""
    before, kv = controller(GRID[2], bins=2), RKV(budget=GRID[9], window=8)
    Plant([3, 6]).run(before, 60)
    grid = grid_of(longest=2 * 16384)
    after = Controller(ControlConfig(auto=True, bin=500), kv, grid, 4000)
    after.restore(json.loads(json.dumps(before.state())))
    had, has = before.schedule, after.schedule
    assert [has.at(c) for c in range(0, 4000, 500)] == [
        min(b for b in grid if b >= had.at(min(c, 1999))) for c in range(0, 4000, 500)
    ]
    assert "searches from where it was" in caplog.text and grid != GRID
    after.restore({})
    assert after.schedule == has


def test_levels_that_fall_from_bin_to_bin_are_restored_as_a_schedule_that_does_not():
    """A bin's own level may be lower than that of one before it, which lifts it."""
    before = controller(GRID[2], bins=3)
    for state, level in zip(before.bins, (9, 4, 6), strict=True):
        state.level, state.seen = level, True
    assert before.levels == [9, 9, 9]
    after = controller(bins=3, config=replace(CONFIG, target=0.5))
    after.restore(json.loads(json.dumps(before.state())))
    assert after.levels == [9, 9, 9] and after.schedule.budgets[0] == GRID[9]


@pytest.mark.parametrize("changed", [{"target": 0.5}, {"quantile": 0.1}, {"statistic": "hazard"}])
def test_with_another_target_it_searches_anew_from_its_budgets(changed, caplog):
    """What passed and failed was measured against the one before."""
    before = controller(GRID[2])
    Plant([9]).run(before, 60)
    after = controller(config=replace(CONFIG, **changed))
    after.restore(json.loads(json.dumps(before.state())))
    assert after.levels == [9] and "searches from where it was" in caplog.text
    for _ in range(30):
        level = after.levels[0]
        after.observe([tail(0.0 if level >= 3 else 0.4, hazard=0.0 if level >= 3 else 0.1, tokens=400_000.0)])
    assert after.levels == [3]


def test_a_rollout_that_was_scored_for_others_counts_for_them():
    """Of three rollouts one was not scored, and the last, all of it bad, stands for three; prompts have 2 tokens."""
    made = SimpleNamespace(
        prompt=Prompt(ids=(1, 2)),
        token_ids=torch.zeros(40),
        sampler_logprobs=torch.zeros(40),
        completion_mask=torch.ones(40, dtype=torch.bool),
    )
    overlap = [torch.full((40,), value) for value in (1.0, torch.nan, 0.5)]
    updated = Updated(
        metrics={},
        dense_logprobs=tuple(each.log() for each in overlap),
        overlap=tuple(overlap),
        row_weights=torch.tensor([1.0, 0.0, 3.0]),
        accepted=torch.ones(3, dtype=torch.bool),
    )
    one, two = measure([made] * 3, updated, ControlConfig(bin=22))
    for found in (one, two):
        assert len(found.tokens) == 2 and found.share(found.under) == pytest.approx(3 / 4) and found.quantile == 0.5
        assert sum(found.tokens) == pytest.approx(20 * 4**2 / (1 + 3**2))  # (sum w)^2 / sum w^2
    assert (one.start, two.start) == (0, 22)


def test_few_tokens_a_step_are_judged_in_the_end():
    """19 tokens of two rollouts a step, and 3 of one in the bin behind it: all bad, or all good."""
    for bad in (0, 1):
        control = controller(GRID[8], bins=2)
        for _ in range(80):
            rows = torch.tensor([0] * 10 + [1] * 9 + [2] * 3)
            overlap, contexts = torch.full((22,), 1.0 - bad), torch.tensor([30] * 19 + [1030] * 3)
            control.observe(
                tails(overlap, overlap, contexts, rows, torch.ones(22), width=1000, target=0.86, quantile=0.05)
            )
        assert all(state.failed >= 8 if bad else state.failed < 0 for state in control.bins)
        assert all((level > 8) == bad and level != 8 for level in control.levels)


def test_a_schedule_s_text_is_read_back():
    schedule = Schedule((0, 10, 20, 30), (4, 4, 8, 9))
    assert schedule.text == "4@0+8@20+9@30"
    assert all(load(schedule.text).at(context) == schedule.at(context) for context in range(50))
    with pytest.raises(ValueError, match=r"kv.budget is '8@0\+4@9': its budget falls"):
        load("8@0+4@9")
    with pytest.raises(ValueError, match="which `sparse-rl train` holds"):
        load("auto")


def test_a_resumed_run_is_the_run_that_was_never_stopped(tmp_path):
    """The budget moves at every step: too small for such a target, and each step is judged."""
    control = ControlConfig(
        auto=True, target=0.99, smallest=8, largest=32, budgets=5, multiple=1, bin=16, patience=1, quantile=0.2
    )
    parts = {"control": control, "optimizer": OptimizerConfig(learning_rate=1e-3), "kv": RKV(budget=8, window=4)}
    small_trainer(tmp_path / "whole", parts=parts).train()
    small_trainer(tmp_path / "parts", parts=parts, steps=2).train()
    resumed = small_trainer(tmp_path / "parts", parts=parts, resume_from_checkpoint=True)
    resumed.train()
    whole, again = (without_times(tmp_path / name) for name in ("whole", "parts"))
    for line in [*whole, *again]:
        line.pop("kv/peak_bytes", None)  # a page table keeps the room that it grew to
    assert again == whole
    assert sum(line["kv/budget_moves"] for line in whole[1:]) > 2
    assert whole[-1]["kv/budget/16"] > whole[1]["kv/budget/16"] == 8
    assert resumed.eval_engines["sparse"].kv == resumed.engine.kv != resumed.kv


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("start", [8, 128])
def test_on_the_embedded_model_it_finds_the_calibrated_budget(start, tmp_path):
    """From far too small and far too large: within a grid step of the cheapest budget that holds, and stays there."""
    control = ControlConfig(auto=True, target=0.9, smallest=8, largest=128, budgets=9, multiple=1, bin=32)
    samples = Sampling(n=8, max_tokens=56)

    def trainer(name, budget, control=control, prompts=8):
        parts = {
            "kv": RKV(budget=budget, interval=4, window=4),
            "sampling": samples,
            "engine": EngineConfig(rows=64, page_size=16),
            "correction": PRESETS["mask"],
            "update": UpdateConfig(max_tokens=8192, skip_zero_rows=False),
            "optimizer": OptimizerConfig(learning_rate=1e-6),
            "eval": EvalConfig(prompts=0),
            "control": control,
        }
        return small_trainer(
            tmp_path / name, task=Chain(), loaded=load_model("embedded"), parts=parts, steps=50,
            prompts_per_step=prompts, save_every=0,
        )  # fmt: skip

    held, passes = trainer("auto", start), []
    grid = held.controller.grid
    assert len(grid) == 9 and (grid[0], held.controller.levels[0]) == (8, 0 if start == 8 else 8)
    for budget in grid:
        probe = trainer(f"at{budget}", budget, ControlConfig(target=0.9, bin=32), prompts=40)
        rollouts = probe._roll_out()
        measured = measure(rollouts, probe._learn(rollouts, torch.randn(len(rollouts))), control)
        passes.append([tail.share(tail.under) <= 0.05 for tail in measured if tail.start in (32, 64)])
    right = [min(i for i, each in enumerate(passes) if each[bin]) for bin in range(2)]
    held.train()
    lines = read_log(tmp_path / "auto" / "metrics.jsonl")[30:]
    for line in lines:
        for bin, want in zip((32, 64), right, strict=True):
            assert abs(grid.index(line[f"kv/budget/{bin}"]) - want) <= 1, (bin, right, line[f"kv/budget/{bin}"])
