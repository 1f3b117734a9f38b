# SPDX-License-Identifier: Apache-2.0
"""What a KV policy does to one text: which positions every layer and head holds, and what that changes.

The dense model answers the prompt; then each cache reads that same answer token by token. So caches can be compared at
every token: what each one holds there, and the overlap sum_v min(p_dense, p_sparse) of the next-token distributions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sparse_rl.kv import Full, KVPolicy
from sparse_rl.kv.sparse_cache import SparseCache
from sparse_rl.model.load import LoadedModel
from sparse_rl.rollout import Engine, EngineConfig, Sampling
from sparse_rl.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A prompt and the dense model's answer to it."""

    ids: tuple[int, ...]  # N
    pieces: tuple[str, ...]  # N, each token as text
    prompt_len: int

    @property
    def contexts(self) -> range:
        """Tokens seen after the prompt and after each token of the answer but the last, which is never read."""
        return range(self.prompt_len, len(self.ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class Firing:
    """What a cut left."""

    context: int  # tokens seen when it came
    kept_LKN: np.ndarray  # bool, by position


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One cache reading the text."""

    name: str
    text: Text
    firings: tuple[Firing, ...]
    entries: tuple[int, ...]  # at hand in each decode step, its own included
    overlap: np.ndarray  # of each token of the answer, in 0 to 1

    def held(self) -> np.ndarray:
        """The share of layers and heads that hold a position, contexts x N; nan where it is not written yet."""
        size, rows = len(self.text.ids), []
        positions = np.arange(size)
        for context in self.text.contexts:
            share = np.ones(size)
            for firing in self.firings:
                if firing.context <= context:
                    known = positions < firing.context
                    share = np.where(known, firing.kept_LKN.mean(axis=(0, 1)), 1.0)
            rows.append(np.where(positions < context, share, np.nan))
        return np.stack(rows)

    def stayed(self) -> np.ndarray:
        """For how much of the time since it was written a position was held, N; nan for the last, never written."""
        held = self.held()
        written = ~np.isnan(held)
        counts = written.sum(axis=0)
        return np.where(counts > 0, np.nansum(held, axis=0) / np.maximum(counts, 1), np.nan)

    @property
    def saved_frac(self) -> float:
        """1 - entries held / entries of a dense cache, over all decode steps, as the engine counts."""
        full = sum(self.text.contexts[1:])
        return 1.0 - sum(self.entries) / full if full else 0.0


def answer(loaded: LoadedModel, prompt: Prompt, *, max_tokens: int, temperature: float, seed: int) -> Text:
    """The prompt and what the dense model writes after it."""
    sampling = Sampling(max_tokens=max_tokens, temperature=temperature, seed=seed)
    (rollout,) = Engine(loaded, Full(), EngineConfig(rows=1)).generate([prompt], sampling)
    ids = (*prompt.ids, *rollout.token_ids.tolist())
    return Text(ids=ids, pieces=tuple(_pieces(loaded, list(ids))), prompt_len=len(prompt.ids))


@torch.no_grad()
def read(loaded: LoadedModel, text: Text, policies: dict[str, KVPolicy]) -> list[Reading]:
    """How each cache reads the text, in the order of the policies."""
    ids = torch.tensor([text.ids], device=loaded.model.device)
    predicting = torch.arange(text.prompt_len - 1, len(text.ids) - 1, device=ids.device)
    dense_TV = loaded.model(ids, use_cache=False, logits_to_keep=predicting).logits[0]
    return [_read(loaded, text, name, policy, ids, dense_TV) for name, policy in policies.items()]


def _read(
    loaded: LoadedModel, text: Text, name: str, policy: KVPolicy, ids: torch.Tensor, dense_TV: torch.Tensor
) -> Reading:
    cache = SparseCache(policy)
    firings: list[Firing] = []
    entries, overlap = [], []
    for i, context in enumerate(text.contexts):
        first = 0 if i == 0 else context - 1
        if i:
            entries.append(cache.entries[0] + 1)
        logits = loaded.model(ids[:, first:context], past_key_values=cache, logits_to_keep=1).logits[0, -1]
        p, q = (each.double().softmax(-1) for each in (dense_TV[i], logits))
        overlap.append(float(torch.minimum(p, q).sum()))
        if cache.num_compressions[0] > len(firings):
            positions = cache.positions(0).cpu().numpy()
            kept = np.zeros((*positions.shape[:2], len(text.ids)), dtype=bool)
            np.put_along_axis(kept, positions, True, axis=-1)
            firings.append(Firing(context=context, kept_LKN=kept))
    return Reading(name=name, text=text, firings=tuple(firings), entries=tuple(entries), overlap=np.array(overlap))


def _pieces(loaded: LoadedModel, ids: list[int]) -> list[str]:
    """Each token as the text it adds; one that ends within a character shows what stands for it."""
    return [str(loaded.tokenizer.decode([token], clean_up_tokenization_spaces=False)) for token in ids]
