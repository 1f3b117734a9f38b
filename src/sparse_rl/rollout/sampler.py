# SPDX-License-Identifier: Apache-2.0
"""How tokens are drawn: the settings. kernels/sampling.py draws."""

from __future__ import annotations

from dataclasses import dataclass

LOWEST_TEMPERATURE = 1e-4  # below it logits overflow, and it is greedy in all but name


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling settings, the same for every request of a call.

    n: samples a prompt
    max_tokens: most tokens a sample may have
    temperature: 0 takes the best token and reports its log-prob at temperature 1
    top_p: sample from the smallest set of best tokens with this mass; 1 is off
    top_k: sample from this many best tokens
    stop_ids: token ids that end a sample; none given means the model's own end tokens
    stop: strings that end a sample
    seed: with the request's number and the token's index, decides every random number
    top_logprobs: also return this many most likely ids and log-probs a token
    """

    n: int = 1
    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    stop_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    seed: int = 0
    top_logprobs: int = 0

    def __post_init__(self) -> None:
        for field, least in (("n", 1), ("max_tokens", 1), ("top_logprobs", 0)):
            if getattr(self, field) < least:
                raise ValueError(f"sampling.{field} is {getattr(self, field)}; it must be at least {least}.")
        if self.temperature != 0.0 and not LOWEST_TEMPERATURE <= self.temperature < float("inf"):
            raise ValueError(
                f"sampling.temperature is {self.temperature}; it must be 0 (greedy) or at least {LOWEST_TEMPERATURE}."
            )
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"sampling.top_p is {self.top_p}; it must lie in (0, 1], 1 being off.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"sampling.top_k is {self.top_k}; it must be at least 1, or left out.")
        if isinstance(self.stop, str):
            raise ValueError(f"sampling.stop is the string {self.stop!r}; give a tuple of strings.")
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"sampling.seed is {self.seed}; it must lie between 0 and 2^63 - 1.")
        if any(not string for string in self.stop):
            raise ValueError("sampling.stop has an empty string, which would stop every sample at once; remove it.")
