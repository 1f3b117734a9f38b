# SPDX-License-Identifier: Apache-2.0
"""What a trainer refuses before anything runs."""

from __future__ import annotations

import pytest
import torch
from small_run import digits, small_model, small_trainer

from sparse_rl.kv import Full
from sparse_rl.model.load import load
from sparse_rl.rollout import Sampling
from sparse_rl.tasks import Rewards, Rows
from sparse_rl.tasks.chain import chain_tokenizer
from sparse_rl.train import UpdateConfig


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (Sampling(n=4, top_p=0.9), "sampling.top_p is 0.9, but training samples from the whole distribution"),
        (Sampling(n=4, top_k=5), "sampling.top_k is 5, but training samples from the whole distribution"),
        (Sampling(n=4, temperature=0.0), "temperature is 0"),
        (Sampling(n=1), "sample at least 2"),
        (Sampling(n=4, seed=7), "sampling.seed is given, but training sets it; its seed is trainer.seed"),
        (Sampling(n=4, top_logprobs=3), "sampling.top_logprobs is given, but training sets it"),
    ],
)
def test_sampling_that_cannot_train_is_refused(tmp_path, sampling, message):
    with pytest.raises(ValueError, match=message):
        small_trainer(tmp_path / "run", parts={"sampling": sampling})
    assert not (tmp_path / "run").exists()


def test_more_updates_than_prompts_are_refused_before_anything_runs(tmp_path):
    with pytest.raises(ValueError, match=r"updates_per_rollout is 3, but a step has 2 prompts"):
        small_trainer(tmp_path / "run", parts={"update": UpdateConfig(updates_per_rollout=3)})


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


def test_dropout_is_refused(tmp_path):
    loaded = load("embedded")
    loaded.model.model.layers[0].mlp.add_module("dropout", torch.nn.Dropout(0.1))
    with pytest.raises(ValueError, match=r"dropout 0.1 in model.layers.0.mlp.dropout"):
        small_trainer(tmp_path / "run", loaded=loaded)


def test_half_precision_without_a_range_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"dtype is float16, in which small gradients become 0; train in bfloat16"):
        small_trainer(tmp_path / "run", loaded=load("embedded", dtype=torch.float16))


def test_names_in_the_place_of_objects_are_refused(tmp_path):
    for parts, said in (({"kv": "rkv"}, "kv is 'rkv'; give an object"), ({"correction": "tis"}, "PRESETS")):
        with pytest.raises(ValueError, match=said):
            small_trainer(tmp_path / "run", parts=parts)
    with pytest.raises(ValueError, match=r"give Rewards\(\(function,\)\)"):
        Rows([{"prompt": "a"}], max, chain_tokenizer())


def test_completions_beyond_the_context_are_told_of(tmp_path, caplog):
    loaded = small_model()
    small_trainer(tmp_path / "run", parts={"sampling": Sampling(n=2, max_tokens=loaded.context + 1)})
    assert f"but the model's context ends at {loaded.context} tokens" in caplog.text
