# SPDX-License-Identifier: Apache-2.0
"""What a schedule saves: Sparrow's eFLOPs as printed, and a decode step's time by what it has to move.

N samples of a prompt of L_in tokens, L_out tokens each; P parameters; D = layers x KV heads x width; r query heads a KV
head; I operations a device does while it moves one element. reads = sum over tokens of min(context, budget(context)).

    dense    2 P N L_out + r (2 L_in + L_out) L_out N D + I (2 L_in L_out D + N L_out^2 D)
    sparse   2 P N L_out + 2 r N D reads + 2 I N D reads + choosing
    choosing 2 N L_in D L_out / page + r N D L_out^2 / (2 page) + I (2 L_in D L_out / page + N D L_out^2 / (2 page))

In the paper the terms with L_in are printed without "/ page"; `printed` leaves it out too. Dense layers read all that
is held and choose nothing. The time of a step, for `rows` sequences at one context:

    max(b W / BW, 2 W rows / F) + rows kv reads / BW + rows landmarks / BW + 4 rows V / BW + fixed

W weights in matrix products, b bytes each; kv bytes of an entry; V vocabulary; BW bytes and F operations a second. What
launching and the host take is `fixed`, measured on the machine at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import transformers

from sparse_rl.calibrate.gpus import find_gpu
from sparse_rl.kv import EvictPolicy, KVPolicy
from sparse_rl.kv.schedule import Schedule

INTENSITY = 412.0  # I of an H200: 989e12 operations over 4.8e12 bytes, 2 bytes an element
REACHED = (4.19 / 4.8, 780 / 989)  # of the published bandwidth and operations; measured on an H200


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What of a model costs time."""

    name: str
    parameters: int
    weights: int  # of them, in matrix products; a tied embedding counts once, as the head
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    itemsize: int = 2
    mixture: bool = False  # of experts: what a step reads of them hangs on where tokens go, which no formula here knows

    @classmethod
    def of(cls, module: transformers.PreTrainedModel, name: str, itemsize: int) -> Model:
        """As the module has it, were each number `itemsize` bytes; its weights may be on no device."""
        config: Any = module.config
        return cls(
            name=name,
            parameters=sum(parameter.numel() for parameter in module.parameters()),
            weights=sum(layer.weight.numel() for layer in module.modules() if isinstance(layer, torch.nn.Linear)),
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            vocabulary=config.vocab_size,
            itemsize=itemsize,
            mixture=any(parameter.ndim == 3 for parameter in module.parameters()),
        )

    @property
    def width(self) -> int:
        """D: numbers of a token's keys in all layers."""
        return self.layers * self.kv_heads * self.head_dim

    @property
    def kv_bytes(self) -> int:
        """Of a token's keys and values."""
        return 2 * self.width * self.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """How a sparse cache reads. A policy that evicts chooses nothing in a step."""

    schedule: Schedule
    page: int = 16
    landmarks: int = 1  # vectors a page that a step reads to choose: 1 for means, 2 for bounds, 0 for none
    dense_layers: int = 2
    left: Schedule | None = None  # entries that an evicting policy leaves to choose from, on average

    @classmethod
    def of(cls, policy: KVPolicy, page_size: int) -> Reading:
        """As the policy reads, with the engine's pages."""
        choice, left = policy.selection, None
        if isinstance(policy, EvictPolicy):  # half an interval more than its budget
            budgets = tuple(budget + policy.interval // 2 for budget in policy.schedule.budgets)
            left = Schedule(policy.schedule.starts, budgets)
        if choice is not None:
            reads, dense = choice.schedule, choice.dense_layers
            return cls(schedule=reads, page=page_size, landmarks=choice.landmarks, dense_layers=dense, left=left)
        if left is None:
            raise ValueError(f"{policy.name!r} reads everything, so it saves nothing; choose a policy with a budget.")
        return cls(schedule=left, page=page_size, landmarks=0, dense_layers=0, left=left)

    def held(self, contexts: np.ndarray) -> np.ndarray:
        """What there is to read at each context."""
        return contexts if self.left is None else np.minimum(contexts, _at(self.left, contexts))

    def entries(self, contexts: np.ndarray) -> np.ndarray:
        """What a sparse layer reads of it."""
        read: np.ndarray = np.minimum(self.held(contexts), _at(self.schedule, contexts))
        return read


def _at(schedule: Schedule, contexts: np.ndarray) -> np.ndarray:
    return np.array(schedule.budgets)[np.searchsorted(schedule.starts, contexts, side="right") - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a device can do, and what a step costs that is neither moving nor computing."""

    name: str
    bandwidth: float
    flops: float
    fixed_s: float = 0.0


def gpu(name: str) -> Machine:
    """A GPU by name, at the share of its published figures that is reached."""
    instead = "--bandwidth and --flops"
    found = find_gpu(name, instead)
    if found.bandwidth is None or found.flops is None:
        raise ValueError(f"the speed of --gpu {name!r} is not known here; give {instead}.")
    return Machine(name=name.upper(), bandwidth=found.bandwidth * REACHED[0], flops=found.flops * REACHED[1])


def dense_eflops(model: Model, *, n: int, prompt: int, output: int) -> float:
    ratio, width = model.heads / model.kv_heads, model.width
    compute = 2.0 * model.parameters * n * output + ratio * (2.0 * prompt + output) * output * n * width
    return compute + INTENSITY * (2.0 * prompt * output * width + n * float(output) ** 2 * width)


def sparse_eflops(model: Model, reading: Reading, *, n: int, prompt: int, output: int, printed: bool = False) -> float:
    ratio, width = model.heads / model.kv_heads, model.width
    contexts = np.arange(prompt, prompt + output)
    dense = min(1.0, reading.dense_layers / model.layers)
    held = float(reading.held(contexts).sum())
    reads = dense * held + (1.0 - dense) * float(reading.entries(contexts).sum())
    of_prompt = 2.0 * prompt * width * output / (1 if printed else reading.page)
    of_output = width * float(output) ** 2 / (2.0 * reading.page)
    choosing = n * of_prompt + ratio * n * of_output + INTENSITY * (of_prompt + n * of_output)
    choosing *= held / float(contexts.sum())
    attention = 2.0 * (ratio + INTENSITY) * n * width * reads
    return 2.0 * n * model.parameters * output + attention + (1.0 - dense) * reading.landmarks * choosing


def step_s(
    model: Model, machine: Machine, contexts: np.ndarray, *, rows: int, reading: Reading | None = None
) -> np.ndarray:
    """Seconds of a decode step at each context, the same for all rows; dense if nothing says how to read."""
    weights = max(model.itemsize * model.weights / machine.bandwidth, 2.0 * model.weights * rows / machine.flops)
    reads, landmarks = contexts.astype(np.float64), np.zeros(len(contexts))
    if reading is not None:
        dense = min(1.0, reading.dense_layers / model.layers)
        held, sparse = reading.held(contexts), reading.entries(contexts)
        pages = np.where(sparse < held, held / reading.page, 0.0)  # a row that reads all of it chooses nothing
        landmarks = (1.0 - dense) * reading.landmarks * pages * model.width * model.itemsize
        reads = dense * held + (1.0 - dense) * sparse
    moved = rows * (reads * model.kv_bytes + landmarks + 4.0 * model.vocabulary)
    return weights + moved / machine.bandwidth + machine.fixed_s


def speed_up(model: Model, machine: Machine, reading: Reading, *, rows: int, prompt: int, output: int) -> float:
    """Dense over sparse time of outputs that long, the same rows in both."""
    contexts = np.arange(prompt, prompt + output)
    dense = step_s(model, machine, contexts, rows=rows).sum()
    return float(dense / step_s(model, machine, contexts, rows=rows, reading=reading).sum())


def by_page(
    model: Model, machine: Machine, reading: Reading, pages: list[int], *, rows: int, prompt: int, output: int
) -> dict[int, float]:
    """The speed-up with pages of each size, the entries read the same: larger ones have fewer landmarks to read."""
    return {
        page: speed_up(model, machine, replace(reading, page=page), rows=rows, prompt=prompt, output=output)
        for page in pages
    }
