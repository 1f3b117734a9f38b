# SPDX-License-Identifier: Apache-2.0
"""How the learner runs the decoder layers: what they keep for the backward pass, and whether they are compiled.

keep        all that the backward pass reads; fastest, and most memory
recompute   each layer's input; the layer runs again in the backward pass, a third more work
offload     the same, and the inputs wait in host memory

The sampler compiles the same layers for itself, in rollout/decoder.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any, Literal

import torch
import transformers
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from sparse_rl.model.attention import keep_out_of_compiled_code
from sparse_rl.rollout.decoder import COMPILER, TRACING
from sparse_rl.specs import first_line

logger = logging.getLogger(__name__)

UNCOMPILED: set[Callable[..., Any]] = set()  # forwards that cannot be
Activations = Literal["keep", "recompute", "offload"]


@contextmanager
def learner_layers(model: transformers.PreTrainedModel, activations: Activations, *, compiles: bool) -> Iterator[None]:
    """Run the layers so for as long as this lasts. Hooks on a layer stay outside of what is compiled and run again."""
    layers = decoder_layers(model)
    if compiles:
        keep_out_of_compiled_code()
    try:
        for layer in layers:
            forward = partial(_run_compiled, layer) if compiles else layer.forward
            layer.forward = _wrapped(forward, activations)
        with torch._dynamo.config.patch(TRACING) if compiles else nullcontext():
            yield
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def decoder_layers(model: transformers.PreTrainedModel) -> list[torch.nn.Module]:
    return [layer for child in model.base_model.children() if isinstance(child, torch.nn.ModuleList) for layer in child]


@lru_cache
def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    """One for all layers of a kind: they differ in their parameters alone."""
    return torch.compile(forward, dynamic=True, options=COMPILER)


def _run_compiled(layer: torch.nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """The layer compiled; a kind that cannot be compiled runs as it is, which is said once."""
    plain = type(layer).forward
    if torch.is_grad_enabled() and not hidden_states.requires_grad:
        # Of a frozen embedding: the first layer would be compiled apart, to leave this one gradient out.
        hidden_states = hidden_states.detach().requires_grad_()
    if plain not in UNCOMPILED:
        try:
            return _compiled(plain)(layer, hidden_states, *args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            UNCOMPILED.add(plain)
            logger.warning("the decoder layers cannot be compiled (%s); they learn as they are.", first_line(error))
    return plain(layer, hidden_states, *args, **kwargs)


def _wrapped(forward: Callable[..., Any], activations: Activations) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if activations == "keep" or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        with save_on_cpu(pin_memory=True) if activations == "offload" else nullcontext():
            return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run
