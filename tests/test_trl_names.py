# SPDX-License-Identifier: Apache-2.0
"""TRL's names as flags and as keys of a file: each is one setting of ours, or a sentence about what to use instead."""

from __future__ import annotations

from dataclasses import fields

import pytest
import yaml
from commands import assert_one_sentence, changes, flat, resolved, train

from sparse_rl.cli.train import train_parser
from sparse_rl.cli.trl_names import NAMES, REFUSED, VALUES, translate_keys

OWN = {"sampling": {"n": 8}, "task": {"name": "rows", "train_file": "train.jsonl", "rewards": ["rewards.py:one"]}}


GIVEN = {  # a value in TRL's words, and the setting it becomes, or why training refuses it
    "model_name_or_path": ("some/model", {"model": "some/model"}),
    "dtype": ("float64", {"dtype": "float64"}),
    "bf16": (True, {"dtype": "bfloat16"}),
    "output_dir": ("runs/other", {"trainer.output_dir": "runs/other"}),
    "max_steps": (7, {"trainer.steps": 7}),
    "seed": (42, {"trainer.seed": 42}),
    "save_steps": (25, {"trainer.save_every": 25}),
    "save_total_limit": (5, {"trainer.save_total_limit": 5}),
    "metric_for_best_model": ("eval/sparse/reward", {"trainer.best_metric": "eval/sparse/reward"}),
    "resume_from_checkpoint": (True, {"trainer.resume_from_checkpoint": True}),
    "report_to": ("trackio", {"trainer.report_to": ["trackio"]}),
    "scale_rewards": ("none", {"trainer.advantage": "dr_grpo"}),
    "reward_weights": ([0.5], {"task.reward_weights": [0.5]}),
    "chat_template_kwargs": ({"enable_thinking": False}, {"task.chat_template_kwargs": {"enable_thinking": False}}),
    "num_generations": (16, {"sampling.n": 16}),
    "max_completion_length": (99, {"sampling.max_tokens": 99}),
    "temperature": (0.7, {"sampling.temperature": 0.7}),
    "top_p": (0.9, "sampling.top_p is 0.9, but training samples from the whole distribution"),
    "top_k": (5, "sampling.top_k is 5, but training samples from the whole distribution"),
    "learning_rate": (3e-06, {"optimizer.learning_rate": 3e-06}),
    "optim": ("adamw_torch_8bit", {"optimizer.kind": "adamw_8bit"}),
    "lr_scheduler_type": ("cosine", {"optimizer.schedule": "cosine"}),
    "warmup_steps": (3, {"optimizer.warmup": 3}),
    "weight_decay": (0.1, {"optimizer.weight_decay": 0.1}),
    "adam_beta1": (0.8, {"optimizer.beta1": 0.8}),
    "adam_beta2": (0.95, {"optimizer.beta2": 0.95}),
    "adam_epsilon": (1e-06, {"optimizer.eps": 1e-06}),
    "lora_r": (16, {"lora.r": 16}),
    "lora_alpha": (16, "lora.alpha is given, but lora.r is 0"),
    "lora_target_modules": (["q_proj", "v_proj"], "lora.target is given, but lora.r is 0"),
    "max_grad_norm": (0.2, {"update.max_grad_norm": 0.2}),
    "num_iterations": (2, {"update.num_iterations": 2}),
    "beta": (0.04, {"loss.beta": 0.04}),
    "epsilon": (0.1, {"loss.clip_low": 0.1}),
    "epsilon_high": (0.28, {"loss.clip_high": 0.28}),
    "delta": (2.0, {"loss.delta": 2.0}),
    "loss_type": ("dr_grpo", {"loss.aggregation": "fixed_length"}),
    "importance_sampling_level": ("sequence", {"loss.surrogate": "gspo"}),
    "mask_truncated_completions": (True, {"loss.mask_truncated_completions": True}),
    "eval_steps": (3, {"eval.every": 3}),
    "num_generations_eval": (4, {"eval.n": 4}),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A file that names a task of one's own, and its settings."""
    path = tmp_path_factory.mktemp("base") / "base.yaml"
    path.write_text(yaml.safe_dump(OWN | {"kv": {"policy": "rkv"}}))
    return str(path), resolved("--config", str(path))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.some(6)
def test_a_name_of_trl_changes_one_setting_as_a_flag_and_as_a_key(name, config, base):
    (value, expected), (path, before) = GIVEN[name], base
    flag = [f"--{name}"] if value is True else [f"--{name}", str(value)]  # a flag that is true may stand alone
    for given in (flag, ["--config", config({name: value})]):
        if isinstance(expected, str):
            assert_one_sentence(train("--config", path, *given, "--dry-run"), expected)
        else:
            assert changes(before, resolved("--config", path, *given)) == expected


def test_ways_to_write_a_flag(base):
    path, before = base
    for given in (["--bf16"], ["--bf16", "true"], ["--bf16=true"], ["--bf16=True"], ["--bf16", "True", "--beta=0"]):
        assert changes(before, resolved("--config", path, *given)) == {"dtype": "bfloat16"}
    for given in (["--loss_type=DR_GRPO"], ["--loss_type", "dr_grpo"], ["--loss.aggregation=fixed_length"]):
        assert changes(before, resolved("--config", path, *given)) == {"loss.aggregation": "fixed_length"}


def test_every_name_is_trl_s_and_every_setting_ours():
    trl = pytest.importorskip("trl")
    known = {field.name for config in (trl.GRPOConfig, trl.ModelConfig) for field in fields(config)}
    assert set(NAMES) | set(REFUSED) <= known
    assert not set(NAMES) & set(REFUSED)
    options = {option for action in train_parser()._actions for option in action.option_strings}
    assert {f"--{setting}" for setting in NAMES.values()} <= options
    assert VALUES.keys() <= NAMES.keys()


def test_trl_s_defaults_may_be_written_out(config):
    trl = pytest.importorskip("trl")
    found = {field.name: field.default for kind in (trl.GRPOConfig, trl.ModelConfig) for field in fields(kind)}
    names = NAMES.keys() - {"max_steps", "top_k", "report_to"}  # -1 counts epochs; the others are below
    written = {name: getattr(found[name], "value", found[name]) for name in names if found[name] is not None}
    assert len(written) > 15
    settings = resolved("--config", config({"task": OWN["task"]} | written))
    assert (settings["optimizer.schedule"], settings["trainer.advantage"]) == ("linear", "grpo")


@pytest.mark.parametrize(("name", "value", "expected"), [("top_k", 0, None), ("report_to", "none", [])])
def test_trl_s_words_for_nothing_mean_nothing(name, value, expected):
    code, out, _ = train(f"--{name}", str(value), "--dry-run")
    assert code == 0 and flat(yaml.safe_load(out))[NAMES[name]] == expected


TRANSLATED = {
    ("bf16", "true"): {"dtype": "bfloat16"},
    ("bf16", "false"): {"dtype": "float32"},
    ("scale_rewards", "group"): {},
    ("scale_rewards", "true"): {},
    ("scale_rewards", "none"): {"trainer.advantage": "dr_grpo"},
    ("scale_rewards", "false"): {"trainer.advantage": "dr_grpo"},
    ("loss_type", "grpo"): {"loss.aggregation": "sequence_mean"},
    ("loss_type", "dr_grpo"): {"loss.aggregation": "fixed_length"},
    ("loss_type", "dapo"): {},
    ("loss_type", "bnpo"): {},
    ("importance_sampling_level", "token"): {},
    ("importance_sampling_level", "sequence"): {"loss.surrogate": "gspo"},
    ("optim", "adamw_torch"): {},
    ("optim", "adamw_torch_fused"): {},
    ("optim", "adamw_torch_8bit"): {"optimizer.kind": "adamw_8bit"},
    ("optim", "adamw_bnb_8bit"): {"optimizer.kind": "adamw_8bit"},
    ("lr_scheduler_type", "constant_with_warmup"): {},
    ("top_k", "0"): {},
    ("report_to", "none"): {},
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in VALUES for value in VALUES[name]])
@pytest.mark.some(5)
def test_trl_s_values_are_translated(name, value, config, base):
    path, before = base
    word = value if value not in ("true", "false") else value == "true"
    for given in ([f"--{name}", value], ["--config", config({name: word})]):
        assert changes(before, resolved("--config", path, *given)) == TRANSLATED[name, value]


@pytest.mark.parametrize("name", REFUSED)
def test_names_without_a_counterpart_say_what_to_use(name, config):
    for arguments in ([f"--{name}=1"], ["--config", config({name: 1})]):
        assert_one_sentence(train(*arguments, "--dry-run"), f"{name} has no counterpart here: {REFUSED[name]}.")


def test_settings_that_a_refusal_names_exist():
    settings = {option.lstrip("-") for action in train_parser()._actions for option in action.option_strings}
    for text in REFUSED.values():
        for word in text.replace(",", " ").replace(";", " ").split():
            assert "." not in word or word in settings


def test_a_name_and_its_counterpart_in_one_file_are_refused(config):
    for name, setting in NAMES.items():
        *sections, key = setting.split(".")
        if key != name or sections:
            value = "grpo" if name == "loss_type" else 1
            both = {name: value} | ({sections[0]: {key: value}} if sections else {key: value})
            with pytest.raises(ValueError, match=f"{name} and {setting} are the same setting; give one of them"):
                translate_keys(both)
    result = train("--config", config("sampling: {n: 8}\nnum_generations: 8\n"), "--dry-run")
    assert_one_sentence(result, "num_generations and sampling.n are the same setting")


def test_a_name_and_its_counterpart_with_a_dot_are_refused(config):
    path = config("max_steps: 5\ntrainer.steps: 3\nsampling.n: 8\n")
    assert_one_sentence(train("--config", path, "--dry-run"), "max_steps and trainer.steps are the same setting")
