# SPDX-License-Identifier: Apache-2.0
"""The loop: what it writes, warns of, refuses, and tells those who watch."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from importlib.metadata import version
from types import SimpleNamespace

import pytest
import torch
from small_run import CHAIN, TASK, TEMPERATURE, digits, small_trainer

from sparse_rl.evaluate import EvalConfig, evaluate
from sparse_rl.grading import Failed
from sparse_rl.kv import RKV, Full
from sparse_rl.metrics import read_log
from sparse_rl.model.load import load
from sparse_rl.objective.correction import PRESETS, Correction
from sparse_rl.objective.loss import LossConfig
from sparse_rl.rollout import Engine, EngineConfig, Sampling
from sparse_rl.runfolder import command
from sparse_rl.tasks import Chain, Graded, Rewards, Rows
from sparse_rl.train import Observer, OptimizerConfig, UpdateConfig
from sparse_rl.train.callbacks import Callbacks
from sparse_rl.train.record import repetition, rollout_metrics
from sparse_rl.types import KVStats


def graded_by(function):
    """The small task with another reward and nothing to evaluate on."""
    return SimpleNamespace(rewards=Rewards((function,)), stream=TASK.stream, held_out=lambda count: [])


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
    assert record["config"]["correction"]["veto"] == 0.1 and record["versions"]["torch"] == version("torch")
    assert record["processes"] == 1 and record["command"] == command() and {"commit", "hardware"} <= record.keys()
    completions = read_log(tmp_path / "run" / "completions.jsonl")
    assert [row["step"] for row in completions] == [1, 2]
    row = completions[0]
    assert row["rewards"]["digits"] == sum(int(c) for c in row["completion"] if c.isdigit()) / 10
    declined = row["rewards"]["declines"]
    assert row["reward"] == pytest.approx(row["rewards"]["digits"] + 0.5 * (declined or 0.0))


def test_a_rejected_completion_is_logged_with_its_worst_token_and_both_log_probs(tmp_path):
    """From the record alone: the dense log-prob is what the model says of the token after its context."""
    trainer = small_trainer(tmp_path / "run", steps=1, parts={"correction": Correction(veto=0.9)}, log_rejected=100)
    before = load("embedded")
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
    small_trainer(tmp_path / "run", steps=2, parts={"kv": RKV(budget=64, interval=64, window=4)}).train()
    assert caplog.text.count("no cache was compressed") == 1 and "a smaller kv.budget" in caplog.text
    lines = read_log(tmp_path / "run" / "metrics.jsonl")
    assert lines[1]["kv/saved_frac"] == 0.0 and lines[1]["correction/rejection_rate"] == 0.0


def test_high_rejection_is_warned_of_once_and_low_is_not(tmp_path, caplog):
    small_trainer(tmp_path / "a", steps=2, parts={"correction": Correction(veto=0.9)}).train()
    assert caplog.text.count("of the completions were rejected") == 1
    caplog.clear()
    small_trainer(tmp_path / "b", steps=2, parts={"correction": PRESETS["none"]}).train()
    assert "rejected" not in caplog.text and "compressed" not in caplog.text


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
    first, reference = load("embedded").model.state_dict(), resumed.learner.ref_head.model.state_dict()
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


def test_learning_rates_by_hand():
    linear = OptimizerConfig(learning_rate=1.0, schedule="linear", warmup=2)
    assert [linear.rate(i, 6) for i in range(6)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    cosine = OptimizerConfig(learning_rate=2.0, schedule="cosine")
    assert [cosine.rate(i, 4) for i in range(4)] == pytest.approx([2.0, 1 + math.sqrt(0.5), 1.0, 1 - math.sqrt(0.5)])
    assert OptimizerConfig(learning_rate=3.0).rate(10**9, 10) == 3.0


def test_the_schedule_reaches_the_optimizer(tmp_path):
    optimizer = OptimizerConfig(learning_rate=1e-3, schedule="linear")
    small_trainer(tmp_path / "run", steps=2, parts={"optimizer": optimizer}).train()
    rates = [line["learning_rate"] for line in read_log(tmp_path / "run" / "metrics.jsonl")[1:]]
    assert rates == pytest.approx([1e-3 * (1.0 + 0.75) / 2, 1e-3 * (0.5 + 0.25) / 2])  # two updates a step


def test_weight_decay_spares_vectors():
    from sparse_rl.train.master import MasterWeights

    masters = MasterWeights(load("embedded").model)
    matrices, vectors = OptimizerConfig(weight_decay=0.1).build(masters).param_groups
    assert matrices["weight_decay"] == 0.1 and all(p.dim() == 2 for p in matrices["params"])
    assert vectors["weight_decay"] == 0.0 and all(p.dim() == 1 for p in vectors["params"])
    assert len(matrices["params"]) + len(vectors["params"]) == len(masters.masters)


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
    trainer.task = type(
        "T", (), {"rewards": Rewards((lambda **_: next(grades),)), "stream": TASK.stream, "held_out": lambda s, c: []}
    )()
    advantages = []
    learn = trainer._learn
    monkeypatch.setattr(trainer, "_learn", lambda rollouts, a: advantages.append(a) or learn(rollouts, a))
    trainer.train()
    assert advantages[0].tolist() == pytest.approx([-1, 0, 0, 1, 0, 0, 0, 0], abs=1e-5)
    metrics = read_log(tmp_path / "run" / "metrics.jsonl")[1]
    assert metrics["completions/ungraded_frac"] == 5 / 8 and metrics["reward"] == 2.0
    assert metrics["frac_reward_zero_std"] == 0.5


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (Sampling(n=4, top_p=0.9), "sampling.top_p is 0.9, but training samples from the whole distribution"),
        (Sampling(n=4, top_k=5), "sampling.top_k is 5, but training samples from the whole distribution"),
        (Sampling(n=4, temperature=0.0), "temperature is 0"),
        (Sampling(n=1), "sample at least 2"),
    ],
)
def test_sampling_that_cannot_train_is_refused(tmp_path, sampling, message):
    with pytest.raises(ValueError, match=message):
        small_trainer(tmp_path / "run", parts={"sampling": sampling})
    assert not (tmp_path / "run").exists()


def test_more_updates_than_prompts_are_refused_before_anything_runs(tmp_path):
    with pytest.raises(ValueError, match=r"updates_per_rollout is 3, but a step has 2 prompts"):
        small_trainer(tmp_path / "run", parts={"update": UpdateConfig(updates_per_rollout=3)})


def test_evaluations_share_their_engines(tmp_path):
    trainer = small_trainer(tmp_path / "run", steps=1)
    trainer._evaluate()
    engines = dict(trainer.eval_engines)
    trainer._evaluate()
    assert engines == trainer.eval_engines and set(engines) == {"dense", "sparse"}
    assert all(engine.cache.k.numel() == 0 for engine in engines.values()), "which hold no pool in between"


@pytest.mark.parametrize(("policy", "kept"), [(None, True), (Full(), False)], ids=["bounded", "full"])
def test_pools_that_grow_with_the_answers_are_freed_while_it_learns(tmp_path, monkeypatch, policy, kept):
    trainer = small_trainer(tmp_path / "run", steps=1, parts={"kv": policy} if policy else {})
    held = []
    learn = trainer._learn
    monkeypatch.setattr(trainer, "_learn", lambda *given: held.append(trainer.engine.cache.k.numel()) or learn(*given))
    trainer.train()
    assert [bool(numel) for numel in held] == [kept]


def test_trackers_of_the_settings_are_used(tmp_path):
    with pytest.raises(ValueError, match="report_to 'nonsense' cannot be used"):
        small_trainer(tmp_path / "run", report_to=("nonsense",))
    with pytest.raises(ValueError, match=r"kv.policy full has no sparse cache"):
        small_trainer(tmp_path / "run", best_metric="eval/sparse/reward", parts={"kv": Full()})


def test_a_prompt_beyond_the_context_is_named_before_anything_runs(tmp_path):
    loaded = load("embedded")
    task = Rows([{"prompt": "a|"}, {"prompt": "b" * 5000}], Rewards((digits,)), loaded.tokenizer)
    with pytest.raises(ValueError, match=r"that begins 'bbbb.* has 5000 tokens, and the model's context is 4096"):
        small_trainer(tmp_path / "run", task=task, loaded=loaded)


def test_a_batch_that_was_cut_off_as_a_whole_is_warned_of(tmp_path, caplog):
    parts = {
        "loss": LossConfig(mask_truncated_completions=True),
        "sampling": Sampling(n=4, max_tokens=8, temperature=2.5),
    }
    small_trainer(tmp_path / "run", steps=1, parts=parts).train()
    assert "ran into the length limit and are masked" in caplog.text


def test_dropout_is_refused(tmp_path):
    loaded = load("embedded")
    loaded.model.model.layers[0].mlp.add_module("dropout", torch.nn.Dropout(0.1))
    with pytest.raises(ValueError, match=r"dropout 0.1 in model.layers.0.mlp.dropout"):
        small_trainer(tmp_path / "run", loaded=loaded)


def test_half_precision_without_a_range_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"dtype is float16, in which small gradients become 0; train in bfloat16"):
        small_trainer(tmp_path / "run", loaded=load("embedded", dtype=torch.float16))


def test_observers_are_told_and_the_run_ends_for_them_even_when_it_fails(tmp_path):
    events = []

    class Watching(Observer):
        def on_begin(self, trainer):
            events.append("begin")

        def on_progress(self, stage, progress):
            events.append(stage)

        def on_log(self, metrics):
            events.append(f"log {metrics['step']}")

        def on_save(self, folder):
            events.append(folder.name)

        def on_end(self):
            events.append("end")

    small_trainer(tmp_path / "run", steps=1, observers=(Watching(),)).train()
    kept = [event for event, after in zip(events, [*events[1:], ""], strict=True) if event != after]
    evaluated = ["eval/dense", "eval/sparse"]
    assert kept == ["begin", *evaluated, "log 0", "rollout", *evaluated, "log 1", "checkpoint-1", "end"]
    events.clear()
    failing = small_trainer(tmp_path / "other", steps=1, observers=(Watching(),))
    failing.task = type(
        "T", (), {"rewards": Rewards((lambda **_: None,)), "stream": TASK.stream, "held_out": lambda s, c: []}
    )()
    with pytest.raises(ValueError, match="returned NoneType"):
        failing.train()
    assert events[-1] == "end"


def test_transformers_callbacks_see_the_run(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    calls = []

    class Recorder(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            calls.append(("begin", args.output_dir, state.max_steps))

        def on_log(self, args, state, control, logs=None, **kwargs):
            calls.append(("log", state.global_step, logs.get("reward")))

        def on_evaluate(self, args, state, control, metrics=None, **kwargs):
            calls.append(("evaluate", state.global_step, sorted(metrics)[0]))

        def on_save(self, args, state, control, **kwargs):
            calls.append(("save", state.global_step))

        def on_train_end(self, args, state, control, **kwargs):
            calls.append(("end",))

    run = tmp_path / "run"
    small_trainer(run, steps=1, observers=(Callbacks(callbacks=(Recorder(),)),)).train()
    reward = read_log(run / "metrics.jsonl")[1]["reward"]
    assert calls == [
        ("begin", str(run), 1), ("log", 0, None), ("evaluate", 0, "eval/dense/clipped_ratio"),
        ("log", 1, reward), ("evaluate", 1, "eval/dense/clipped_ratio"), ("save", 1), ("end",),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="report_to 'nonsense' cannot be used"):
        Callbacks(("nonsense",))


def test_evaluation_equals_the_mean_over_prompts_by_hand():
    loaded = load("embedded")
    engine = Engine(loaded, RKV(budget=12, interval=4, window=4), EngineConfig(rows=8))
    prompts, sampling = CHAIN.held_out(5), Sampling(n=3, max_tokens=24, seed=3, temperature=TEMPERATURE)
    got = evaluate(engine, prompts, sampling, Rewards((digits,)))
    rollouts = engine.generate(prompts, sampling)
    texts = [loaded.tokenizer.decode(rollout.token_ids) for rollout in rollouts]
    means = [sum(digits(texts[3 * i : 3 * i + 3])) / 3 for i in range(5)]
    assert len(set(means)) == 5
    assert got["reward"] == pytest.approx(statistics.mean(means))
    assert got["reward_se"] == pytest.approx(statistics.stdev(means) / math.sqrt(5))
    held, full = (sum(x) for x in zip(*[(sum(r.kv.held), r.kv.full) for r in rollouts], strict=True))
    assert got["kv_saved_frac"] == pytest.approx(1 - held / full)
    assert got["failed"] == 0


def test_evaluation_leaves_out_and_counts_what_graders_failed_at():
    def fails_at_zero(completions, **columns):
        return [Failed("hung") if i % 5 == 0 else float(i) for i in range(len(completions))]

    engine = Engine(load("embedded"), config=EngineConfig(rows=8))
    got = evaluate(engine, CHAIN.held_out(3), Sampling(n=2, max_tokens=4), Rewards((fails_at_zero,)))
    assert got["failed"] == 2 and got["reward"] == pytest.approx((1 + 2.5 + 4) / 3)  # of (-, 1), (2, 3), (4, -)


def test_rollout_metrics_by_hand():
    """Two groups of two: lengths 3, 5 and 2, 4; the second group's rewards are equal."""

    def rollout(length, reason, peak, held):
        return SimpleNamespace(
            token_ids=torch.arange(length),
            finish_reason=reason,
            prompt=SimpleNamespace(ids=(1, 2)),
            kv=KVStats(held=held, full=10, hybrid=10.0, peak=peak, peak_bytes=0, num_compressions=0),
        )

    rollouts = [
        rollout(3, "stop", 4, (2, 3)), rollout(5, "length", 4, (1, 1)), rollout(2, "stop", 3, (4,)),
        rollout(4, "stop", 4, (5, 4)),
    ]  # fmt: skip
    graded = Graded(rewards=torch.tensor([0.0, 1.0, 2.0, 2.0]).double(), by_function={})
    got = rollout_metrics(rollouts, graded, [0, 0, 1, 1])
    assert got["completions/mean_length"] == 3.5 and got["completions/mean_terminated_length"] == 3.0
    assert (got["completions/min_length"], got["completions/max_length"]) == (2.0, 5.0)
    assert got["completions/clipped_ratio"] == 0.25 and got["frac_reward_zero_std"] == 0.5
    assert got["kv/saved_frac"] == 1 - 20 / 40
    assert got["kv/peak_frac"] == pytest.approx(15 / (4 + 6 + 3 + 5))


def test_repetition_by_hand():
    assert repetition(torch.arange(50)) == 0.0
    assert repetition(torch.tensor([1, 2] * 10)) == pytest.approx(1 - 2 / 13)
    assert repetition(torch.tensor([1, 2, 3])) == 0.0


def test_evaluation_settings_are_checked():
    with pytest.raises(ValueError, match=r"eval.n is 0"):
        EvalConfig(n=0)
    assert replace(EvalConfig(), prompts=0).prompts == 0


def test_the_minimal_example_takes_a_step(monkeypatch, capsys):
    import importlib.util
    from pathlib import Path

    path = Path(__file__).parents[2] / "examples" / "minimal.py"
    spec = importlib.util.spec_from_file_location("minimal", path)
    minimal = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(minimal)
    monkeypatch.setattr(minimal, "PROMPTS", 2)
    monkeypatch.setattr(minimal, "GROUP", 2)
    monkeypatch.setattr(minimal, "Chain", lambda: Chain(letters=2, steps=3))
    minimal.main(steps=1)
    assert "step 1: reward" in capsys.readouterr().out
