# SPDX-License-Identifier: Apache-2.0
"""The cells of benchmarks/evidence: names, what needs what, and what they do."""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
from pathlib import Path

import pytest


def all_cells(cells, pool):
    makers = [cells.warm_cells, *pool._makers()]
    return [cell for bed in cells.TESTBEDS.values() for make in makers for cell in make(bed)]


def test_a_name_means_one_cell(evidence):
    cells, pool = evidence
    found = all_cells(cells, pool)
    by_name = {}
    for cell in found:
        assert by_name.setdefault(cell.name, cell) == cell
        json.dumps(cell.settings)
    for cell in found:
        assert all(need in by_name for need in cell.needs), cell
    for bed in ("short", "long"):
        arms = [cell for cell in found if cell.part == "a" and cell.settings["testbed"]["name"] == bed]
        assert len(arms) == 3 + 8 * 3 * 3
    assert not any(cell.part in "fg" and cell.settings["testbed"]["name"] == "long" for cell in found)
    kept = {cell.name for cell in found if cell.settings.get("keep")} | {
        cell.name for cell in found if cell.part == "warm"
    }
    assert {need for cell in found if cell.part == "c" for need in cell.needs} <= kept


def test_budgets_are_measured_before_training(evidence):
    """The predictors need a measurement for every policy and budget that something is trained with."""
    cells, pool = evidence
    for bed in cells.TESTBEDS.values():
        made = [cell for make in pool._makers() for cell in make(bed)]
        measured = {(c.settings["policy"], c.settings["budget"]) for c in made if c.work == "measure"}
        runs = [c.settings for c in made if c.work == "train" and "target" not in c.settings]
        trained = {(own["policy"], own["budget"]) for own in runs}
        assert trained <= measured


def test_schedules_and_budgets_that_follow_the_tail(evidence, tmp_path):
    """Four targets, what finds its budget by itself at one of them, and constants that part a does not have."""
    cells, pool = evidence
    import part_g
    import work

    from sparse_rl.train.distill import DistillConfig

    assert part_g.cells(cells.LONG) == []
    calibrate, *runs = part_g.cells(cells.SHORT)
    arms = [(run.settings["arm"], run.settings.get("target"), bool(run.needs)) for run in runs]
    assert {arm: arms.count(arm) for arm in arms} == dict.fromkeys(
        [
            *(("schedule", target, True) for target in part_g.TARGETS),
            *(("auto", 0.86, False), ("auto_distill", 0.86, False)),
        ],
        3,
    ) | {("tis", None, False): 6}
    assert {run.settings["preset"] for run in runs} == {"tis"} and 0.86 in part_g.TARGETS
    others = {cell.name for make in pool._makers() if make is not part_g.cells for cell in make(cells.SHORT)}
    assert others.isdisjoint(run.name for run in runs)
    for run in runs:
        assert work.control_of(run.settings).auto == run.settings["arm"].startswith("auto")
        assert DistillConfig(**run.settings.get("distill", {})).r == (8 if "distill" in run.settings["arm"] else 0)
    assert len({pool._kind(run) for run in runs}) == 2  # an adapter takes longer
    (tmp_path / calibrate.name).mkdir()
    (tmp_path / calibrate.name / "config.json").write_text('{"0.02": "32@0", "0.86": "41@0+44@60"}')
    assert [work.budget_of(run.settings, tmp_path) for run in (runs[0], runs[3], runs[-1])] == [
        "41@0+44@60",
        "32@0",
        90,
    ]


def test_what_a_run_followed_by_its_own_names(evidence):
    import work

    from sparse_rl.kv import RKV

    steps = [{"tail/0/overlap": 0.5, "tail/0/tokens": 9.0, "kv/budget/0": 32, "reward": 1.0}, {"tail/0/overlap": None}]
    found = work.followed(steps, RKV(budget="32@0+44@60"))
    assert found == {"bins": {"kv/budget/0": [32.0, None], "tail/0/overlap": [0.5, None]}, "budgets": "32@0+44@60"}


@pytest.mark.slow
def test_a_calibration_and_what_trains_on_it(evidence, tmp_path):
    """The smallest of testbeds: one bin, two targets, two steps."""
    cells, _ = evidence
    import part_g
    import work

    small = {"letters": 3, "steps": 2, "filler": 0, "prompts": 2, "n": 2, "problems": 4, "interval": 4}
    bed = dataclasses.replace(cells.TRIAL, **small, budgets=(30, 20, 16), sweep=(12,))
    made = {cell.name: cell for cell in part_g.cells(bed)}
    calibrate = made["trial-calibrate"]
    found = work.calibrate(calibrate, "cpu", tmp_path)
    assert list(found["schedules"]) == [f"{target:g}" for target in part_g.TARGETS]
    assert list(found["curve"]) == [12, 13, 14, 15, 17, 18, 20, 21, 23, 25, 28, 30]
    assert all(len(at["p05"]) == len(found["bins"]) for at in found["curve"].values())
    for target, held in found["schedules"].items():  # the interval's lower end decides, and P05 is told as measured
        assert all(low <= tail for low, tail in zip(held["lower_ends"], held["tails"], strict=True))
        assert min(held["lower_ends"]) >= float(target) - 0.03 or held["notes"]
    budgets = json.loads((tmp_path / "trial-calibrate" / "config.json").read_text())
    run = work.train(made["trial-schedule-0.86-s0"], "cpu", tmp_path)
    assert run["budgets"] == budgets["0.86"] and len(run["bins"]["tail/overlap_lowest"]) == 2
    run = work.train(made["trial-auto_distill-0.86-s0"], "cpu", tmp_path)
    assert run["bins"]["kv/budget/0"][0] == 30 and run["bins"]["distill/overlap_p05"][0] is not None


def test_a_measurement_by_hand(evidence, monkeypatch):
    """Two rollouts of three tokens: xi is 1, 1e-5, 0.5 and 1, 1, 2e-4, the overlap 1 but for one token of each."""
    import torch
    import work

    from sparse_rl.score import DenseScores
    from sparse_rl.types import KVStats, Prompt, Rollout

    unknown = KVStats(held=(), full=0, hybrid=0.0, peak=0, peak_bytes=0, num_compressions=0)
    rollouts, scores = [], []
    for xi, shared in (([1.0, 1e-5, 0.5], [1.0, 0.2, 1.0]), ([1.0, 1.0, 2e-4], [1.0, 1.0, 0.6])):
        sampler = torch.tensor([[1.0, 0.0]]).expand(3, 2).clamp(min=1e-30).log()
        dense = torch.stack([torch.tensor(shared), 1 - torch.tensor(shared)], dim=1).clamp(min=1e-30).log()
        known = {"sampler_logprobs": torch.zeros(3), "completion_mask": torch.ones(3, dtype=torch.bool)}
        known |= {"top_ids": torch.zeros(3, 2, dtype=torch.long), "top_logprobs": sampler}
        prompt = Prompt(ids=(1,))
        rollouts.append(
            Rollout(prompt=prompt, sample=0, token_ids=torch.zeros(3), finish_reason="length", kv=unknown, **known)
        )
        scores.append(DenseScores(dense_logprobs=torch.tensor(xi).log(), at_top_ids=dense))
    monkeypatch.setattr(work, "score", lambda *_, **__: scores)
    found = work.mismatch(argparse.Namespace(model=None), rollouts, 100)
    assert found["first_veto"] == [1] and found["rejection"] == 0.5
    assert (found["length"], found["lengths"], found["rollouts"]) == (3, [3, 3], 2)
    assert found["overlap_min"] == pytest.approx(0.4) and found["overlap_mean"] == pytest.approx(4.8 / 6)
    log_xi = torch.tensor([1e-5, 0.5, 2e-4], dtype=torch.float64).log()
    assert found["kl"] == pytest.approx(-float(log_xi.sum()) / 6, rel=1e-4)


def test_a_cells_threshold_is_the_runs(evidence, tmp_path, monkeypatch):
    cells, _ = evidence
    import work

    asked = []

    def stopped(*_, correction, **__):
        asked.append(correction.veto)
        raise InterruptedError

    monkeypatch.setattr(work, "Trainer", stopped)
    monkeypatch.setattr(work.tempfile, "tempdir", str(tmp_path))
    for eps in (1e-2, None):
        with pytest.raises(InterruptedError):
            work.train(cells.training("b", cells.TRIAL, "sparse_rl", 45, 0, eps=eps), "cpu", tmp_path)
    assert asked == [1e-2, 1e-4]


def test_the_real_models_caches(evidence):
    import real

    found = real.caches(64)
    entries = {name: getattr(policy, "budget", 0) for name, policy in found.items()}
    budgets = {f"{name}:{budget}": budget for name in real.POLICIES for budget in (64, 48)}
    assert entries == {"full": 0} | budgets


def test_needs_come_first_unless_their_model_is_there(evidence, tmp_path):
    cells, pool = evidence
    known = {cell.name: cell for cell in all_cells(cells, pool)}
    asked = ["long-under-naive-127-s1", "long-naive-127-s1"]
    order = pool.with_needs(asked, known, tmp_path)
    assert order == ["long-warm", "long-naive-127-s1", "long-under-naive-127-s1"]
    (tmp_path / "long-warm").mkdir()
    (tmp_path / "long-warm" / "config.json").touch()
    assert pool.with_needs(asked[1:], known, tmp_path) == ["long-naive-127-s1"]


def test_a_step_is_timed_on_some_completions_and_told_for_all(evidence, tmp_path, monkeypatch):
    """A clock that moves a second whenever it is read: each stage takes 1 s, four times as many completions 4 s."""
    cells, _ = evidence
    import part_e
    import timing

    seconds = iter(range(1000))
    monkeypatch.setattr(timing, "clock", lambda _: next(seconds))
    learnt = []
    monkeypatch.setattr(timing, "learn", lambda args, learner, part, guards, preset: learnt.append((len(part), preset)))
    small = {
        "shape": "tiny",
        "sequences": 16,
        "learnt": 4,
        "prompt": 8,
        "response": 24,
        "interval": 4,
        "max_tokens": 256,
    }
    cell = part_e.cells(cells.TRIAL)[1]
    found = timing.step(dataclasses.replace(cell, settings=cell.settings | small | {"budget": 8}), "cpu", tmp_path)
    assert {found[f"{name}_s"] for name in ("score", "update_plain", "update_corrected", "correct")} == {4}
    assert found["rollout_s"] == 1 and 0 < found["kv_saved"] < 1
    assert {count for count, _ in learnt} == {4} and {preset for _, preset in learnt} == {"none", "reweight_only"}


@pytest.mark.parametrize("accuracy", [0.5, 0.7, 0.9])
def test_a_start_model_appears_whole_and_within_range(evidence, tmp_path, monkeypatch, accuracy):
    """Its script writes beside the place where cells look, and what cannot gain or lose is no start."""
    cells, _ = evidence
    import work

    def script(command, **_):
        folder = Path(command[2])
        assert folder.name == "long-warm.tmp"
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
        (folder / "training.json").write_text(json.dumps({"accuracy": accuracy}))
        return argparse.Namespace(returncode=0, stdout="step 1")

    monkeypatch.setattr(work.subprocess, "run", script)
    (cell,) = cells.warm_cells(cells.LONG)
    if accuracy != 0.7:
        with pytest.raises(RuntimeError, match=r"between 0\.55 and 0\.85"):
            work.warm(cell, "cpu", tmp_path)
        assert not (tmp_path / "long-warm").exists()
        return
    assert work.warm(cell, "cpu", tmp_path)["start"] == hashlib.sha256(b"weights").hexdigest()
    assert (tmp_path / "long-warm" / "training.json").exists()


@pytest.mark.slow
def test_a_run_that_is_no_longer_finite_is_a_result(evidence, tmp_path):
    cells, _ = evidence
    import work

    bed = dataclasses.replace(cells.TRIAL, lr=1e25)
    found = work.train(cells.training("a", bed, "naive", 45, 0), "cpu", tmp_path)
    assert (found["not_finite"], found["dense"], found["sparse"]) == (True, [None, None], [None, None])
    assert len(found["curves"]["reward"]) == 1
