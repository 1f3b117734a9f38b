# SPDX-License-Identifier: Apache-2.0
"""`sparse-rl train`: settings in, a run folder out."""

from __future__ import annotations

import logging
import sys
from dataclasses import asdict, fields
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from sparse_rl.cli.parsing import add_model, make_parser, model_dtype, parse, quiet_bars
from sparse_rl.cli.trl_names import NAMES, translate, translate_keys

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

DESCRIPTION = """Train a model with reinforcement learning; rollouts run on a sparse KV cache.

Without --config and --model, a small embedded model learns an embedded task (the recipe default.yaml). Recipes that
come with the package are known by name. Every setting is a flag and a key of the YAML file; flags win. TRL's names work
too (--num_generations, --learning_rate, ...).

  sparse-rl train --trainer.output_dir runs/first
  sparse-rl train --config qwen2.5-1.5b.yaml --task.train_file train.jsonl --task.rewards rewards.py:accuracy
  sparse-rl train --trainer.output_dir runs/first --trainer.resume_from_checkpoint true
  sparse-rl train --lora.r 16 --optimizer.learning_rate 1e-5 --trainer.output_dir runs/adapters
  sparse-rl train --kv.policy snapkv --kv.budget 64 --correction.preset tis --dry-run
"""

TRAINER_SETS = ("seed", "top_logprobs")  # of the sampling settings


def run(arguments: list[str]) -> None:
    settings = parse(_parser(), _configs_first(_with_recipe(translate(arguments))), tuple(NAMES))
    from sparse_rl.config import build_correction, build_kv, build_section, build_task
    from sparse_rl.evaluate import EvalConfig
    from sparse_rl.model.load import load
    from sparse_rl.model.lora import LoraConfig
    from sparse_rl.objective.loss import LossConfig
    from sparse_rl.rollout import EngineConfig, Sampling
    from sparse_rl.train import OptimizerConfig, Trainer, TrainerConfig, UpdateConfig
    from sparse_rl.train.config import check_settings
    from sparse_rl.train.folder import check_folder

    for key in ("model", "device", "kv", "task", "correction"):
        if settings[key] is None:
            raise ValueError(f"{key} is null; give it a value or leave it out.")
    dtype = model_dtype(settings.dtype)
    task = build_task(settings["task"])
    parts: dict[str, Any] = {
        "kv": build_kv(settings["kv"]),
        "correction": build_correction(settings["correction"]),
        "sampling": build_section(Sampling, "sampling", settings["sampling"]),
        "engine": build_section(EngineConfig, "engine", settings["engine"]),
        "loss": build_section(LossConfig, "loss", settings["loss"]),
        "update": build_section(UpdateConfig, "update", settings["update"]),
        "optimizer": build_section(OptimizerConfig, "optimizer", settings["optimizer"]),
        "lora": build_section(LoraConfig, "lora", settings["lora"]),
        "eval": build_section(EvalConfig, "eval", settings["eval"]),
        "config": build_section(TrainerConfig, "trainer", settings["trainer"]),
    }
    check_settings(parts["sampling"], parts["update"], parts["kv"], parts["config"])
    if settings.dry_run:
        print(yaml.dump(_resolved(settings, task, parts), Dumper=_Lists, sort_keys=False), end="")
        return
    from sparse_rl.report.live import Live

    logging.basicConfig(format="sparse-rl: %(levelname)s: %(message)s", level=logging.WARNING, stream=sys.stderr)
    check_folder(parts["config"])
    quiet_bars()
    loaded = load(settings.model, dtype=dtype, device=settings.device)
    Trainer(loaded, task.build(loaded.tokenizer), observers=(Live(),), **parts).train()


def _parser() -> ArgumentParser:
    from sparse_rl.config import add_correction_section, add_kv_section, add_section, add_task_section
    from sparse_rl.evaluate import EvalConfig
    from sparse_rl.model.lora import LoraConfig
    from sparse_rl.objective.loss import LossConfig
    from sparse_rl.rollout import EngineConfig, Sampling
    from sparse_rl.train import OptimizerConfig, TrainerConfig, UpdateConfig

    parser = make_parser("train", DESCRIPTION)
    parser.add_argument("--config", action="config", help="YAML file with any of these settings, or a recipe's name")
    add_model(parser, default="embedded")
    parser.add_argument("--dry-run", action="store_true", help="print all settings as YAML, and stop")
    add_section(parser, "trainer", TrainerConfig)
    add_task_section(parser)
    add_kv_section(parser)
    add_correction_section(parser)
    add_section(parser, "sampling", Sampling, leave_out=TRAINER_SETS)
    for name, component in (
        ("loss", LossConfig),
        ("optimizer", OptimizerConfig),
        ("lora", LoraConfig),
        ("update", UpdateConfig),
        ("eval", EvalConfig),
        ("engine", EngineConfig),
    ):
        add_section(parser, name, component)
    parser.set_defaults({"sampling.n": 8})  # one completion has nothing to be compared with
    return parser


def _with_recipe(arguments: list[str]) -> list[str]:
    """The default recipe before everything else, unless a model or a config is named."""
    named = any(argument.split("=")[0] in ("--model", "--config") for argument in arguments)
    return arguments if named else ["--config", "default.yaml", *arguments]


def _configs_first(arguments: list[str]) -> list[str]:
    """Each --config FILE replaced by its settings, TRL's keys translated; before the flags, so that flags win."""
    configs, others = [], []
    given = iter(arguments)
    for argument in given:
        name, equals, value = argument.partition("=")
        if name != "--config":
            others.append(argument)
            continue
        path = value if equals else next(given, None)
        if path is None:
            raise ValueError("--config needs the name of a file or a recipe.")
        configs.append(_config(path))
    for config in configs:
        _drop_unfit(config, others)
    return [*(text for config in configs for text in ("--config", yaml.safe_dump(config))), *others]


def _drop_unfit(config: dict[str, Any], flags: list[str]) -> None:
    """Where a flag names another policy or task than the file, leave out the file's settings that it does not have."""
    from sparse_rl.kv import POLICIES
    from sparse_rl.tasks import TASKS

    for section, key, components in (("kv", "policy", POLICIES), ("task", "name", TASKS)):
        option = f"--{section}.{key}"
        named = [flag.partition("=")[2] for flag in flags if flag.startswith(f"{option}=")]
        named += [value for flag, value in pairwise(flags) if flag == option]
        settings = config.get(section)
        if named and named[-1] in components and isinstance(settings, dict) and settings.get(key) != named[-1]:
            known = {field.name for field in fields(components[named[-1]])}
            config[section] = {name: value for name, value in settings.items() if name in known}


def _config(name: str) -> dict[str, Any]:
    path = Path(name)
    recipe = _recipe(name)
    if not path.exists() and not recipe.is_file():
        recipes = ", ".join(sorted(entry.name for entry in _recipe("").iterdir() if entry.name.endswith(".yaml")))
        raise ValueError(f"--config {name!r} is neither a file nor a recipe; the recipes are {recipes}.")
    try:
        settings = yaml.safe_load((path if path.exists() else recipe).read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{name} is not YAML: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{name} is not a table of settings; write lines of the form `key: value`.")
    settings = translate_keys(settings)
    correction = settings.get("correction")
    for key, value in (correction if isinstance(correction, dict) else {}).items():
        if value is None and key != "preset":
            raise ValueError(
                f"correction.{key} is null in {name}, which would leave the preset's; leave it out, or give 0 (or .inf "
                "for upper) to switch it off."
            )
    return settings


def _recipe(name: str) -> Any:
    return resources.files("sparse_rl") / "recipes" / name


def _resolved(settings: Namespace, task: Any, parts: dict[str, Any]) -> dict[str, Any]:
    """Every setting, in the form of a config file."""
    sections: dict[str, Any] = {key: settings[key] for key in ("model", "dtype", "device")}
    sections["trainer"] = asdict(parts["config"])
    sections["task"] = {"name": task.name, **asdict(task)}
    sections["kv"] = {"policy": parts["kv"].name, **asdict(parts["kv"])}
    given = {key: value for key, value in asdict(parts["correction"]).items() if value is not None}
    sections["correction"] = {"preset": settings.correction.preset, **given}
    for name in ("sampling", "loss", "optimizer", "lora", "update", "eval", "engine"):
        sections[name] = asdict(parts[name])
    for name in TRAINER_SETS:
        del sections["sampling"][name]
    return sections


class _Lists(yaml.SafeDumper):  # type: ignore[misc]
    """Writes tuples as lists."""


_Lists.add_representer(tuple, lambda dumper, value: dumper.represent_list(value))
