# SPDX-License-Identifier: Apache-2.0
"""A benchmark made ready: its problems, how they are run and graded, and the prompts a model gets.

Nothing runs here.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from sparse_rl.evaluate.plan import Evaluation
from sparse_rl.evaluate.protocols import Settings
from sparse_rl.model.load import Reader
from sparse_rl.rollout import Sampling
from sparse_rl.tasks.base import Reward, Rewards
from sparse_rl.tasks.benchmarks import find, read_problems
from sparse_rl.tasks.prompts import Style, find_template, make_prompt, named_template, too_long
from sparse_rl.tasks.rewards import build_reward
from sparse_rl.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """One benchmark of an evaluation."""

    name: str
    rows: list[dict[str, Any]]
    settings: Settings
    sampling: Sampling
    rewards: Rewards
    departures: list[str]  # what is not as the protocol has it, a sentence part each
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
    folder = Path(evaluation.data_dir).expanduser() if evaluation.data_dir is not None else None
    rows, departures = read_problems(name, folder)
    if not rows:
        raise ValueError(f"benchmark {name!r} has no problems; look at its file.")
    if evaluation.problems is not None and evaluation.problems < len(rows):
        departures.append(f"{evaluation.problems} of {len(rows)} problems are taken, a sample")
        order = random.Random(name).sample(range(len(rows)), len(rows))
        rows = [rows[i] for i in sorted(order[: evaluation.problems])]
    rewards = Rewards((reward(find(name).reward),))
    for row in rows:
        if (wrong := rewards.check(row)) is not None:
            raise ValueError(f"problem {row['id']!r} of {name} {wrong}; mend or remove it.")
    settings = evaluation.settings(name)
    return Suite(
        name=name,
        rows=rows,
        settings=settings,
        sampling=settings.sampling(),
        rewards=rewards,
        departures=[*evaluation.departures(name), *departures],
        digest=_digest(rows),
    )


def build_prompts(suite: Suite, evaluation: Evaluation, reader: Reader) -> Prompts:
    """What the model is asked; an error where too many problems do not fit into its context."""
    template = find_template(suite.settings.template, reader.tokenizer)
    style = Style(template=template, system=evaluation.system)
    made = {}
    for row in suite.rows:
        where = f"problem {row['id']!r} of {suite.name}"
        written = {**row, "prompt": style.write(row["problem"], where)}
        made[where] = make_prompt(written, where, reader.tokenizer, evaluation.chat_template_kwargs)
    remedy = "leave out the benchmark, take a model with a longer context"
    overlong = set(too_long(made, lambda prompt: len(prompt.ids), reader.context - 1, remedy))
    kept = [prompt for where, prompt in made.items() if where not in overlong]
    return Prompts(
        prompts=kept,
        overlong=len(overlong),
        clipped=sum(len(prompt.ids) + suite.sampling.max_tokens > reader.context for prompt in kept),
        plain=named_template(suite.settings.template).chat and not reader.tokenizer.chat_template,
        digest=_digest([prompt.ids for prompt in kept]),
    )


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
