# SPDX-License-Identifier: Apache-2.0
"""How far a sparse sampler is from the dense model, token by token, as something to learn from.

Named by their gradients where the tokens are the sampler's own samples:

    forward   k3 of the sampled token: exp(d) - d - 1, d = log dense - log sparse     KL(dense || sparse)
    reverse   k2 of the sampled token: d^2 / 2                                        KL(sparse || dense)
    topk      the forward KL itself over the sampler's most likely ids, the rest of the vocabulary as one more

The adapter that learns from it is in train/distill.py.
"""

from __future__ import annotations

from typing import Literal

import torch

from sparse_rl.objective.correction import MAX_LOG_RATIO

Divergence = Literal["forward", "reverse", "topk"]
LEAST = 1e-6  # mass of the rest, so that its logarithm is finite


def divergence(dense_Tk: torch.Tensor, sparse_Tk: torch.Tensor, kind: Divergence) -> torch.Tensor:
    """(T,), with a gradient to `sparse`; log-probs of the sampled token first, then those at the most likely ids."""
    dense_Tk = dense_Tk.detach()
    if kind == "topk":
        return topk_kl(dense_Tk[:, 1:], sparse_Tk[:, 1:])
    difference = (dense_Tk[:, 0] - sparse_Tk[:, 0]).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.exp() - difference - 1.0 if kind == "forward" else 0.5 * difference.square()


def topk_kl(dense_Tk: torch.Tensor, sparse_Tk: torch.Tensor) -> torch.Tensor:
    """KL(dense || sparse), (T,), of both distributions with all but the given ids put together."""
    p = dense_Tk.exp()
    rest_p, rest_q = ((1.0 - x.exp().sum(dim=-1)).clamp(min=LEAST) for x in (dense_Tk, sparse_Tk))
    return (p * (dense_Tk - sparse_Tk)).sum(dim=-1) + rest_p * (rest_p / rest_q).log()
