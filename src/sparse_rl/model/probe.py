# SPDX-License-Identifier: Apache-2.0
"""Whether a model gives the same logits with our attention as with its own: found on a few texts.

Texts of several lengths, near position 0 and at the end of the context, packed into one row or decoded token by token:
other masks, positions or scales show in one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import transformers
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from sparse_rl.kernels.attention import AttentionCall, causal_attention_ref
from sparse_rl.model.attention import AttentionContext, PackedRows, UnsupportedModelError, no_mask, registered
from sparse_rl.specs import first_line

PROBES = (5, 72)  # tokens of texts that begin at position 0
FAR = 6  # tokens of a text that ends where the model's context does; the second half is also decoded
FARTHEST = 1 << 17
STEPS = (7, 11, 13)  # between the ids of neighbours
HALF = (torch.bfloat16, torch.float16)


def own_attention(name: str) -> str:
    """Why a model whose attention is not looked up in transformers' interface is refused."""
    return (
        f"{name} computes its layers in code of its own, not through transformers' AttentionInterface, so sparse_rl's "
        "attention cannot stand in; use a model that does."
    )


def check_logits(model: transformers.PreTrainedModel) -> None:
    """Compare ours with the model's own attention: other masks, other positions, other scales show up here.

    Rounding can send a token to other experts, with any effect; a mixture has to agree on one of several sets of texts.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        for step in STEPS if has_experts(model) else STEPS[:1]:
            reason = _disagreement(model, step)
            if not reason:
                return
    finally:
        model.set_attn_implementation(registered())
        for module, training in modes:
            module.training = training
    raise UnsupportedModelError(reason)


def _disagreement(model: transformers.PreTrainedModel, step: int) -> str:
    """Why the logits of some texts are not the model's own, or nothing if they are.

    Weights in half precision are compared in fp32, where rounding hides nothing. In half precision itself the two may
    then differ by a tenth, or by what rounding does to the model's own logits.
    """
    name, half = type(model).__name__, model.dtype in HALF
    ours, own = _probe(model, step)
    exact_ours, exact = ours, own
    if half:
        with _InFloat32():
            exact_ours, exact = _probe(model, step)
    if not torch.cat(own).isfinite().all():
        return f"{name} has logits that are not finite; check its weights, or load it in float32."
    for mine, theirs in zip(exact_ours, exact, strict=True):
        difference, spread = (mine - theirs).abs().mean(), theirs.std()
        if difference <= 1e-3 * spread:
            continue
        shorter, longer = exact[:2]  # the longer text begins with the shorter
        if (longer[: len(shorter)] - shorter).abs().mean() > 1e-3 * spread:
            return (
                f"{name} reads the tokens that follow: the logits of a text's beginning change with what comes behind "
                "it. sparse_rl needs a causal language model."
            )
        return (
            f"{name} gives other logits with its own attention or positions (mean difference {difference:.2g}, spread "
            f"{spread:.2g}); sparse_rl would sample from the wrong distribution."
        )
    rounding = max(float((theirs - true).abs().mean()) for theirs, true in zip(own, exact, strict=True))
    for mine, theirs in zip(ours, own, strict=True) if half else ():
        difference = (mine - theirs).abs().mean()
        if not difference <= max(0.1 * float(theirs.std()), 3 * rounding):  # seen: 1.5
            return (
                f"{name} gives other logits with its own attention in half precision (mean difference "
                f"{difference:.2g}, of rounding alone {rounding:.2g}), though not in fp32; try --dtype float32."
            )
    return ""


def _probe(model: transformers.PreTrainedModel, step: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Logits of several texts, T V each, with our attention and with the model's own.

    Ours are of all texts packed into one row, then of the second half of the last, decoded behind the first.
    """
    config, device = model.config.get_text_config(), model.device
    reach = min(getattr(config, "max_position_embeddings", None) or FARTHEST, FARTHEST)
    spans = [*(range(min(length, reach)) for length in PROBES), range(max(0, reach - FAR), max(0, reach - FAR) + FAR)]
    texts = [torch.arange(1, len(span) + 1, device=device)[None] * step % config.vocab_size for span in spans]
    places = [torch.tensor([*span], device=device)[None] for span in spans]
    with as_unsupported(model):
        model.set_attn_implementation(registered())
        row = PackedRows([0, *accumulate(map(len, spans))])
        packed = _logits(model, torch.cat(texts, dim=1), torch.cat(places, dim=1), row)
        held = _Held()
        parts = [slice(0, FAR // 2), *(slice(t, t + 1) for t in range(FAR // 2, FAR))]
        decoded = [_logits(model, texts[-1][:, part], places[-1][:, part], held) for part in parts][1:]
        _set_eager(model)
        given = [{} if span.start == 0 else {"position_ids": at} for span, at in zip(spans, places, strict=True)]
        own = [
            model(input_ids=ids, use_cache=False, **at).logits[0].float() for ids, at in zip(texts, given, strict=True)
        ]
    return [*packed.split([len(span) for span in spans]), torch.cat(decoded)], [*own, own[-1][FAR // 2 :]]


def _set_eager(model: transformers.PreTrainedModel) -> None:
    model.set_attn_implementation("eager")
    if model.config._attn_implementation != "eager":  # not every model can be set
        raise UnsupportedModelError(own_attention(type(model).__name__))


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
def as_unsupported(model: transformers.PreTrainedModel) -> Iterator[None]:
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
        _set_eager(model)
        with torch.no_grad():
            model(input_ids=token, use_cache=False)
    except UnsupportedModelError as own:
        return str(own)
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


def has_experts(model: transformers.PreTrainedModel) -> bool:
    return any(name.endswith(".experts") for name, _ in model.named_modules())


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
