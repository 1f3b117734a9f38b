# SPDX-License-Identifier: Apache-2.0
"""`sparse-rl bench learner`: what it counts, what it writes, what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from sparse_rl.bench.learner import LearnerBenchConfig, make_rollouts, operations
from sparse_rl.cli import main
from sparse_rl.cli.bench_learner import default_label
from sparse_rl.model.dry_run import dry_run
from sparse_rl.model.load import LoadedModel
from sparse_rl.model.shapes import random_model
from sparse_rl.model.tiny import tiny_model, tiny_tokenizer
from sparse_rl.train import OptimizerConfig, UpdateConfig

LINE = ["bench", "learner", "--shape", "tiny", "--device", "cpu", "--sequences", "8", "--prompt", "5", "--steps", "1"]


@pytest.mark.parametrize("tied", [True, False])
def test_operations_by_hand(tied):
    model = tiny_model(tie_word_embeddings=tied)
    loaded = LoadedModel(model=model, tokenizer=tiny_tokenizer(), shape=dry_run(model))
    config = loaded.model.config
    width, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    kv = config.num_key_value_heads * config.head_dim
    q = config.num_attention_heads * config.head_dim
    layer = 2 * width * q + 2 * width * kv + 3 * width * inner + 2 * width
    body = layers * layer + width
    # Lengths 2 and 6: 8 tokens, weighted mean (4 + 36) / 8 = 5.
    per_token = 6 * body + 6 * width * loaded.vocab_size + 6 * layers * width * 5
    assert operations(loaded, [2, 6]) == 8 * per_token


def test_lengths_are_spread_as_stated_and_nothing_would_be_rejected():
    loaded = random_model("tiny", "cpu", torch.float32)
    config = LearnerBenchConfig(sequences=64, prompt=3, output=60, median=20)
    rollouts = make_rollouts(config, loaded)
    lengths = sorted(len(rollout.token_ids) for rollout in rollouts)
    assert 10 < lengths[32] < 40 and lengths[-1] == 60 and lengths[0] >= 1
    assert all(rollout.prompt is rollouts[i // 8 * 8].prompt for i, rollout in enumerate(rollouts))
    assert all(float(rollout.sampler_logprobs.max()) < -1 for rollout in rollouts), "the model's own log-probs"
    equal = make_rollouts(LearnerBenchConfig(sequences=8, prompt=3, output=60, spread="equal"), loaded)
    assert {len(rollout.token_ids) for rollout in equal} == {60}


def test_a_measurement_is_written(tmp_path, capsys):
    result = tmp_path / "speed.json"
    main([*LINE, "--output", "40", "--median", "15", "--flops", "1e12", "--result", str(result)])
    shown = capsys.readouterr().out
    (record,) = json.loads(result.read_text())
    results = record["results"]
    assert results["mfu"] == pytest.approx(results["operations"] / (results["seconds"] * 1e12), rel=1e-4)
    assert results["tokens_per_s"] == pytest.approx(results["tokens"] / results["seconds"], rel=1e-4)
    assert "MFU = (6 N + 6 h V + 6 L h l) x tokens / (seconds x F)" in shown
    assert record["settings"]["update"]["activations"] == "keep"


def test_measurements_of_other_settings_have_other_names():
    config = LearnerBenchConfig(device="cpu", dtype="float32", spread="equal")
    plain = default_label(config, UpdateConfig(), OptimizerConfig())
    assert plain == "tiny, cpu, float32, 64 x 128+4096, 8192 tokens a forward, keep"
    moved = default_label(config, UpdateConfig(max_tokens=64), OptimizerConfig(kind="adamw_8bit", offload=True))
    assert moved == "tiny, cpu, float32, 64 x 128+4096, 64 tokens a forward, keep, adamw_8bit, offload"
    other = default_label(replace(config, seed=3), UpdateConfig(num_iterations=2), OptimizerConfig(beta2=0.9))
    assert other == f"{plain}, seed 3, num_iterations 2, beta2 0.9"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sequences", "12"], "must be a multiple of 8"),
        (["--spread", "foo"], "--spread is 'foo'; choose one of lognormal, equal"),
        (["--seed", "99999999999999999999"], "--seed is 99999999999999999999; it must be at least 0 and below 2^63"),
        (["--spread", "uniform"], "choose one of lognormal, equal"),
        (["--against", "verl"], "choose among trl"),
        (["--sigma", "-1"], "must be 0 or more"),
        (["--update.activations", "some"], "choose one of keep, recompute, offload"),
        (["--shape", "qwen9"], "is unknown"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        main([*LINE, *arguments])
    assert exit.value.code == 2
    assert message in capsys.readouterr().err
