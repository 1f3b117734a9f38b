# SPDX-License-Identifier: Apache-2.0
"""The one attention function this package gives to transformers, registered once and never toggled.

What it does depends on the context handed to the call, `model(..., kv=context)`:

    a context   its `attend` decides: decode into the paged cache, packed prefill into it, or packed rows
    none        plain causal attention, as under `model.generate`

Under `generate(past_key_values=SparseCache(...))` no context can be handed over: there the keys carry it, and a padding
mask goes to it. Anywhere else padding is refused. Whatever is not implemented raises here: an ignored keyword would
change the logits without a word.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any, Protocol

import torch
import transformers

from sparse_rl.kernels.attention import AttentionCall, causal_attention_ref, packed_attention
from sparse_rl.model.rope import check_length

NAME = "sparse_rl"
HOLDER = "sparse_rl_holder"
HANDED = threading.local()  # `holder`: a weak reference to who handed out keys last in this thread

# Keywords that travel through the layers and do not change what attention computes.
HARMLESS = frozenset({"position_ids", "use_cache", "cache_position"})


class UnsupportedModelError(ValueError):
    """The model needs something our attention does not implement."""


class AttentionContext(Protocol):
    def attend(self, layer_idx: int, call: AttentionCall) -> torch.Tensor:
        """The attention output, B H T E."""
        ...


class KeyHolder(Protocol):
    """What a cache puts into the attribute HOLDER of the keys it hands out."""

    def context(
        self, num_layers: int, padding_BS: torch.Tensor | None, positions_BT: torch.Tensor | None
    ) -> AttentionContext:
        """Who attends; the mask is true where a token is none of the padding, B x (seen + T)."""
        ...

    def expects(self, layer_idx: int, key_BKTD: torch.Tensor) -> bool:
        """Whether these are the keys that the layer made of the latents it was handed."""
        ...

    def get_seq_length(self) -> int:
        """Tokens seen, padding included."""
        ...


class PackedRows:
    """Several sequences in one row, each attending to itself alone; what the learner's forward uses."""

    def __init__(self, boundaries: list[int]) -> None:
        self.boundaries = boundaries  # [0, end of sequence 0, end of sequence 1, ...]

    def attend(self, layer_idx: int, call: AttentionCall) -> torch.Tensor:
        return packed_attention(call, self.boundaries)


def packed_positions(boundaries: list[int], device: torch.device) -> torch.Tensor:
    """Positions 0, 1, 2, ... inside each packed sequence, (1, T)."""
    return torch.cat([torch.arange(b - a, device=device) for a, b in pairwise(boundaries)])[None]


def no_mask(device: torch.device) -> torch.Tensor:
    """The `attention_mask` of a call with a context: empty, since the context knows who sees whom.

    Without a mask transformers looks for packed rows in the positions, and waits for the device to do so; one of four
    dimensions it takes for finished and passes on.
    """
    return torch.empty((1, 0, 0, 0), device=device)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    kv: AttentionContext | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Registered with transformers. Takes B H T D after rotation, returns (B T H E, None). `s_aux` are sinks."""
    if kwargs.get("output_attentions"):
        raise ValueError("output_attentions asks for weights, which this attention never holds; leave it out.")
    unknown = [
        name for name, given in kwargs.items() if name not in HARMLESS and given is not None and given is not False
    ]
    if unknown:
        raise UnsupportedModelError(
            f"{type(module).__name__} passes {', '.join(sorted(unknown))} to attention, which sparse_rl does not "
            "implement; its logits would be wrong. Use a model with plain softmax attention."
        )
    if dropout:
        raise UnsupportedModelError(f"attention dropout is {dropout}; set it to 0 in the model's config.")
    holder = _holder(module, key)
    if kv is None:  # no engine has checked it
        seen = holder.get_seq_length() if holder is not None else 0
        check_length(module, seen + key.shape[2], kwargs.get("position_ids"))
    if holder is not None and (attention_mask is None or attention_mask.ndim == 2):
        num_layers: int = module.config.num_hidden_layers  # type: ignore[union-attr,assignment]
        kv, attention_mask = holder.context(num_layers, attention_mask, kwargs.get("position_ids")), None
    if attention_mask is not None and attention_mask.ndim == 2:
        raise ValueError(
            "got a padding mask, which this attention does not read: pack the rows (`kv=PackedRows(...)`), generate "
            "with `past_key_values=SparseCache(...)`, or load the model with attn_implementation='sdpa'."
        )
    if attention_mask is not None and (kv is None or attention_mask.numel()):  # an empty one marks packed rows
        raise UnsupportedModelError(
            "attention got a mask, which it does not read; packed rows go with `model(..., kv=PackedRows(...))`."
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    call = AttentionCall(query, key, value, scale=scale, window=sliding_window, softcap=softcap, sinks_H=s_aux)
    out = causal_attention_ref(call) if kv is None else kv.attend(module.layer_idx, call)  # type: ignore[arg-type]
    return out.transpose(1, 2).contiguous(), None


def _holder(module: torch.nn.Module, key: torch.Tensor) -> KeyHolder | None:
    """The cache that handed out these keys. Latent attention caches latents, and makes keys without a note of them."""
    holder: KeyHolder | None = getattr(key, HOLDER, None)
    if holder is None and hasattr(HANDED, "holder"):
        last: KeyHolder | None = HANDED.holder()
        holder = last if last is not None and last.expects(module.layer_idx, key) else None  # type: ignore[arg-type]
    return holder


def attention_mask(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    attention_mask: torch.Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    device: torch.device | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Registered with transformers. None for plain causal attention, the mask itself where there is padding, a marker
    for packed rows (see `attention`).
    """
    HANDED.__dict__.clear()  # a forward pass begins: what one that was cut short handed out is none of its keys
    if use_vmap:
        raise UnsupportedModelError(
            "the model adds its own mask to causal attention, which sparse_rl does not implement."
        )
    if not isinstance(q_offset, int) or q_offset + q_length != kv_offset + kv_length:
        raise ValueError("static caches are not supported by this attention; use the default dynamic cache.")
    if attention_mask is not None and attention_mask.shape[-1] < kv_offset + kv_length:
        raise ValueError(
            f"the attention mask has {attention_mask.shape[-1]} columns, but with what the cache has seen there are "
            f"{kv_offset + kv_length} tokens: a used cache goes on from all it has seen, so give that and what is new "
            "(generate does, but for use_cache=False), or make a new cache."
        )
    if attention_mask is not None and not bool(attention_mask.all()):
        return attention_mask
    if not allow_is_causal_skip:
        return torch.empty(0, device=device)
    return None


@lru_cache(maxsize=1)
def registered() -> str:
    """The name to set as `attn_implementation`; transformers knows it from the first call on."""
    function: Callable[..., Any] = attention
    transformers.AttentionInterface.register(NAME, function)
    transformers.AttentionMaskInterface.register(NAME, attention_mask)
    return NAME


@lru_cache(maxsize=1)
def keep_out_of_compiled_code() -> None:
    """Let `torch.compile` step around our attention: it reads the layer's number, which would compile every layer."""
    transformers.AttentionInterface.register(registered(), torch.compiler.disable(attention))
