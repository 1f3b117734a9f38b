# SPDX-License-Identifier: Apache-2.0
"""The floor of xi: how far log-probs are apart where nothing is dropped, by rounding alone.

engine   |log p of the engine's decode steps - log p of the teacher-forced forward|
module   the same for the module's own decode steps, with transformers' cache and attention, on the same tokens

What a sparse cache adds to it is not measured here, but in calibrate/tokens.py.
"""

from __future__ import annotations

import torch
import transformers

from sparse_rl.model.attention import registered
from sparse_rl.model.load import LoadedModel
from sparse_rl.score import score
from sparse_rl.types import Rollout

FLOOR_ROLLOUTS = 8
FLOOR_TOKENS = 64  # of a rollout, the last ones that a whole cache gave
FLOOR_CONTEXT = 1 << 15  # tokens of all these rollouts, or one rollout


def rollouts_for(context: int) -> int:
    """How many rollouts of so many tokens are looked at."""
    return max(1, min(FLOOR_ROLLOUTS, FLOOR_CONTEXT // context))


def xi_floor(loaded: LoadedModel, rollouts: list[Rollout], dense_tokens: int) -> dict[str, float] | None:
    """Mean and largest |log xi| of rollouts with prompts of one length; their first `dense_tokens` are dense."""
    if not rollouts:
        return None
    last = min(dense_tokens, *(len(rollout.token_ids) for rollout in rollouts))
    context = len(rollouts[0].prompt.ids) + last
    rollouts, tokens = rollouts[: rollouts_for(context)], slice(max(0, last - FLOOR_TOKENS), last)
    dense = torch.stack([scores.dense_logprobs[tokens] for scores in score(loaded.model, rollouts)])
    engine = (dense - torch.stack([rollout.sampler_logprobs[tokens] for rollout in rollouts])).abs()
    module = (dense - module_logprobs(loaded.model, rollouts, tokens)).abs()
    return {
        "mean": float(engine.mean()),
        "max": float(engine.max()),
        "module_mean": float(module.mean()),
        "module_max": float(module.max()),
        "tokens": engine.numel(),
        "context": context,  # of the last of them
    }


def fused(model: transformers.PreTrainedModel) -> str:
    """The module's own attention, fused where there is such a kernel; sinks have none."""
    return "sdpa" if model._supports_sdpa else "eager"


@torch.no_grad()
def module_logprobs(model: transformers.PreTrainedModel, rollouts: list[Rollout], tokens: slice) -> torch.Tensor:
    """Log-probs of the rollouts' tokens, decoded one at a time by the module itself, R T."""
    prompt_len = len(rollouts[0].prompt.ids)
    sequences = [torch.cat([torch.tensor(r.prompt.ids), r.token_ids[: tokens.stop]]) for r in rollouts]
    ids = torch.stack(sequences).to(model.device)
    first, last = prompt_len + tokens.start, prompt_len + tokens.stop
    found = []
    model.set_attn_implementation(fused(model))
    try:
        out = model(input_ids=ids[:, :first], use_cache=True, logits_to_keep=1)
        for place in range(first, last):
            logprobs_RV = out.logits[:, -1].float().log_softmax(-1)
            found.append(logprobs_RV.gather(-1, ids[:, place, None])[:, 0])
            if place + 1 < last:
                past = out.past_key_values
                out = model(input_ids=ids[:, place, None], past_key_values=past, use_cache=True)
    finally:
        model.set_attn_implementation(registered())
    return torch.stack(found, dim=1).cpu()
