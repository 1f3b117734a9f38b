# SPDX-License-Identifier: Apache-2.0
"""What is measured: requests, their lengths, and the steps in which a run is at its full speed.

standard:   2 x rows requests submitted together, `rows` in flight, every output `output` tokens long
lognormal:  4 x rows requests, lengths output / 2 x exp(0.6 z) with z normal, clipped to [1, output]

Nothing is run here: rollout.py does that, with the clock of meter.py.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import torch

from sparse_rl.kv import EvictPolicy, KVPolicy
from sparse_rl.model.shapes import shape_config
from sparse_rl.rollout.engine import MAX_ROWS
from sparse_rl.types import Prompt

WORKS = {"standard": 2, "lognormal": 4}  # requests a row
RIVALS = ("full", "generate", "vllm")
SIGMA = 0.6
BEFORE_THE_END = 0.95  # of an output: a window ends before the first row does


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig:
    """One work on one shape.

    shape: model shape by name, its weights random
    device: cpu, cuda, cuda:1, ...; without it a GPU where there is one
    dtype: float32, bfloat16 or float16; without it bfloat16 on a GPU, float32 on a CPU
    rows: sequences in flight
    prompt: tokens of a prompt
    output: tokens of an output, of the longest if work is lognormal
    n: samples of a prompt, which is prefilled once for them
    work: standard (outputs of one length) or lognormal (of many)
    max_steps: stop after this many decode steps; the figure is then of a window in which caches are full
    profile: split a step's time by kernels, in a second, short run (on a GPU)
    against: others to run the same work, separated by commas: generate, vllm, or full for the engine's own dense cache
    generate_tokens: tokens an output that `generate` is run for
    adapter: rank of a sampler's adapter (DistillSparse) on every projection; the same work is then timed without it too
    bandwidth: bytes a second the device's memory is read with, for the roofline
    flops: operations a second of the device's matrix units in this dtype, for the roofline
    seed: of weights, prompts, lengths and samples
    """

    shape: str = "tiny"
    device: str | None = None
    dtype: str | None = None
    rows: int = 256
    prompt: int = 128
    output: int = 4096
    n: int = 1
    work: str = "standard"
    max_steps: int | None = None
    profile: bool = True
    against: str = ""
    generate_tokens: int = 256
    adapter: int = 0
    bandwidth: float | None = None
    flops: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for field in ("rows", "prompt", "output", "n", "generate_tokens", "max_steps", "bandwidth", "flops"):
            given = getattr(self, field)
            if given is not None and given < 1:
                raise ValueError(f"--{field.replace('_', '-')} is {given}; it must be at least 1.")
        for field in ("seed", "adapter"):
            if getattr(self, field) < 0:
                raise ValueError(f"--{field} is {getattr(self, field)}; it must be at least 0.")
        if self.seed >= 2**63:
            raise ValueError(f"--seed is {self.seed}; it must be below 2^63.")
        if self.rows > MAX_ROWS:
            raise ValueError(f"--rows is {self.rows}; it must be at most {MAX_ROWS}.")
        if self.work not in WORKS:
            raise ValueError(f"--work is {self.work!r}; choose one of {', '.join(WORKS)}.")
        _ = self.rivals  # or one is unknown
        if self.num_requests % self.n:
            raise ValueError(
                f"--n is {self.n}, which does not divide the {self.num_requests} requests ({WORKS[self.work]} x rows); "
                "choose another."
            )
        if self.cut and self.work != "standard":
            raise ValueError(f"--max-steps cuts the standard work, not {self.work!r}; leave it out.")

    @property
    def rivals(self) -> list[str]:
        return split_rivals(self.against, RIVALS)

    @property
    def num_requests(self) -> int:
        return WORKS[self.work] * self.rows

    @property
    def cut(self) -> bool:
        """Whether the run stops before its outputs end."""
        return self.max_steps is not None and self.max_steps < self.output


def split_rivals(against: str, known: tuple[str, ...]) -> list[str]:
    """The names between the commas; ValueError if one is unknown."""
    found = [name.strip() for name in against.split(",") if name.strip()]
    for name in found:
        if name not in known:
            raise ValueError(f"--against has {name!r}; choose among {', '.join(known)}.")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Decode steps of full rows: from `start`, `steps` of them."""

    start: int
    steps: int


def make_prompts(config: BenchConfig, vocabulary: int) -> list[Prompt]:
    """Random prompts, each with the length of its outputs."""
    count, generator = config.num_requests // config.n, torch.Generator().manual_seed(config.seed)
    ids = torch.randint(0, vocabulary, (count, config.prompt), generator=generator)
    if config.work == "standard":
        lengths = [config.output] * count
    else:
        spread = (SIGMA * torch.randn(count, generator=generator)).exp()
        lengths = (config.output / 2 * spread).round().clamp(1, config.output).int().tolist()
    return [Prompt(ids=tuple(row), max_tokens=length) for row, length in zip(ids.tolist(), lengths, strict=True)]


def output_lengths(prompts: list[Prompt]) -> list[int]:
    return [prompt.max_tokens or 0 for prompt in prompts]


def steps_to_fill(policy: KVPolicy, prompt: int) -> int:
    """Decode steps until a cache is cut for the first time; dense: 0.

    With one budget it holds from then on what it ever will; with a schedule, all that its context lets it.
    """
    if not isinstance(policy, EvictPolicy):
        return 0
    held = min(prompt, policy.target(prompt, prompt))
    steps = 0
    while (more := policy.trigger(prompt, prompt + steps) - held - steps) > 0:
        steps += more  # by then the trigger may have risen
    return steps


def check_positions(config: BenchConfig) -> None:
    """Refuse what is longer than the shape was made for."""
    positions = shape_config(config.shape).max_position_embeddings
    if config.prompt + config.output > positions:
        raise ValueError(
            f"a prompt of {config.prompt} and an output of {config.output} are {config.prompt + config.output} tokens, "
            f"but {config.shape} has {positions} positions; shorten one."
        )


def full_window(config: BenchConfig, policy: KVPolicy, prompts: list[Prompt]) -> Window:
    """The steps that a step's time is taken from: caches full, rows full, compressions in their true share."""
    if config.work != "standard":  # refills fall into it; the tail does not
        steps = sum(output_lengths(prompts)) * config.n // config.rows
        return Window(start=steps // 4, steps=int(0.45 * steps))
    fill = steps_to_fill(policy, config.prompt)
    last = config.max_steps if config.cut and config.max_steps else int(BEFORE_THE_END * config.output)
    interval = policy.interval if isinstance(policy, EvictPolicy) else 1
    if isinstance(policy, EvictPolicy) and fill + interval <= last:
        return Window(start=fill, steps=(last - fill) // interval * interval)
    if config.cut and isinstance(policy, EvictPolicy):
        raise ValueError(
            f"--max-steps is {config.max_steps}, but caches are full after {fill} steps and compressed every "
            f"{interval}; give at least {fill + interval}."
        )
    return Window(start=last // 4, steps=last - last // 4)


def profile_window(config: BenchConfig, policy: KVPolicy, prompts: list[Prompt]) -> Window | None:
    """About two compressions, or 32 steps of a dense cache, of the work itself; None if it is too short for that.

    Where lengths differ, rows are in all phases by then, and refills fall into it.
    """
    fill, steps = 8, 32
    if isinstance(policy, EvictPolicy):
        times = 2 if policy.interval <= 256 else 1  # the profiler keeps every kernel in memory
        fill, steps = steps_to_fill(policy, config.prompt), times * policy.interval
    if config.work != "standard":
        full = full_window(config, policy, prompts)
        return Window(start=full.start, steps=steps) if steps <= full.steps else None
    return Window(start=fill, steps=steps) if fill + steps < config.output else None


def dense_peak_entries(config: BenchConfig, prompts: list[Prompt]) -> int:
    """Most entries a dense cache would hold for this work at once; samples of a prompt share its entries."""
    free, starts, ends = [0] * config.rows, [], []
    for length in np.repeat(output_lengths(prompts), config.n).tolist():
        start = heapq.heappop(free)
        starts.append(start)
        ends.append(start + length - 1)  # the first token comes from the prefill, the last is never written
        heapq.heappush(free, ends[-1])
    began, ended, group = np.array(starts), np.array(ends), np.arange(len(starts)) // config.n
    peak = config.prompt
    for step in np.unique(ended):
        active = (began < step) & (ended >= step)
        shared = len(np.unique(group[active])) * config.prompt
        peak = max(peak, int(shared + (step - began[active]).sum()))
    return peak
