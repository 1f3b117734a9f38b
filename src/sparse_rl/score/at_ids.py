# SPDX-License-Identifier: Apache-2.0
"""Log-probs at several ids of each token, with a gradient; chunk by chunk, each computed again in the backward pass.

Those of the sampled tokens alone are `head.py`'s.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from sparse_rl.kernels.backend import upcast
from sparse_rl.score.head import Head, chunks


def logprobs_at(
    head: Head,
    inputs: dict[str, Any],  # of the module's forward, one packed row
    predicting: torch.Tensor,  # (T,) positions of the row whose next token is scored
    ids_Tk: torch.Tensor,
    temperature: float,
) -> torch.Tensor:
    """(T, k), fp32 (fp64 of an fp64 model)."""

    def normalised(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(upcast(logits) / temperature, dim=-1).gather(-1, ids)

    if head.map is None:
        return normalised(head.model(**inputs, logits_to_keep=predicting).logits[0], ids_Tk)
    hidden, output, logit_map = head.model.get_decoder()(**inputs), head.model.get_output_embeddings(), head.map
    states = hidden.last_hidden_state[0, predicting]

    def scored(hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return normalised(logit_map(output(hidden)), ids)

    parts = [
        checkpoint(scored, states[part], ids_Tk[part], use_reentrant=False, preserve_rng_state=False)
        for part in chunks(len(ids_Tk), output.weight)
    ]
    return torch.cat(parts)
