# SPDX-License-Identifier: Apache-2.0
"""What a model weighs, from its configuration alone: parameters, and what a token leaves behind for the backward pass.

The module is built on torch's meta device, where tensors have sizes and no memory, and run there on a few tokens.

What a run holds of that, and when, is in `memory.py` and `resident.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from sparse_rl.kernels.attention import AttentionCall
from sparse_rl.model import dequantise, rope, wrappers
from sparse_rl.model.attention import no_mask, registered
from sparse_rl.model.dry_run import AttentionShape
from sparse_rl.model.load import EMBEDDED, check_name
from sparse_rl.model.tiny import tiny_config
from sparse_rl.specs import first_line
from sparse_rl.train.layers import decoder_layers

PROBES = (32, 64)  # tokens of the two passes whose difference is what a token costs


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """Counts of parameters, and bytes a token."""

    name: str
    dtype: torch.dtype
    parameters: int  # a tied head counts once
    layer: int  # parameters of the largest decoder layer
    around: int  # of what is no layer: embedding, head, last norm
    matrix: int  # of the largest matrix in a layer
    embedding: int
    hidden: int
    intermediate: int  # the widest output of a layer's matrices
    vocabulary: int
    context: int  # positions the model has
    attention: AttentionShape
    saved_layers: int  # bytes a token leaves behind in all layers
    saved_layer: int  # in the one that keeps most
    saved_outside: int  # before and after the layers
    linears: tuple[tuple[str, int], ...]  # by the matrices' names, rows and columns of all layers: LoRA's places
    in_linears: int  # weights of these matrices

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    def adapters(self, rank: int, targets: tuple[str, ...] = ()) -> int:
        """Parameters of LoRA adapters on the named matrices, on all of the layers' if none are named."""
        sides = dict(self.linears)
        for target in targets:
            if _last(target) not in sides:
                raise ValueError(f"lora.target has {target!r}; this model's projections are {', '.join(sides)}.")
        return rank * sum(sides[name] for name in ({_last(target) for target in targets} or sides))


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def model_config(name: str, *, download: bool) -> transformers.PretrainedConfig:
    """The configuration of a model by the name that `load` takes; ValueError if it is not at hand."""
    if name == "tiny" or name.startswith("tiny:"):
        return tiny_config(name.partition(":")[2] or "llama")
    path = str(EMBEDDED) if name == "embedded" else name
    if download:
        check_name(name)
    try:
        config: Any = transformers.AutoConfig.from_pretrained(path, local_files_only=not download)
    except Exception as error:  # whatever the library, the hub or the file system says
        where = "this folder" if Path(name).exists() else "the hub" if download else "the local cache"
        raise ValueError(f"the configuration of {name!r} is not to be had from {where}: {first_line(error)}") from error
    assert isinstance(config, transformers.PretrainedConfig)
    dequantise.ask_for_plain_weights(config, name)
    return config


def model_size(config: transformers.PretrainedConfig, name: str, dtype: torch.dtype) -> ModelSize:
    """The size of a model with this configuration and dtype."""
    model: Any = empty_model(config, dtype)
    config = model.config
    mixture = any(parameter.ndim == 3 for parameter in model.parameters())
    traced = torch.bfloat16 if mixture else dtype  # experts' grouped products know no other on the meta device
    try:
        layers = decoder_layers(model.to(traced))
        few, many = (_trace(model, layers, tokens) for tokens in PROBES)
    except Exception as error:  # a model that is more than layers of attention
        raise ValueError(f"{type(model).__name__} cannot be sized ({type(error).__name__}: {error}).") from error
    tokens, larger = PROBES[1] - PROBES[0], dtype.itemsize // traced.itemsize
    per_token = {place: -(-(many.saved[place] - few.saved[place]) * larger // tokens) for place in many.saved}
    inside = [count for place, count in per_token.items() if place is not None]
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    linears: Counter[str] = Counter()
    in_linears = 0
    for layer in layers:
        for path, module in layer.named_modules():
            if isinstance(module, torch.nn.Linear):
                linears[_last(path)] += module.in_features + module.out_features
                in_linears += module.weight.numel()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    in_layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    return ModelSize(
        name=name,
        dtype=dtype,
        parameters=parameters,
        layer=max(in_layers),
        around=parameters - sum(in_layers),
        matrix=max(p.numel() for layer in layers for p in layer.parameters()),
        embedding=embedding.weight.numel(),
        hidden=config.hidden_size,
        intermediate=max(m.out_features for x in layers for m in x.modules() if isinstance(m, torch.nn.Linear)),
        vocabulary=head.weight.shape[0],
        context=rope.context(config),
        attention=many.shape(dtype),
        saved_layers=sum(inside),
        saved_layer=max(inside),
        saved_outside=per_token.get(None, 0),
        linears=tuple(linears.items()),
        in_linears=in_linears,
    )


def empty_model(config: transformers.PretrainedConfig, dtype: torch.dtype) -> transformers.PreTrainedModel:
    """What `load` makes of the configuration, on torch's meta device."""
    dequantise.forget(config)
    wrapped = wrappers.is_wrapper(config)
    kind: Any = transformers.AutoModelForImageTextToText if wrapped else wrappers.causal_lm(config)
    with torch.device("meta"):
        model = kind.from_config(config, dtype=dtype, attn_implementation=registered())
    model = wrappers.text_of(model) if wrapped else model
    rope.fix(model)
    assert isinstance(model, transformers.PreTrainedModel)
    return model


class _Trace:
    """Stands in for attention, and for autograd's memory: what is saved for the backward pass, by layer."""

    def __init__(self, parameters: set[int]) -> None:
        self.known = parameters  # storages that are counted elsewhere
        self.kept: list[torch.Tensor] = []  # alive, so that no two storages get the same number
        self.saved: Counter[int | None] = Counter()  # bytes by layer, None outside of them
        self.layer: int | None = None
        self.calls: list[AttentionCall] = []

    def attend(self, layer_idx: int, call: AttentionCall) -> torch.Tensor:
        self.calls.append(call)
        out: torch.Tensor = _Flash.apply(call.q_BHTD, call.k_BKTD, call.v_BKTE)  # type: ignore[no-untyped-call]
        return out

    def save(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.known:
            self.known.add(storage._cdata)
            self.kept.append(tensor)
            self.saved[self.layer] += storage.nbytes()
        return tensor

    def shape(self, dtype: torch.dtype) -> AttentionShape:
        first = self.calls[0]
        return AttentionShape(
            num_heads=first.q_BHTD.shape[1],
            num_kv_heads=first.k_BKTD.shape[1],
            head_dim=first.k_BKTD.shape[3],
            value_dim=first.v_BKTE.shape[3],
            windows=tuple(call.window for call in self.calls),
            scales=tuple(call.scale for call in self.calls),
            dtype=dtype,
            device=torch.device("meta"),
        )


class _Flash(torch.autograd.Function):
    """What a fused attention keeps: its inputs, its output, and one number a query."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, torch.empty(q.shape[:3], dtype=torch.float32, device=q.device))
        return out


def _trace(model: transformers.PreTrainedModel, layers: list[torch.nn.Module], tokens: int) -> _Trace:
    trace = _Trace({parameter.untyped_storage()._cdata for parameter in model.parameters()})
    hooks = []
    for i, layer in enumerate(layers):
        hooks.append(layer.register_forward_pre_hook(lambda *_, i=i: setattr(trace, "layer", i)))
        hooks.append(layer.register_forward_hook(lambda *_: setattr(trace, "layer", None)))
    ids = torch.zeros((1, tokens), dtype=torch.long, device="meta")
    mask = no_mask(ids.device)
    try:
        with torch.autograd.graph.saved_tensors_hooks(trace.save, lambda tensor: tensor):
            model.get_decoder()(input_ids=ids, position_ids=ids, attention_mask=mask, use_cache=False, kv=trace)
    finally:
        for hook in hooks:
            hook.remove()
    assert len(trace.calls) == len(layers), f"attention was called {len(trace.calls)} times for {len(layers)} layers"
    return trace
