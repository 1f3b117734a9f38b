# SPDX-License-Identifier: Apache-2.0
"""Mean reward on held-out prompts with its standard error, while a model trains.

Benchmarks are those of `benchmarks.py`.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch

from sparse_rl.rollout import Engine, Sampling
from sparse_rl.specs import renamed
from sparse_rl.tasks import Graded, Rewards
from sparse_rl.types import Prompt, Rollout, kv_saved_frac


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalConfig:
    """Evaluation while training, with the dense cache and with the run's own.

    every: steps between evaluations; 0 evaluates at the start and the end only
    prompts: held-out prompts, at most; 0 never evaluates
    n: samples a prompt
    temperature: 0 takes the best token
    top_p: sample from the smallest set of best tokens with this mass; 1 is off
    seed: of the samples
    """

    every: int = 10
    prompts: int = 512
    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for field, least in (("every", 0), ("prompts", 0), ("n", 1)):
            if getattr(self, field) < least:
                raise ValueError(f"eval.{field} is {getattr(self, field)}; it must be at least {least}.")
        with renamed("sampling", "eval."):
            self.sampling(max_tokens=1)

    def sampling(
        self, max_tokens: int, stop: tuple[str, ...] = (), stop_ids: tuple[int, ...] | None = None
    ) -> Sampling:
        return Sampling(
            n=self.n,
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=stop,
            stop_ids=stop_ids,
        )


def digest_of(prompts: list[Prompt], sampling: Sampling, rewards: Rewards, specs: Any = None) -> str:
    """A hash of what an evaluation is of: rewards of two with the same can be compared.

    specs: what else is known of the rewards, their settings say
    """
    asked = [(prompt.ids, prompt.max_tokens, _plain(prompt.columns)) for prompt in prompts]
    text = repr((asked, sorted(asdict(sampling).items()), rewards.names, rewards.weights, specs))
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()


def _plain(columns: dict[str, Any]) -> list[tuple[str, str]]:
    """Names and values; of a value that may look otherwise in another process, its type."""
    simple = (str, int, float, bool, type(None))
    return sorted((str(key), repr(v) if isinstance(v, simple) else type(v).__name__) for key, v in columns.items())


def evaluate(engine: Engine, prompts: list[Prompt], sampling: Sampling, rewards: Rewards) -> dict[str, float]:
    """reward, its standard error over prompts, graders that failed, length, truncation and KV saved."""
    rollouts = engine.generate(prompts, sampling)
    return summary(rollouts, rewards.grade(rollouts, engine.loaded.tokenizer), sampling.n)


def summary(rollouts: list[Rollout], graded: Graded, n: int) -> dict[str, float]:
    """What `evaluate` returns, of rollouts that are graded, `n` a prompt."""
    means = graded.rewards.view(-1, n).nanmean(dim=1)
    means = means[~means.isnan()]
    spread = float(means.std()) if len(means) > 1 else math.nan
    lengths = torch.tensor([len(rollout.token_ids) for rollout in rollouts], dtype=torch.float64)
    return {
        "reward": float(means.mean()) if len(means) else math.nan,
        "reward_se": spread / math.sqrt(len(means)) if len(means) else math.nan,
        "failed": float(graded.num_failed),
        "mean_length": float(lengths.mean()),
        "clipped_ratio": sum(rollout.finish_reason == "length" for rollout in rollouts) / len(rollouts),
        "kv_saved_frac": kv_saved_frac(rollouts),
    }
