# SPDX-License-Identifier: Apache-2.0
"""What is known of every token that a cache sampled: how near the dense model is there, and where it stands.

Nothing is averaged here: `statistics.py` does that.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

from sparse_rl.kv import KVPolicy
from sparse_rl.model.load import LoadedModel
from sparse_rl.objective.mismatch import TOP, overlap_bounds, overlap_ids, overlap_top
from sparse_rl.rollout import EngineConfig, Progress, Sampling
from sparse_rl.rollout.memory import GuardedEngine, Memory
from sparse_rl.runfolder import write_whole
from sparse_rl.score.head import Head
from sparse_rl.score.pack import flatten, pack
from sparse_rl.score.score import score_microbatch
from sparse_rl.types import Prompt, Rollout

BLOCK = 4  # samples generated and scored together, in units of the engine's rows
SCORED_TOKENS = 8192  # in one dense forward


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """T tokens of R rollouts; the sums are over the rollouts' decode steps."""

    rollouts: np.ndarray  # (T,) which rollout, ascending
    contexts: np.ndarray  # (T,) tokens before it, the prompt's included
    lower: np.ndarray  # (T,) overlap sum_v min(p, q), a lower bound; exact where the vocabulary is small
    upper: np.ndarray  # (T,) and an upper one
    top20: np.ndarray  # (T,) Sparrow's: over tokens that are among the best 20 of both sides
    entropy: np.ndarray  # (T,) of the dense model, in nats
    log_xi: np.ndarray  # (T,) dense - sampler log-prob of the token
    num_rollouts: int
    held: float  # entries held
    read: float  # entries read
    full: float  # entries `full` would have held

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each rollout."""
        return np.bincount(self.rollouts, minlength=self.num_rollouts)

    def save(self, path: Path) -> None:
        """All of it or nothing, and on disk when this returns."""
        content = io.BytesIO()
        np.savez(content, **asdict(self))
        write_whole(path, content.getbuffer())

    @classmethod
    def load(cls, path: Path) -> Tokens | None:
        """None where there is no such file, or it is damaged."""
        try:
            with np.load(path) as found:
                values: dict[str, Any] = {field.name: found[field.name] for field in fields(cls)}
        except (FileNotFoundError, BadZipFile, KeyError, ValueError, EOFError, TypeError):  # the last: one array
            return None
        scalars = {name: value.item() for name, value in values.items() if value.ndim == 0}
        return cls(**{**values, **scalars})


def probe(
    loaded: LoadedModel,
    policy: KVPolicy,
    prompts: list[Prompt],
    sampling: Sampling,
    engine: EngineConfig,
    memory: Memory,
    *,
    on_step: Callable[[int, Progress], None] | None = None,  # gets the rollouts done before, and the engine's progress
) -> Tokens:
    """Sample with the policy, then one dense pass over what it sampled; block by block, so memory stays bounded."""
    sampling = replace(sampling, top_logprobs=overlap_ids(loaded.vocab_size))
    sampler, head = GuardedEngine(loaded, policy, engine, memory, stage="calibrate"), Head(loaded.model)
    size = max(1, BLOCK * engine.rows // sampling.n)
    parts: list[Tokens] = []
    for start in range(0, len(prompts), size):

        def step(progress: Progress, before: int = start * sampling.n) -> None:
            if on_step is not None:
                on_step(before, progress)

        rollouts = sampler.generate(prompts[start : start + size], sampling, first=start, on_step=step)
        parts.append(measure(head, rollouts, sampling.temperature))
    return _joined(parts)


@torch.no_grad()
def measure(head: Head, rollouts: list[Rollout], temperature: float) -> Tokens:
    """The dense model's view of these rollouts, which have the sampler's top log-probs."""
    completions = flatten(rollouts, head.model.device)
    assert completions.top_ids is not None and completions.top_logprobs is not None
    found = {name: torch.zeros_like(completions.sampler_logprobs) for name in ("lower", "upper", "top20", "entropy")}
    dense = torch.zeros_like(completions.sampler_logprobs)
    num_top = min(TOP, completions.top_ids.shape[1])
    for microbatch in pack(rollouts, SCORED_TOKENS):
        scores = score_microbatch(head, completions, microbatch, temperature, at_top=True, num_top=num_top)
        at = microbatch.tokens.to(completions.rows.device)
        ids, logprobs = completions.top_ids[at], completions.top_logprobs[at]
        assert scores.at_ids is not None and scores.top_ids is not None and scores.top_logprobs is not None
        dense[at] = scores.logprobs.float()
        found["lower"][at], found["upper"][at] = overlap_bounds(logprobs, scores.at_ids)
        found["top20"][at] = overlap_top(ids[:, :num_top], logprobs[:, :num_top], scores.top_ids, scores.top_logprobs)
        found["entropy"][at] = entropy(scores.at_ids if ids.shape[1] > TOP else scores.top_logprobs)
    contexts = [len(r.prompt.ids) + torch.arange(len(r.token_ids)) for r in rollouts]
    kept = completions.mask.cpu().numpy()
    return Tokens(
        rollouts=completions.rows.cpu().numpy()[kept].astype(np.int32),
        contexts=torch.cat(contexts).numpy()[kept].astype(np.int32),
        **{name: values.cpu().numpy()[kept] for name, values in found.items()},
        log_xi=(dense - completions.sampler_logprobs).cpu().numpy()[kept],
        num_rollouts=len(rollouts),
        held=float(sum(sum(r.kv.held) for r in rollouts)),
        read=float(sum(r.kv.num_read for r in rollouts)),
        full=float(sum(r.kv.full for r in rollouts)),
    )


def entropy(logprobs_Tk: torch.Tensor) -> torch.Tensor:
    """Of distributions whose best ids are known, (T,): a lower bound, all other ids taken as one; exact with k = V."""
    p_Tk = logprobs_Tk.exp()
    rest = (1.0 - p_Tk.sum(dim=-1)).clamp(min=0.0)
    entropy: torch.Tensor = -torch.special.xlogy(p_Tk, p_Tk).sum(dim=-1) - torch.special.xlogy(rest, rest)
    return entropy


def _joined(parts: list[Tokens]) -> Tokens:
    """Parts one after the other, their rollouts numbered on."""
    firsts = np.cumsum([0, *(part.num_rollouts for part in parts)])
    merged: dict[str, Any] = {}
    for field in fields(Tokens):
        values = [getattr(part, field.name) for part in parts]
        if field.name == "rollouts":
            values = [value + first for value, first in zip(values, firsts[:-1], strict=True)]
        merged[field.name] = np.concatenate(values) if isinstance(values[0], np.ndarray) else sum(values)
    merged["rollouts"] = merged["rollouts"].astype(np.int32)
    return Tokens(**merged)
