# SPDX-License-Identifier: Apache-2.0
"""Log-probs of given tokens from a chunk of logits, and the gradient that goes back into it.

    logprob_t = x_to - lse_t    with x = logits / temperature, lse_t = log sum_v exp(x_tv)
    d logits_tv = grad_t / temperature * ([v = o_t] - exp(x_tv - lse_t))

Logits stay in the module's precision; only what is summed over the vocabulary is fp32.

The logits come from score/head.py, a chunk of tokens at a time.
"""

from __future__ import annotations

import torch

from sparse_rl.kernels.backend import upcast, use_triton

GROUP = 128  # tokens of the vocabulary that share a maximum, when the most likely are looked for


def logsumexp(logits_TV: torch.Tensor, temperature: float) -> torch.Tensor:
    """`logsumexp_ref`, in one pass over the logits where they lie on a GPU."""
    if use_triton(logits_TV):
        from sparse_rl.kernels.logprob_triton import logsumexp_triton

        return logsumexp_triton(logits_TV, temperature)
    return logsumexp_ref(logits_TV, temperature)


def logsumexp_ref(logits_TV: torch.Tensor, temperature: float) -> torch.Tensor:
    """lse (T,), fp32; fp64 of fp64 logits."""
    return torch.logsumexp(upcast(logits_TV) / temperature, dim=-1)


def logprob_gradient(
    logits_TV: torch.Tensor, lse_T: torch.Tensor, ids_T: torch.Tensor, grad_T: torch.Tensor, temperature: float
) -> torch.Tensor:
    """`logprob_gradient_ref`; on a GPU it is written over the logits."""
    if use_triton(logits_TV):
        from sparse_rl.kernels.logprob_triton import logprob_gradient_triton

        return logprob_gradient_triton(logits_TV, lse_T, ids_T, grad_T, temperature)
    return logprob_gradient_ref(logits_TV, lse_T, ids_T, grad_T, temperature)


def logprob_gradient_ref(
    logits_TV: torch.Tensor, lse_T: torch.Tensor, ids_T: torch.Tensor, grad_T: torch.Tensor, temperature: float
) -> torch.Tensor:
    """What the logits' gradient is where the log-probs of `ids` have `grad`; (T, V) in the logits' dtype."""
    minus_p = -(upcast(logits_TV) / temperature - lse_T[:, None]).exp()
    minus_p.scatter_add_(1, ids_T[:, None], torch.ones_like(minus_p[:, :1]))
    return (minus_p * (grad_T / temperature).to(minus_p.dtype)[:, None]).to(logits_TV.dtype)


def most_likely(logits_TV: torch.Tensor, count: int) -> torch.Tensor:
    """Ids of the `count` largest logits of each row, largest first.

    They lie in the `count` groups with the largest maxima, so only those are sorted.
    """
    num_tokens, size = logits_TV.shape
    num_groups = size // GROUP
    if num_groups <= 2 * count:
        return logits_TV.topk(count, dim=-1).indices
    whole = num_groups * GROUP
    grouped = logits_TV[:, :whole].view(num_tokens, num_groups, GROUP)
    groups = grouped.amax(dim=-1).topk(count, dim=-1).indices
    ids = (groups[:, :, None] * GROUP + torch.arange(GROUP, device=groups.device)).flatten(1)
    rest = torch.arange(whole, size, device=groups.device).expand(num_tokens, -1)
    ids = torch.cat([ids, rest], dim=1)
    return ids.gather(1, logits_TV.gather(1, ids).topk(count, dim=-1).indices)
