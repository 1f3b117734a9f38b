# SPDX-License-Identifier: Apache-2.0
"""`--dry-run`: the trainer that the run would have, on a model without weights, which refuses what the run's would.

What only the weights, the device and its memory can say it does not know.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparse_rl.model.load import LoadedModel
    from sparse_rl.train import SFTTrainer, Trainer


class NotAtHand(Exception):
    """Why there is no model to check the settings with."""


def check(
    name: str, dtype: str | None, device: str, trainer_of: Callable[[LoadedModel], Trainer | SFTTrainer]
) -> list[str]:
    """Raise what a run would raise before its first step; comment lines on what was not checked."""
    import torch

    from sparse_rl.model.load import check_device

    said = []
    try:
        torch.device(device)
    except RuntimeError:  # of no machine
        check_device(device)
    try:
        trainer_of(_loaded(name, dtype, device)).run.check()
    except NotAtHand as error:
        said.append(f"# not checked with the model and its data: {error}")
    try:
        check_device(device)
    except ValueError as error:
        said.append(f"# not checked on the device: {error}")
    return said


def _loaded(name: str, dtype: str | None, device: str) -> LoadedModel:
    """The model as `load` gives it for the device, but without weights, on torch's meta device."""
    import torch
    import transformers

    from sparse_rl.cli.parsing import model_dtype
    from sparse_rl.cli.plan import IN_FP32
    from sparse_rl.model.load import LoadedModel, load_reader
    from sparse_rl.plan import empty_model, model_size

    source, config = _config(name)
    tokenizer = load_reader(source if name == "smollm2" else name).tokenizer  # or it says what `load` would refuse
    chosen = model_dtype(dtype) or (name.partition(":")[0] not in IN_FP32 and config.dtype) or torch.float32
    try:
        size = model_size(config, name, chosen)
        model = empty_model(config, chosen)
    except Exception as error:  # what only `load` can make
        raise NotAtHand(f"{name} cannot be made without its weights ({' '.join(str(error).split())}).") from error
    if (Path(source) / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(source)
    model.config.name_or_path = name
    return LoadedModel(model=model.eval(), tokenizer=tokenizer, shape=size.attention, asked=device)


def _config(name: str) -> tuple[str, Any]:
    """Where the model's configuration is, and what it says, if it is on this machine."""
    from sparse_rl.model import smollm2
    from sparse_rl.model.load import check_name, load_reader
    from sparse_rl.model.lora import ADAPTER, base_name
    from sparse_rl.plan import model_config

    source = base_name(Path(name)) if (Path(name) / ADAPTER).is_file() else name
    if source == "smollm2":
        source = str(smollm2.converted(make=False) or smollm2.HUB_NAME)
    try:
        return source, model_config(source, download=False)
    except ValueError as error:
        if source.partition(":")[0] != "tiny" and not Path(source).exists():
            check_name(source)
            raise NotAtHand(str(error)) from error
        load_reader(name)  # which says what is wrong with a folder
        raise
