# SPDX-License-Identifier: Apache-2.0
"""Supervised learning of completions: a warm start for a model that earns no reward yet.

    loss = - sum over the completion tokens of a step's rows of log p(token) / how many there are

Rows are packed, scored, learnt from and saved as rollouts are, so a checkpoint is one of `sparse-rl train` in all but
the settings it records. Every random number is a function of the seed and the step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from sparse_rl.model import rope
from sparse_rl.model.load import LoadedModel, stop_ids
from sparse_rl.score.head import Head
from sparse_rl.score.pack import Microbatch, Packable, pack
from sparse_rl.specs import check_choices
from sparse_rl.tasks.supervised import Example, Examples
from sparse_rl.train.callbacks import Callbacks
from sparse_rl.train.config import check_model, check_run
from sparse_rl.train.guards import BadUpdate, Guards, optimizer_memory
from sparse_rl.train.layers import Activations, learner_layers
from sparse_rl.train.learner import Learner, OptimizerConfig
from sparse_rl.train.observer import Observer
from sparse_rl.train.run import Run

OPTIMIZER = OptimizerConfig(learning_rate=1e-4, schedule="cosine")  # where none is given


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTConfig:
    """The run.

    output_dir: folder of the run; it must be new unless the run is resumed
    epochs: passes over the rows
    steps: updates, instead of epochs; 0 for as many as the epochs take
    rows_per_step: rows an update learns from
    max_tokens: tokens of a forward, prompts included
    max_grad_norm: gradients are scaled down to this norm; .inf is off
    activations: what a layer keeps for its backward pass: "keep" (all), "recompute" or "offload" (to host memory)
    compile: compile the decoder layers on a GPU; takes up to a minute once, and a C compiler
    seed: decides the order of the rows, another one every epoch
    eval_every: steps between evaluations; the start and the end are evaluated in any case
    save_every: steps between checkpoints; the best and the last are saved in any case
    save_total_limit: checkpoints to keep; the best (by eval/loss) and the newest are kept in any case
    resume_from_checkpoint: true for the newest checkpoint of output_dir, or the path of one in it
    report_to: trackers that transformers knows: trackio, tensorboard, wandb, ...
    """

    output_dir: str = "runs/sft"
    epochs: float = 3.0
    steps: int = 0
    rows_per_step: int = 64
    max_tokens: int = 8192
    max_grad_norm: float = 1.0
    activations: Activations = "keep"
    compile: bool = True
    seed: int = 0
    eval_every: int = 50
    save_every: int = 100
    save_total_limit: int | None = 2
    resume_from_checkpoint: bool | str = False
    report_to: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_choices(self, "trainer")
        for field in ("steps", "seed", "eval_every", "save_every"):
            if getattr(self, field) < 0:
                raise ValueError(f"trainer.{field} is {getattr(self, field)}; it must be at least 0.")
        for field in ("epochs", "rows_per_step", "max_tokens", "max_grad_norm"):
            if not getattr(self, field) > 0:
                raise ValueError(f"trainer.{field} is {getattr(self, field)}; it must be above 0.")
        if math.isinf(self.epochs):
            raise ValueError(f"trainer.epochs is {self.epochs}; it must be finite.")
        check_run(self)


class SFTGuards(Guards):
    """Speak of rows and of this run's settings."""

    limit, unit = "trainer.max_tokens", "row"
    smaller = "lower data.max_length, recompute or offload activations, or choose an 8-bit or offloaded optimizer"

    def sized(self, stage: str, settings: dict[str, Any]) -> Any:
        return [settings["trainer"][name] for name in ("max_tokens", "activations")]


class SFTTrainer:
    """Trains a model on completions; `train` runs to the last step.

    loaded = load("tiny")
    data = ExamplesConfig(train_file="warm.jsonl").build(loaded.tokenizer, end_ids(loaded), loaded.context)
    SFTTrainer(loaded, data, config=SFTConfig(output_dir="runs/warm")).train()
    """

    def __init__(
        self,
        loaded: LoadedModel,
        data: Examples,
        *,
        config: SFTConfig | None = None,
        optimizer: OptimizerConfig | None = None,
        observers: tuple[Observer, ...] = (),
    ) -> None:
        self.loaded, self.data, self.optimizer_config = loaded, data, optimizer or OPTIMIZER
        config = config or SFTConfig()
        num_rows = len(data.train)
        if config.rows_per_step > num_rows:
            raise ValueError(
                f"trainer.rows_per_step is {config.rows_per_step}, but there are {num_rows} rows; lower it."
            )
        steps = config.steps or math.ceil(config.epochs * num_rows / config.rows_per_step)
        self.config = replace(config, steps=steps)
        self.observers = (*observers, Callbacks(config.report_to)) if config.report_to else observers
        self._check_vocabulary()
        check_model(loaded.model)
        masters = self.optimizer_config.masters(loaded.model, loaded.device)
        self.learner = Learner(
            Head(loaded.model),
            self.optimizer_config.build(masters),
            masters,
            rate=lambda update: self.optimizer_config.rate(update, steps),
        )
        self.guards = SFTGuards()
        self.run = Run(self, section="data", best_metric="eval/loss", lower_is_better=True, files=("metrics.jsonl",))

    @property
    def step(self) -> int:
        return self.run.step

    def train(self) -> None:
        """Run to the last step, from the start or from where `resume_from_checkpoint` says.

        SIGTERM and Ctrl-C save the run and raise `Stopped`, a SystemExit.
        """
        with self.run.opened():
            if self.run.pending is not None:
                self._finish_step(self.run.pending, time.perf_counter())
            while self.step < self.config.steps:
                self._take_step()

    def _take_step(self) -> None:
        """Learn from the next rows, and write down what came of it."""
        self.guards.check()
        config, run, began = self.config, self.run, time.perf_counter()
        rows = self.data.stream(run.step * config.rows_per_step, config.rows_per_step, config.seed)
        with run.timer("update"):
            metrics = self.guards.fit(partial(self._learn, rows), config.max_tokens, rows, self.learner)
        num_tokens = sum(row.num_tokens for row in rows)
        run.step, run.num_tokens = run.step + 1, run.num_tokens + num_tokens
        loss, norm = metrics["loss"], metrics["grad_norm"]
        bad = [] if math.isfinite(loss + norm) else [BadUpdate(rows=rows, loss=loss, grad_norm=norm)]
        self.guards.note(bad, 1, None, run.step, run.folder)
        metrics["update/nonfinite"] = len(bad)
        metrics["update/max_tokens"] = self.guards.part("update", config.max_tokens)
        metrics["epoch"] = run.step * config.rows_per_step / len(self.data.train)
        metrics["train/tokens_per_s"] = num_tokens / run.timer.seconds["time/update_s"]
        run.remember(metrics)
        self.guards.check_finite()
        self.guards.check()
        self._finish_step(metrics, began)

    def _learn(self, rows: list[Example], max_tokens: int) -> dict[str, float]:
        compiles = self.config.compile and self.learner.device.type == "cuda"
        with learner_layers(self.loaded.model, self.config.activations, compiles=compiles):
            return learn(self.learner, rows, max_tokens, self.config.max_grad_norm, self.guards.check)

    def _finish_step(self, metrics: dict[str, float], began: float) -> None:
        """Evaluate if it is time, write the step's line, save if it is time."""
        evaluates = self.data.eval and self.run.evaluates(self.config.eval_every)
        self.run.finish_step(metrics | (self._evaluate() if evaluates else {}), began)

    def _evaluate(self) -> dict[str, float]:
        """The loss of the held-out rows."""
        max_tokens, rows = self.config.max_tokens, self.data.eval
        with self.run.timer("eval"):
            loss = self.guards.fit(self._held_out_loss, max_tokens, rows, self.learner, "an evaluation")
        return {"eval/loss": loss, "eval/perplexity": math.exp(loss) if loss < 700 else math.inf}

    def _held_out_loss(self, max_tokens: int) -> float:
        return mean_nll(self.learner.head, self.data.eval, max_tokens, self.guards.check)

    def settings(self) -> dict[str, Any]:
        """Every setting of the run, as run.json and the checkpoints have them."""
        return {
            "model": self.loaded.model.config.name_or_path,
            **rope.settings(self.loaded.model),
            "dtype": str(self.loaded.model.dtype).removeprefix("torch."),
            "device": self.loaded.device,
            "data": self.data.settings,
            "optimizer": asdict(self.optimizer_config),
            "trainer": asdict(self.config),
        }

    def state(self) -> dict[str, Any]:
        """What else it goes on from: nothing."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        pass

    def _check_vocabulary(self) -> None:
        highest = max(max(*row.prompt.ids, int(row.token_ids.max())) for row in [*self.data.train, *self.data.eval])
        known = self.loaded.vocab_size
        if highest >= known:
            raise ValueError(
                f"the rows have token {highest}, but the model has {known} tokens; use the model's own tokenizer."
            )


def learn(
    learner: Learner,
    rows: Sequence[Packable],
    max_tokens: int,
    max_grad_norm: float,
    check: Callable[[], None] = lambda: None,  # called where it may stop
) -> dict[str, float]:
    """One optimiser step on the mean over all completion tokens of the rows; if it is not finite, nothing moves."""
    num_tokens = sum(len(row.token_ids) for row in rows)
    learner.masters.zero_grad()
    total = torch.zeros((), dtype=torch.float64, device=learner.device)
    for microbatch in pack(rows, max_tokens):
        check()
        loss = nll(learner.head, microbatch) / num_tokens
        loss.backward()
        total += loss.detach()
    metrics = {"loss": float(total)}
    with optimizer_memory():
        return metrics | learner.step(max_grad_norm, skip=not math.isfinite(metrics["loss"]))


@torch.no_grad()
def mean_nll(head: Head, rows: Sequence[Packable], max_tokens: int, check: Callable[[], None] = lambda: None) -> float:
    """The same mean, without learning from it."""
    total = 0.0
    for microbatch in pack(rows, max_tokens):
        check()
        total += float(nll(head, microbatch))
    return total / sum(len(row.token_ids) for row in rows)


def nll(head: Head, microbatch: Microbatch) -> torch.Tensor:
    """Negative log-likelihood of the microbatch's completion tokens, summed in fp64."""
    device = head.model.device
    token_ids = microbatch.ids[microbatch.predicting + 1]
    scores = head(microbatch.inputs(device), microbatch.predicting.to(device), token_ids.to(device))
    return -scores.logprobs.double().sum()


def end_ids(loaded: LoadedModel) -> tuple[int, ...]:
    """The tokens that end the model's completions, its tokenizer's own first: that one ends what the model learns."""
    known, own = stop_ids(loaded.model), loaded.tokenizer.eos_token_id
    if own is None and not known:
        raise ValueError("the model has no end token; set eos_token_id in its generation_config.json.")
    return (own, *known) if own in known or not known else known
