# SPDX-License-Identifier: Apache-2.0
"""The decode step, from the last token's embedding to the next token and its log-prob, eagerly or as CUDA graphs.

A graph replays kernels at the addresses it was captured with. All it touches are parameters and tensors of `Rows` and
`PagedCache` that never move; before every call their addresses are compared with those at capture, and graphs that no
longer fit are captured anew. The pool itself may move: kernels look its address up.

Which rows decode is the scheduler's; prompts go through `runner.py`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from typing import Any

import torch
import transformers

from sparse_rl.kernels.backend import use_triton
from sparse_rl.kernels.sampling import sample
from sparse_rl.kv.cache import PagedCache
from sparse_rl.kv.select import SelectPolicy, decode_step
from sparse_rl.model.attention import keep_out_of_compiled_code, no_mask
from sparse_rl.model.dry_run import waits_for_device
from sparse_rl.rollout.fusion import Group, find_groups, fused
from sparse_rl.rollout.rows import ADVANCE, ENTRIES, INDEX, KEY, POSITION, TOKEN, Rows
from sparse_rl.rollout.sampler import Sampling
from sparse_rl.specs import first_line

logger = logging.getLogger(__name__)

WARM_UPS = 2  # steps before a capture: the first compiles
# Round where the module rounds: with the digits a compiler keeps by itself, xi would measure the compiler too.
COMPILER: dict[str, Any] = {"emulate_precision_casts": True}
KEPT: list[torch.cuda.CUDAGraph] = []  # see `graph_memory`
# Layers may be of several kinds, so more variants than torch's 8. A float (a norm's eps, an adapter's scale) is one and
# the same in all of them: a constant. By itself torch makes it a tensor on the CPU, kept for the backward pass.
TRACING: dict[str, Any] = {"recompile_limit": 64, "specialize_float": True}


class Decoder:
    def __init__(
        self,
        model: transformers.PreTrainedModel,
        cache: PagedCache,
        sampling: Sampling,
        *,
        num_rows: int,
        max_entries: int,  # a row ever holds
        selection: SelectPolicy | None,
        graphs: bool,
        compiles: bool,
    ) -> None:
        self.model = model
        self.cache = cache
        self.sampling = sampling
        self.max_entries = max_entries
        self.step_of = decode_step(selection)
        device = cache.shape.device
        self.rows = Rows(num_rows, -(-max_entries // cache.page_size), sampling.top_logprobs, device)
        self.uses_graphs = graphs and use_triton(cache.k)
        if self.uses_graphs and (reason := waits_for_device(model)):
            logger.warning("%s decodes without CUDA graphs: %s.", type(model).__name__, reason)
            self.uses_graphs = False
        self.compiles = compiles
        self.sizes = batch_sizes(num_rows)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.groups: list[Group] = []
        self.addresses: tuple[int, ...] = ()
        self.capture_s = 0.0

    def prepare(self) -> None:
        """Before a call: forget graphs that point to where parameters or buffers no longer are."""
        if self._addresses() != self.addresses:
            if self.graphs:
                logger.info("parameters or buffers have moved; decode graphs are captured anew.")
            self.graphs.clear()
            self.groups = find_groups(self.model) if self.uses_graphs and self.compiles else []
            for group in self.groups:
                group.join()
            self.addresses = self._addresses()
        self.rows.cursor.zero_()

    def _addresses(self) -> tuple[int, ...]:
        tensors = (*self.model.parameters(), *self.model.buffers(), *self.cache.fixed_tensors(), *self.rows.tensors())
        return tuple(tensor.data_ptr() for tensor in tensors)

    def batch_of(self, count: int) -> int:
        """The batch that decodes `count` rows: a graph's size, or just as many."""
        return next(size for size in self.sizes if size >= count) if self.uses_graphs else count

    def run(self, batch: int, steps: int) -> None:
        """Decode the rows in order, `steps` tokens each."""
        if self.uses_graphs and batch not in self.graphs:
            self._capture(batch)  # or find that it cannot be
        for _ in range(steps):
            if self.uses_graphs:
                self.graphs[batch].replay()
            else:
                self.step(batch)

    def step(self, batch: int) -> None:
        rows = self.rows
        rows_B = rows.order[:batch]
        state = rows.ints.index_select(1, rows_B)
        context = self.step_of(
            self.cache,
            pages_BN=rows.table.index_select(0, rows_B),
            lengths_B=state[ENTRIES] + 1,
            positions_B=state[POSITION],
            rows_B=rows_B,
            max_length=self.max_entries,
        )
        # In every layer transformers calls model/attention.py, which calls `context.attend`.
        logits_BV = self.model(
            input_ids=state[TOKEN][:, None],
            attention_mask=no_mask(rows.device),
            position_ids=state[POSITION][:, None],
            use_cache=False,
            kv=context,
        ).logits[:, -1]
        drawn = self.sample(logits_BV, state[KEY], state[INDEX])
        rows.record(*drawn)
        rows.ints[TOKEN].index_copy_(0, rows_B, drawn[0])
        rows.ints[POSITION : INDEX + 1].index_add_(1, rows_B, state[ADVANCE].expand(3, -1))

    def sample(
        self, logits_BV: torch.Tensor, keys_B: torch.Tensor, index_B: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        return sample(
            logits_BV,
            keys_B,
            index_B,
            temperature=self.sampling.temperature,
            top_k=self.sampling.top_k,
            top_p=self.sampling.top_p,
            num_top=self.sampling.top_logprobs,
        )

    @torch.no_grad()
    def capture(self) -> None:
        """Make the graphs of all batch sizes now rather than when a call first needs them."""
        for batch in self.sizes:
            if self.uses_graphs and batch not in self.graphs:
                with torch.cuda.device(self.rows.device):
                    self._capture(batch)

    def _capture(self, batch: int) -> None:
        """Make the graph of one batch size, on rows that are nobody's."""
        began, stream = time.perf_counter(), torch.cuda.current_stream()
        order, cursor = self.rows.order.clone(), self.rows.cursor.clone()
        self.rows.order.fill_(self.rows.num_rows)
        try:
            self._warm_up(batch)
            self.graphs[batch] = self._captured(batch)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            torch.cuda.set_stream(stream)  # which a capture that fails leaves switched
            recover_from_failed_capture(self.rows.device)
            logger.warning(
                "the decode step cannot be captured as a CUDA graph (%s); it runs eagerly.", first_line(error)
            )
            self.uses_graphs = False
        finally:
            self.rows.order.copy_(order)
            self.rows.cursor.copy_(cursor)
            self.capture_s += time.perf_counter() - began

    def _warm_up(self, batch: int) -> None:
        """Run the step as it will be captured; what cannot be compiled runs as it is."""
        _, stream = graph_memory(self.rows.device)
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with self._compiled(), torch.cuda.stream(stream):
                for _ in range(WARM_UPS):
                    self.step(batch)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if not self.compiles:
                raise
            logger.warning("the decoder layers cannot be compiled (%s); they run as they are.", first_line(error))
            self.compiles = False
            self._warm_up(batch)
        torch.cuda.current_stream().wait_stream(stream)

    def _captured(self, batch: int) -> torch.cuda.CUDAGraph:
        memory, stream = graph_memory(self.rows.device)
        graph = torch.cuda.CUDAGraph()
        with self._compiled(), torch.cuda.graph(graph, pool=memory, stream=stream, capture_error_mode="thread_local"):
            self.step(batch)
        return graph

    @contextmanager
    def _compiled(self) -> Iterator[None]:
        """Compile the decoder layers one by one for as long as a graph is made; the learner runs them as they are.

        Layers share their code, so it is compiled once; attention stays out of it (it reads the layer's number).
        """
        if not self.compiles:
            yield
            return
        keep_out_of_compiled_code()
        before = {part: part._compiled_call_impl for part in compiled_parts(self.model)}
        for part in before:
            part._compiled_call_impl = torch.compile(part._call_impl, dynamic=True, options=COMPILER)
        try:
            with fused(self.groups), torch._dynamo.config.patch(TRACING):
                yield
        finally:
            for part, own in before.items():
                part._compiled_call_impl = own


@lru_cache
def graph_memory(device: torch.device) -> tuple[Any, torch.cuda.Stream]:
    """The memory pool and the stream of all graphs on a device: they never run at once, so they share them.

    A graph of nothing much keeps the pool alive for as long as the process lives: torch will not take one up again
    that has been without a graph.
    """
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        torch.zeros(1, device=device)
    KEPT.append(graph)
    return pool, stream


def recover_from_failed_capture(device: torch.device) -> None:
    """Undo what torch leaves behind when a capture fails: allocations would go on to go to the graphs' pool."""
    pool, _ = graph_memory(device)
    with suppress(RuntimeError, AttributeError):
        torch._C._cuda_endAllocateToPool(device.index or 0, pool)
    graph_memory.cache_clear()
    torch.cuda.synchronize(device)


def batch_sizes(num_rows: int) -> list[int]:
    """Batches graphs are made for: powers of two, three quarters of them, and all rows.

    None of one row unless there is but one: code compiled for any number of rows does not serve a single one.
    """
    powers = [1 << i for i in range(2, num_rows.bit_length())]
    sizes = {size for power in powers for size in (power, power * 3 // 4) if size < num_rows}
    return sorted(sizes | {num_rows})


def compiled_parts(model: transformers.PreTrainedModel) -> list[torch.nn.Module]:
    """Decoder layers, and what stands beside them but the embedding."""
    parts: list[torch.nn.Module] = []
    for child in model.base_model.children():
        if isinstance(child, torch.nn.ModuleList):
            parts += list(child)
        elif not isinstance(child, torch.nn.Embedding):
            parts.append(child)
    return parts
