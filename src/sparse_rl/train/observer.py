# SPDX-License-Identifier: Apache-2.0
"""Who may watch a run: an observer is told what happens and changes nothing.

The one in the terminal is in report/live.py, transformers' own are brought by `callbacks.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_rl.rollout import Progress
from sparse_rl.tasks.preserved import one_process, preserved

if TYPE_CHECKING:  # which import this module
    from sparse_rl.train.sft import SFTTrainer
    from sparse_rl.train.trainer import Trainer


class Observer:
    """Does nothing; override what you want to see."""

    def on_begin(self, trainer: Trainer | SFTTrainer) -> None:
        """Before the first step, or the first after a resume."""

    def on_progress(self, stage: str, progress: Progress) -> None:
        """While sampling; the stage is "rollout", "baseline", "eval/dense" or "eval/sparse"."""

    def on_stage(self, stage: str) -> None:
        """Before a stage without progress: "grading" or "learning"."""

    def on_log(self, metrics: dict[str, Any]) -> None:
        """After each step, with what goes into metrics.jsonl."""

    def on_save(self, folder: Path) -> None:
        """After a checkpoint."""

    def on_end(self) -> None:
        """After the last step, or when a run that it saw begin stops for another reason."""


def tell(observers: Iterable[Observer], event: str, *what: Any) -> None:
    """Call a method of each; what that changes of the process's global state is put back."""
    for observer in observers:
        with preserved(f"the observer {type(observer).__name__}"), one_process():
            getattr(observer, event)(*what)
