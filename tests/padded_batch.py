# SPDX-License-Identifier: Apache-2.0
"""transformers' `generate` of prompts of several lengths."""

from __future__ import annotations

import torch

NEW = 40


def padded(prompts, device):
    """The prompts padded on the left, and their mask."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    return ids, mask


def generate(model, prompts, cache, **settings):
    """New tokens of each row, and their log-probs."""
    ids, mask = padded(prompts, model.device)
    settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | settings
    out = model.generate(
        ids, attention_mask=mask, past_key_values=cache, output_logits=True, return_dict_in_generate=True, **settings
    )
    tokens = out.sequences[:, ids.shape[1] :]
    logprobs = torch.stack(out.logits, dim=1).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    return tokens, logprobs
