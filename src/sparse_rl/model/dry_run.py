# SPDX-License-Identifier: Apache-2.0
"""What a model's attention looks like, and whether ours can stand in for it: found by running a few tokens.

The library's own support flags are no test. A model passes if our attention function is called exactly once a layer,
in order, with plain arguments, every layer is full or sliding attention, and texts of several lengths, near and far
from position 0, packed into one row or decoded, have the logits of the model with its own attention, to rounding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from sparse_rl.kernels.attention import AttentionCall, causal_attention_ref
from sparse_rl.model.attention import AttentionContext, PackedRows, UnsupportedModelError, no_mask, registered
from sparse_rl.specs import first_line

logger = logging.getLogger(__name__)

PROBES = (5, 72)  # tokens of texts that begin at position 0
FAR = 6  # tokens of a text that ends where the model's context does
FARTHEST = 1 << 17
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
    switch_dropout_off(model)
    warn_of_rope(model)
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
    with _as_unsupported(model):
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


def own_attention(name: str) -> str:
    """Why a model whose attention is not looked up in transformers' interface is refused."""
    return (
        f"{name} computes its layers in code of its own, not through transformers' AttentionInterface, so sparse_rl's "
        "attention cannot stand in; use a model that does."
    )


def check_logits(model: transformers.PreTrainedModel) -> None:
    """Compare ours with the model's own attention: other masks, other positions, other scales show up here.

    Weights in half precision are compared in fp32, where rounding hides nothing. In half precision itself the two may
    then differ by a tenth, or by what rounding does to the model's own logits. There the median token counts: a router
    near a tie sends single ones to other experts.
    """
    name, half = type(model).__name__, model.dtype in HALF
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        ours, own = _probe(model)
        exact_ours, exact = ours, own
        if half:
            with _InFloat32():
                exact_ours, exact = _probe(model)
    finally:
        model.set_attn_implementation(registered())
        for module, training in modes:
            module.training = training
    if not torch.cat(own).isfinite().all():
        raise UnsupportedModelError(f"{name} has logits that are not finite; check its weights, or load it in float32.")
    for mine, theirs in zip(exact_ours, exact, strict=True):
        difference, spread = (mine - theirs).abs().mean(), theirs.std()
        if not difference <= 1e-3 * spread:
            shorter, longer = exact[:2]  # the longer text begins with the shorter
            if (longer[: len(shorter)] - shorter).abs().mean() > 1e-3 * spread:
                raise UnsupportedModelError(
                    f"{name} reads the tokens that follow: the logits of a text's beginning change with what comes "
                    "behind it. sparse_rl needs a causal language model."
                )
            raise UnsupportedModelError(
                f"{name} gives other logits with its own attention or positions (mean difference {difference:.2g}, "
                f"spread {spread:.2g}); sparse_rl would sample from the wrong distribution."
            )
    for mine, theirs, true in zip(ours, own, exact, strict=True) if half else ():
        difference, rounding = ((x - theirs).abs().mean(-1).median() for x in (mine, true))
        if len(theirs) > 1 and not difference <= max(0.1 * theirs.std(), 3 * rounding):  # seen: 1.5
            raise UnsupportedModelError(
                f"{name} gives other logits with its own attention in half precision (median difference "
                f"{difference:.2g}, of rounding alone {rounding:.2g}), though not in fp32; try --dtype float32."
            )


def _probe(model: transformers.PreTrainedModel) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logits of several texts, T V each, with our attention and with the model's own.

    Ours are of all texts packed into one row, then of the last token of the last text, decoded behind the others.
    """
    config, device = model.config.get_text_config(), model.device
    reach = min(getattr(config, "max_position_embeddings", None) or FARTHEST, FARTHEST)
    spans = [*(range(length) for length in PROBES), range(max(0, reach - FAR), max(0, reach - FAR) + FAR)]
    texts = [torch.arange(1, len(span) + 1, device=device)[None] * 7 % config.vocab_size for span in spans]
    places = [torch.tensor([*span], device=device)[None] for span in spans]
    with _as_unsupported(model):
        model.set_attn_implementation(registered())
        row = PackedRows([0, *accumulate(map(len, spans))])
        packed = _logits(model, torch.cat(texts, dim=1), torch.cat(places, dim=1), row)
        held = _Held()
        _logits(model, texts[-1][:, :-1], places[-1][:, :-1], held)
        decoded = _logits(model, texts[-1][:, -1:], places[-1][:, -1:], held)
        model.set_attn_implementation("eager")
        given = [{} if span.start == 0 else {"position_ids": at} for span, at in zip(spans, places, strict=True)]
        own = [
            model(input_ids=ids, use_cache=False, **at).logits[0].float() for ids, at in zip(texts, given, strict=True)
        ]
    return [*packed.split([len(span) for span in spans]), decoded], [*own, own[-1][-1:]]


def _logits(
    model: transformers.PreTrainedModel, ids: torch.Tensor, positions: torch.Tensor, kv: AttentionContext
) -> torch.Tensor:
    """As the engine and the learner ask for them: of chosen tokens, here of all, from the last to the first."""
    backwards = torch.arange(ids.shape[1] - 1, -1, -1, device=ids.device)
    logits: torch.Tensor = model(
        input_ids=ids,
        attention_mask=no_mask(model.device),
        position_ids=positions,
        use_cache=False,
        kv=kv,
        logits_to_keep=backwards,
    ).logits[0]
    return logits[backwards].float()


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
def _as_unsupported(model: transformers.PreTrainedModel) -> Iterator[None]:
    """Whatever a model raises in a dry run is the reason it is refused."""
    try:
        with torch.no_grad():
            yield
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(_why_it_fails(model, error)) from error


def _why_it_fails(model: transformers.PreTrainedModel, error: Exception) -> str:
    """Whether that is the model's own fault, or comes of our attention, which is made without a mask."""
    name, token = type(model).__name__, torch.zeros((1, 1), dtype=torch.long, device=model.device)
    try:
        model.set_attn_implementation("eager")
        with torch.no_grad():
            model(input_ids=token, use_cache=False)
    except Exception as own:
        if model.dtype == torch.float64:
            return f"{name} does not run in float64 ({first_line(own)}); give --dtype float32."
        return f"{name} does not run with its own attention either ({first_line(own)}); check its config and weights."
    finally:
        model.set_attn_implementation(registered())
    return (
        f"{name} runs with its own attention only: it reads or changes the attention mask ({first_line(error)}), and "
        "sparse_rl's attention is made without one."
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


def warn_of_rope(model: transformers.PreTrainedModel) -> None:
    """Some rotations depend on the longest sequence of the batch, so rows then influence each other."""
    kinds = batch_ropes(model)
    if kinds:
        logger.warning(
            "rope type %s depends on the longest sequence decoded together: results then vary with the batch.",
            ", ".join(sorted(kinds)),
        )


def batch_ropes(model: transformers.PreTrainedModel) -> set[str]:
    """The model's rope types that look at the positions of the whole batch."""
    parameters = getattr(model.config, "rope_parameters", None) or {}
    nested = [given for given in parameters.values() if isinstance(given, dict)]
    return {str(given.get("rope_type")) for given in (parameters, *nested)} & {"dynamic", "longrope"}


def waits_for_device(model: transformers.PreTrainedModel) -> str:
    """Why the model's forward pass cannot go into a CUDA graph, or nothing if it can."""
    if batch_ropes(model):
        return f"its rotation ({', '.join(sorted(batch_ropes(model)))}) looks at the positions"
    return "it routes tokens to experts" if has_experts(model) else ""


def has_experts(model: transformers.PreTrainedModel) -> bool:
    return any(name.endswith(".experts") for name, _ in model.named_modules())


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


class _Held:
    """Keys and values of one text, pass by pass."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(self, layer_idx: int, call: AttentionCall) -> torch.Tensor:
        k_BKTD, v_BKTE = call.k_BKTD, call.v_BKTE
        if layer_idx in self.held:
            seen_k, seen_v = self.held[layer_idx]
            k_BKTD, v_BKTE = torch.cat([seen_k, k_BKTD], dim=2), torch.cat([seen_v, v_BKTE], dim=2)
        self.held[layer_idx] = (k_BKTD, v_BKTE)
        return causal_attention_ref(replace(call, k_BKTD=k_BKTD, v_BKTE=v_BKTE))


class _Recorder:
    def __init__(self) -> None:
        self.calls: list[_Call] = []

    def attend(self, layer_idx: int, call: AttentionCall) -> torch.Tensor:
        num_heads, (num_kv_heads, _, head_dim), k = call.q_BHTD.shape[1], call.k_BKTD.shape[1:], call.k_BKTD
        heads = (num_heads, num_kv_heads, head_dim, call.v_BKTE.shape[3])
        self.calls.append(_Call(layer_idx, *heads, call.window, call.scale, k.dtype, k.device))
        return call.v_BKTE.repeat_interleave(num_heads // num_kv_heads, dim=1)
