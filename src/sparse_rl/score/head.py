# SPDX-License-Identifier: Apache-2.0
"""Log-probs from hidden states, a chunk of tokens at a time: [tokens x vocabulary] is never held whole.

    logprob_t = log_softmax(logits(h_t) / temperature)[o_t]

Each chunk is computed again in the backward pass. Whether `scale * lm_head(h)` gives the module's own logits is checked
when the head is made; a head that does something else (soft-capping, say) is called through the module, unchunked.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

CHUNK_LOGITS = 1 << 24  # fp32 logits held at once


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Of T tokens; the last three only on request."""

    logprobs: torch.Tensor  # (T,) fp32, of the given tokens
    at_ids: torch.Tensor | None = None  # (T, k) fp32, at the given ids
    top_ids: torch.Tensor | None = None  # (T, m) int64, most likely first
    top_logprobs: torch.Tensor | None = None  # (T, m) fp32


class Head:
    """The last step of a causal LM, split off from its body."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.scale = _logit_scale(model)

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
        if self.scale is None:
            logits = self.model(**inputs, logits_to_keep=predicting).logits[0]
            return _scores(logits, token_ids, temperature, at_ids, num_top)
        hidden = self.model.get_decoder()(**inputs).last_hidden_state[0, predicting]
        weight = self.model.get_output_embeddings().weight
        size = max(1, CHUNK_LOGITS // weight.shape[0])
        if torch.is_grad_enabled() and weight.dtype.itemsize < 4:
            weight = weight.float()  # the chunks' gradients meet here in fp32, and are rounded once
        chunks = []
        for start in range(0, len(token_ids), size):
            part = slice(start, start + size)
            ids = None if at_ids is None else at_ids[part]
            arguments = (hidden[part], weight, token_ids[part], temperature, ids, num_top)
            if torch.is_grad_enabled():
                chunks.append(checkpoint(self._chunk, *arguments, use_reentrant=False))
            else:
                chunks.append(self._chunk(*arguments))
        return _join(chunks)

    def _chunk(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        token_ids: torch.Tensor,
        temperature: float,
        at_ids: torch.Tensor | None,
        num_top: int,
    ) -> TokenScores:
        assert self.scale is not None
        bias = getattr(self.model.get_output_embeddings(), "bias", None)
        logits = linear(hidden, weight.to(hidden.dtype), bias) * self.scale
        return _scores(logits, token_ids, temperature, at_ids, num_top)


def _scores(
    logits: torch.Tensor, token_ids: torch.Tensor, temperature: float, at_ids: torch.Tensor | None, num_top: int
) -> TokenScores:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    top = logprobs.detach().topk(num_top, dim=-1) if num_top else None
    return TokenScores(
        logprobs=logprobs.gather(-1, token_ids[:, None])[:, 0].float(),
        at_ids=None if at_ids is None else logprobs.gather(-1, at_ids).float(),
        top_ids=None if top is None else top.indices,
        top_logprobs=None if top is None else top.values.float(),
    )


def _join(chunks: list[TokenScores]) -> TokenScores:
    def cat(parts: list[torch.Tensor | None]) -> torch.Tensor | None:
        tensors = [part for part in parts if part is not None]
        return torch.cat(tensors) if tensors else None

    return TokenScores(
        logprobs=torch.cat([chunk.logprobs for chunk in chunks]),
        at_ids=cat([chunk.at_ids for chunk in chunks]),
        top_ids=cat([chunk.top_ids for chunk in chunks]),
        top_logprobs=cat([chunk.top_logprobs for chunk in chunks]),
    )


@torch.no_grad()
def _logit_scale(model: PreTrainedModel) -> float | None:
    """s with logits = s * lm_head(hidden), or None if there is no such number."""
    if any("softcap" in key and given for key, given in model.config.to_dict().items()):
        return None  # small logits would not show it
    ids = torch.arange(4, device=model.device)[None] % model.config.vocab_size
    try:
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        plain = model.get_output_embeddings()(hidden).double()
    except (AttributeError, TypeError):
        return None
    logits = model(input_ids=ids, use_cache=False).logits.double()
    scale = float((logits * plain).sum() / (plain * plain).sum())
    tolerance = 1e-5 if model.dtype.itemsize >= 4 else 1e-2
    if not torch.allclose(logits, scale * plain, rtol=tolerance, atol=tolerance * float(logits.abs().max())):
        return None
    return 1.0 if abs(scale - 1.0) < tolerance else scale
