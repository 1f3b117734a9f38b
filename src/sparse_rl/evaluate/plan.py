# SPDX-License-Identifier: Apache-2.0
"""What an evaluation is made of: models x benchmarks x caches, and a protocol that says how each benchmark is run.

A cache is written as `full`, `rkv:128` (its budget) or `rkv:budget=128,interval=32`.

No problem is read and no model loaded here: that is done in `suite.py` and `benchmarks.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from sparse_rl.evaluate.protocols import PROTOCOLS, Settings
from sparse_rl.kv import POLICIES, KVPolicy, check_use
from sparse_rl.model.load import DTYPES
from sparse_rl.rollout import EngineConfig
from sparse_rl.specs import build, renamed
from sparse_rl.tasks.benchmarks import find
from sparse_rl.tasks.lookup import Lookup
from sparse_rl.tasks.prompts import Style, named_template
from sparse_rl.tasks.rewards import GradingConfig

OVERRIDES = ("n", "max_tokens", "temperature", "top_p", "seed", "template")  # what may depart from the protocol
BLOCK = 4  # samples of a block by the engine's rows


@dataclass(frozen=True, slots=True)
class Cell:
    """One field of the table."""

    model: str
    benchmark: str
    cache: str

    def __str__(self) -> str:
        return f"{self.model}, {self.benchmark}, {self.cache}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What is evaluated, and how. What is None is as the protocol has it.

    models: smollm2, embedded, tiny, folders (checkpoints, adapters) or hub names
    benchmarks: gsm8k, math500, lookup:pairs=15, ...; `sparse-rl data check` lists them
    kv: caches: full, rkv:128 (its budget), snapkv:budget=64,interval=16, ...
    protocol: how a benchmark is run: prompt, samples, temperature, limits, metrics
    data_dir: folder with BENCHMARK/test.jsonl
    problems: of each benchmark at most, a sample that is always the same, and part of every larger one
    n: samples a problem
    max_tokens: most tokens of an answer
    temperature: 0 takes the best token
    top_p: sample from the smallest set of best tokens with this mass; 1 is off
    seed: of the samples
    template: a prompt template by name, or a text with {problem} in it
    system: system prompt, in place of the template's own
    chat_template_kwargs: for the model's chat template, e.g. {"enable_thinking": false}
    dtype: float32, bfloat16, float16 or float64; the checkpoint's own if not given
    device: cpu, cuda, cuda:1, ...
    """

    models: tuple[str, ...]
    benchmarks: tuple[str, ...]
    kv: tuple[str, ...] = ("full",)
    protocol: str = "default"
    data_dir: str | None = None
    problems: int | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    template: str | None = None
    system: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    dtype: str | None = None
    device: str = "cpu"
    engine: EngineConfig = field(default_factory=EngineConfig)
    grading: GradingConfig = field(default_factory=GradingConfig)

    def __post_init__(self) -> None:
        for name in ("models", "benchmarks", "kv"):
            given = getattr(self, name)
            if not given or not all(given):
                raise ValueError(f"--{name} has nothing in it; give at least one.")
            _check_once(name, given)
        if self.protocol not in PROTOCOLS:
            raise ValueError(f"protocol is {self.protocol!r}; choose one of {', '.join(PROTOCOLS)}.")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is unknown; choose one of {', '.join(DTYPES)}.")
        if self.problems is not None and self.problems < 1:
            raise ValueError(f"problems is {self.problems}; it must be at least 1.")
        usable_caches(self.kv, self.engine.page_size)
        sets: dict[tuple[str, Lookup | None], str] = {}
        for benchmark in self.benchmarks:
            same = sets.setdefault((benchmark.partition(":")[0], find(benchmark).lookup), benchmark)
            if same != benchmark:
                raise ValueError(f"--benchmarks has {same!r} and {benchmark!r}, which are the same; leave one out.")
            settings = self.settings(benchmark)
            Style(template=named_template(settings.template), system=self.system).write("", f"benchmark {benchmark}")

    @property
    def cells(self) -> list[Cell]:
        """In the order in which they run: a model is loaded once, a cache has one engine."""
        return [Cell(m, b, c) for m, c, b in product(self.models, self.kv, self.benchmarks)]

    def settings(self, benchmark: str) -> Settings:
        """The protocol's settings with the user's own."""
        settings = PROTOCOLS[self.protocol].settings(benchmark)
        return settings.changed(**{name: getattr(self, name) for name in OVERRIDES})

    def departures(self, benchmark: str) -> list[str]:
        """Which settings are not as the protocol has them."""
        found = PROTOCOLS[self.protocol].departures(benchmark, self.settings(benchmark))
        if self.system is not None:
            found.append(f"the system prompt is {self.system!r}")
        if self.chat_template_kwargs and named_template(self.settings(benchmark).template).chat:
            found.append(f"the chat template gets {json.dumps(self.chat_template_kwargs)}")
        return found

    def block_problems(self, benchmark: str) -> int:
        """Problems of a block, which a kill loses at most: whole ones, and samples to keep the engine's rows busy."""
        return max(1, BLOCK * self.engine.rows // self.settings(benchmark).n)


def parse_cache(spec: str) -> KVPolicy:
    """The policy that `full`, `rkv:128` or `rkv:budget=128,interval=32` stands for."""
    return build("cache", spec, POLICIES, first="budget")


def usable_caches(specs: Sequence[str], page_size: int | None = None) -> dict[str, KVPolicy]:
    """The policy of each cache of --kv; no two are the same."""
    _check_once("kv", specs)
    policies = {spec: usable_cache(spec, page_size) for spec in specs}
    first: dict[str, str] = {}
    for spec, policy in policies.items():
        same = first.setdefault(repr(policy), spec)
        if same != spec:
            raise ValueError(f"--kv has {same!r} and {spec!r}, which are the same cache; leave one out.")
    return policies


def _check_once(name: str, given: Sequence[str]) -> None:
    for value in given:
        if given.count(value) > 1:
            raise ValueError(f"--{name} has {value!r} twice; give it once.")


def usable_cache(spec: str, page_size: int | None = None) -> KVPolicy:
    """The same, of a cache that is used as it stands, with pages of this size or the policy's own."""
    policy = parse_cache(spec)
    try:
        with renamed("kv", ""):
            check_use(policy)
            policy.check_page_size(page_size or policy.page_size)
    except ValueError as error:
        raise ValueError(f"cache {spec!r}: {error}") from None
    return policy
