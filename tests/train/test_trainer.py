# SPDX-License-Identifier: Apache-2.0
"""The loop: what it writes, warns of, learns from, and holds meanwhile."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from importlib.metadata import version
from threading import Lock

import pytest
import torch
from small_run import CHAIN, TEMPERATURE, graded_by, small_model, small_trainer
from small_sft import small_sft
from transformers import PreTrainedModel

from sparse_rl.evaluate import EvalConfig, digest_of
from sparse_rl.kv import RKV, Full
from sparse_rl.metrics import read_log
from sparse_rl.model.load import load
from sparse_rl.objective.correction import PRESETS, Correction
from sparse_rl.objective.loss import LossConfig
from sparse_rl.rollout import EngineConfig, Sampling
from sparse_rl.runfolder import command
from sparse_rl.tasks import Rewards, Rows
from sparse_rl.train import ControlConfig, OptimizerConfig, UpdateConfig
from sparse_rl.train.processes import Processes
from sparse_rl.types import Prompt


def test_a_run_writes_what_it_did(tmp_path):
    trainer = small_trainer(tmp_path / "run", steps=2)
    trainer.train()
    lines = read_log(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert {name for name in lines[0] if name.startswith("eval/")} >= {"eval/dense/reward", "eval/sparse/reward_se"}
    assert "eval/dense/reward" not in lines[1] and "eval/sparse/kv_saved_frac" in lines[2]
    assert lines[2]["kv/saved_frac"] > 0 and lines[2]["num_tokens"] == trainer.run.num_tokens
    assert lines[1]["num_tokens"] == 8 * (CHAIN.prompt_len + lines[1]["completions/mean_length"])
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["config"]["kv"] == {
        "policy": "rkv",
        **{k: v for k, v in record["config"]["kv"].items() if k != "policy"},
    }
    assert record["config"]["correction"]["veto"] == 0.6 and record["versions"]["torch"] == version("torch")
    assert record["processes"] == 1 and record["command"] == command() and {"commit", "hardware"} <= record.keys()
    completions = read_log(tmp_path / "run" / "completions.jsonl")
    assert [row["step"] for row in completions] == [1, 2]
    row = completions[0]
    assert row["rewards"]["digits"] == sum(int(c) for c in row["completion"] if c.isdigit()) / 10
    declined = row["rewards"]["declines"]
    assert row["reward"] == pytest.approx(row["rewards"]["digits"] + 0.5 * (declined or 0.0))


@pytest.mark.parametrize(
    ("asked", "is_on", "grouped", "recorded"),
    [
        ("cpu", "cpu", False, "cpu"),
        ("cuda", "cuda:0", False, "cuda"),
        ("cuda:1", "cuda:1", False, "cuda:1"),
        ("cpu", "cuda:1", False, "cuda"),  # it was moved there
        ("cuda:1", "cuda:1", True, "cuda"),  # torchrun gives each process its own
    ],
)
def test_the_device_is_recorded_as_it_was_asked_for(tmp_path, monkeypatch, asked, is_on, grouped, recorded):
    trainers = [small_trainer(tmp_path / "run"), *(() if grouped else [small_sft(tmp_path / "sft")])]
    for trainer in trainers:
        assert trainer.settings()["device"] == "cpu"
        trainer.loaded = replace(trainer.loaded, asked=asked)
        trainer.processes = Processes(grouped=grouped)
        with monkeypatch.context() as patch:
            patch.setattr(PreTrainedModel, "device", torch.device(is_on))
            assert trainer.settings()["device"] == recorded


def test_a_model_says_which_device_it_was_loaded_to():
    assert (load("tiny").device, load("embedded", device=torch.device("cpu")).device) == ("cpu", "cpu")
    assert load("tiny", device="cpu:0").asked == load("embedded", device=torch.device("cpu:0")).asked == "cpu:0"


def test_a_rejected_completion_is_logged_with_its_worst_token_and_both_log_probs(tmp_path):
    """From the record alone: the dense log-prob is what the model says of the token after its context."""
    trainer = small_trainer(tmp_path / "run", steps=1, parts={"correction": Correction(veto=0.9)}, log_rejected=100)
    before = small_model()
    trainer.train()
    rows = read_log(tmp_path / "run" / "rejected.jsonl")
    metrics = read_log(tmp_path / "run" / "metrics.jsonl")[1]
    assert len(rows) == metrics["correction/rejection_rate"] * 8 > 0
    assert [row["log_xi"] for row in rows] == sorted(row["log_xi"] for row in rows)
    for row in rows:
        text = row["before"] if row["before"].startswith(row["prompt"]) else None
        assert text is not None and len(text) == len(row["prompt"]) + row["index"]
        ids = torch.tensor([before.tokenizer(text).input_ids])
        logprobs = torch.log_softmax(before.model(ids).logits[0, -1].float() / TEMPERATURE, -1)
        assert float(logprobs[row["token_id"]].detach()) == pytest.approx(row["dense_logprob"], abs=1e-3)
        assert row["log_xi"] == pytest.approx(row["dense_logprob"] - row["sampler_logprob"], abs=1e-5)
        assert math.exp(row["log_xi"]) < 0.9 and before.tokenizer.decode([row["token_id"]]) == row["token"]
        assert row["entries_held"] <= 17 and row["entries_dense"] == len(text)


def test_a_budget_above_all_lengths_is_warned_of_once(tmp_path, caplog):
    parts = {"kv": RKV(budget=64, interval=64, window=4)}
    small_trainer(tmp_path / "run", steps=2, parts=parts).train()
    said = "is cut when it holds 128 (64 + kv.interval 64); a smaller kv.interval (and kv.budget) would save memory"
    assert caplog.text.count("no cache was ever cut") == 1 and said in caplog.text
    small_trainer(tmp_path / "run", steps=3, parts=parts, resume_from_checkpoint=True).train()
    assert caplog.text.count("no cache was ever cut") == 1
    lines = read_log(tmp_path / "run" / "metrics.jsonl")
    assert lines[1]["kv/saved_frac"] == 0.0 and lines[1]["correction/rejection_rate"] == 0.0


def test_a_budget_that_follows_what_is_measured_is_not_warned_of(tmp_path, caplog):
    parts = {"kv": RKV(budget=40, interval=4, window=4), "control": ControlConfig(auto=True)}
    small_trainer(tmp_path / "run", steps=1, parts=parts).train()
    assert "no cache was ever cut" not in caplog.text


@pytest.mark.parametrize(("preset", "kv", "warned"), [("none", RKV, 1), ("none", None, 0), ("tis", RKV, 0)])
def test_a_sparse_cache_without_a_correction_is_warned_of_once(tmp_path, caplog, preset, kv, warned):
    """Naive runs lose accuracy more often than not (docs/evidence.md), and no other alarm sees it."""
    parts = {"correction": PRESETS[preset], "kv": kv(budget=40, interval=8) if kv else Full()}
    small_trainer(tmp_path, steps=1 + warned, parts=parts).train()
    assert caplog.text.count("corrects nothing") == warned


def test_many_anomalies_are_warned_of_once_whatever_is_rejected(tmp_path, caplog, monkeypatch):
    small_trainer(tmp_path / "a", steps=2, parts={"correction": Correction(veto=0.9)}).train()
    assert read_log(tmp_path / "a" / "metrics.jsonl")[2]["correction/rejection_rate"] > 0.15
    assert "would all but never have written" not in caplog.text, "not by the dense model's measure"
    monkeypatch.setattr("sparse_rl.objective.mismatch.CATASTROPHIC", 0.9)
    small_trainer(tmp_path / "b", steps=2, parts={"correction": PRESETS["none"]}).train()
    assert caplog.text.count("of the completions (above 15%) have a token that the dense model would all but") == 1


@pytest.mark.parametrize("advantage", ["dr_grpo", "rloo", "remax"])
def test_every_advantage_trains(tmp_path, advantage):
    small_trainer(tmp_path / "run", steps=1, advantage=advantage, parts={"correction": PRESETS["tis"]}).train()
    assert read_log(tmp_path / "run" / "metrics.jsonl")[1]["grad_norm"] > 0


def test_the_reference_is_the_first_model_even_after_a_resume(tmp_path):
    parts = {
        "loss": LossConfig(beta=0.1),
        "correction": PRESETS["none"],
        "optimizer": OptimizerConfig(learning_rate=1e-3),
    }
    small_trainer(tmp_path / "run", steps=2, parts=parts).train()
    resumed = small_trainer(tmp_path / "run", steps=3, parts=parts, resume_from_checkpoint=True)
    resumed.train()
    lines = read_log(tmp_path / "run" / "metrics.jsonl")
    assert lines[-1]["kl"] > 0
    first, reference = small_model().model.state_dict(), resumed.learner.ref_head.model.state_dict()
    assert all(torch.equal(first[name], reference[name]) for name in first)


def test_reward_goes_up(tmp_path):
    """Eight dense steps towards larger digits."""
    parts = {
        "kv": Full(),
        "sampling": Sampling(n=8, max_tokens=12, temperature=TEMPERATURE),
        "correction": PRESETS["none"],
        "update": UpdateConfig(),
        "eval": EvalConfig(prompts=0),
        "optimizer": OptimizerConfig(learning_rate=3e-4),
        "engine": EngineConfig(rows=64),
    }
    small_trainer(tmp_path / "run", steps=8, prompts_per_step=8, save_every=0, parts=parts).train()
    rewards = [line["reward"] for line in read_log(tmp_path / "run" / "metrics.jsonl")[1:]]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3


def test_rows_in_memory_train(tmp_path):
    loaded = load("embedded")
    rows = [{"prompt": prompt.text, "answer": prompt.columns["answer"]} for prompt in CHAIN.stream(0, 3, 1)]
    seen = []

    def graded(prompts, completions, answer, **_):
        seen.extend(zip(prompts, answer, strict=True))
        return [float(len(text)) for text in completions]

    task = Rows(rows, Rewards((graded,)), loaded.tokenizer)
    small_trainer(tmp_path / "run", task=task, loaded=loaded, steps=2).train()
    assert set(seen) == {(row["prompt"], row["answer"]) for row in rows}
    assert "eval/dense/reward" not in read_log(tmp_path / "run" / "metrics.jsonl")[-1]


def test_a_group_that_nobody_graded_has_no_advantage(tmp_path, monkeypatch):
    trainer = small_trainer(tmp_path / "run", steps=1)
    grades = iter([[1.0, 2.0, None, 3.0, None, None, None, None]])
    trainer.task = graded_by(lambda **_: next(grades))
    advantages = []
    learn = trainer._learn
    monkeypatch.setattr(trainer, "_learn", lambda rollouts, a: advantages.append(a) or learn(rollouts, a))
    trainer.train()
    assert advantages[0].tolist() == pytest.approx([-1, 0, 0, 1, 0, 0, 0, 0], abs=1e-5)
    metrics = read_log(tmp_path / "run" / "metrics.jsonl")[1]
    assert metrics["completions/ungraded_frac"] == 5 / 8 and metrics["reward"] == 2.0
    assert metrics["frac_reward_zero_std"] == 0.5


def test_evaluations_share_their_engines(tmp_path):
    trainer = small_trainer(tmp_path / "run", steps=1)
    trainer._evaluate()
    engines = dict(trainer.eval_engines)
    trainer._evaluate()
    assert engines == trainer.eval_engines and set(engines) == {"dense", "sparse"}
    assert all(engine.cache.k.numel() == 0 for engine in engines.values()), "which hold no pool in between"


def test_evaluations_end_where_the_runs_samples_do(tmp_path):
    ends = Sampling(n=4, max_tokens=16, stop_ids=tuple(range(small_model().vocab_size)))  # at the first token
    found = small_trainer(tmp_path / "run", parts={"sampling": ends})._evaluate()
    assert found["eval/dense/mean_length"] == found["eval/sparse/mean_length"] == 1.0
    assert found["eval/dense/clipped_ratio"] == 0.0


def test_a_fall_is_of_the_same_evaluation_and_beyond_its_error(tmp_path, monkeypatch, caplog):
    """One prompt has no error; two evaluations that differ are not compared."""
    trainer = small_trainer(tmp_path / "run", steps=1)
    lines = [(0.9, 0.01, "a"), (0.1, math.nan, "a"), (0.2, 0.01, "a"), (0.2, 0.01, "b"), (0.1, 0.01, "b")]
    logged = []

    def evaluate():
        reward, error, trainer.evaluated = lines.pop(0)
        return {"eval/dense/reward": reward, "eval/dense/reward_se": error}

    monkeypatch.setattr(trainer, "_evaluate", evaluate)
    monkeypatch.setattr(trainer.run, "evaluates", lambda every: True)
    monkeypatch.setattr(trainer.run, "finish_step", lambda metrics, began: logged.append(metrics.get("alarm/collapse")))
    while lines:
        trainer._finish_step({}, 0.0)
    assert logged == [0, None, 1, 0, 1]
    assert "the evaluation is another than before: a fall is looked for from 0.200 on" in caplog.text


def test_what_an_evaluation_is_of(tmp_path):
    """Another number of prompts, way of sampling or limit is another; how often, and what is trained on, is not."""

    def of(**parts):
        trainer = small_trainer(tmp_path / "run", steps=1, parts=parts)
        trainer._evaluate()
        return trainer.evaluated

    config = EvalConfig(prompts=4)
    own = of(eval=config)
    assert own == of(eval=replace(config, every=3), optimizer=OptimizerConfig(learning_rate=0.5))
    others = [{"eval": replace(config, prompts=3)}, {"eval": replace(config, temperature=0.0)}]
    others += [{"eval": config, "sampling": Sampling(n=4, max_tokens=7, temperature=TEMPERATURE)}]
    assert len({own, *(of(**other) for other in others)}) == 4


class Odd:
    """Each with a look of its own, as the interpreter prints it."""


@pytest.mark.parametrize(
    "column", [lambda: {(1, 2): 3}, lambda: {1: 2, "a": 3}, Lock, Odd, lambda: {"a", "b"}, lambda: "\ud800"]
)
def test_any_column_may_be_evaluated_and_is_the_same_when_it_is_made_again(column):
    def of(value, answer="3", weights=(), specs=None):
        prompt = Prompt(ids=(1, 2), columns={"m": value, "answer": answer})
        return digest_of([prompt], Sampling(max_tokens=4), Rewards((count_of_zeros,), weights), specs)

    own = of(column())
    assert own == of(column())
    others = (of(column(), answer="4"), of(column(), weights=(0.1,)), of(column(), specs=["overlong:limit=20"]))
    assert len({own, *others}) == 4


def count_of_zeros(completions, **_):
    return [float(text.count("0")) for text in completions]


def test_the_best_is_sought_anew_where_the_evaluation_is_another(tmp_path, monkeypatch):
    parts = {"eval": EvalConfig(every=1, prompts=4)}
    trainer = small_trainer(tmp_path / "run", steps=2, parts=parts)
    trainer.train()
    trainer.run.best["value"] = 2.0  # which nothing can beat
    trainer.evaluated = "another"
    monkeypatch.setattr(trainer, "_evaluate", lambda: {"eval/dense/reward": 0.5, "eval/dense/reward_se": 0.1})
    monkeypatch.setattr(trainer.run, "finish_step", lambda metrics, began: None)
    trainer._finish_step({}, 0.0)
    assert trainer.run.best == {"checkpoint": None, "value": None}


@pytest.mark.parametrize(("policy", "kept"), [(None, True), (Full(), False)], ids=["bounded", "full"])
def test_pools_that_grow_with_the_answers_are_freed_while_it_learns(tmp_path, monkeypatch, policy, kept):
    trainer = small_trainer(tmp_path / "run", steps=1, parts={"kv": policy} if policy else {})
    held = []
    learn = trainer._learn
    monkeypatch.setattr(trainer, "_learn", lambda *given: held.append(trainer.engine.cache.k.numel()) or learn(*given))
    trainer.train()
    assert [bool(numel) for numel in held] == [kept]


def test_a_batch_that_was_cut_off_as_a_whole_is_warned_of(tmp_path, caplog):
    parts = {
        "loss": LossConfig(mask_truncated_completions=True),
        "sampling": Sampling(n=4, max_tokens=8, temperature=2.5),
    }
    small_trainer(tmp_path / "run", steps=1, parts=parts).train()
    assert "ran into the length limit and are masked" in caplog.text
