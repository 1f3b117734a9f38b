# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters, through peft: W x becomes W x + (alpha / r) B A x, and only A and B are trained.

They are put into the Hugging Face module in place, so sampler and learner share them as they share everything else. B
starts at 0: before the first update the adapted module is the base. A checkpoint holds the adapters alone, in peft's
layout; `merge` adds such a folder to the weights of its base. Adapters of a wrapper's text model have the names of the
wrapper's modules: the wrapper is the base that their config names, so peft can put them on it.

An adapter that the sampler alone has is in `sampler_adapter.py`.
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from sparse_rl.model import wrappers
from sparse_rl.model.probe import has_experts
from sparse_rl.specs import first_line, refuse_unused

logger = logging.getLogger(__name__)

ALL = "all-linear"
EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
ROUTERS = {"router", "gate", "shared_expert_gate"}  # what transformers calls those of mixtures
ADAPTER = "adapter_config.json"  # a folder with this file is an adapter's
WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Adapters to train instead of the weights; dropout is off, as everywhere.

    r: rank of the adapters, 0 for none; they need about ten times the learning rate of a full model
    alpha: the adapters' output is scaled by alpha / r
    target: projections to adapt by name, or "all-linear" for all but the head and routers of experts
    """

    r: int = 0
    alpha: float = 32.0
    target: tuple[str, ...] = (ALL,)

    def __post_init__(self) -> None:
        if self.r < 0:
            raise ValueError(f"lora.r is {self.r}; it must be at least 1, or 0 to train all weights.")
        if not 0 < self.alpha < float("inf"):
            raise ValueError(f"lora.alpha is {self.alpha}; it must be above 0.")
        if not self.target or (ALL in self.target and len(self.target) > 1):
            raise ValueError(f"lora.target is {list(self.target)}; name projections, or {ALL} alone.")
        if not self.r:
            refuse_unused(self, "lora", "lora.r is 0: there are no adapters; set lora.r")


def check_rank(rank: int, width: int) -> None:
    """Refuse adapters that are no smaller than what they adapt."""
    if rank > width:
        raise ValueError(f"lora.r is {rank}, more than the model is wide ({width}); lower it, to 16 say.")


def add_adapters(model: transformers.PreTrainedModel, config: LoraConfig, seed: int) -> None:
    """Freeze the module and give it adapters in its own dtype. Same seed, same adapters."""
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError("the model has adapters already; load it anew before it gets others.")
    _check_target(model, config.target)
    check_rank(config.r, model.config.get_text_config().hidden_size)
    settings = _peft(f"lora.r is {config.r}").LoraConfig(
        r=config.r, lora_alpha=config.alpha, target_modules=_target_modules(model, config.target)
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.add_adapter(settings)
    model.train(model.training)  # what is new among its parts too
    model.peft_config["default"].base_model_name_or_path = wrappers.lasting_name(model.config.name_or_path)


def save_model(model: transformers.PreTrainedModel, folder: Path) -> None:
    """The model in Hugging Face layout, or its adapters alone in peft's."""
    if not getattr(model, "_hf_peft_config_loaded", False):
        model.save_pretrained(folder)
        return
    # Not the library's own `save_pretrained`, which asks the hub each time whether the base's vocabulary has changed.
    state = _peft("the model has adapters").get_peft_model_state_dict(model, save_embedding_layers=False)
    inside, outside = wrappers.prefixes(model)
    outer = {name: re.sub(f"^{re.escape(inside)}", outside, name) for name in state}
    weights = {f"base_model.model.{outer[name]}": value.contiguous() for name, value in state.items()}
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    settings: Any = copy.copy(model.peft_config["default"])
    if inside != outside:  # in full, because the vision tower may have projections of the same names
        settings.target_modules = {name.partition(".lora_")[0] for name in outer.values()}
    settings.save_pretrained(folder)


@contextmanager
def adapters_off(model: transformers.PreTrainedModel) -> Iterator[None]:
    """The base model, for as long as this lasts."""
    model.disable_adapters()
    try:
        yield
    finally:
        model.enable_adapters()


def adapted_by_policy(part: torch.nn.Module) -> bool:
    """Whether a module is a projection with one adapter like this file's: switched on, not merged, of its dtype."""
    layer: Any = part  # one of peft's, if it has what they have
    if not hasattr(layer, "lora_A") or type(layer).__name__ != "Linear" or layer.disable_adapters or layer.merged:
        return False
    if len(layer.active_adapters) != 1 or layer.active_adapters[0] not in layer.lora_A or layer.lora_variant:
        return False
    halves = [half[layer.active_adapters[0]] for half in (layer.lora_A, layer.lora_B)]
    return all(half.weight.dtype == layer.base_layer.weight.dtype for half in halves)


def base_name(folder: Path) -> str:
    """The model that a folder's adapter was trained on."""
    try:
        settings = json.loads((folder / ADAPTER).read_text())
        kind, base = settings["peft_type"], settings["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / ADAPTER} is damaged; the adapter cannot be loaded.") from error
    if kind != "LORA":
        raise ValueError(f"{folder} holds an adapter of type {kind}; only LORA can be merged.")
    if not base:
        raise ValueError(
            f"{folder / ADAPTER} does not say what it was trained on; set base_model_name_or_path in it to a folder or "
            "a hub name."
        )
    return str(base)


@torch.no_grad()
def merge(
    model: transformers.PreTrainedModel,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    masters: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Add the folder's adapter to the module's weights, in fp32 or better, and round once: to `dtype`, or the module's.

    `masters` are parameters by name, of more digits than those in the folder.
    """
    dtype = dtype or model.dtype
    _cast(model, torch.promote_types(torch.promote_types(model.dtype, dtype), torch.float32))
    peft = _peft(f"{folder} is an adapter")
    try:
        adapted = peft.PeftModel.from_pretrained(model, str(folder), **_from_wrapper(model, folder, peft))
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError) as error:
        raise ValueError(f"the adapter in {folder} does not fit its base model: {first_line(error)}") from error
    for name, parameter in model.named_parameters():
        if masters is not None and ".lora_" in name:
            parameter.copy_(masters[name])
    adapted.merge_and_unload()
    _cast(model, dtype)
    model.requires_grad_(True)


def _cast(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Parameters alone: a rotation's frequencies, which are buffers, need all their digits."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _from_wrapper(model: transformers.PreTrainedModel, folder: Path, peft: Any) -> dict[str, Any]:
    """How peft reads an adapter of a wrapper into its text model; one of other parts too is refused."""
    inside, outside = wrappers.prefixes(model)
    if inside == outside:
        return {}
    names = load_file(folder / WEIGHTS)
    places = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in names}
    found = {place: re.sub(f"^{re.escape(outside)}", inside, place) for place in sorted(places)}
    known = {name for name, _ in model.named_modules()}
    foreign = [place for place, name in found.items() if name not in known]
    if foreign:
        raise ValueError(f"it adapts {len(foreign)} modules outside of the text model, {foreign[0]} among them")
    config = peft.PeftConfig.from_pretrained(str(folder))
    config.target_modules = {*found.values()}
    return {"config": config, "key_mapping": {f"^{re.escape(outside)}": inside}}


def _check_target(model: transformers.PreTrainedModel, target: tuple[str, ...]) -> None:
    """Whether each name is that of linear layers, the head left out: its weight is read as it is."""
    linear, head = torch.nn.Linear, model.get_output_embeddings()
    found = {name: type(part) is linear and part is not head for name, part in model.named_modules()}
    known = sorted({name.rpartition(".")[2] for name, fits in found.items() if fits})
    for given in target:
        fits = [fit for name, fit in found.items() if name == given or name.endswith(f".{given}")]
        if given != ALL and not (fits and all(fits)):
            raise ValueError(f"lora.target has {given!r}; this model's projections are {', '.join(known)}.")


def _target_modules(model: transformers.PreTrainedModel, target: tuple[str, ...]) -> str | list[str]:
    """As peft wants them. Of a mixture all but the routers, which peft would adapt too: tokens then go elsewhere."""
    head = model.get_output_embeddings()
    linear = {name for name, part in model.named_modules() if isinstance(part, torch.nn.Linear) and part is not head}
    routers = {name for name in linear if ROUTERS & {*name.split(".")}} if has_experts(model) else set()
    if ALL not in target:
        hit = sorted(name for name in routers if any(name.endswith(f".{given}") for given in target))
        if hit:
            logger.warning("lora.target adapts %d routers of experts too, such as %s.", len(hit), hit[0])
        return list(target)
    if not has_experts(model):
        return ALL
    logger.info("lora.target all-linear leaves out the routers of experts.")
    # By their last names, and by those that peft knows the experts' fused projections by.
    names = {name.rpartition(".")[2] for name in linear - routers} | {*EXPERTS}
    return rf".*\.({'|'.join(sorted(names))})"


def _peft(reason: str) -> Any:
    try:
        return importlib.import_module("peft")
    except ImportError as error:
        raise ValueError(f"{reason}, which needs peft; pip install 'sparse-rl[lora]'.") from error
