# SPDX-License-Identifier: Apache-2.0
"""TRL's names as flat flags and YAML keys: `--num_generations 16` is `--sampling.n 16`.

Each name maps to one setting; where TRL has other words for the values, they are translated too. Names without a
counterpart are refused with what to use instead.

What is neither TRL's name nor ours passes through, and is refused in `parsing.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

NAMES: dict[str, str] = {
    "model_name_or_path": "model",
    "dtype": "dtype",
    "bf16": "dtype",
    "output_dir": "trainer.output_dir",
    "max_steps": "trainer.steps",
    "seed": "trainer.seed",
    "save_steps": "trainer.save_every",
    "save_total_limit": "trainer.save_total_limit",
    "metric_for_best_model": "trainer.best_metric",
    "resume_from_checkpoint": "trainer.resume_from_checkpoint",
    "report_to": "trainer.report_to",
    "scale_rewards": "trainer.advantage",
    "reward_weights": "task.reward_weights",
    "chat_template_kwargs": "task.chat_template_kwargs",
    "num_generations": "sampling.n",
    "max_completion_length": "sampling.max_tokens",
    "temperature": "sampling.temperature",
    "top_p": "sampling.top_p",
    "top_k": "sampling.top_k",
    "learning_rate": "optimizer.learning_rate",
    "optim": "optimizer.kind",
    "lr_scheduler_type": "optimizer.schedule",
    "warmup_steps": "optimizer.warmup",
    "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "adam_epsilon": "optimizer.eps",
    "lora_r": "lora.r",
    "lora_alpha": "lora.alpha",
    "lora_target_modules": "lora.target",
    "max_grad_norm": "update.max_grad_norm",
    "num_iterations": "update.num_iterations",
    "beta": "loss.beta",
    "epsilon": "loss.clip_low",
    "epsilon_high": "loss.clip_high",
    "delta": "loss.delta",
    "loss_type": "loss.aggregation",
    "importance_sampling_level": "loss.surrogate",
    "mask_truncated_completions": "loss.mask_truncated_completions",
    "eval_steps": "eval.every",
    "num_generations_eval": "eval.n",
}

TABLES = ("chat_template_kwargs",)  # settings that have keys and values of their own

VALUES: dict[str, dict[str, str]] = {
    "bf16": {"true": "bfloat16", "false": "float32"},
    "scale_rewards": {"group": "grpo", "true": "grpo", "none": "dr_grpo", "false": "dr_grpo"},
    "loss_type": {
        "grpo": "sequence_mean",
        "dr_grpo": "fixed_length",
        "dapo": "token_mean",
        "bnpo": "token_mean",
    },
    "importance_sampling_level": {"token": "ppo", "sequence": "gspo"},
    "optim": {
        "adamw_torch": "adamw",
        "adamw_torch_fused": "adamw",
        "adamw_torch_8bit": "adamw_8bit",
        "adamw_bnb_8bit": "adamw_8bit",
    },
    "lr_scheduler_type": {"constant_with_warmup": "constant"},
    "top_k": {"0": "null"},
    "report_to": {"none": "[]"},
}

REFUSED: dict[str, str] = {
    "per_device_train_batch_size": "a step samples trainer.prompts_per_step prompts, sampling.n completions each; "
    "update.max_tokens bounds a forward",
    "gradient_accumulation_steps": "update.max_tokens bounds a forward, and a step's forwards are accumulated",
    "generation_batch_size": "give trainer.prompts_per_step",
    "steps_per_generation": "give update.updates_per_rollout, the optimiser steps a rollout batch",
    "num_train_epochs": "give trainer.steps",
    "logging_steps": "every step is logged",
    "use_vllm": "rollouts run on the model itself",
    "vllm_importance_sampling_correction": "give correction.preset",
    "min_p": "training samples from the whole distribution",
    "repetition_penalty": "training samples from the whole distribution",
    "gradient_checkpointing": "give update.activations recompute",
    "use_peft": "give lora.r, the adapters' rank",
    "lora_dropout": "dropout is off in sampler and learner",
    "use_rslora": "give lora.alpha times the square root of lora.r",
    "lora_modules_to_save": "only adapters are trained with lora.r",
    "load_in_4bit": "sampler and learner share one module of plain weights; lora.r leaves them frozen in bfloat16",
    "load_in_8bit": "sampler and learner share one module of plain weights; lora.r leaves them frozen in bfloat16",
    "log_completions": "give trainer.log_completions, completions a step",
}


def translate(arguments: list[str]) -> list[str]:
    """The arguments with TRL's flags as our own."""
    translated = list(arguments)
    given: dict[str, str] = {}
    for i, argument in enumerate(arguments):
        if not argument.startswith("--") or (i and arguments[i - 1] == "--config"):
            continue
        name, equals, value = argument[2:].partition("=")
        if name in REFUSED:
            raise ValueError(f"--{name} has no counterpart here: {REFUSED[name]}.")
        if given.setdefault(NAMES.get(name, name), name) != name:
            raise ValueError(f"--{given[NAMES.get(name, name)]} and --{name} are the same setting; give one of them.")
        if name not in NAMES:
            continue
        translated[i] = f"--{NAMES[name]}" + (f"={_value(name, value)}" if equals else "")
        has_value = i + 1 < len(arguments) and not arguments[i + 1].startswith("--")
        if not equals and has_value:
            translated[i + 1] = _value(name, arguments[i + 1])
        elif not equals:  # a bare boolean flag
            translated[i] += f"={_value(name, 'true')}"
    return translated


def translate_keys(settings: dict[str, Any]) -> dict[str, Any]:
    """A YAML file's settings as sections: TRL's names and keys with dots moved to where they belong."""
    translated: dict[str, Any] = {}
    given: dict[str, str] = {}
    for name, value in _flat(settings):
        if name in REFUSED:
            raise ValueError(f"{name} has no counterpart here: {REFUSED[name]}.")
        key = NAMES.get(name, name)
        if key in given:
            other = name if name != key else given[key]
            raise ValueError(f"{other} and {key} are the same setting; give one of them.")
        given[key] = name
        ours = _value(name, str(value))
        value = value if ours == str(value) else yaml.safe_load(ours)
        *sections, last = key.split(".")
        place = translated
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise ValueError(f"{section} is {place!r}; it must be a table of keys and values.")
        place[last] = value
    return translated


def _flat(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by their keys with dots; what is no table comes first, so that it is not hidden by one."""
    for key, value in sorted(settings.items(), key=lambda item: isinstance(item[1], dict)):
        if isinstance(value, dict) and value and key not in TABLES:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _value(name: str, value: str) -> str:
    if name == "loss_type" and value.lower() not in VALUES[name]:
        raise ValueError(
            f"loss_type is {value!r}; {', '.join(VALUES[name])} say how to average, and loss.surrogate has cispo, gspo."
        )
    return VALUES.get(name, {}).get(value.lower(), value)
