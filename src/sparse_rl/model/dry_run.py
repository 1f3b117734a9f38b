# SPDX-License-Identifier: Apache-2.0
"""What a model's attention looks like, and whether ours can stand in for it: found by running a few tokens.

The library's own support flags are no test. A model passes if our attention function is called exactly once a layer,
in order, with plain arguments, every layer is full or sliding attention, and texts of several lengths, near and far
from position 0, packed into one row or decoded, have the logits of the model with its own attention, to rounding.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
import transformers

from sparse_rl.kernels.attention import AttentionCall
from sparse_rl.model import rope
from sparse_rl.model.attention import UnsupportedModelError
from sparse_rl.model.probe import as_unsupported, check_logits, has_experts, own_attention

logger = logging.getLogger(__name__)

LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What the paged cache has to hold for one model."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int  # latent attention has narrower values than keys
    windows: tuple[int | None, ...]  # one a layer; None = full attention
    scales: tuple[float, ...]  # one a layer
    dtype: torch.dtype
    device: torch.device

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def entry_bytes(self) -> int:
        """Key, value and position of one token in every layer and KV head."""
        return self.num_layers * self.num_kv_heads * ((self.head_dim + self.value_dim) * self.dtype.itemsize + 4)

    @property
    def landmark_bytes(self) -> int:
        """One vector for each page in every layer and KV head."""
        return self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def precise(self) -> torch.dtype:
        """What scales and tallies are held in."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @property
    def tally_bytes(self) -> int:
        """One number for each entry of a token in every layer and KV head."""
        return self.num_layers * self.num_kv_heads * self.precise.itemsize

    def query_bytes(self, num_queries: int) -> int:
        """The remembered queries of one sequence."""
        return self.num_layers * num_queries * self.num_heads * self.head_dim * self.dtype.itemsize

    def hybrid_entries(self, contexts: range) -> float:
        """Entries transformers' own cache holds, summed over contexts, mean over layers: sliding ones keep a window."""
        per_window = {window: _held(contexts, window) for window in {*self.windows}}
        return sum(per_window[window] for window in self.windows) / self.num_layers


def _held(contexts: range, window: int | None) -> int:
    """The sum of min(context, window)."""
    below = contexts if window is None else contexts[: max(0, window - contexts.start)]
    rest = (window or 0) * (len(contexts) - len(below))
    return (below[0] + below[-1]) * len(below) // 2 + rest if below else rest


def dry_run(model: transformers.PreTrainedModel) -> AttentionShape:
    """The model's attention shape; raises UnsupportedModelError with the reason if it cannot be sampled from."""
    config, name = model.config, type(model).__name__
    switch_dropout_off(model)
    check_rope(model)
    layer_types = getattr(config, "layer_types", None)
    strange = sorted(set(layer_types or ()) - set(LAYER_TYPES))
    if strange:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(strange)}; only full and sliding softmax attention holds one entry "
            "a token that a policy can keep or evict."
        )
    both_ways = getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision")  # images alone
    if both_ways or not getattr(config, "is_causal", True):
        raise UnsupportedModelError(f"{name} attends in both directions; sparse_rl needs a causal language model.")

    if not isinstance(getattr(config, "num_hidden_layers", None), int):
        raise UnsupportedModelError(
            f"{name} is not one stack of decoder layers; give a model that is, or its text model by itself."
        )

    recorder = _Recorder()
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    with as_unsupported(model):
        model(input_ids=token, position_ids=token, use_cache=False, kv=recorder)
    calls = recorder.calls
    if not calls:
        raise UnsupportedModelError(own_attention(name))
    layers = [call.layer_idx for call in calls]
    if layers != list(range(config.num_hidden_layers)):
        raise UnsupportedModelError(
            f"{name} attends for layers {layers}, expected each of its {config.num_hidden_layers} once in order; the "
            "cache holds one entry a token for each layer."
        )
    first = calls[0]
    for call in calls:
        if call.size != first.size:
            raise UnsupportedModelError(
                f"{name} has layers of different sizes ({call.size} in layer {call.layer_idx}, {first.size} in layer "
                "0); a page of the cache holds the entries of all layers, so they must be alike."
            )
    for call, kind in zip(calls, layer_types or [], strict=False):
        if (kind == "sliding_attention") != (call.window is not None):
            raise UnsupportedModelError(
                f"{name} layer {call.layer_idx} is {kind} but attends with window {call.window}; sparse_rl cannot tell "
                "which is meant."
            )
    check_logits(model)
    return AttentionShape(
        num_heads=calls[0].num_heads,
        num_kv_heads=calls[0].num_kv_heads,
        head_dim=calls[0].head_dim,
        value_dim=calls[0].value_dim,
        windows=tuple(call.window for call in calls),
        scales=tuple(call.scale for call in calls),
        dtype=calls[0].dtype,
        device=calls[0].device,
    )


def switch_dropout_off(model: transformers.PreTrainedModel) -> None:
    """Sampler and learner must agree. The config stays: an exported model has its own dropout again."""
    found = set()
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p:
            module.p = 0.0
            found.add("dropout")
        for key, given in vars(module).items():  # copied from the config
            if "drop" in key and isinstance(given, int | float) and not isinstance(given, bool) and given:
                setattr(module, key, 0.0)
                found.add(key)
    if found:
        logger.warning("dropout is switched off, so that sampler and learner agree: %s.", ", ".join(sorted(found)))


def check_rope(model: transformers.PreTrainedModel) -> None:
    """A rotation that follows the longest sequence of a forward would make rows influence each other."""
    if rope.moves(model):
        name, kinds = type(model).__name__, ", ".join(sorted(rope.moving_types(model.config)))
        fixed = "even after rope.fix" if rope.fixed_for(model) else "load it with load, or call rope.fix(model) first"
        raise UnsupportedModelError(
            f"{name} chooses its rotation (rope type {kinds}) in every forward, by the longest sequence in it; {fixed}."
        )


def waits_for_device(model: transformers.PreTrainedModel) -> str:
    """Why the model's forward pass cannot go into a CUDA graph, or nothing if it can."""
    if rope.synchronises(model):
        return f"its rotation ({', '.join(sorted(rope.moving_types(model.config)))}) looks at the positions"
    return "it routes tokens to experts" if has_experts(model) else ""


@dataclass(frozen=True, slots=True)
class _Call:
    layer_idx: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None
    scale: float
    dtype: torch.dtype
    device: torch.device

    @property
    def size(self) -> str:
        return f"{self.num_heads} heads and {self.num_kv_heads} of keys, {self.head_dim} and {self.value_dim} wide"


class _Recorder:
    def __init__(self) -> None:
        self.calls: list[_Call] = []

    def attend(self, layer_idx: int, call: AttentionCall) -> torch.Tensor:
        num_heads, (num_kv_heads, _, head_dim), k = call.q_BHTD.shape[1], call.k_BKTD.shape[1:], call.k_BKTD
        heads = (num_heads, num_kv_heads, head_dim, call.v_BKTE.shape[3])
        self.calls.append(_Call(layer_idx, *heads, call.window, call.scale, k.dtype, k.device))
        return call.v_BKTE.repeat_interleave(num_heads // num_kv_heads, dim=1)
