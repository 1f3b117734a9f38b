# SPDX-License-Identifier: Apache-2.0
"""A run in the terminal: lines that stay, and a moving one for what is being done.

It shows a few metrics: all of them are in metrics.jsonl, of which `page.py` makes a page.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

from sparse_rl.report.progress import MovingLine, describe
from sparse_rl.rollout import Progress
from sparse_rl.train import Observer, SFTTrainer, Trainer

COLUMNS = {  # heading, metric, format
    "reward": ("reward", "{:.3f}"),
    "rejected": ("correction/rejection_rate", "{:.1%}"),
    "KL": ("rollout_corr/kl", "{:.4f}"),
    "KV saved": ("kv/saved_frac", "{:.0%}"),
    "length": ("completions/mean_length", "{:.0f}"),
    "grad": ("grad_norm", "{:.3f}"),
    "tok/s": ("rollout/tokens_per_s", "{:,.0f}"),
    "s": ("step_time", "{:.1f}"),
}
ZERO = re.compile(r"^-([0.]+%?)$")


class Terminal(Observer):
    """Lines on standard error, and a moving one."""

    def __init__(self) -> None:
        self.line = MovingLine()

    def _start(self, *lines: str) -> None:
        for line in lines:
            self.line.print(line)
        self.line.start()

    def on_save(self, folder: Path) -> None:
        self.line.move(f"saved {folder}")

    def on_end(self) -> None:
        self.line.stop()


class Live(Terminal):
    """One line a step, and a moving one for what is being sampled."""

    def on_begin(self, trainer: Trainer | SFTTrainer) -> None:
        assert isinstance(trainer, Trainer)
        settings = trainer.settings()
        parameters = sum(parameter.numel() for parameter in trainer.loaded.model.parameters())
        kv = settings["kv"]
        budget = f" budget {kv['budget']}" if "budget" in kv else ""
        if trainer.controller is not None:
            grid = trainer.controller.grid
            first = trainer.controller.schedule.text.removesuffix("@0")
            budget = f" budget auto (at first {first}, {grid[0]} to {grid[-1]})"
        budget += f" + {kv['interval']}" if "interval" in kv else ""
        self._start(
            f"{trainer.config.output_dir}: {parameters / 1e6:.2f}M parameters, {settings['dtype']} on "
            f"{trainer.loaded.device}, KV {kv['policy']}{budget}, correction {settings['correction']['preset']}, "
            f"{trainer.config.prompts_per_step} prompts x {trainer.sampling.n}, steps {trainer.step} to "
            f"{trainer.config.steps}",
            "  step " + "".join(f"{heading:>10}" for heading in COLUMNS),
        )
        if trainer.step >= trainer.config.steps > 0 and trainer.run.pending is None:
            self.line.print("nothing is left to do; raise trainer.steps to go on")

    def on_progress(self, stage: str, progress: Progress) -> None:
        self.line.move(f"{stage}: {describe(progress)}")

    def on_stage(self, stage: str) -> None:
        self.line.rewrite(stage)

    def on_log(self, metrics: dict[str, Any]) -> None:
        if metrics["step"]:
            cells = "".join(f"{_cell(metrics.get(name), form):>10}" for name, form in COLUMNS.values())
            self.line.print(f"{metrics['step']:>6} {cells}")
        evaluated = [cache for cache in ("dense", "sparse") if metrics.get(f"eval/{cache}/reward") is not None]
        if evaluated:
            found = ", ".join(f"{cache} cache {_reward(metrics, cache)}" for cache in evaluated)
            self.line.print(f"{metrics['step']:>6} held out: {found}")


class SupervisedLive(Terminal):
    """One line an evaluation, and a moving one for the last step."""

    def on_begin(self, trainer: Trainer | SFTTrainer) -> None:
        assert isinstance(trainer, SFTTrainer)
        config, data = trainer.config, trainer.data
        self.steps = config.steps
        parameters = sum(parameter.numel() for parameter in trainer.loaded.model.parameters())
        self._start(
            f"{config.output_dir}: {parameters / 1e6:.2f}M parameters, {len(data.train):,} rows and {len(data.eval):,} "
            f"held out, {config.rows_per_step} rows a step, steps {trainer.step} to {self.steps}"
        )

    def on_log(self, metrics: dict[str, Any]) -> None:
        evaluated = metrics.get("eval/loss") is not None
        line = f"step {metrics['step']}/{self.steps}"
        if metrics["step"]:
            line += (
                f", epoch {metrics['epoch']:.2f}, loss {metrics['loss']:.4f}, grad {metrics['grad_norm']:.3f}, "
                f"learning rate {metrics['learning_rate']:.2e}, {metrics['train/tokens_per_s']:,.0f} tok/s"
            )
        if evaluated:
            line += f", held out: loss {metrics['eval/loss']:.4f}, perplexity {metrics['eval/perplexity']:.3f}"
        if evaluated or metrics["step"] == self.steps:
            self.line.print(line)
        else:
            self.line.move(line)


def _reward(metrics: dict[str, Any], cache: str) -> str:
    value, error = metrics[f"eval/{cache}/reward"], metrics[f"eval/{cache}/reward_se"]
    return f"{value:.3f} ± {error:.3f}" if error is not None and math.isfinite(error) else f"{value:.3f}"


def _cell(value: float | None, form: str) -> str:
    """The number; one that is 0 as it is shown has no sign."""
    return "" if value is None or not math.isfinite(value) else ZERO.sub(r"\1", form.format(value))
