# SPDX-License-Identifier: Apache-2.0
"""A run in the terminal: one line a step, and a moving one for what is being sampled."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from sparse_rl.report.progress import PLAIN_S, TERMINAL_S, describe
from sparse_rl.rollout import Progress
from sparse_rl.train import Observer, Trainer

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


class Live(Observer):
    """On standard error; where that is no terminal, sampling is reported every ten seconds."""

    def on_begin(self, trainer: Trainer) -> None:
        self.console = Console(stderr=True)
        self.steps, self.shown = trainer.config.steps, time.perf_counter()
        settings = trainer.settings()
        parameters = sum(parameter.numel() for parameter in trainer.loaded.model.parameters())
        kv = settings["kv"]
        budget = f" budget {kv['budget']} + {kv['interval']}" if "budget" in kv else ""
        self._print(
            f"{trainer.config.output_dir}: {parameters / 1e6:.2f}M parameters, KV {kv['policy']}{budget}, correction "
            f"{settings['correction']['preset']}, {trainer.config.prompts_per_step} prompts x {trainer.sampling.n}, "
            f"steps {trainer.step} to {self.steps}"
        )
        self._print("  step " + "".join(f"{heading:>10}" for heading in COLUMNS))
        self.status = self.console.status("starting") if self.console.is_terminal else None
        if self.status is not None:
            self.status.start()

    def on_progress(self, stage: str, progress: Progress) -> None:
        now = time.perf_counter()
        if now - self.shown < (PLAIN_S if self.status is None else TERMINAL_S):
            return
        self.shown = now
        line = f"{stage}: {describe(progress)}"
        if self.status is not None:
            self.status.update(line)
        else:
            self._print(line)

    def on_log(self, metrics: dict[str, Any]) -> None:
        if metrics["step"]:
            cells = "".join(f"{_cell(metrics.get(name), form):>10}" for name, form in COLUMNS.values())
            self._print(f"{metrics['step']:>6} {cells}")
        evaluated = [cache for cache in ("dense", "sparse") if metrics.get(f"eval/{cache}/reward") is not None]
        if evaluated:
            found = ", ".join(f"{cache} cache {_reward(metrics, cache)}" for cache in evaluated)
            self._print(f"{metrics['step']:>6} held out: {found}")

    def on_save(self, folder: Path) -> None:
        if self.status is not None:
            self.status.update(f"saved {folder}")

    def on_end(self) -> None:
        if self.status is not None:
            self.status.stop()

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def _reward(metrics: dict[str, Any], cache: str) -> str:
    value, error = metrics[f"eval/{cache}/reward"], metrics[f"eval/{cache}/reward_se"]
    return f"{value:.3f} ± {error:.3f}" if error is not None and math.isfinite(error) else f"{value:.3f}"


def _cell(value: float | None, form: str) -> str:
    return "" if value is None or not math.isfinite(value) else form.format(value)
