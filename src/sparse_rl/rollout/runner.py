# SPDX-License-Identifier: Apache-2.0
"""From the scheduler's integers to tensors: prefill, start, decode, compress, save and restore.

Nothing is decided here: who runs, and on which pages, is the scheduler's; which entries a cut keeps, the policy's.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from typing import TypeVar

import torch

from sparse_rl.kv.cache import PrefillStep, Saved, to_device
from sparse_rl.kv.compress import compress, rows_at_once
from sparse_rl.kv.policy import EvictPolicy, KVPolicy
from sparse_rl.model.attention import no_mask, packed_positions
from sparse_rl.rollout.decoder import Decoder
from sparse_rl.rollout.rows import Fetch
from sparse_rl.rollout.scheduler import Start
from sparse_rl.rollout.sequence import HeldPrompt, Sequence
from sparse_rl.types import Prompt

T = TypeVar("T")
Item = TypeVar("Item", Sequence, HeldPrompt)


class Runner:
    def __init__(self, decoder: Decoder, policy: KVPolicy, *, record_kept: bool) -> None:
        self.decoder = decoder
        self.model = decoder.model
        self.cache = decoder.cache
        self.rows = decoder.rows
        self.policy = policy
        self.record_kept = record_kept
        self.device = self.cache.shape.device
        self.order: list[int] = []  # rows decoded, as the device has them
        self.num_pages: dict[int, int] = {}  # of each row's table, as the device has it
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
            attention_mask=no_mask(self.device),
            position_ids=packed_positions(boundaries, self.device),
            use_cache=False,
            kv=step,
            logits_to_keep=self._ints(boundaries[1:]) - 1,
        ).logits[0]
        for i, prompt in enumerate(held):
            prompt.logits_V = logits[i]
            prompt.queries_LWHD = step.queries_LBWHD[:, i]

    def start(self, starts: list[Start]) -> None:
        """Copy what starting sequences do not share, and draw their first tokens: one step of output."""
        sources = [page for start in starts for page in start.sources]
        if sources:
            self.cache.copy_pages(sources, [page for start in starts for page in start.targets])
        sequences = [start.sequence for start in starts]
        rows = [sequence.row for sequence in sequences]
        if self.cache.num_queries:
            self.cache.queries[:, self._ints(rows)] = torch.stack([_set(s.prompt.queries_LWHD) for s in starts], dim=1)
        keys_B, index_B = self._ints([[s.key for s in sequences], [0] * len(sequences)])
        drawn = self.decoder.sample(torch.stack([_set(s.prompt.logits_V) for s in starts]), keys_B, index_B)
        self.rows.record(*drawn)
        self._begin(sequences, drawn[0])

    def decode(self, sequences: list[Sequence], steps: int) -> None:
        """Write each sequence's last token into its cache and draw the next, `steps` times."""
        batch = self.decoder.batch_of(len(sequences))
        order = [sequence.row for sequence in sequences]
        if order != self.order:
            self.rows.set_order(order, batch)
            self.order = order
        self._update_tables([s for s in sequences if self.num_pages[s.row] != len(_set(s.holding).pages)])
        self.decoder.run(batch, steps)

    def fetch(self, first: int, count: int, batch: int) -> Fetch:
        return self.rows.fetch(first, count, batch)

    def compress_prompts(self, held: list[HeldPrompt]) -> None:
        """Cut freshly prefilled prompts to the policy's target."""
        for chunk in self._chunks(held):
            tables = [prompt.holding.pages for prompt in chunk]
            width = max(map(len, tables))  # those filled up are filled with page 0, which the lengths keep out of sight
            pages_BN = self._ints([table + [0] * (width - len(table)) for table in tables])
            self._compress(chunk, pages_BN, torch.stack([_set(p.queries_LWHD) for p in chunk], dim=1))

    def compress(self, sequences: list[Sequence]) -> None:
        """Cut running sequences to the policy's target."""
        assert isinstance(self.policy, EvictPolicy)
        for chunk in self._chunks(sequences):
            rows_B = self._ints([sequence.row for sequence in chunk])
            width = -(-max(sequence.num_entries for sequence in chunk) // self.cache.page_size)
            pages_BN = self.rows.table[:, :width].index_select(0, rows_B)
            self._compress(chunk, pages_BN, self.cache.queries.index_select(1, rows_B))
        if sequences:
            targets = [self.policy.target(s.prompt_len, s.seen) for s in sequences]
            self.rows.set_entries([s.row for s in sequences], targets)

    def save(self, sequence: Sequence, pages: list[int]) -> None:
        self.saved[sequence.request] = self.cache.save(pages)

    def restore(self, sequence: Sequence) -> None:
        self.cache.restore(self.saved.pop(sequence.request), _set(sequence.holding).pages)
        self._begin([sequence])

    def _begin(self, sequences: list[Sequence], tokens: torch.Tensor | None = None) -> None:
        """Tell the device where sequences stand; their last tokens may be known there alone."""
        state = [
            [s.newest(1)[0] if tokens is None else 0, s.seen, s.num_entries, s.num_drawn, s.key] for s in sequences
        ]
        self.rows.begin([s.row for s in sequences], state, tokens)
        self._update_tables(sequences)

    def _update_tables(self, sequences: list[Sequence]) -> None:
        if sequences:
            tables = [_set(sequence.holding).pages for sequence in sequences]
            self.rows.set_tables([sequence.row for sequence in sequences], tables)
            self.num_pages |= {s.row: len(table) for s, table in zip(sequences, tables, strict=True)}

    def _compress(
        self, items: SequenceOf[Sequence | HeldPrompt], pages_BN: torch.Tensor, queries_LBWHD: torch.Tensor
    ) -> None:
        assert isinstance(self.policy, EvictPolicy)
        counts = [min(item.num_entries, self.policy.target(item.prompt_len, item.seen)) for item in items]
        lengths_B, contexts_B, prompt_lens_B, cut_B = self._ints(
            [[item.num_entries, item.seen, item.prompt_len, item.num_cut] for item in items]
        ).T
        kept = compress(
            self.cache,
            self.policy,
            pages_BN=pages_BN,
            lengths_B=lengths_B,
            contexts_B=contexts_B,
            prompt_lens_B=prompt_lens_B,
            queries_LBWHD=queries_LBWHD,
            max_count=max(counts),
            cut_B=cut_B,
            record=self.record_kept,
        )
        for i, item in enumerate(items):
            item.num_cut = counts[i]
            item.compressed_at.append(item.seen - item.prompt_len)
            if kept is not None:
                item.kept_positions.append(kept[:, i, :, : counts[i]].clone())

    def _chunks(self, items: list[Item]) -> list[list[Item]]:
        assert isinstance(self.policy, EvictPolicy)
        size = rows_at_once(self.cache, self.policy, [item.num_entries for item in items])
        return [items[start : start + size] for start in range(0, len(items), size)]

    def _ints(self, values: list[int] | list[list[int]]) -> torch.Tensor:
        return to_device(values, self.device)


def _set(value: T | None) -> T:
    assert value is not None
    return value
