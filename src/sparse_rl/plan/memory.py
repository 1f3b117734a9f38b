# SPDX-License-Identifier: Apache-2.0
"""What a run holds, line by line, and whether it fits: pure arithmetic on records of numbers.

How large a model is, and what a device has, is found out in `size.py` and `device.py`; what to change, in `advice.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch

from sparse_rl.kv import EvictPolicy
from sparse_rl.kv.cache import PagedCache
from sparse_rl.plan.records import ALWAYS, LEARNING, Device, Footprint, RunSize
from sparse_rl.plan.resident import resident_lines
from sparse_rl.plan.size import ModelSize
from sparse_rl.rollout.engine import GPU_RESERVE, HOST_SHARE
from sparse_rl.rollout.rows import Rows
from sparse_rl.rollout.scheduler import entries_needed, entries_reached
from sparse_rl.rollout.sequence import Sequence
from sparse_rl.score.head import CHUNK_LOGITS

CONTEXT = 600_000_000  # of CUDA, its libraries and our kernels, outside of torch's allocator
FRAGMENTED = 0.02  # of a GPU's memory, lost between the allocator's blocks
GRAPHS = 300_000_000  # of captured graphs, and the matrix library's workspaces


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run holds on a device."""

    size: ModelSize
    run: RunSize
    device: Device
    lines: tuple[Footprint, ...]
    pages_a_row: int
    pages_wanted: int  # for all rows at their longest
    pages: int  # the engine takes: what is free, less its reserve

    @property
    def in_host_memory(self) -> list[Footprint]:
        """What a GPU does not hold; a CPU's memory is the host's."""
        return [line for line in self.lines if line.where == "host" and self.device.cuda]

    def holds(self, *stages: str) -> list[Footprint]:
        """What is on the device at any of the stages."""
        elsewhere = self.in_host_memory
        return [line for line in self.lines if line not in elsewhere and not set(stages).isdisjoint(line.stages)]

    def held(self, stage: str, *, driver: bool = True) -> int:
        return sum(line.bytes for line in self.holds(stage) if driver or line.where != "driver")

    @property
    def learning(self) -> str:
        """The stage at which learning holds most."""
        return max(LEARNING, key=self.held)

    @property
    def pool_fits(self) -> bool:
        return self.pages >= self.pages_wanted

    @property
    def wanted(self) -> int:
        """What the rollout would hold with room for all rows at their longest."""
        return self.held("rollout") + (self.pages_wanted - self.pages) * self.page_bytes

    @property
    def rollout_fits(self) -> bool:
        return self.pool_fits and self.held("rollout") <= self.device.memory

    @property
    def learning_fits(self) -> bool:
        return self.held(self.learning) <= self.device.memory

    @property
    def fits(self) -> bool:
        return self.rollout_fits and self.learning_fits

    @property
    def page_bytes(self) -> int:
        return self.run.kv.page_bytes(self.size.attention, self.run.page_size)

    @property
    def rows_in_flight(self) -> int:
        """Rows that the pool holds at their longest, one more being kept for a prompt."""
        rows = self.pages // self.pages_a_row - (self.run.pool_pages is None)
        return max(0, min(self.run.rows_used, rows))


def make_plan(size: ModelSize, run: RunSize, device: Device) -> Plan:
    """What the run holds; the pool is what the engine would make of the memory that is left."""
    resident, state = resident_lines(size, run), _rows_state(size, run)
    outside = _outside(device)
    sequence = _longest(size, run)
    pages_a_row = -(-entries_needed(run.kv, sequence) // run.page_size)
    wanted = pages = pages_a_row * (run.rows_used + 1)
    if run.pool_pages is not None:
        wanted, pages = max(run.pool_pages, pages_a_row), run.pool_pages
    else:
        used = sum(line.bytes for line in (*resident, *state) if line.where == "device" and "rollout" in line.stages)
        free = device.memory - used - sum(line.bytes for line in outside if line.name == "CUDA context")
        spare = free - int(GPU_RESERVE * device.memory) if device.cuda else int(HOST_SHARE * free)
        pages = min(wanted, max(spare // run.kv.page_bytes(size.attention, run.page_size), pages_a_row))
    phases = (*_rollout(size, run, device), *_learning(size, run, device), *outside)

    def plan(*, pool_stays: bool) -> Plan:
        lines = (*resident, _pool(size, run, pages, pool_stays), *state, *phases)
        held = tuple(line for line in lines if line.bytes)
        return Plan(size, run, device, held, pages_a_row=pages_a_row, pages_wanted=wanted, pages=pages)

    whole = plan(pool_stays=run.bounded)
    if whole.learning_fits or not run.bounded:
        return whole
    without = plan(pool_stays=False)  # as the run does when an update runs out of memory
    return without if without.learning_fits else whole


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest number up to `most` that fits, where every smaller one does; 0 if none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _longest(size: ModelSize, run: RunSize) -> Sequence:
    completion = max(1, min(run.completion, size.context - run.prompt))
    return Sequence(request=0, prompt_idx=0, prompt_len=run.prompt, max_tokens=completion)


def _pool(size: ModelSize, run: RunSize, pages: int, stays: bool) -> Footprint:
    more = f" and {run.kv.num_landmarks} landmarks" if run.kv.num_landmarks else ""
    held = f"to {run.length:,} tokens a row"
    if isinstance(run.kv, EvictPolicy):
        at = f" ({run.kv.schedule.at(run.length):,} at {run.length:,} tokens)" if isinstance(run.kv.budget, str) else ""
        prompt = ", and its prompt" if run.kv.protect_prompt else ""
        up_to = "up to " if run.auto else ""
        held = f"{up_to}{run.kv.budget}{at} + {run.kv.interval} entries a row{prompt}"
        if run.prompt > run.kv.trigger(run.prompt, run.length):
            held += f", and all of its prompt's {run.prompt:,} until it is cut"
        held += "" if stays or not run.bounded else "; given back for learning"
    return Footprint(
        name="KV pool",
        bytes=(pages + 1) * run.kv.page_bytes(size.attention, run.page_size),  # and the page that is nobody's
        stages=ALWAYS if stays else ("rollout",),
        formula=f"{pages + 1:,} pages x {run.page_size} entries x {run.kv.entry_bytes(size.attention):,}{more}: {held}",
    )


def _rows_state(size: ModelSize, run: RunSize) -> list[Footprint]:
    """Query rings, page tables, and tokens on their way to the host: made by the engine's own code, without memory."""
    longest = entries_reached(run.kv, _longest(size, run))
    entries = min(run.kv.bound or 1 << (longest - 1).bit_length(), size.context)
    return [
        Footprint(
            name="rows",
            bytes=_state_bytes(size, run.rows, run.page_size, run.kv.num_queries, entries, run.top_logprobs),
            stages=ALWAYS,
            formula=f"{run.rows} rows: the last {run.kv.num_queries} queries, page tables, tokens drawn",
        )
    ]


@lru_cache(maxsize=256)
def _state_bytes(size: ModelSize, rows: int, page_size: int, queries: int, entries: int, top: int) -> int:
    cache = PagedCache(size.attention, num_pages=0, page_size=page_size, num_rows=rows, num_queries=queries)
    tensors = (*cache.fixed_tensors(), cache.windows, cache.scales)
    table = Rows(rows, -(-entries // page_size), top, torch.device("meta"))
    return sum(tensor.nbytes for tensor in tensors) + table.num_bytes


def _rollout(size: ModelSize, run: RunSize, device: Device) -> list[Footprint]:
    """What prefill, decoding and compression need beside the pool."""
    item, shape, rows = size.itemsize, size.attention, run.rows_used
    tokens = min(rows * run.prompt, max(run.prompt, run.prefill_tokens))
    prompts = -(-tokens // run.prompt)
    prefill = tokens * (6 * size.hidden + 3 * size.intermediate) * item
    prefill += prompts * (size.vocabulary * item + shape.query_bytes(run.kv.num_queries))
    decode = run.rows * (2 * size.vocabulary + 8 * size.hidden + 3 * size.intermediate) * item
    lines = [
        Footprint(
            name="prefill",
            bytes=prefill,
            stages=("rollout",),
            formula=f"{tokens:,} tokens x (6 hidden + 3 intermediate) x {item}, logits, queries of {prompts} prompts",
        ),
        Footprint(
            name="graph pool" if device.cuda and run.graphs else "decode step",
            bytes=decode + (GRAPHS if device.cuda and run.graphs else 0),
            stages=ALWAYS if device.cuda and run.graphs else ("rollout",),
            formula=f"{run.rows} rows x (2 vocabulary + 8 hidden + 3 intermediate) x {item}, and graphs",
        ),
    ]
    if isinstance(run.kv, EvictPolicy):
        entries = rows * min(run.kv.trigger(run.prompt, run.length), run.length) * shape.num_layers * shape.num_kv_heads
        lines.append(
            Footprint(
                name="compression",
                bytes=32 * entries + rows * shape.query_bytes(run.kv.num_queries),
                stages=("rollout",),
                formula=f"{entries:,} entries of all layers and KV heads x 32: importance, positions, slots; queries",
            )
        )
    return lines


def _learning(size: ModelSize, run: RunSize, device: Device) -> list[Footprint]:
    """Activations of the largest forward, and what the backward pass needs beside them."""
    item, tokens, layers = size.itemsize, run.forward_tokens, size.attention.num_layers
    states = layers * size.hidden * item
    chunk = CHUNK_LOGITS["cuda" if device.cuda else "cpu"]
    logits = size.vocabulary * min(tokens, max(1, chunk // size.vocabulary))
    each = item if device.cuda else item + 8  # a GPU writes the gradient over the logits
    head = logits * each + 2 * tokens * size.hidden * item
    backward = tokens * (3 * size.intermediate + 4 * size.hidden) * item
    backward += 0 if run.lora else size.matrix * item  # a gradient on its way to its fp32 sum
    outside = tokens * size.saved_outside
    if run.activations == "keep":
        saved, text = tokens * size.saved_layers, f"{tokens:,} tokens x {size.saved_layers:,} in {layers} layers"
    else:
        saved, text = tokens * states, f"{tokens:,} tokens x {layers} layers x {size.hidden} x {item}"
        backward += tokens * size.saved_layer
    lines = [
        Footprint(
            name="activations",
            bytes=saved + (0 if run.activations == "offload" else outside),
            stages=("head", "layers"),
            formula=text + ("" if run.activations == "offload" else ", and around them"),
            where="host" if run.activations == "offload" else "device",
        ),
        Footprint(
            name="head",
            bytes=head,
            stages=("head",),
            formula=f"{logits:,} logits x {each}, {tokens:,} hidden states twice",
        ),
        Footprint(
            name="backward of a layer",
            bytes=backward,
            stages=("layers",),
            formula=f"{tokens:,} tokens x (3 intermediate + 4 hidden) x {item}"
            + (f", one layer's {size.saved_layer:,} a token" if run.activations != "keep" else "")
            + ("" if run.lora else f", a matrix of {size.matrix:,} x {item}"),
        ),
        Footprint(
            name="gradient of the embedding",
            bytes=0 if run.lora else size.embedding * item,
            stages=("embedding",),
            formula=f"{size.embedding:,} x {item}",
        ),
    ]
    if run.activations == "offload":
        in_flight = tokens * (2 * size.hidden * item + size.saved_outside)
        lines.append(
            Footprint(
                name="activations on their way",
                bytes=in_flight,
                stages=("head", "layers"),
                formula=f"{tokens:,} tokens x 2 layers x {size.hidden} x {item}, and around them",
            )
        )
    if run.ranks > 1:
        gathered = size.layer + size.around
        lines.append(
            Footprint(
                name="gathered parameters",
                bytes=gathered * (item if run.lora else item + 4),
                stages=LEARNING,
                formula=f"one layer, embedding and head: {gathered:,} x {item}"
                + ("" if run.lora else ", their gradients x 4"),
            )
        )
    return lines


def _outside(device: Device) -> list[Footprint]:
    """What torch's allocator does not show."""
    if not device.cuda:
        return []
    return [
        Footprint(name="CUDA context", bytes=CONTEXT, stages=ALWAYS, formula="about", where="driver"),
        Footprint(
            name="fragmentation",
            bytes=int(FRAGMENTED * device.memory),
            stages=ALWAYS,
            formula=f"allowance, {100 * FRAGMENTED:.0f} % of the memory",
            where="driver",
        ),
    ]
