# SPDX-License-Identifier: Apache-2.0
"""The settings of a run, and what they may not be together. Those of a component are where it is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import torch
import transformers

from sparse_rl.kv import Full, KVPolicy
from sparse_rl.objective.advantage import Estimator
from sparse_rl.rollout import Engine, Sampling
from sparse_rl.specs import check_choices
from sparse_rl.tasks import Rows, Task
from sparse_rl.train.distill import DistillConfig
from sparse_rl.train.update import UpdateConfig
from sparse_rl.types import Prompt

if TYPE_CHECKING:  # which imports this module
    from sparse_rl.train.sft import SFTConfig

BEST = ("eval/dense/reward", "eval/sparse/reward")
RunConfig: TypeAlias = "TrainerConfig | SFTConfig"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """The run.

    output_dir: folder of the run; it must be new unless the run is resumed
    steps: rollout batches to learn from
    prompts_per_step: prompts a rollout batch, sampling.n completions each
    advantage: "grpo", "dr_grpo" (no division by the std), "rloo" or "remax" (against a greedy completion)
    seed: decides prompts, samples and everything else that is random
    save_every: steps between checkpoints; the best and the last are saved in any case
    save_total_limit: checkpoints to keep; the best and the newest are kept in any case
    best_metric: the evaluation that decides which checkpoint is best, higher being better
    resume_from_checkpoint: true for the newest checkpoint of output_dir, or the path of one; later ones are removed
    log_completions: completions written to completions.jsonl a step
    log_rejected: rejected completions written to rejected.jsonl a step, the most surprising first
    report_to: trackers that transformers knows: trackio, tensorboard, wandb, ...
    """

    output_dir: str = "runs/default"
    steps: int = 100
    prompts_per_step: int = 16
    advantage: Estimator = "grpo"
    seed: int = 0
    save_every: int = 10
    save_total_limit: int | None = 2
    best_metric: str = "eval/dense/reward"
    resume_from_checkpoint: bool | str = False
    log_completions: int = 2
    log_rejected: int = 2
    report_to: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_choices(self, "trainer")
        for field in ("steps", "seed", "save_every", "log_completions", "log_rejected"):
            if getattr(self, field) < 0:
                raise ValueError(f"trainer.{field} is {getattr(self, field)}; it must be at least 0.")
        if self.prompts_per_step < 1:
            raise ValueError(f"trainer.prompts_per_step is {self.prompts_per_step}; it must be at least 1.")
        if self.best_metric not in BEST:
            raise ValueError(f"trainer.best_metric is {self.best_metric!r}; choose one of {', '.join(BEST)}.")
        check_run(self)


def check_run(config: RunConfig) -> None:
    """Refuse what no run can have."""
    if config.seed >= 1 << 32:
        raise ValueError(f"trainer.seed is {config.seed}; it must be below 2^32.")
    if config.save_total_limit is not None and config.save_total_limit < 1:
        raise ValueError(f"trainer.save_total_limit is {config.save_total_limit}; it must be at least 1, or left out.")
    if not config.output_dir:
        raise ValueError("trainer.output_dir is empty; name a folder.")


def check_settings(
    sampling: Sampling, update: UpdateConfig, kv: KVPolicy, config: TrainerConfig, distill: DistillConfig
) -> None:
    """Refuse what would make the importance ratios, or the advantages, meaningless."""
    for name, off in (("top_p", 1.0), ("top_k", None)):
        if getattr(sampling, name) != off:
            raise ValueError(
                f"sampling.{name} is {getattr(sampling, name)}, but training samples from the whole distribution: "
                "a truncated one has other log-probs than the dense model's; leave it out."
            )
    if update.updates_per_rollout > config.prompts_per_step:
        raise ValueError(
            f"update.updates_per_rollout is {update.updates_per_rollout}, but a step has {config.prompts_per_step} "
            "prompts, and a prompt's completions stay together; lower it, or raise trainer.prompts_per_step."
        )
    if sampling.temperature == 0.0:
        raise ValueError("sampling.temperature is 0, but training needs samples that differ; set it above 0.")
    if sampling.n < 2 and config.advantage != "remax":
        raise ValueError(
            f"sampling.n is {sampling.n}, but advantage {config.advantage!r} compares the completions of a prompt; "
            "sample at least 2."
        )
    if isinstance(kv, Full) and config.best_metric != BEST[0]:
        raise ValueError(f"trainer.best_metric is {config.best_metric!r}, but kv.policy full has no sparse cache.")
    if isinstance(kv, Full) and distill.r:
        raise ValueError("distill.r is given, but kv.policy full is the dense model already; choose a sparse policy.")


def check_dtype(dtype: torch.dtype | None) -> None:
    if dtype == torch.float16:
        raise ValueError("dtype is float16, in which small gradients become 0; train in bfloat16 or float32.")


def check_model(model: transformers.PreTrainedModel) -> None:
    """The learner's log-probs must be the sampler's, and its gradients must be numbers."""
    check_dtype(model.dtype)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Dropout) and module.p > 0:
            raise ValueError(f"the model has dropout {module.p} in {name}; set it to 0 in its config.")


def known_prompts(task: Task, config: TrainerConfig) -> list[Prompt]:
    """All that a task can ask, or those of the first step where it makes them up as it goes."""
    return task.train if isinstance(task, Rows) else task.stream(0, config.prompts_per_step, config.seed)


def longest_prompt(task: Task, config: TrainerConfig) -> int:
    """Tokens of the longest prompt that is known."""
    return max(len(prompt.ids) for prompt in known_prompts(task, config))


def longest_sequence(task: Task, config: TrainerConfig, sampling: Sampling, num_held_out: int) -> int:
    """Tokens of the longest sequence that training or evaluation may ask for."""
    held_out = task.eval if isinstance(task, Rows) else task.held_out(num_held_out)
    return max([longest_prompt(task, config), *(len(prompt.ids) for prompt in held_out)]) + sampling.max_tokens


def check_requests(engine: Engine, task: Task, config: TrainerConfig, sampling: Sampling) -> None:
    """What the engine would refuse at some step is better known now."""
    _check_prompts(task, engine.loaded.context)
    engine.check(task.stream(0, config.prompts_per_step, config.seed), sampling)
    engine.check(known_prompts(task, config), replace(sampling, n=1))


def _check_prompts(task: Task, context: int) -> None:
    for prompt in [*task.train, *task.eval] if isinstance(task, Rows) else []:
        if len(prompt.ids) >= context:
            raise ValueError(
                f"the prompt that begins {prompt.text[:60]!r} has {len(prompt.ids)} tokens, and the model's "
                f"context is {context}; remove it."
            )
