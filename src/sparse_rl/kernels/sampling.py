# SPDX-License-Identifier: Apache-2.0
"""Sample a token and its log-prob from a row of logits, with random numbers that depend on nothing but a key.

    token   = argmax_v ( logits_v / T - log(-log(1 - u_v)) )          Gumbel-max
    logprob = log_softmax(logits / T)[token]                            of the distribution sampled from

u_v is the v-th output of a SplitMix64 generator started at the token's key, which is made of the request's key and
the token's index, and the request's key of (seed, request). So a token depends neither on the batch it was sampled in
nor on its row.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from sparse_rl.kernels.backend import upcast, use_triton

GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
WORD = (1 << 64) - 1


Sampled = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]


def sample(
    logits_BV: torch.Tensor,
    keys_B: torch.Tensor,
    index_B: torch.Tensor,
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float = 1.0,
    num_top: int = 0,
) -> Sampled:
    """`sample_ref`, by one pass over the logits where they lie on a GPU."""
    if use_triton(logits_BV):
        from sparse_rl.kernels.sampling_triton import sample_triton as implementation
    else:
        implementation = sample_ref
    return implementation(
        logits_BV, keys_B, index_B, temperature=temperature, top_k=top_k, top_p=top_p, num_top=num_top
    )


def sample_ref(
    logits_BV: torch.Tensor,
    keys_B: torch.Tensor,  # int64, of the requests
    index_B: torch.Tensor,  # int64, of the tokens to draw
    *,
    temperature: float,
    top_k: int | None = None,
    top_p: float = 1.0,
    num_top: int = 0,
) -> Sampled:
    """Tokens (B,), their log-probs (B,), and the `num_top` most likely ids and log-probs (B, k), if any.

    Temperature 0 takes the best token and reports its log-prob at temperature 1. Logits that are not finite give a
    log-prob that is not either.
    """
    scaled = scale_ref(logits_BV, temperature)
    if top_k is not None or top_p < 1.0:
        scaled = truncate_ref(scaled, top_k, top_p)
    logprobs_BV = torch.log_softmax(scaled, dim=-1)
    if temperature > 0:
        exponential = -torch.log1p(-uniform_ref(token_keys_ref(keys_B, index_B), scaled.shape[-1]))
        tokens = (scaled - exponential.log()).argmax(dim=-1)
    else:
        tokens = scaled.argmax(dim=-1)
    chosen = logprobs_BV.gather(-1, tokens[:, None])[:, 0].float()
    if not num_top:
        return tokens, chosen, None, None
    top_ids = scaled.topk(num_top, dim=-1).indices
    return tokens, chosen, top_ids, logprobs_BV.gather(-1, top_ids).float()


def scale_ref(logits_BV: torch.Tensor, temperature: float) -> torch.Tensor:
    return upcast(logits_BV) / temperature if temperature > 0 else upcast(logits_BV)


def truncate_ref(scaled_BV: torch.Tensor, top_k: int | None, top_p: float) -> torch.Tensor:
    """-inf outside the k best tokens, then outside the smallest set of best tokens with mass >= top_p."""
    if top_k is not None and top_k < scaled_BV.shape[-1]:
        worst_kept = scaled_BV.topk(top_k, dim=-1).values[:, -1:]
        scaled_BV = scaled_BV.masked_fill(scaled_BV < worst_kept, float("-inf"))
    if top_p < 1.0:
        ordered, index = scaled_BV.sort(dim=-1, descending=True, stable=True)
        mass_before = torch.softmax(ordered, dim=-1).cumsum(dim=-1).roll(1, dims=-1)
        mass_before[:, 0] = 0.0  # the best token always stays
        dropped = torch.zeros_like(ordered, dtype=torch.bool).scatter(-1, index, mass_before >= top_p)
        scaled_BV = scaled_BV.masked_fill(dropped, float("-inf"))
    return scaled_BV


def token_keys_ref(keys_B: torch.Tensor, index_B: torch.Tensor) -> torch.Tensor:
    """The key of each request's token, (B,) int64."""
    return mix_ref(keys_B + (index_B + 1) * _signed(GOLDEN))


def uniform_ref(token_keys_B: torch.Tensor, size: int) -> torch.Tensor:
    """(B, size) fp32 uniforms from 2^-33 to 1 - 2^-24: the exponentials made of them are finite and never 0."""
    word = mix_ref(token_keys_B[:, None] + _offsets(size, token_keys_B.device))
    uniform = (_shift(word, 32).float() + 0.5) * 2.0**-32
    return uniform.clamp(max=1.0 - 2.0**-24)  # the largest words round up to 1


def mix_ref(word: torch.Tensor) -> torch.Tensor:
    """`mix` on int64 tensors."""
    word = (word ^ _shift(word, 30)) * _signed(MIX_1)
    word = (word ^ _shift(word, 27)) * _signed(MIX_2)
    return word ^ _shift(word, 31)


def mix(word: int) -> int:
    """SplitMix64's finaliser on Python integers: a bijection of 64-bit words that looks random."""
    word = ((word ^ (word >> 30)) * MIX_1) & WORD
    word = ((word ^ (word >> 27)) * MIX_2) & WORD
    return word ^ (word >> 31)


def request_key(seed: int, request: int) -> int:
    """The signed 64-bit key of one request, as torch's int64 holds it."""
    return _signed(mix((mix(seed & WORD) + (request + 1) * GOLDEN) & WORD))


@lru_cache(maxsize=8)
def _offsets(size: int, device: torch.device) -> torch.Tensor:
    return torch.arange(1, size + 1, device=device) * _signed(GOLDEN)


def _shift(word: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (word >> bits) & ((1 << (64 - bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word
