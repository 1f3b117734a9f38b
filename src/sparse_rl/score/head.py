# SPDX-License-Identifier: Apache-2.0
"""Log-probs from hidden states, a chunk of tokens at a time: [tokens x vocabulary] is never held whole.

    logprob_t = log_softmax(logits(h_t) / temperature)[o_t]     logits = cap(scale * lm_head(h)), cap(x) = c tanh(x / c)

Each chunk's logits are computed again in the backward pass. Whether the formula gives the module's own logits is
checked when the head is made; a head that does something else is called through the module, unchunked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch.nn.functional import linear

from sparse_rl.kernels.backend import upcast
from sparse_rl.kernels.logprob import logprob_gradient, logsumexp, most_likely

CHUNK_LOGITS = {"cpu": 1 << 24, "cuda": 1 << 28}  # held at once; fewer make slow products on a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Of T tokens; the last three only on request, and without gradient."""

    logprobs: torch.Tensor  # (T,) fp32 (fp64 of an fp64 model), of the given tokens
    at_ids: torch.Tensor | None = None  # (T, k) fp32, at the given ids
    top_ids: torch.Tensor | None = None  # (T, m) int64, most likely first
    top_logprobs: torch.Tensor | None = None  # (T, m) fp32


@dataclass(frozen=True, slots=True)
class LogitMap:
    """From what lm_head gives to the logits."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap

    def backward(self, grad: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Through the map, where it gave `logits`."""
        if self.cap is not None:
            grad = grad * (1.0 - (logits / self.cap).square())
        return grad if self.scale == 1.0 else grad * self.scale


class Head:
    """The last step of a causal LM, split off from its body."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        self.model = model
        self.map = _logit_map(model)

    def __call__(
        self,
        inputs: dict[str, Any],  # of the module's forward, one packed row
        predicting: torch.Tensor,  # (T,) positions of the row whose next token is scored
        token_ids: torch.Tensor,  # (T,) those next tokens
        *,
        temperature: float = 1.0,
        at_ids: torch.Tensor | None = None,  # (T, k)
        num_top: int = 0,
    ) -> TokenScores:
        """Scores of the given tokens, with gradient if it is enabled."""
        if self.map is None:
            logits = self.model(**inputs, logits_to_keep=predicting).logits[0]
            return _scores(logits, token_ids, temperature, at_ids, num_top)
        hidden = self.model.get_decoder()(**inputs).last_hidden_state[0, predicting]
        output = self.model.get_output_embeddings()
        fused = FusedScores.apply(  # type: ignore[no-untyped-call]
            hidden,
            output.weight,
            getattr(output, "bias", None),
            token_ids,
            at_ids,
            self.map,
            temperature,
            num_top,
            getattr(output.weight, "gradient_holder", None),
        )
        return TokenScores(logprobs=fused[0], at_ids=fused[1], top_ids=fused[2], top_logprobs=fused[3])


class FusedScores(torch.autograd.Function):
    """Hidden states to scores, without the logits in between.

    The weight's gradient is summed over the chunks in fp32: into its master's gradient, or else rounded once.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,  # (T, D)
        weight: torch.Tensor,  # (V, D)
        bias: torch.Tensor | None,
        token_ids: torch.Tensor,
        at_ids: torch.Tensor | None,
        logit_map: LogitMap,
        temperature: float,
        num_top: int,
        holder: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        ctx.map, ctx.temperature, ctx.holder = logit_map, temperature, holder
        parts: list[tuple[torch.Tensor, ...]] = []
        for part in chunks(len(token_ids), weight):
            logits = logit_map(linear(hidden[part], weight, bias))
            lse = logsumexp(logits, temperature)
            found = [_logprobs(logits, lse, token_ids[part, None], temperature)[:, 0], lse]
            if at_ids is not None:
                found.append(_logprobs(logits, lse, at_ids[part], temperature).float())
            if num_top:
                top_ids = most_likely(logits, num_top)
                found += [top_ids, _logprobs(logits, lse, top_ids, temperature).float()]
            parts.append(tuple(found))
        given, lse, *others = (torch.cat(columns) for columns in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, bias, token_ids, lse)
        ctx.mark_non_differentiable(*others)
        at = others.pop(0) if at_ids is not None else None
        return given, at, *(others or (None, None))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, bias, token_ids, lse = ctx.saved_tensors
        wide = torch.float32 if weight.dtype.itemsize < 4 else weight.dtype
        to_hidden, to_weight, to_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if to_hidden else None
        grad_weight = _sum_of(ctx.holder, weight, wide) if to_weight else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if to_bias else None
        for part in chunks(len(token_ids), weight):
            logits = ctx.map(linear(hidden[part], weight, bias))
            kept = logits.clone() if ctx.map.cap is not None else logits
            grad_logits = logprob_gradient(logits, lse[part], token_ids[part], grad[part], ctx.temperature)
            grad_logits = ctx.map.backward(grad_logits, kept)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[part])
            if grad_weight is not None:
                _add_product(grad_weight, grad_logits.T, hidden[part])
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0, dtype=wide)
        if ctx.holder is not None:
            grad_weight = None  # it is where it belongs
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None, None


def _logprobs(logits: torch.Tensor, lse: torch.Tensor, ids: torch.Tensor, temperature: float) -> torch.Tensor:
    return logits.gather(-1, ids).to(lse.dtype) / temperature - lse[:, None]


def _sum_of(holder: torch.Tensor | None, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Where the weight's gradient is summed."""
    if holder is None:
        return torch.zeros_like(weight, dtype=dtype)
    if holder.grad is None:
        holder.grad = torch.zeros(holder.shape, dtype=holder.dtype, device=holder.device)
    return holder.grad


def chunks(num_tokens: int, weight: torch.Tensor) -> list[slice]:
    size = max(1, CHUNK_LOGITS.get(weight.device.type, CHUNK_LOGITS["cpu"]) // weight.shape[0])
    return [slice(start, start + size) for start in range(0, num_tokens, size)]


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """total += a @ b, the product's digits kept where a GPU can."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def _scores(
    logits: torch.Tensor, token_ids: torch.Tensor, temperature: float, at_ids: torch.Tensor | None, num_top: int
) -> TokenScores:
    logprobs = torch.log_softmax(upcast(logits) / temperature, dim=-1)
    top = logprobs.detach().topk(num_top, dim=-1) if num_top else None
    return TokenScores(
        logprobs=logprobs.gather(-1, token_ids[:, None])[:, 0],
        at_ids=None if at_ids is None else logprobs.detach().gather(-1, at_ids).float(),
        top_ids=None if top is None else top.indices,
        top_logprobs=None if top is None else top.values.float(),
    )


@torch.no_grad()
def _logit_map(model: transformers.PreTrainedModel) -> LogitMap | None:
    """How the module's logits come from lm_head(hidden), if it is known."""
    if model.device.type == "meta":  # nothing is computed there
        return None
    capping = {key: given for key, given in model.config.to_dict().items() if "softcap" in key and given}
    cap = capping.pop("final_logit_softcapping", None)
    capping.pop("attn_logit_softcapping", None)  # before the hidden states
    if capping:
        return None
    ids = torch.arange(4, device=model.device)[None] % model.config.vocab_size
    try:
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        plain = model.get_output_embeddings()(hidden).double()
    except (AttributeError, TypeError):
        return None
    logits = model(input_ids=ids, use_cache=False).logits.double()
    tolerance = 1e-5 if model.dtype.itemsize >= 4 else 1e-2
    scale = 1.0 if cap is not None else float((logits * plain).sum() / (plain * plain).sum())
    found = LogitMap(1.0 if abs(scale - 1.0) < tolerance else scale, cap)
    same = torch.allclose(logits, found(plain), rtol=tolerance, atol=tolerance * float(logits.abs().max()))
    return found if same else None
