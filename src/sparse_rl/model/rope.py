# SPDX-License-Identifier: Apache-2.0
"""Scaled rotary embeddings: how many tokens they reach, and one factor for all sequences of a run.

    rope type           the context is
    yarn                original x factor, or max_position_embeddings if that is more
    dynamic             max_position_embeddings x factor
    longrope            max_position_embeddings; with the short factor, the original length
    linear              max_position_embeddings: most checkpoints count the factor in; a warning says so
    llama3, others      max_position_embeddings

The original length is `original_max_position_embeddings`; if a config has none, transformers takes
max_position_embeddings. If layer types have parameters of their own, those of sliding layers do not count: no query
sees a key beyond the window.

`longrope` (Phi-3, MiniCPM) and `dynamic` choose their frequencies in every forward, by the longest sequence in it. Keys
would then depend on what is decoded or packed beside them, and cached keys on when they were made. `fix` chooses once,
for the longest sequence that there can be, as vLLM does. Config and state dict stay as they are.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import transformers
from torch.utils._pytree import tree_leaves

logger = logging.getLogger(__name__)

ENDLESS = 1 << 30  # tokens, where a config names no end
FIXED = "rope_reach"  # attribute of a fixed model and of its parts: the tokens that its rotation was fixed for
OWN_TYPE = "rope_type_before"  # attribute of a module whose `rope_type` was changed
RECORD = "sparse_rl.json"  # beside the weights of a model that was trained here
MOVING = ("longrope", "dynamic")


def context(config: Any, longest: int | None = None) -> int:
    """Most tokens of a sequence, under the factor for sequences of `longest`; without it, under the long one."""
    config = config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None) or ENDLESS
    kinds = _parameters(config)
    whole = [given for kind, given in kinds.items() if kind != "sliding_attention"]
    return min(_reach(given, positions, longest) for given in whole or kinds.values())


@torch.no_grad()
def fix(model: transformers.PreTrainedModel, longest: int | None = None) -> None:
    """Choose the factor for sequences of `longest` tokens, the long one without it; it may be chosen again."""
    if not moving_types(model.config):
        return
    reach = context(model.config, longest)
    for rotary in _rotaries(model):
        own = rotary.rope_type = vars(rotary).setdefault(OWN_TYPE, rotary.rope_type)
        if model.device.type != "meta":
            _rotate(rotary, [0])  # begin from what it was made with
            _rotate(rotary, [reach - 1])  # and let it choose
        rotary.rope_type = dict.fromkeys(own, "default") if isinstance(own, dict) else "default"  # never again
    for module in model.modules():
        if module is model or hasattr(module, "layer_idx"):
            setattr(module, FIXED, reach)
    plain = transformers.GenerationMixin.prepare_inputs_for_generation
    own = getattr(type(model), plain.__name__, plain)
    if "original_max_position_embeddings" in own.__code__.co_names:
        # Phi-3's: where the factor would change, it drops the cache, a SparseCache too.
        setattr(model, plain.__name__, MethodType(plain, model))


def fixed_for(model: torch.nn.Module) -> int | None:
    """The tokens that a model's rotation was fixed for, if it was."""
    reach: int | None = getattr(model, FIXED, None)
    return reach


def moving_types(config: Any) -> set[str]:
    """The config's rope types that choose their frequencies from the longest sequence of a forward."""
    return {str(given.get("rope_type")) for given in _parameters(config.get_text_config()).values()} & {*MOVING}


def say_if_unclear(config: Any) -> None:
    """Warn of a scaling that `max_position_embeddings` may or may not count in."""
    given = _parameters(config.get_text_config()).get(None, {})
    if given.get("rope_type") == "linear" and (factor := given.get("factor") or 1.0) > 1:
        reach = context(config)
        logger.warning(
            "rope type linear stretches positions by %g, and max_position_embeddings %d is taken as the context that "
            "this gives; if it is the one before, set it to %d in the config.",
            factor,
            reach,
            reach * factor,
        )


@torch.no_grad()
def moves(model: transformers.PreTrainedModel) -> bool:
    """Whether a far position, within the context, changes how near ones are rotated; also if that cannot be seen."""
    near, far, rotaries = [0, 1, 2, 3], context(model.config) - 1, list(_rotaries(model))
    if moving_types(model.config) and not rotaries:
        return True
    for rotary in rotaries:
        alone, beside = _rotate(rotary, near), _rotate(rotary, [*near, far])
        _rotate(rotary, near)  # leave it as it was
        if not all(torch.equal(one, other[:, : len(near)]) for one, other in zip(alone, beside, strict=True)):
            return True
    return False


def synchronises(model: transformers.PreTrainedModel) -> bool:
    """Whether a forward looks at positions on the device, to choose by them."""
    return any(kind in MOVING for rotary in _rotaries(model) for kind in _kinds(rotary.rope_type))


def check_length(module: torch.nn.Module, length: int, positions: torch.Tensor | None) -> None:
    """Refuse a sequence that is longer than what the rotation of this attention layer's model is right for."""
    config, reach = getattr(module, "config", None), fixed_for(module)
    if reach is None and config is not None and (kinds := moving_types(config)):
        first = context(config, 1)
        if positions is not None:  # transformers 5.17 feeds Phi-3 one token without a cache where the factor changes
            length = max(length, int(positions.max()) + 1)
        if length > first:
            raise ValueError(
                f"a sequence has {length} tokens, and from {first + 1} on this model's rotation ({', '.join(kinds)}) "
                "changes for all tokens, also for those cached before; load the model with sparse_rl.model.load.load, "
                "or call sparse_rl.model.rope.fix(model) first."
            )
    if reach is not None and length > reach:
        raise ValueError(
            f"a sequence has {length} tokens, but the model was loaded for {reach}; give load a larger `longest`."
        )


def settings(model: torch.nn.Module) -> dict[str, int]:
    """What a run's settings say of it: nothing of most models."""
    reach = fixed_for(model)
    return {} if reach is None else {"longest": reach}


def save(longest: int | None, folder: Path) -> None:
    """Write down beside a model's weights what its rotation was fixed for, if it was."""
    if longest is not None:
        (folder / RECORD).write_text(json.dumps({"longest": longest}) + "\n")


def recorded(folder: Path) -> int | None:
    """What `save` wrote there."""
    path = folder / RECORD
    if not path.is_file():
        return None
    try:
        return int(json.loads(path.read_text())["longest"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged; remove it, and the model gets the long factor.") from error


def _parameters(config: Any) -> dict[str | None, dict[str, Any]]:
    """By layer type, or of all layers."""
    given = getattr(config, "rope_parameters", None) or {}
    return {kind: value for kind, value in given.items() if isinstance(value, dict)} or {None: given}


def _reach(given: dict[str, Any], positions: int, longest: int | None) -> int:
    kind, factor = given.get("rope_type"), given.get("factor") or 1.0
    original = given.get("original_max_position_embeddings") or positions
    if kind == "yarn":
        return max(positions, int(original * factor))
    if kind == "dynamic":
        most = int(positions * factor)
        return most if longest is None else min(most, max(longest, positions))
    if kind == "longrope" and longest is not None and longest <= original:
        return min(original, positions)
    return int(positions)


def _rotaries(model: transformers.PreTrainedModel) -> Iterator[Any]:
    """The modules that rotate, where some of them may choose how."""
    if moving_types(model.config):
        yield from (module for module in model.modules() if hasattr(module, "rope_type"))


def _kinds(rope_type: str | dict[str, str]) -> list[str]:
    return list(rope_type.values()) if isinstance(rope_type, dict) else [rope_type]


def _rotate(rotary: Any, positions: list[int]) -> list[torch.Tensor]:
    """What the module gives for positions that stand in one row, for every layer type."""
    device = next(rotary.buffers()).device
    x, position_ids = torch.zeros(1, device=device), torch.tensor([positions], device=device)
    if not isinstance(rotary.rope_type, dict):
        return tree_leaves(rotary(x, position_ids))
    found = []
    for kind in rotary.rope_type:
        vars(rotary).pop(f"{kind}_long_inv_freq", None)  # or transformers 5.17 fails the second time
        found += tree_leaves(rotary(x, position_ids, layer_type=kind))
    return found
