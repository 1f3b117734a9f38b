# SPDX-License-Identifier: Apache-2.0
"""A random part of the context: what any other policy should beat.

An entry's importance is a random number that it keeps for life, so at every firing the kept ones are a uniform choice
of all that ever came; drawing anew each time would leave little of what is old. The number is made of the seed, the
prompt's length, the position, the layer and the KV head, and of nothing else: neither batch nor order matters, and
samples of one prompt keep the same positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from sparse_rl.kernels.sampling import mix_ref, request_key
from sparse_rl.kv.policy import Entries, KeepsNewest

BITS = 24  # of a random number, as many as fp32 holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Random(KeepsNewest):
    """A uniform choice of all positions, another one in each layer and KV head.

    seed: of the choice
    """

    name: ClassVar[str] = "random"

    seed: int = 0

    def __post_init__(self) -> None:
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 63:
            raise ValueError(f"kv.seed is {self.seed!r}; it must be a whole number from 0 to 2^63 - 1.")
        KeepsNewest.__post_init__(self)

    @property
    def copies(self) -> bool:
        return True  # whole words, of which a few bits stay

    def importance(self, entries: Entries) -> torch.Tensor:
        batch, num_heads, _ = entries.positions_BKS.shape
        layer_B = torch.arange(batch, device=entries.positions_BKS.device) // (batch // entries.num_layers)
        head_BK = layer_B[:, None] * num_heads + torch.arange(num_heads, device=layer_B.device)
        stream_BK = mix_ref(mix_ref(entries.prompt_lens_B + request_key(self.seed, 0))[:, None] + head_BK)
        word_BKS = mix_ref(stream_BK[..., None] + entries.positions_BKS)
        return (word_BKS & ((1 << BITS) - 1)).float()
