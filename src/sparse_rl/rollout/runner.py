# SPDX-License-Identifier: Apache-2.0
"""From the scheduler's integers to tensors: prefill, start, decode, compress, save and restore."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from sparse_rl.kv.cache import DecodeStep, PagedCache, PrefillStep, Saved
from sparse_rl.kv.policy import EvictPolicy, KVPolicy
from sparse_rl.model.attention import packed_positions
from sparse_rl.rollout.scheduler import Start
from sparse_rl.rollout.sequence import HeldPrompt, Sequence
from sparse_rl.types import Prompt

T = TypeVar("T")
Item = TypeVar("Item", Sequence, HeldPrompt)

COMPRESS_ENTRIES = 1 << 19  # slots of all layers scored at once, which bounds the memory it takes


class Runner:
    def __init__(self, model: PreTrainedModel, cache: PagedCache, policy: KVPolicy, *, record_kept: bool) -> None:
        self.model = model
        self.cache = cache
        self.policy = policy
        self.record_kept = record_kept
        self.device = cache.k.device
        self.saved: dict[int, Saved] = {}  # preempted sequences, by request

    def prefill(self, held: list[HeldPrompt], prompts: list[Prompt]) -> None:
        """Run prompts in one packed row; each keeps the logits of its last token and its last queries."""
        boundaries = [0]
        for prompt in held:
            boundaries.append(boundaries[-1] + prompt.prompt_len)
        step = PrefillStep(self.cache, boundaries=boundaries, pages=[prompt.holding.pages for prompt in held])
        ids = [token for prompt in held for token in prompts[prompt.prompt_idx].ids]
        logits = self.model(
            input_ids=self._ints(ids)[None],
            position_ids=packed_positions(boundaries, self.device),
            use_cache=False,
            kv=step,
            logits_to_keep=self._ints(boundaries[1:]) - 1,
        ).logits[0]
        for i, prompt in enumerate(held):
            prompt.logits_V = logits[i]
            prompt.queries_LWHD = step.queries_LBWHD[:, i]

    def start(self, starts: list[Start]) -> torch.Tensor:
        """Copy what starting sequences do not share; returns the logits of their first token, B V."""
        sources = [page for start in starts for page in start.sources]
        if sources:
            self.cache.copy_pages(sources, [page for start in starts for page in start.targets])
        if self.cache.num_queries:
            rows = self._ints([start.sequence.row for start in starts])
            self.cache.queries[:, rows] = torch.stack([_set(s.prompt.queries_LWHD) for s in starts], dim=1)
        return torch.stack([_set(start.prompt.logits_V) for start in starts])

    def decode(self, sequences: list[Sequence]) -> torch.Tensor:
        """Write each sequence's last token into its cache and return the logits of the next, B V."""
        inputs = self._ints(
            [[s.token_ids[-1], s.context - 1, s.num_entries, s.row] for s in sequences],
        )
        tokens, positions, slots, rows = inputs.unbind(1)
        step = DecodeStep(
            self.cache, pages_BN=self._pages(sequences), slots_B=slots, positions_B=positions, rows_B=rows
        )
        return self.model(input_ids=tokens[:, None], position_ids=positions[:, None], use_cache=False, kv=step).logits[
            :, -1
        ]

    def compress_prompts(self, held: list[HeldPrompt]) -> None:
        """Cut freshly prefilled prompts to the policy's target."""
        for chunk in self._chunks(held):
            self._compress(chunk, torch.stack([_set(p.queries_LWHD) for p in chunk], dim=1))

    def compress(self, sequences: list[Sequence]) -> None:
        """Cut running sequences to the policy's target."""
        for chunk in self._chunks(sequences):
            self._compress(chunk, self.cache.queries[:, self._ints([s.row for s in chunk])])

    def save(self, sequence: Sequence, pages: list[int]) -> None:
        self.saved[sequence.request] = self.cache.save(pages)

    def restore(self, sequence: Sequence) -> None:
        assert sequence.holding is not None
        self.cache.restore(self.saved.pop(sequence.request), sequence.holding.pages)

    def _compress(self, items: SequenceOf[Sequence | HeldPrompt], queries_LBWHD: torch.Tensor) -> None:
        assert isinstance(self.policy, EvictPolicy)
        kept = self.cache.compress(
            self.policy,
            pages_BN=self._pages(items),
            lengths_B=self._ints([item.num_entries for item in items]),
            contexts_B=self._ints([item.context for item in items]),
            prompt_lens_B=self._ints([item.prompt_len for item in items]),
            queries_LBWHD=queries_LBWHD,
            record=self.record_kept,
        )
        for i, item in enumerate(items):
            item.num_compressions += 1
            if kept is not None:
                count = min(item.num_entries, self.policy.target(item.prompt_len))
                item.kept_positions.append(kept[:, i, :, :count].clone())

    def _chunks(self, items: list[Item]) -> list[list[Item]]:
        largest = max((item.num_entries for item in items), default=1)
        size = max(1, COMPRESS_ENTRIES // (largest * self.cache.shape.num_layers))
        return [items[start : start + size] for start in range(0, len(items), size)]

    def _pages(self, items: SequenceOf[Sequence | HeldPrompt]) -> torch.Tensor:
        """Page tables, padded with page 0, which the lengths keep out of sight."""
        tables = [_set(item.holding).pages for item in items]
        width = max(map(len, tables))
        return self._ints([table + [0] * (width - len(table)) for table in tables])

    def _ints(self, values: list[int] | list[list[int]]) -> torch.Tensor:
        return torch.tensor(values, device=self.device)


def _set(value: T | None) -> T:
    assert value is not None
    return value
