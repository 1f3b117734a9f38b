# SPDX-License-Identifier: Apache-2.0
"""The budget that follows the tail: against made-up models whose right budget is known, and in a run."""

from __future__ import annotations

import json
import math
import random
from itertools import accumulate, pairwise

import pytest
import torch
from small_run import small_trainer, without_times

from sparse_rl.cli.train import read, train_parser
from sparse_rl.evaluate import EvalConfig
from sparse_rl.kv import RKV, Full
from sparse_rl.kv.schedule import Schedule, load, save
from sparse_rl.metrics import read_log
from sparse_rl.model.load import load as load_model
from sparse_rl.objective.correction import PRESETS
from sparse_rl.objective.tail import BinTail, tails
from sparse_rl.rollout import EngineConfig, Sampling
from sparse_rl.tasks import Chain
from sparse_rl.train import OptimizerConfig, UpdateConfig
from sparse_rl.train.control import ControlConfig, Controller, measure

CONFIG = ControlConfig(auto=True, bin=1000)
GRID = CONFIG.grid
KV = RKV(budget=512, window=8)


class Plant:
    """A model whose share of bad tokens falls with the budget, and rises with length: logistic in its logarithm.

    With `loss`, a bin suffers from a budget below its own need in the one before it, as where entries are evicted.
    """

    def __init__(self, levels, slope=1.5, tokens=4000, spread=None, loss=0.0):
        # The cheapest that passes is `level`: the share is the limit a little below it.
        self.needs = [math.log(GRID[level]) - 0.3 * math.log(GRID[1] / GRID[0]) for level in levels]
        self.slope, self.tokens, self.spread, self.loss = slope, tokens, spread, loss

    def share(self, i, levels):
        spare = math.log(GRID[levels[i]]) - self.needs[i]
        lost = min(0.0, math.log(GRID[levels[max(0, i - 1)]]) - self.needs[i])
        at_limit = math.log(0.05 / 0.95)
        return 1 / (1 + math.exp(self.slope * (spare + self.loss * lost) - at_limit))

    def measured(self, controller):
        found = []
        levels = controller.levels
        for i in range(len(self.needs)):
            share = self.share(i, levels)
            if self.spread is not None:  # tokens of a rollout share their fate
                share = random.betavariate(share * self.spread, (1 - share) * self.spread)
            found.append(BinTail(start=1000 * i, tokens=self.tokens, quantile=0.9, under=share, hazard=0.0))
        return found

    def run(self, controller, steps):
        """The levels after each step."""
        history = []
        for _ in range(steps):
            controller.observe(self.measured(controller))
            history.append(controller.levels[: len(self.needs)])
        return history


def controller(budget=GRID[0], bins=1, config=CONFIG):
    return Controller(config, RKV(budget=budget, window=8), bins * config.bin)


def test_the_grid_is_geometric_and_aligned():
    assert len(GRID) == 18 and GRID[0] == 256 and GRID[-1] == 16384 and all(budget % 16 == 0 for budget in GRID)
    factors = [after / before for before, after in pairwise(GRID)]
    assert max(factors) / min(factors) < 1.1
    assert ControlConfig(smallest=8, largest=64, budgets=4, multiple=1).grid == (8, 16, 32, 64)


@pytest.mark.parametrize("start", range(18))
def test_from_every_start_to_every_right_budget_within_30_steps_and_it_stays(start):
    for right in range(18):
        levels = [level for (level,) in Plant([right]).run(controller(GRID[start]), 200)]
        assert levels[29] == right
        away = [level for level in levels[29:] if level != right]
        assert set(away) <= {right - 1}, "tries of the next cheaper one"
        assert len(away) < 0.1 * len(levels), "ever fewer of them"


@pytest.mark.parametrize("start", [0, 17])
def test_with_noise_it_is_within_a_grid_step_and_stays(start):
    """Many random models of several bins: from far too small and far too large."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    random.seed(seed)
    late = []
    for _ in range(100):
        right = list(accumulate([random.randrange(1, 8), *random.choices(range(3), k=4)]))
        plant = Plant(right, slope=random.uniform(1.0, 4.0), tokens=random.choice([500, 5000, 50000]), spread=1000)
        history = plant.run(controller(GRID[start], bins=5), 90)
        late += [abs(got - want) for levels in history[29:] for got, want in zip(levels, right, strict=True)]
    assert sum(distance <= 1 for distance in late) > 0.99 * len(late)
    assert max(late) <= 3 and sum(distance == 0 for distance in late) > 0.5 * len(late)


def test_what_earlier_bins_evicted_is_put_right_there():
    """The third bin cannot be mended by its own budget while the second's is small: that one is lifted, no further."""
    for start in (0, 17):
        plant = Plant([3, 4, 9], loss=3.0)
        late = plant.run(controller(GRID[start], bins=3), 400)[30:]
        assert sum(plant.share(2, levels) <= 0.055 for levels in late) > 0.9 * len(late)
        assert all(4 < levels[1] <= levels[2] <= 11 for levels in late)


def test_without_eviction_a_bin_may_need_any_number_of_times_more():
    control = controller(GRID[0], bins=3)
    control.doubling = None  # as for a policy that keeps everything
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
    bad, good = (BinTail(start=0, tokens=4000, quantile=0.9, under=share, hazard=0.0) for share in (0.2, 0.0))
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
        control.observe([BinTail(start=0, tokens=1e5, quantile=0.1, under=1.0, hazard=bad)])
    assert control.levels == [6]


def test_a_calibration_is_believed_and_a_number_is_searched_from(tmp_path):
    save(Schedule((0, 1000), (GRID[3], GRID[7])), tmp_path / "schedule.json")
    calibrated = controller(str(tmp_path / "schedule.json"), bins=3)
    assert calibrated.levels == [3, 7, 7]
    assert Plant([3, 7, 7]).run(calibrated, 19) == [[3, 7, 7]] * 19
    assert Plant([3, 7, 7]).run(controller(GRID[3], bins=3), 2)[-1] != [3, 3, 3]


def test_a_number_above_the_grid_starts_at_its_top():
    assert controller(1 << 20).levels == [17]


def test_its_state_survives_a_checkpoint():
    one, two = controller(GRID[2], bins=3), controller(GRID[9], bins=3)
    plant = Plant([5, 8, 11])
    plant.run(one, 7)
    two.restore(json.loads(json.dumps(one.state())))
    assert two.policy == one.policy
    assert plant.run(one, 30) == plant.run(two, 30)


def test_another_grid_starts_anew(caplog):
    control = controller(GRID[9])
    control.restore(controller(GRID[2], config=ControlConfig(auto=True, bin=500)).state())
    assert control.levels == [9] and "starts anew" in caplog.text


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ControlConfig(target=1.2), "control.target is 1.2"),
        (lambda: ControlConfig(statistic="mean"), "control.statistic is 'mean'; choose one of tail, hazard"),
        (lambda: ControlConfig(bin=0), "control.bin is 0"),
        (lambda: ControlConfig(auto=True, every=0), "control.every is 0"),
        (lambda: ControlConfig(smallest=64, largest=32), "control.largest 32"),
        (lambda: ControlConfig(smallest=16, largest=64, budgets=9), "lower control.budgets"),
        (lambda: Controller(CONFIG, Full(), 1000), "kv.policy full has none"),
        (lambda: Controller(CONFIG, RKV(budget="512@0+99999@9"), 1000), "99999, above control.largest 16384"),
        (lambda: Controller(ControlConfig(smallest=16, multiple=4), RKV(window=32), 1000), "control.smallest is too"),
    ],
)
def test_bad_settings_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_tails_by_hand():
    """Contexts 0-9 and 10-19; of 20 tokens each, the lowest is the 5th percentile."""
    overlap = torch.cat([torch.linspace(0.5, 1.0, 20), torch.full((20,), 0.9)])
    log_xi = torch.zeros(40)
    log_xi[0] = log_xi[1] = math.log(5e-5)
    contexts = torch.arange(10).repeat(4).sort().values.repeat(1) % 10 + torch.tensor([0] * 20 + [10] * 20)
    one, two = tails(overlap, log_xi, contexts, torch.ones(40), width=10, target=0.86, quantile=0.05)
    assert (one.start, two.start, one.tokens, two.tokens) == (0, 10, 20.0, 20.0)
    assert one.quantile == pytest.approx(0.5) and two.quantile == pytest.approx(0.9)
    assert one.under == pytest.approx(14 / 20) and two.under == 0.0  # 0.5 + 0.5 i / 19 < 0.86 for i <= 13
    assert one.hazard == pytest.approx(0.1) and two.hazard == 0.0


def test_the_share_under_the_target_says_whether_the_quantile_meets_it():
    for _ in range(50):
        overlap, weights = torch.rand(200), torch.randint(1, 5, (200,)).double()
        (tail,) = tails(
            overlap, torch.zeros(200), torch.zeros(200, dtype=torch.long), weights, width=10, target=0.1, quantile=0.1
        )
        assert (tail.under < 0.1) == (tail.quantile >= 0.1) or tail.under == pytest.approx(0.1)
        assert tail.tokens < 200


def test_a_schedule_s_text_is_read_back():
    schedule = Schedule((0, 10, 20, 30), (4, 4, 8, 9))
    assert schedule.text == "4@0+8@20+9@30"
    assert all(load(schedule.text).at(context) == schedule.at(context) for context in range(50))
    with pytest.raises(ValueError, match=r"kv.budget is '8@0\+4@9': its budget falls"):
        load("8@0+4@9")
    with pytest.raises(ValueError, match="which `sparse-rl train` holds"):
        load("auto")


def test_auto_on_the_command_line():
    _, _, parts = read(["--kv.policy", "rkv", "--kv.budget", "auto", "--control.target", "0.9"], train_parser())
    assert parts["control"] == ControlConfig(auto=True, target=0.9) and parts["kv"].budget == 512
    _, _, parts = read(["--kv.policy", "rkv", "--kv.budget", "64"], train_parser())
    assert not parts["control"].auto


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
    whole, again = (without_times(tmp_path / name / "metrics.jsonl") for name in ("whole", "parts"))
    for line in [*whole, *again]:
        line.pop("kv/peak_bytes", None)  # a page table keeps the room that it grew to
    assert again == whole
    assert sum(line["kv/budget_moves"] for line in whole[1:]) > 2
    assert whole[-1]["kv/budget/16"] > whole[1]["kv/budget/16"] == 8
    assert resumed.eval_engines["sparse"].kv == resumed.engine.kv != resumed.kv


@pytest.mark.slow
@pytest.mark.parametrize("start", [8, 128])
def test_on_the_embedded_model_it_finds_the_calibrated_budget(start, tmp_path):
    """From far too small and far too large: within a grid step of the cheapest budget that meets the target."""
    control = ControlConfig(auto=True, target=0.9, smallest=8, largest=128, budgets=9, multiple=1, bin=32)
    grid, samples = control.grid, Sampling(n=8, max_tokens=56)

    def trainer(name, budget, control=control, steps=30):
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
            tmp_path / name, task=Chain(), loaded=load_model("embedded"), parts=parts, steps=steps, prompts_per_step=8,
            save_every=0,
        )  # fmt: skip

    passes = []
    for budget in grid:
        probe = trainer(f"at{budget}", budget, ControlConfig(target=0.9, bin=32))
        rollouts = probe._roll_out()
        measured = measure(rollouts, probe._learn(rollouts, torch.randn(len(rollouts))), control)
        passes.append([tail.under <= 0.05 for tail in measured if tail.start in (32, 64)])
    right = [min(i for i, each in enumerate(passes) if each[bin]) for bin in range(2)]
    held = trainer("auto", start)
    held.train()
    lines = read_log(tmp_path / "auto" / "metrics.jsonl")[-6:]
    for line in lines:
        for bin, want in zip((32, 64), right, strict=True):
            assert abs(grid.index(line[f"kv/budget/{bin}"]) - want) <= 1, (bin, right, line[f"kv/budget/{bin}"])
