# SPDX-License-Identifier: Apache-2.0
"""A benchmark made ready: its problems, how they are run and graded, and the prompts a model gets."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from sparse_rl.evaluate.plan import Evaluation, find_template
from sparse_rl.evaluate.protocols import Settings
from sparse_rl.model.load import LoadedModel
from sparse_rl.rollout import Sampling
from sparse_rl.tasks.base import Reward, Rewards
from sparse_rl.tasks.benchmarks import find, problems
from sparse_rl.tasks.prompts import make_prompt
from sparse_rl.tasks.rewards import build_reward
from sparse_rl.types import Prompt

MAX_OVERLONG = 0.1  # of the problems; with more left out, a result would be another benchmark's


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """One benchmark of an evaluation."""

    name: str
    rows: list[dict[str, Any]]
    settings: Settings
    sampling: Sampling
    rewards: Rewards
    digest: str  # of the rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """A suite as one model reads it."""

    prompts: list[Prompt]
    overlong: int  # problems left out, since their prompt alone fills the context
    clipped: int  # problems with less than max_tokens of room
    plain: bool  # a chat was asked for, but the model has no chat template
    digest: str  # of the token ids


def build_suites(evaluation: Evaluation) -> dict[str, Suite]:
    """The benchmarks by name. Graders are made here, so that one that cannot start says so before a model is loaded."""

    @cache
    def reward(spec: str) -> Reward:
        return build_reward(spec, evaluation.grading)

    return {name: _suite(name, evaluation, reward) for name in evaluation.benchmarks}


def _suite(name: str, evaluation: Evaluation, reward: Any) -> Suite:
    rows = problems(name, evaluation.data_dir)
    if not rows:
        raise ValueError(f"benchmark {name!r} has no problems; look at its file.")
    if len({row["id"] for row in rows}) < len(rows):
        raise ValueError(f"benchmark {name!r} has two problems with one id; mend its file.")
    if evaluation.problems is not None:
        order = random.Random(name).sample(range(len(rows)), len(rows))
        rows = [rows[i] for i in sorted(order[: evaluation.problems])]
    return Suite(
        name=name,
        rows=rows,
        settings=evaluation.settings(name),
        sampling=evaluation.sampling(name),
        rewards=Rewards((reward(find(name).reward),)),
        digest=_digest(rows),
    )


def build_prompts(suite: Suite, evaluation: Evaluation, loaded: LoadedModel) -> Prompts:
    """What the model is asked; an error where too many problems do not fit into its context."""
    made = [_prompt(row, suite, evaluation, loaded.tokenizer) for row in suite.rows]
    kept = [prompt for prompt in made if len(prompt.ids) < loaded.context]
    overlong = len(made) - len(kept)
    if overlong > MAX_OVERLONG * len(made):
        raise ValueError(
            f"{overlong} of {len(made)} prompts of {suite.name} do not fit into the model's context of "
            f"{loaded.context} tokens; leave the benchmark out, or take a model that reaches further."
        )
    template = find_template(suite.settings.template)
    return Prompts(
        prompts=kept,
        overlong=overlong,
        clipped=sum(len(prompt.ids) + suite.sampling.max_tokens > loaded.context for prompt in kept),
        plain=template.chat and loaded.tokenizer.chat_template is None,
        digest=_digest([prompt.ids for prompt in kept]),
    )


def _prompt(row: dict[str, Any], suite: Suite, evaluation: Evaluation, tokenizer: PreTrainedTokenizerBase) -> Prompt:
    given = find_template(suite.settings.template).prompt(row["problem"], evaluation.system)
    if isinstance(given, list) and tokenizer.chat_template is None:
        given = "".join(f"{turn['content']}\n" for turn in given)
    where = f"problem {row['id']!r} of {suite.name}"
    return make_prompt({**row, "prompt": given}, where, tokenizer, evaluation.chat_template_kwargs)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
