# SPDX-License-Identifier: Apache-2.0
"""What a run passes on: seeds, prompts, temperatures, baselines, minibatches, weights of sampled rows."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from small_run import CHAIN, TASK, TEMPERATURE, graded_by, small_trainer

from sparse_rl.kv import RKV
from sparse_rl.metrics import read_log
from sparse_rl.model.load import load
from sparse_rl.model.tiny import tiny_model
from sparse_rl.objective.correction import PRESETS, Correction
from sparse_rl.objective.loss import LossConfig
from sparse_rl.rollout import Engine, EngineConfig, Sampling
from sparse_rl.score import score
from sparse_rl.score.head import Head
from sparse_rl.train import ControlConfig, UpdateConfig
from sparse_rl.train.learner import Learner
from sparse_rl.train.master import MasterWeights
from sparse_rl.train.update import _minibatches, update


@pytest.fixture(scope="module")
def loaded():
    return load("embedded")


@pytest.fixture(scope="module")
def rollouts(loaded):
    engine = Engine(loaded, RKV(budget=12, interval=4, window=4), EngineConfig(rows=32))
    return engine.generate(CHAIN.stream(0, 4, 3), Sampling(n=4, max_tokens=20, temperature=TEMPERATURE))


def taken(rollouts, advantages_R, correction, *, model=None, ref=None, temperature=TEMPERATURE, seed=0, **settings):
    model = model or load("embedded").model
    masters = MasterWeights(model)
    before = [master.detach().clone() for master in masters.masters]
    ref_head = None if ref is None else Head(ref)
    learner = Learner(Head(model), torch.optim.SGD(masters.masters, lr=1.0), masters, ref_head=ref_head)
    loss = LossConfig(beta=0.1 if ref is not None else 0.0)
    result = update(
        learner, rollouts, advantages_R, [i // 4 for i in range(len(rollouts))], correction, loss,
        UpdateConfig(max_grad_norm=1e9, **settings), temperature=temperature, max_length=20,
        generator=torch.Generator().manual_seed(seed),
    )  # fmt: skip
    return [b - m.detach() for b, m in zip(before, masters.masters, strict=True)], result.metrics


def test_every_step_has_its_own_prompts_and_random_numbers(tmp_path, monkeypatch):
    trainer = small_trainer(tmp_path / "run", steps=3)
    starts, samplings, seeds = [], [], []

    def learn(*args, generator, **more):
        seeds.append(generator.initial_seed())
        return update(*args, generator=generator, **more)

    monkeypatch.setattr("sparse_rl.train.trainer.update", learn)
    stream, generate = TASK.stream, trainer.engine.generate
    trainer.task = SimpleNamespace(
        rewards=TASK.rewards,
        stream=lambda start, count, seed: starts.append((start, count)) or stream(start, count, seed),
        held_out=lambda count: [],
    )
    monkeypatch.setattr(trainer.engine, "generate", lambda p, s, **more: samplings.append(s) or generate(p, s, **more))
    trainer.train()
    assert starts == [(0, 2), (2, 2), (4, 2)]
    assert len({sampling.seed for sampling in samplings}) == 3
    assert seeds == [sampling.seed for sampling in samplings]
    other = small_trainer(tmp_path / "other", seed=1)
    assert other._seed not in {sampling.seed for sampling in samplings}


def test_a_task_of_ones_own_may_have_any_attributes(tmp_path, loaded):
    """run.json has what JSON can hold of them; `train` and `eval` are the trainer's business in `Rows` alone."""

    @dataclass
    class Own:
        tokenizer: object
        train: str = "train.jsonl"
        most: int = 9
        eval = None
        rewards = TASK.rewards
        stream, held_out = staticmethod(TASK.stream), staticmethod(TASK.held_out)

    small_trainer(
        tmp_path / "run", steps=1, task=Own(loaded.tokenizer), parts={"control": ControlConfig(auto=True)}
    ).train()
    recorded = json.loads((tmp_path / "run" / "run.json").read_text())["config"]["task"]
    assert recorded == {"name": "Own", "train": "train.jsonl", "most": 9}


def test_the_update_is_told_the_samplers_temperature_and_length(tmp_path, monkeypatch):
    given = {}

    def record(*args, **more):
        given.update(more)
        return update(*args, **more)

    monkeypatch.setattr("sparse_rl.train.trainer.update", record)
    small_trainer(tmp_path / "run", steps=1).train()
    assert (given["temperature"], given["max_length"]) == (TEMPERATURE, 16)


def test_remax_compares_with_one_greedy_completion_of_each_prompt(tmp_path, monkeypatch):
    trainer = small_trainer(tmp_path / "run", steps=1, advantage="remax")
    calls, generate = [], trainer.engine.generate
    monkeypatch.setattr(trainer.engine, "generate", lambda p, s, **more: calls.append((p, s)) or generate(p, s, **more))
    graded = iter([[5.0, 6.0, 7.0, 8.0, 1.0, 2.0, 3.0, 4.0], [6.5, None]])
    trainer.task = graded_by(lambda **_: next(graded))
    got, learn = [], trainer._learn
    monkeypatch.setattr(trainer, "_learn", lambda rollouts, a: got.append(a) or learn(rollouts, a))
    trainer.train()
    (prompts, _), (greedy_prompts, greedy) = calls
    assert (greedy.temperature, greedy.n) == (0.0, 1) and greedy_prompts == prompts
    assert got[0].tolist() == [-1.5, -0.5, 0.5, 1.5, 0.0, 0.0, 0.0, 0.0]  # nobody graded the second baseline


def test_minibatches_are_whole_groups_and_leave_none_out():
    groups = [i // 3 for i in range(15)]
    config = UpdateConfig(updates_per_rollout=2, num_iterations=3)
    found = list(_minibatches(groups, config, torch.Generator().manual_seed(0)))
    assert len(found) == 6
    for i in range(0, 6, 2):
        assert sorted(found[i] + found[i + 1]) == list(range(15))
        assert all(len(part) % 3 == 0 and part == sorted(part) for part in found[i : i + 2])
    assert len({tuple(part) for part in found}) > 2


def test_the_reference_is_scored_at_the_samplers_temperature(rollouts):
    _, metrics = taken(rollouts, torch.ones(16), PRESETS["none"], ref=load("embedded").model)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-9)


def test_rejected_rollouts_keep_their_kl(rollouts):
    """Scoring first skips the backward of rejected rollouts, but not where there is a KL term."""
    other = load("embedded").model
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.1)
    advantages_R = torch.linspace(-1, 1, 16)
    first, one = taken(rollouts, advantages_R, Correction(veto=0.3), ref=other)
    second, two = taken(rollouts, advantages_R, Correction(veto=0.3), ref=other, score_first=True)
    assert 0 < one["correction/rejection_rate"] < 1 and one["kl"] == pytest.approx(two["kl"])
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-3)


def test_sampled_rows_stand_for_all_idle_ones():
    """Every rollout with an advantage is rejected, no other one is: the rate is known without scoring them all."""
    model = tiny_model()
    engine = Engine(load("tiny"), RKV(budget=10, interval=4, window=4), EngineConfig(rows=16, page_size=16))
    few = engine.generate([[1, 2, 3]], Sampling(n=16, max_tokens=16, stop_ids=()))
    dense = [float((s.dense_logprobs - r.sampler_logprobs).min()) for s, r in zip(score(model, few), few, strict=True)]
    order = sorted(range(16), key=lambda i: dense[i])
    many = [few[i] for i in order[:4]] + [few[i] for i in order[4:]] * 8  # 4 working, 96 idle
    advantages_R = torch.tensor([1.0, -1.0, 1.0, -1.0] + [0.0] * 96)
    veto = Correction(veto=math.exp((dense[order[3]] + dense[order[4]]) / 2))
    _, all_scored = taken(many, advantages_R, veto, skip_zero_rows=False, model=tiny_model(), temperature=1.0)
    runs = [taken(many, advantages_R, veto, seed=seed, model=tiny_model(), temperature=1.0)[1] for seed in range(16)]
    assert all(run["correction/rejection_rate"] == pytest.approx(0.04) for run in runs)
    assert all(run["mismatch/coverage"] == pytest.approx((4 + 10) / 100) for run in runs)
    errors = torch.tensor([run["rollout_corr/kl"] - all_scored["rollout_corr/kl"] for run in runs])
    assert abs(errors.mean()) <= 4 * errors.std() / 4


def test_tokens_the_sampler_did_not_choose_veto_nothing(rollouts, loaded):
    scores = score(loaded.model, rollouts, temperature=TEMPERATURE)
    log_xi = [s.dense_logprobs - r.sampler_logprobs for s, r in zip(scores, rollouts, strict=True)]
    worst = [int(values.argmin()) for values in log_xi]
    masked = []
    for rollout, place in zip(rollouts, worst, strict=True):
        mask = rollout.completion_mask.clone()
        mask[place] = False
        masked.append(replace(rollout, completion_mask=mask))
    second = [
        float(values[torch.arange(len(values)) != place].min()) for values, place in zip(log_xi, worst, strict=True)
    ]
    threshold = sorted(second)[8] - 1e-4
    _, metrics = taken(masked, torch.ones(16), Correction(veto=math.exp(threshold)))
    assert metrics["correction/rejection_rate"] == pytest.approx(sum(value < threshold for value in second) / 16)


def test_dense_is_dense_and_sparse_is_sparse_and_the_best_exists(tmp_path):
    trainer = small_trainer(tmp_path / "run", steps=2)
    evaluated, values = trainer._evaluate, iter([0.9, 0.1])
    trainer._evaluate = lambda: evaluated() | {"eval/dense/reward": next(values)}
    trainer.train()
    line = read_log(tmp_path / "run" / "metrics.jsonl")[-1]
    assert line["eval/dense/kv_saved_frac"] == 0.0 < line["eval/sparse/kv_saved_frac"]
    assert (tmp_path / "run" / trainer.run.best["checkpoint"]).is_dir()
