# SPDX-License-Identifier: Apache-2.0
"""`sparse-rl train`: settings in, a run folder out. Checked here, used in train/trainer.py."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from sparse_rl.cli.parsing import add_model, make_parser, model_dtype, parse, quiet_bars, refuse_null, show_warnings
from sparse_rl.cli.recipes import (
    DEFAULT,
    add_config,
    default_settings,
    read_configs,
    split_configs,
    to_yaml,
    with_configs,
)
from sparse_rl.cli.resume import check_paths, named, own_settings
from sparse_rl.cli.trl_names import NAMES, translate, translate_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from jsonargparse import ArgumentParser, Namespace

    from sparse_rl.model.load import LoadedModel
    from sparse_rl.train import Trainer
    from sparse_rl.train.processes import Processes

logger = logging.getLogger(__name__)

DESCRIPTION = """Train a model with reinforcement learning; rollouts run on a sparse KV cache.

Without --config and --model, a small embedded model learns an embedded task, with the recipe default.yaml, which sets
{default}
The defaults listed below are for all else, and for runs with --config or --model. Recipes that come with the package
are known by name. Every setting is a flag and a key of the YAML file; flags win. TRL's names work too
(--num_generations, --learning_rate, ...). A resumed run keeps its own settings, but for those that are given.

  sparse-rl train --trainer.output_dir runs/first
  sparse-rl train --config qwen2.5-1.5b.yaml --task.train_file train.jsonl --task.rewards rewards.py:accuracy
  sparse-rl train --trainer.output_dir runs/first --trainer.resume_from_checkpoint true
  sparse-rl train --lora.r 16 --optimizer.learning_rate 1e-5 --trainer.output_dir runs/adapters
  sparse-rl train --kv.policy snapkv --kv.budget 64 --correction.preset tis --dry-run
  sparse-rl train --kv.policy rkv --kv.budget auto --control.target 0.86 ...   (the budget follows what is measured)
  torchrun --nproc-per-node 8 -m sparse_rl train --config qwen2.5-1.5b.yaml ...   (weights sharded over 8 GPUs)
"""

TRAINER_SETS = ("seed", "top_logprobs")  # of the sampling settings


def read(arguments: list[str], parser: ArgumentParser) -> tuple[Namespace, Any, dict[str, Any]]:
    """The settings that were given, the task's, and those of all other components, checked."""
    arguments = translate(arguments)
    settings = parse(parser, _configs_first(_with_recipe(arguments)), tuple(NAMES))
    if (own := own_settings(parser, settings, "task")) is not None:
        settings = parse(parser, _configs_first(arguments, own), tuple(NAMES))
        check_paths(settings, own)
    from sparse_rl.config import build_correction, build_kv, build_section, build_task, given_of
    from sparse_rl.evaluate import EvalConfig
    from sparse_rl.model.lora import LoraConfig
    from sparse_rl.objective.loss import LossConfig
    from sparse_rl.rollout import EngineConfig, Sampling
    from sparse_rl.tasks import GradingConfig
    from sparse_rl.train import ControlConfig, OptimizerConfig, TrainerConfig, UpdateConfig
    from sparse_rl.train.config import check_dtype, check_settings
    from sparse_rl.train.control import schedule_of
    from sparse_rl.train.distill import DistillConfig

    refuse_null(settings, "model", "device", "kv", "task", "correction")
    check_dtype(model_dtype(settings.dtype))
    task = build_task(settings["task"])
    if getattr(settings.kv, "budget", None) == "auto":
        given_of(settings["control"])  # or it is no table
        settings.kv.budget, settings.control.auto = None, True  # from the policy's own default
    if settings.unsafe_code:
        settings.grading.unsafe_code = True
    parts: dict[str, Any] = {
        "kv": build_kv(settings["kv"]),
        "correction": build_correction(settings["correction"]),
        "sampling": build_section(Sampling, "sampling", settings["sampling"]),
        "engine": build_section(EngineConfig, "engine", settings["engine"]),
        "loss": build_section(LossConfig, "loss", settings["loss"]),
        "update": build_section(UpdateConfig, "update", settings["update"]),
        "optimizer": build_section(OptimizerConfig, "optimizer", settings["optimizer"]),
        "lora": build_section(LoraConfig, "lora", settings["lora"]),
        "control": build_section(ControlConfig, "control", settings["control"]),
        "distill": build_section(DistillConfig, "distill", settings["distill"]),
        "eval": build_section(EvalConfig, "eval", settings["eval"]),
        "config": build_section(TrainerConfig, "trainer", settings["trainer"]),
        "grading": build_section(GradingConfig, "grading", settings["grading"]),
    }
    check_settings(*(parts[name] for name in ("sampling", "update", "kv", "config", "distill")))
    if parts["control"].auto:  # which tries no budget that the pages do not allow
        schedule_of(parts["kv"])  # or it has none
    else:
        parts["kv"].check_page_size(parts["engine"].page_size or parts["kv"].page_size)
    return settings, task, parts


def run(arguments: list[str]) -> None:
    from sparse_rl.train.processes import joined

    with joined() as processes:
        if not processes.first:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
        show_warnings(logging.WARNING if processes.first else logging.ERROR)
        settings, task, parts = processes.together(lambda: read(arguments, train_parser()))
        if settings.dry_run:
            from sparse_rl.cli.plan import plan_comments

            print(to_yaml(_resolved(settings, task, parts)), end="")
            print("\n".join(plan_comments(settings, parts, processes.size)))
            sys.stdout.flush()
            for line in processes.together(lambda: _check(settings, task, parts, processes)):
                print(line)
        else:
            _train(settings, task, parts, processes)
    if processes.grouped:  # torch's threads, torn down with the interpreter, at times abort a process that is done
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)


def _check(settings: Namespace, task: Any, parts: dict[str, Any], processes: Processes) -> list[str]:
    """Raise what `_train` would raise before the first step; comment lines on what was not checked."""
    from sparse_rl.cli.dry_run import check
    from sparse_rl.train.folder import check_folder
    from sparse_rl.train.shard import check_sharded

    check_folder(parts["config"])
    if processes.grouped:
        check_sharded(parts["optimizer"])
    quiet_bars()
    return check(settings.model, settings.dtype, settings.device, lambda model: _trainer(model, task, parts))


def _trainer(loaded: LoadedModel, task: Any, parts: dict[str, Any], processes: Processes | None = None) -> Trainer:
    """All that is between settings and a run: what it refuses, a dry run does."""
    from sparse_rl.report.live import Live
    from sparse_rl.train import Trainer
    from sparse_rl.train.config import longest_sequence
    from sparse_rl.train.folder import fit_rotation
    from sparse_rl.train.processes import Processes

    processes = processes or Processes()
    more = {name: part for name, part in parts.items() if name != "grading"}  # which is the task's
    built = processes.together(lambda: task.build(loaded.tokenizer, context=loaded.context, grading=parts["grading"]))
    asked = longest_sequence(built, parts["config"], parts["sampling"], parts["eval"].prompts)
    processes.together(lambda: fit_rotation(loaded, parts["config"], asked))
    return processes.together(lambda: Trainer(loaded, built, observers=(Live(),), processes=processes, **more))


def _train(settings: Namespace, task: Any, parts: dict[str, Any], processes: Processes) -> None:
    import torch

    from sparse_rl.cli.plan import warn_of_memory
    from sparse_rl.kv.schedule import beyond, origin
    from sparse_rl.model.load import load
    from sparse_rl.train.config import longest_prompt
    from sparse_rl.train.folder import check_folder

    if processes.first:
        logging.getLogger("sparse_rl.tasks").setLevel(logging.INFO)  # which rows were read, and how
    processes.by_first(lambda: check_folder(parts["config"]))
    quiet_bars()
    if processes.first:
        warn_of_memory(settings, parts, processes.size)
        if settings.device == "cpu" and torch.cuda.is_available():
            logger.warning("this run is on the CPU, and the machine has a GPU; --device cuda uses it.")
        other = origin(getattr(parts["kv"], "budget", None)).model
        if other is not None and not _same_model(other, settings.model):
            logger.warning("kv.budget was calibrated on the model %s, and this run is of %s.", other, settings.model)
    dtype = model_dtype(settings.dtype)
    loaded = processes.together(lambda: load(settings.model, dtype=dtype, device=processes.device(settings.device)))
    trainer = _trainer(loaded, task, parts, processes)
    longest = min(loaded.context, longest_prompt(trainer.task, trainer.config) + trainer.sampling.max_tokens)
    if processes.first and (said := beyond(getattr(trainer.kv, "budget", None), longest)):
        logger.warning("%s.", said)
    trainer.train()
    if (newest := trainer.run.newest) is not None:
        model, other = newest
        print(f"the model is in {model}{other}; sparse-rl report {model.parent} makes a page of the run")


def _same_model(one: str, other: str) -> bool:
    return one == other or (os.path.isdir(one) and os.path.isdir(other) and os.path.samefile(one, other))


def train_parser(
    command: str = "train", description: str = DESCRIPTION, add_own: Callable[[ArgumentParser], None] | None = None
) -> ArgumentParser:
    """Of every setting of a run; a command's own come first in its help."""
    from sparse_rl.config import add_correction_section, add_kv_section, add_section, add_task_section
    from sparse_rl.evaluate import EvalConfig
    from sparse_rl.model.lora import LoraConfig
    from sparse_rl.objective.loss import LossConfig
    from sparse_rl.rollout import EngineConfig, Sampling
    from sparse_rl.tasks import GradingConfig
    from sparse_rl.train import ControlConfig, OptimizerConfig, TrainerConfig, UpdateConfig
    from sparse_rl.train.distill import DistillConfig

    parser = make_parser(command, description.format(default=default_settings()))
    parser.usage = f"sparse-rl {command} [--config FILE] [--SETTING VALUE ...]"
    if add_own is not None:
        add_own(parser)
    add_config(parser)
    add_model(parser, default="embedded")
    if command == "train":
        words = (
            "print all settings as YAML and the plan, refuse what the run would refuse, and stop; the plan and checks "
            "that need the model or the device are left out where those are not at hand"
        )
        parser.add_argument("--dry-run", action="store_true", help=words)
    parser.add_argument("--unsafe-code", action="store_true", help="the same as --grading.unsafe_code true")
    add_section(parser, "trainer", TrainerConfig)
    add_task_section(parser)
    add_kv_section(parser)
    add_correction_section(parser)
    add_section(parser, "sampling", Sampling, leave_out=TRAINER_SETS)
    for name, component in (
        ("loss", LossConfig),
        ("optimizer", OptimizerConfig),
        ("lora", LoraConfig),
        ("distill", DistillConfig),
        ("update", UpdateConfig),
        ("control", ControlConfig),
        ("eval", EvalConfig),
        ("engine", EngineConfig),
        ("grading", GradingConfig),
    ):
        add_section(parser, name, component)
    parser.set_defaults({"sampling.n": 8})  # one completion has nothing to be compared with
    return parser


def _with_recipe(arguments: list[str]) -> list[str]:
    """The default recipe before everything else, unless a model or a config is named."""
    chosen = any(argument.split("=")[0] in ("--model", "--config", "--shape") for argument in arguments)
    return arguments if chosen else ["--config", DEFAULT, *arguments]


def _configs_first(arguments: list[str], own: dict[str, Any] | None = None) -> list[str]:
    """Each --config FILE replaced by its settings, TRL's keys translated; before the flags, so that flags win.

    A run's own settings, if it is resumed, come before all of them.
    """
    from sparse_rl.train.control import OF_AUTO

    names, others = split_configs(arguments)
    options = {argument.partition("=")[0] for argument in others}
    if "--task.train_file" in options and "--task.name" not in options:
        others = ["--task.name", "rows", *others]  # the only task that has files
    configs = [_checked(each, name) for name in names for each in read_configs(name, "train")]
    if own is not None:
        if named("correction", "preset", others, configs) is not None:
            own.pop("correction", None)
        if named("kv", "budget", others, configs) not in (None, "auto"):
            _leave_out(own, "control", ("auto", *OF_AUTO))  # a budget that is given stands still
        configs = [own, *configs]
    for i, config in enumerate(configs):
        _drop_unfit(config, others, configs[i + 1 :])
    return with_configs(configs, others)


def _drop_unfit(config: dict[str, Any], flags: list[str], later: list[dict[str, Any]]) -> None:
    """Where a flag or a later file chooses otherwise, leave out the settings that its choice does not have."""
    from sparse_rl.kv import POLICIES
    from sparse_rl.objective.loss import UNREAD
    from sparse_rl.tasks import TASKS
    from sparse_rl.train.control import OF_AUTO

    surrogate, moves = named("loss", "surrogate", flags, later), named("kv", "budget", [], [config]) == "auto"
    _leave_out(config, "loss", UNREAD.get(str(surrogate), ()))
    for section, key, components in (("kv", "policy", POLICIES), ("task", "name", TASKS)):
        name, settings = named(section, key, flags, later), config.get(section)
        if isinstance(name, str) and name in components and isinstance(settings, dict) and settings.get(key) != name:
            known = {field.name for field in fields(components[name])}
            _leave_out(config, section, settings.keys() - known)
    if moves and named("kv", "budget", flags, [config, *later]) != "auto":
        _leave_out(config, "control", OF_AUTO)


def _leave_out(config: dict[str, Any], section: str, names: Collection[str]) -> None:
    if isinstance(settings := config.get(section), dict):
        config[section] = {name: value for name, value in settings.items() if name not in names}


def _checked(settings: dict[str, Any], name: str) -> dict[str, Any]:
    settings = translate_keys(settings)
    correction = settings.get("correction")
    for key, value in (correction if isinstance(correction, dict) else {}).items():
        if value is None and key != "preset":
            raise ValueError(
                f"correction.{key} is null in {name}, which would leave the preset's; leave it out, or give 0 (or .inf "
                "for upper) to switch it off."
            )
    return settings


def _resolved(settings: Namespace, task: Any, parts: dict[str, Any]) -> dict[str, Any]:
    """Every setting, in the form of a config file."""
    sections: dict[str, Any] = {key: settings[key] for key in ("model", "dtype", "device")}
    sections["trainer"] = asdict(parts["config"])
    sections["task"] = {"name": task.name, **asdict(task)}
    sections["kv"] = {"policy": parts["kv"].name, **asdict(parts["kv"])}
    given = {key: value for key, value in asdict(parts["correction"]).items() if value is not None}
    sections["correction"] = {"preset": settings.correction.preset, **given}
    for name in ("sampling", "loss", "optimizer", "lora", "distill", "update", "control", "eval", "engine", "grading"):
        sections[name] = asdict(parts[name])
    for name in TRAINER_SETS:
        del sections["sampling"][name]
    return sections
