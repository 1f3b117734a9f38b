# SPDX-License-Identifier: Apache-2.0
"""What a decode step reads and writes, on the device and at addresses that never change.

A sequence keeps its row while it runs; `order` lists the rows a step decodes. Changing who runs, or shrinking the
batch, is a new `order`: nothing else moves. One row more belongs to nobody; a batch is filled up with it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from sparse_rl.kv.cache import to_device

TOKEN, POSITION, ENTRIES, INDEX, KEY, ADVANCE = range(6)  # rows of `Rows.ints`
CAPACITY = 64  # steps whose tokens wait to be fetched


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens of a few steps, (batch, steps), and the most likely ones, (batch, steps, k)."""

    tokens: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray | None
    top_logprobs: np.ndarray | None

    def part(self, steps: slice, batch: int) -> Drawn:
        """A copy of what some of the steps drew for the first rows of the batch, each row in one piece."""
        ids, logprobs = self.top_ids, self.top_logprobs
        if ids is not None and logprobs is not None:
            ids, logprobs = ids[:batch, steps].copy(), logprobs[:batch, steps].copy()
        return Drawn(self.tokens[:batch, steps].copy(), self.logprobs[:batch, steps].copy(), ids, logprobs)


class Fetch:
    """Tensors on their way to the host."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.event = None
        if tensors[0].is_cuda:
            tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
            self.event = torch.cuda.Event(blocking=True)  # who waits for it leaves the core to graders, or other runs
            self.event.record()
        self.tensors = tensors

    def wait(self) -> Drawn:
        if self.event is not None:
            self.event.synchronize()
        tokens, logprobs, *top = (tensor.numpy().swapaxes(0, 1) for tensor in self.tensors)
        return Drawn(tokens, logprobs, *(top or (None, None)))


class Rows:
    def __init__(self, num_rows: int, table_width: int, num_top: int, device: torch.device) -> None:
        self.num_rows = num_rows
        self.device = device
        self.ints = torch.zeros((6, num_rows + 1), dtype=torch.int64, device=device)
        self.table = torch.zeros((num_rows + 1, table_width), dtype=torch.int64, device=device)  # page 0 is nobody's
        self.order = torch.full((num_rows,), num_rows, dtype=torch.int64, device=device)
        self.cursor = torch.zeros(1, dtype=torch.int64, device=device)  # steps drawn, modulo CAPACITY
        self.tokens = torch.zeros((CAPACITY, num_rows), dtype=torch.int64, device=device)
        self.logprobs = torch.zeros((CAPACITY, num_rows), dtype=torch.float32, device=device)
        self.top_ids = torch.zeros((CAPACITY, num_rows, num_top), dtype=torch.int64, device=device)
        self.top_logprobs = torch.zeros((CAPACITY, num_rows, num_top), dtype=torch.float32, device=device)

    @property
    def num_top(self) -> int:
        return self.top_ids.shape[2]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return (
            self.ints, self.table, self.order, self.cursor, self.tokens, self.logprobs, self.top_ids, self.top_logprobs
        )  # fmt: skip

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def set_order(self, rows: list[int], batch: int) -> None:
        """Decode these rows, filled up to `batch` with nobody's."""
        self.order[:batch] = to_device(rows + [self.num_rows] * (batch - len(rows)), self.device)

    def set_tables(self, rows: list[int], tables: list[list[int]]) -> None:
        padded = np.zeros((len(tables), self.table.shape[1]), dtype=np.int64)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        self.table.index_copy_(0, to_device(rows, self.device), to_device(padded, self.device))

    def set_entries(self, rows: list[int], entries: list[int]) -> None:
        index, values = to_device([rows, entries], self.device)
        self.ints[ENTRIES].index_copy_(0, index, values)

    def begin(self, rows: list[int], state: list[list[int]], tokens: torch.Tensor | None = None) -> None:
        """Set rows to [token, position, entries, index, key] each; `tokens` where they are on the device alone."""
        columns = to_device(np.array([[*values, 1] for values in state], dtype=np.int64).T.copy(), self.device)
        if tokens is not None:
            columns[TOKEN] = tokens
        self.ints.index_copy_(1, to_device(rows, self.device), columns)

    def record(
        self,
        tokens_B: torch.Tensor,
        logprobs_B: torch.Tensor,
        top_ids_Bk: torch.Tensor | None,
        top_logprobs_Bk: torch.Tensor | None,
    ) -> None:
        """Store what a step drew, and move on to the next."""
        batch = tokens_B.shape[0]
        self.tokens[:, :batch].index_copy_(0, self.cursor, tokens_B[None])
        self.logprobs[:, :batch].index_copy_(0, self.cursor, logprobs_B[None])
        if top_ids_Bk is not None and top_logprobs_Bk is not None:
            self.top_ids[:, :batch].index_copy_(0, self.cursor, top_ids_Bk[None])
            self.top_logprobs[:, :batch].index_copy_(0, self.cursor, top_logprobs_Bk[None])
        self.cursor.add_(1).remainder_(CAPACITY)

    def fetch(self, first: int, count: int, batch: int) -> Fetch:
        """Start to copy what `count` steps from step `first` drew to the host."""
        steps = to_device((first + np.arange(count)) % CAPACITY, self.device)
        outputs = [self.tokens, self.logprobs] + [self.top_ids, self.top_logprobs] * bool(self.num_top)
        return Fetch([output[:, :batch].index_select(0, steps) for output in outputs])
