# SPDX-License-Identifier: Apache-2.0
"""What a model's attention looks like, and whether ours can stand in for it: found by running a few tokens.

The library's own support flags are no test. A model passes if our attention function is called exactly once a layer,
in order, with plain arguments, every layer is full or sliding attention, and a few tokens packed twice into one row
give the logits of the model with its own attention and its own positions, to rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from sparse_rl.kernels.attention import AttentionCall
from sparse_rl.model import rope
from sparse_rl.model.attention import PackedRows, UnsupportedModelError, no_mask, packed_positions, registered

logger = logging.getLogger(__name__)

PROBE_TOKENS = 6
HALF = (torch.bfloat16, torch.float16)
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
    check_dropout(model)
    check_rope(model)
    layer_types = getattr(config, "layer_types", None)
    strange = sorted(set(layer_types or ()) - set(LAYER_TYPES))
    if strange:
        raise UnsupportedModelError(
            f"{name} has layers of type {', '.join(strange)}; sparse_rl needs every layer to be full or sliding "
            "softmax attention (Llama, Qwen2, Qwen3, Mistral, Gemma 3, OLMo 2 are)."
        )
    if not getattr(config, "is_causal", True) or getattr(config, "use_bidirectional_attention", False):
        raise UnsupportedModelError(f"{name} attends in both directions; sparse_rl needs a causal language model.")

    if not isinstance(getattr(config, "num_hidden_layers", None), int):
        raise UnsupportedModelError(f"{name} is not one stack of decoder layers; load its text model by itself.")

    recorder = _Recorder()
    token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
    with _as_unsupported(name):
        model(input_ids=token, position_ids=token, use_cache=False, kv=recorder)
    calls = recorder.calls
    if [call.layer_idx for call in calls] != list(range(config.num_hidden_layers)) or not calls:
        raise UnsupportedModelError(
            f"{name} called attention for layers {[call.layer_idx for call in calls]}, expected each of its "
            f"{config.num_hidden_layers} layers once in order; sparse_rl cannot hold its cache."
        )
    if len({(call.num_heads, call.num_kv_heads, call.head_dim, call.value_dim) for call in calls}) > 1:
        raise UnsupportedModelError(
            f"{name} has layers of different head counts or widths; the cache needs them equal."
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


def check_logits(model: transformers.PreTrainedModel) -> None:
    """Compare ours with the model's own attention: other masks, other positions, other scales show up here."""
    name = type(model).__name__
    ids = torch.arange(PROBE_TOKENS, device=model.device) % model.config.vocab_size
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        packed, own = _probe(model, ids)
        difference, spread = (packed - own).abs().mean(), own.std()
        half = model.dtype in HALF
        agree = difference <= (0.1 if half else 1e-3) * spread
        if half and not agree:  # perhaps rounding moves it far: then the two agree in fp32, and rounding is as large
            with _InFloat32():
                exact_packed, exact = _probe(model, ids)
            agree = (exact_packed - exact).abs().mean() <= 1e-3 * exact.std()
            agree &= difference <= 3 * (own - exact).abs().mean()  # seen: 1.5
    finally:
        model.set_attn_implementation(registered())
        for module, training in modes:
            module.training = training
    if not own.isfinite().all():
        raise UnsupportedModelError(f"{name} has logits that are not finite; check its weights, or load it in float32.")
    if not agree:
        raise UnsupportedModelError(
            f"{name} gives other logits with its own attention or positions (mean difference {difference:.2g}, spread "
            f"{spread:.2g}); sparse_rl would sample from the wrong distribution."
        )


def _probe(model: transformers.PreTrainedModel, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the ids with our attention, packed behind themselves, and with the model's own."""
    boundaries = [0, PROBE_TOKENS, 2 * PROBE_TOKENS]
    model.set_attn_implementation(registered())
    with _as_unsupported(type(model).__name__):
        packed = model(
            input_ids=ids.repeat(2)[None],
            attention_mask=no_mask(model.device),
            position_ids=packed_positions(boundaries, model.device),
            use_cache=False,
            kv=PackedRows(boundaries),
            logits_to_keep=torch.arange(PROBE_TOKENS, 2 * PROBE_TOKENS, device=model.device),
        ).logits[0]
    model.set_attn_implementation("eager")
    with _as_unsupported(type(model).__name__):
        own = model(input_ids=ids[None], use_cache=False).logits[0]
    return packed.float(), own.float()


class _InFloat32(TorchFunctionMode):
    """Every call on tensors in half precision is made in fp32: a copy of one weight at a time, not of the model."""

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return function(*tree_map(_in_float32, args), **tree_map(_in_float32, kwargs or {}))


def _in_float32(given: Any) -> Any:
    if isinstance(given, torch.Tensor) and given.dtype in HALF:
        return given.float()
    return torch.float32 if isinstance(given, torch.dtype) and given in HALF else given


@contextmanager
def _as_unsupported(name: str) -> Iterator[None]:
    """Whatever a model raises in a dry run is the reason it is refused."""
    try:
        with torch.no_grad():
            yield
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(
            f"{name} does not run as sparse_rl needs it to ({type(error).__name__}: {error}); use a "
            "causal language model whose attention goes through transformers' AttentionInterface."
        ) from error


def check_dropout(model: transformers.PreTrainedModel) -> None:
    """Dropout makes sampler and learner disagree at random, so any in the config is an error."""
    for key, given in model.config.to_dict().items():
        unused = key.startswith(("classifier", "summary"))  # heads a language model does not have
        if "drop" in key and isinstance(given, int | float) and given and not unused:
            raise UnsupportedModelError(
                f"the model's config has {key} = {given}; sampler and learner need dropout off: set {key} to 0.0."
            )


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
    if any(getattr(model.config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        return "it routes tokens to experts"
    return ""


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


class _Recorder:
    def __init__(self) -> None:
        self.calls: list[_Call] = []

    def attend(self, layer_idx: int, call: AttentionCall) -> torch.Tensor:
        num_heads, (num_kv_heads, _, head_dim), k = call.q_BHTD.shape[1], call.k_BKTD.shape[1:], call.k_BKTD
        heads = (num_heads, num_kv_heads, head_dim, call.v_BKTE.shape[3])
        self.calls.append(_Call(layer_idx, *heads, call.window, call.scale, k.dtype, k.device))
        return call.v_BKTE.repeat_interleave(num_heads // num_kv_heads, dim=1)
