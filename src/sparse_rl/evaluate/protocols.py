# SPDX-License-Identifier: Apache-2.0
"""Evaluation protocols by name: template, samples, sampling, limits and metrics of each benchmark.

default    one greedy answer in the model's own chat, as one would use it
sparse-rl  as the Sparse-RL paper evaluates: no chat, temperature 0.8, and 32 samples of contest problems
sparrow    as the Sparrow paper evaluates: temperature 1, top-p 0.7, and 16 samples of contest problems

    settings = PROTOCOLS["sparse-rl"].settings("aime24").changed(n=8)
    PROTOCOLS["sparse-rl"].departures("aime24", settings)      # ["n is 8 instead of 32"]

Which benchmarks there are is in tasks/benchmarks.py, what a template says in tasks/templates.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from sparse_rl.evaluate.statistics import parse_metric
from sparse_rl.rollout import Sampling
from sparse_rl.specs import renamed
from sparse_rl.tasks.benchmarks import Kind, find

SAMPLED = ("n", "temperature", "top_p", "max_tokens", "seed", "stop")  # settings that the engine knows


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a benchmark is put to a model. `metrics` are names that statistics.by_problem knows."""

    template: str  # of tasks/templates.py
    n: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    max_tokens: int
    seed: int = 0
    stop: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ("pass@1",)

    def __post_init__(self) -> None:
        self.sampling()
        if self.n > 1 and self.temperature == 0:
            raise ValueError(f"n is {self.n}, but samples at temperature 0 are all the same; give a temperature too.")
        for metric in self.metrics:
            if parse_metric(metric)[1] > self.n:
                raise ValueError(f"{metric} needs more than the {self.n} samples that are drawn; raise n.")

    def sampling(self) -> Sampling:
        """What of it the engine knows; ValueError where it cannot be."""
        with renamed("sampling", ""):
            return Sampling(**{name: getattr(self, name) for name in SAMPLED})

    def changed(self, **given: Any) -> Settings:
        """With what a user asked for instead; None keeps what is there. Another n has metrics of its own."""
        given = {name: value for name, value in given.items() if value is not None}
        if given.get("n", self.n) != self.n and "metrics" not in given:
            given["metrics"] = metrics_of(given["n"])
        return replace(self, **given)


def metrics_of(n: int) -> tuple[str, ...]:
    """What n samples can say, where no protocol does."""
    return (f"avg@{n}", f"pass@{n}") if n > 1 else ("pass@1",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """Settings for the kinds of benchmarks it covers, and for those benchmarks that differ from their kind."""

    name: str
    kinds: Mapping[Kind, Settings]
    own: Mapping[str, Settings] = field(default_factory=dict)
    benchmarks: tuple[str, ...] = ()  # those of the paper; none for a protocol that is no paper's
    headline: tuple[str, ...] = ()  # those whose plain average is the paper's one number
    notes: Mapping[str, str] = field(default_factory=dict)  # where a benchmark is not quite the paper's

    def settings(self, benchmark: str) -> Settings:
        """The settings for a benchmark by name; ValueError if the protocol has none for such."""
        found = find(benchmark)
        if found.name in self.own:
            return self.own[found.name]
        if found.kind not in self.kinds:
            raise ValueError(
                f"protocol {self.name!r} says nothing of {benchmark} ({found.kind}); "
                f"it is for {', '.join(self.benchmarks)}. Take protocol default."
            )
        return self.kinds[found.kind]

    def departures(self, benchmark: str, settings: Settings) -> list[str]:
        """In which ways an evaluation with these settings is not the protocol's, a sentence part each."""
        meant = self.settings(benchmark)
        said = [
            f"{name} is {getattr(settings, name)!r} instead of {getattr(meant, name)!r}"
            for name in (each.name for each in fields(Settings))
            if name != "metrics" and getattr(settings, name) != getattr(meant, name)
        ]
        if self.benchmarks and benchmark not in self.benchmarks:
            said.append(f"{benchmark} is not among the benchmarks of {self.name}")
        return said + ([self.notes[benchmark]] if benchmark in self.notes else [])


_DEFAULT = Protocol(
    name="default",
    kinds={
        "maths": Settings(template="boxed_chat", max_tokens=4096),
        "contest": Settings(template="boxed_chat", max_tokens=16384),
        "words": Settings(template="boxed_chat", max_tokens=1024),
        "code": Settings(template="code", max_tokens=2048),
        "countdown": Settings(template="countdown", max_tokens=1024),
        "lookup": Settings(template="chat", max_tokens=64),
    },
)

# Base models are evaluated as well, hence no chat; the three stops are those of the papers' model families.
_ONE = Settings(
    template="sparse-rl-eval",
    temperature=0.8,
    top_p=0.95,
    max_tokens=8192,
    stop=("</s>", "<|im_end|>", "<|endoftext|>"),
)
_SEVEN = ("gsm8k", "math500", "gaokao2023en", "minerva_math", "olympiadbench", "aime24", "amc23")
_SPARSE_RL = Protocol(
    name="sparse-rl",
    kinds={"words": _ONE, "maths": _ONE, "contest": replace(_ONE, n=32, max_tokens=16384, metrics=("avg@32",))},
    benchmarks=_SEVEN,
    headline=_SEVEN,
)

# Validation has the cutoffs of training: 37K tokens for maths, 24K for code. (32K is the cutoff of its timings.)
_SIXTEEN = Settings(
    template="sparrow", n=16, temperature=1.0, top_p=0.7, max_tokens=37 * 1024, metrics=("mean@16", "pass@16")
)
_SPARROW = Protocol(
    name="sparrow",
    kinds={
        "contest": _SIXTEEN,
        "code": replace(_SIXTEEN, template="code", n=1, max_tokens=24 * 1024, metrics=("pass@1",)),
    },
    own={"amc23": replace(_SIXTEEN, n=4, metrics=("mean@4",))},
    benchmarks=("aime24", "aime25", "aime26", "amc23", "livecodebench_v1", "humaneval_plus", "mbpp_plus"),
    notes={
        "amc23": "the paper has 83 problems of AMC 2022 and 2023, and 45 of AMC 12 2024",
        "livecodebench_v1": "release 1 with its public tests alone; the paper does not state its release",
    }
    | dict.fromkeys(("humaneval_plus", "mbpp_plus"), "the paper does not state its prompt for code"),
)

PROTOCOLS: dict[str, Protocol] = {protocol.name: protocol for protocol in (_DEFAULT, _SPARSE_RL, _SPARROW)}
