# SPDX-License-Identifier: Apache-2.0
"""The budgets to choose among: what the policy, the pages and the contexts allow, or an error that says why."""

from __future__ import annotations

from itertools import pairwise

import pytest
from control_plant import GRID, grid_of, tail
from small_run import small_trainer

from sparse_rl.cli.train import read, train_parser
from sparse_rl.kv import RKV, Full, PagesMean
from sparse_rl.model.load import load
from sparse_rl.train import Trainer
from sparse_rl.train.control import ControlConfig, Controller


def test_the_grid_is_geometric_and_aligned():
    assert len(GRID) == 18 and GRID[0] == 256 and GRID[-1] == 16384 and all(budget % 16 == 0 for budget in GRID)
    factors = [after / before for before, after in pairwise(GRID)]
    assert max(factors) / min(factors) < 1.1
    small = ControlConfig(auto=True, smallest=8, largest=64, budgets=4, multiple=1)
    assert grid_of(small, RKV(window=4)) == (8, 16, 32, 64)


def test_the_grid_ends_where_nothing_is_dropped():
    """Cut at budget + interval entries, of which the last token is none: from longest - interval on there is no cut."""
    kv = RKV(budget=56, interval=8, window=8)
    assert [grid_of(kv=kv, longest=longest)[-1] for longest in (241, 4096, 4104, 4105)] == [233, 4096, 4096, 4112]
    protecting = RKV(budget=56, interval=8, window=8, protect_prompt=True)
    assert grid_of(kv=protecting, prompt=100, longest=348)[-1] == 240
    assert grid_of(kv=RKV(interval=128), prompt=200, longest=220)[-1] == 200  # a prompt beyond the budget is cut
    assert grid_of(kv=PagesMean(), longest=4096, page_size=16)[-1] == 4096
    assert grid_of(ControlConfig(auto=True, largest=128), kv, longest=4096)[-1] == 128
    assert grid_of(ControlConfig(auto=True, largest=100), kv, longest=4096)[-1] == 96, "it bounds the memory"
    own = RKV(budget="24@0+100@200", interval=8, window=8)
    assert grid_of(ControlConfig(auto=True, largest=100), own, longest=4096)[-1] == 100, "a schedule's own are kept"


def test_the_grid_begins_with_what_the_policy_and_the_pages_allow():
    assert grid_of(kv=RKV(window=40), longest=400)[0] == 40 and grid_of(kv=RKV(window=40), longest=2000)[0] == 48
    for size in (16, 64, 128, 256):
        grid = grid_of(kv=PagesMean(budget=1104), longest=16384, page_size=size)
        assert grid[0] == max(256, 3 * size) and all(budget % size == 0 for budget in grid)
        control = Controller(ControlConfig(auto=True), PagesMean(budget=1104), grid, 2000)
        for _ in range(60):
            control.policy.check_page_size(size)
            control.observe([tail(0.0)])
        assert control.levels == [0]
    assert grid_of(kv=RKV(budget="24@0+56@200", window=8), longest=4096)[0] == 16, "a schedule is within it"
    assert grid_of(longest=1 << 17)[0] == 512, "and so is a number"


def test_a_schedule_beyond_what_contexts_need_is_no_error():
    long = RKV(budget="512@0+99999@9000", window=8)
    control = Controller(ControlConfig(auto=True, largest=16384), long, grid_of(kv=long, longest=4096), 4096)
    assert control.schedule.text == f"{min(b for b in control.grid if b >= 512)}@0"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: ControlConfig(target=1.2), "control.target is 1.2"),
        (lambda: ControlConfig(largest=64), "control.largest is given, but the budget does not move; set kv.budget"),
        (lambda: ControlConfig(statistic="hazard"), "control.statistic is given, but the budget does not move"),
        (lambda: ControlConfig(patience=3), "control.patience is given"),
        (lambda: ControlConfig(multiple=3), "control.multiple is given"),
        (lambda: ControlConfig(budgets=3), "control.budgets is given"),
        (lambda: ControlConfig(auto=True, hazard=1e-3), "control.hazard is given, but control.statistic is 'tail'"),
        (lambda: ControlConfig(statistic="mean"), "control.statistic is 'mean'; choose one of tail, hazard"),
        (lambda: ControlConfig(bin=0), "control.bin is 0"),
        (lambda: ControlConfig(bin=10**30), "control.bin is 10+; it must be at most 16777216"),
        (lambda: ControlConfig(auto=True, budgets=10**9), "control.budgets is 1000000000; it must be from 2 to 1000"),
        (lambda: ControlConfig(auto=True, every=0), "control.every is 0"),
        (lambda: ControlConfig(auto=True, smallest=64, largest=32), "control.largest is 32"),
        (lambda: ControlConfig(auto=True, smallest=0), "control.smallest is 0"),
        (lambda: ControlConfig(auto=True, budgets=1), "control.budgets is 1"),
        (lambda: grid_of(kv=Full()), "kv.policy full has none"),
        (lambda: grid_of(ControlConfig(auto=True, smallest=256), longest=240), "no budget .*smallest 256; .*112 on"),
        (
            lambda: grid_of(ControlConfig(auto=True, smallest=112), longest=240),
            "only 112 .*Lower control.smallest",
        ),
        (lambda: grid_of(kv=RKV(interval=512), longest=400, prompt=8), "nothing from 8 on .kv.interval 512."),
        (
            lambda: grid_of(ControlConfig(auto=True, largest=256), PagesMean(), page_size=128),
            "pages of 128, control.largest 256;",
        ),
        (
            lambda: Controller(ControlConfig(auto=True, largest=16384), RKV(budget="512@0+99999@9"), GRID, 1000),
            "99999, above control.largest 16384",
        ),
        (
            lambda: Controller(ControlConfig(auto=True, smallest=256), RKV(budget="24@0+56@400"), GRID, 1000),
            "begins with 24, below control.smallest 256; lower control.smallest",
        ),
    ],
)
def test_bad_settings_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()


def test_auto_on_the_command_line():
    _, _, parts = read(["--kv.policy", "rkv", "--kv.budget", "auto", "--control.target", "0.9"], train_parser())
    assert parts["control"] == ControlConfig(auto=True, target=0.9) and parts["kv"].budget == 512
    _, _, parts = read(["--kv.policy", "rkv", "--kv.budget", "64"], train_parser())
    assert not parts["control"].auto


def test_the_default_recipe_can_evict(tmp_path):
    """Contexts of about 230 tokens: budgets far below that, and one that drops nothing."""
    folder = ["--trainer.output_dir", str(tmp_path / "run")]
    _, task, parts = read(["--kv.budget", "auto", *folder], train_parser())
    loaded, _ = load("embedded"), parts.pop("grading")
    trainer = Trainer(loaded, task.build(loaded.tokenizer), **parts)
    (prompt,) = {len(prompt.ids) for prompt in trainer.task.stream(5, 20, 3)}
    grid, longest = trainer.controller.grid, prompt + 195
    assert grid[0] == 8 and len(grid) == 18
    assert grid[-2] + 8 < longest == grid[-1] + 8, "only the last drops nothing"
    assert trainer.engine.kv.budget == f"{grid[-1]}@0"


def test_a_run_that_has_nothing_to_choose_does_not_begin(tmp_path):
    parts = {"kv": PagesMean(budget=64, first=1, last=2), "control": ControlConfig(auto=True)}
    with pytest.raises(ValueError, match=r"no budget .*pages_mean on pages of 16; and contexts end at \d\d tokens"):
        small_trainer(tmp_path, parts=parts)
