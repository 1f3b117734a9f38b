# SPDX-License-Identifier: Apache-2.0
"""What a KV policy does to one text: which positions every layer and head holds and reads, and what that changes.

The dense model answers the prompt; then each cache reads that same answer token by token. So caches can be compared at
every token: what each one holds and reads there, and the overlap sum_v min(p_dense, p_sparse) of the next-token
distributions.

Nothing is drawn here: that is done in report/inspect_page.py and report/inspect_plot.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from sparse_rl.kernels.decode import LayerPool
from sparse_rl.kv import Full, KVPolicy
from sparse_rl.kv.cache import PagedCache
from sparse_rl.kv.select import SelectPolicy, SelectStep
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
class Marks:
    """The positions that a cut left, or that a decode step read."""

    context: int  # tokens seen by then
    at_LKT: np.ndarray  # bool, by position


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One cache reading the text."""

    name: str
    text: Text
    firings: tuple[Marks, ...]
    entries: tuple[int, ...]  # at hand in each decode step, its own included
    overlap: np.ndarray  # of each token of the answer, in 0 to 1
    reads: tuple[Marks, ...] = ()  # of each decode step, where the policy chooses what is read
    choosing: tuple[int, ...] = ()  # layers that do; shares are over them, since the others read everything

    def held(self) -> np.ndarray:
        """The share of layers and heads that hold a position, contexts x T; nan where it is not written yet."""
        return self._shares(self.firings)

    def read(self) -> np.ndarray:
        """The share that reads a position, in the same form; the prompt's own pass, the first, reads everything."""
        return self._shares(self.reads or self.firings)

    def stayed(self) -> np.ndarray:
        """For how much of the time since it was written a position was held, T; nan for the last, never written."""
        return _over_time(self.held())

    def often(self) -> np.ndarray:
        """In how many of the decode steps since it was written a position was read, in the same form."""
        return _over_time(self.read()[1:]) if self.reads else self.stayed()

    def _shares(self, marks: tuple[Marks, ...]) -> np.ndarray:
        size, rows = len(self.text.ids), []
        found = {each.context: each.at_LKT[list(self.choosing) or slice(None)].mean(axis=(0, 1)) for each in marks}
        share = np.ones(size)
        for context in self.text.contexts:
            if context in found:
                share = np.where(np.arange(size) < context, found[context], 1.0)
            rows.append(np.where(np.arange(size) < context, share, np.nan))
        return np.stack(rows)

    @property
    def saved_frac(self) -> float:
        """1 - entries held / entries of a dense cache, over all decode steps, as the engine counts."""
        full = sum(self.text.contexts[1:])
        return 1.0 - sum(self.entries) / full if full else 0.0

    @property
    def read_frac(self) -> float:
        """Entries read / those a dense cache would read, over all decode steps and layers, as the engine counts."""
        if not self.reads:
            return 1.0 - self.saved_frac
        return float(sum(each.at_LKT.mean(axis=(0, 1)).sum() for each in self.reads) / sum(self.text.contexts[1:]))


class WatchedStep(SelectStep):
    """Writes down the positions that row 0 reads, layer by layer, K S."""

    def __init__(self, seen: list[np.ndarray], policy: SelectPolicy, cache: PagedCache, **step: Any) -> None:
        super().__init__(policy, cache, **step)
        self.seen = seen

    def pages_to_read(
        self, layer_idx: int, q_BHD: torch.Tensor, pool: LayerPool, window: int | None
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        pages, lengths_B, max_length = super().pages_to_read(layer_idx, q_BHD, pool, window)
        positions_PKS = self.cache.positions[layer_idx]
        heads_K1 = torch.arange(positions_PKS.shape[1], device=pages.device)[:, None]
        positions_KS = positions_PKS[pages[0].long(), heads_K1].flatten(1)[:, : int(lengths_B[0])]
        self.seen.append(positions_KS.cpu().numpy())
        return pages, lengths_B, max_length


def answer(loaded: LoadedModel, prompt: Prompt, sampling: Sampling) -> Text:
    """The prompt and what the dense model writes after it."""
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
    seen: list[np.ndarray] = []  # of the step under way, one a layer
    if policy.selection is not None:
        cache.make_step = partial(WatchedStep, seen, policy.selection)
    firings: list[Marks] = []
    reads: list[Marks] = []
    entries, overlap = [], []
    for i, context in enumerate(text.contexts):
        first = 0 if i == 0 else context - 1
        if i:
            entries.append(cache.entries[0] + 1)
        logits = loaded.model(ids[:, first:context], past_key_values=cache, logits_to_keep=1).logits[0, -1]
        p, q = (each.double().softmax(-1) for each in (dense_TV[i], logits))
        overlap.append(float(torch.minimum(p, q).sum()))
        if cache.num_compressions[0] > len(firings):
            firings.append(_marks(context, list(cache.positions(0).cpu().numpy()), len(text.ids)))
        if seen:
            reads.append(_marks(context, seen, len(text.ids)))
            seen.clear()
    return Reading(
        name=name,
        text=text,
        firings=tuple(firings),
        entries=tuple(entries),
        overlap=np.array(overlap),
        reads=tuple(reads),
        choosing=_choosing(loaded, policy) if reads else (),
    )


def _marks(context: int, positions: list[np.ndarray], size: int) -> Marks:
    """Of the positions of each layer, K S."""
    at_LKT = np.zeros((len(positions), len(positions[0]), size), dtype=bool)
    for at_KT, positions_KS in zip(at_LKT, positions, strict=True):
        np.put_along_axis(at_KT, positions_KS, True, axis=-1)
    return Marks(context=context, at_LKT=at_LKT)


def _choosing(loaded: LoadedModel, policy: KVPolicy) -> tuple[int, ...]:
    """The layers that choose what they read."""
    selection = policy.selection
    return tuple(i for i, window in enumerate(loaded.shape.windows) if selection and selection.selects(i, window))


def _over_time(shares: np.ndarray) -> np.ndarray:
    """The mean over the contexts since a position was written, T; nan if it never was."""
    counts = (~np.isnan(shares)).sum(axis=0)
    return np.where(counts > 0, np.nansum(shares, axis=0) / np.maximum(counts, 1), np.nan)


def _pieces(loaded: LoadedModel, ids: list[int]) -> list[str]:
    """Each token as the text it adds; one that ends within a character shows what stands for it."""
    return [str(loaded.tokenizer.decode([token], clean_up_tokenization_spaces=False)) for token in ids]
