# SPDX-License-Identifier: Apache-2.0
"""`sparse-rl sft`: completions to imitate in, a run folder out. Checked here, used in train/sft.py."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sparse_rl.cli.parsing import add_model, make_parser, model_dtype, parse, quiet_bars, refuse_null, show_warnings
from sparse_rl.cli.recipes import add_config, given_configs, to_yaml, with_configs
from sparse_rl.cli.resume import check_paths, named, own_settings

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

    from sparse_rl.model.load import LoadedModel

DESCRIPTION = """Teach a model completions to imitate: a warm start for training with rewards.

Each row of the data is one JSON object, {"prompt": string or chat messages, "completion": string}. Chats go through the
model's chat template, completions get the model's end token, and the loss is the cross-entropy of completion tokens
alone. The run folder is that of `sparse-rl train`; with held-out rows the checkpoint of the lowest loss there is kept.
Recipes that come with the package are known by name. Every setting is a flag and a key of the YAML file; flags win.

  sparse-rl sft --model smollm2 --data.train_file warm.jsonl --trainer.output_dir runs/warm
  sparse-rl sft --config smollm2-warm.yaml --data.train_file warm.jsonl --data.eval_file held_out.jsonl
  sparse-rl sft --config smollm2-warm.yaml --trainer.resume_from_checkpoint true
  sparse-rl train --model runs/warm/checkpoint-300 ...
"""


def run(arguments: list[str]) -> None:
    parser, (configs, others) = _parser(), given_configs(arguments, "sft")
    settings = parse(parser, with_configs(configs, others))
    if (own := own_settings(parser, settings, "data")) is not None:
        in_file = named("trainer", "epochs", [], configs)
        if named("trainer", "epochs", others, []) is not None or in_file not in (None, own["trainer"].get("epochs")):
            own["trainer"].pop("steps", None)  # which would come before other epochs
        settings = parse(parser, with_configs([own, *configs], others))
        check_paths(settings, own)
    from sparse_rl.config import build_section
    from sparse_rl.model.load import load
    from sparse_rl.tasks.supervised import ExamplesConfig
    from sparse_rl.train import OptimizerConfig, SFTConfig, SFTTrainer
    from sparse_rl.train.folder import check_folder, fit_rotation
    from sparse_rl.train.sft import end_ids

    refuse_null(settings, "model", "device")
    dtype = model_dtype(settings.dtype)
    config = build_section(SFTConfig, "trainer", settings["trainer"])
    if config.resume_from_checkpoint:
        check_folder(config, "data")  # whose data are then those
    data = build_section(ExamplesConfig, "data", settings["data"])
    optimizer = build_section(OptimizerConfig, "optimizer", settings["optimizer"])
    from sparse_rl.report.live import SupervisedLive

    def trainer_of(loaded: LoadedModel) -> SFTTrainer:
        examples = data.build(loaded.tokenizer, end_ids(loaded), loaded.context)
        fit_rotation(loaded, config, max(example.num_tokens for example in (*examples.train, *examples.eval)))
        return SFTTrainer(loaded, examples, config=config, optimizer=optimizer, observers=(SupervisedLive(),))

    if settings.dry_run:
        from sparse_rl.cli.dry_run import check

        sections: dict[str, Any] = {key: settings[key] for key in ("model", "dtype", "device")}
        sections |= {"trainer": asdict(config), "data": asdict(data), "optimizer": asdict(optimizer)}
        print(to_yaml(sections), end="", flush=True)
        check_folder(config, "data")
        for line in check(settings.model, settings.dtype, settings.device, trainer_of):
            print(line)
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        if os.environ.get("RANK", "0") != "0":
            sys.exit(2)  # the first process says it
        raise ValueError("sparse-rl sft runs in one process; start it without torchrun.")
    show_warnings()
    check_folder(config, "data")
    quiet_bars()
    trainer = trainer_of(load(settings.model, dtype=dtype, device=settings.device))
    trainer.train()
    if (newest := trainer.run.newest) is not None:
        model, other = newest
        print(
            f"the model is in {model}{other}; sparse-rl train --model {model} ... goes on from it, sparse-rl report "
            f"{model.parent} makes a page of the run"
        )


def _parser() -> ArgumentParser:
    from sparse_rl.config import add_section
    from sparse_rl.tasks.supervised import ExamplesConfig
    from sparse_rl.train import OptimizerConfig, SFTConfig
    from sparse_rl.train.sft import OPTIMIZER

    parser = make_parser("sft", DESCRIPTION)
    add_config(parser)
    add_model(parser, default="smollm2")
    parser.add_argument(
        "--dry-run", action="store_true", help="print all settings as YAML, refuse what the run would, and stop"
    )
    add_section(parser, "trainer", SFTConfig)
    add_section(parser, "data", ExamplesConfig)
    add_section(parser, "optimizer", OptimizerConfig)
    parser.set_defaults({f"optimizer.{name}": value for name, value in asdict(OPTIMIZER).items()})
    return parser
