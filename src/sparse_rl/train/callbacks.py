# SPDX-License-Identifier: Apache-2.0
"""transformers' callbacks as an observer: trackio, tensorboard, wandb and the rest come with them.

They watch only: what they ask for in their TrainerControl is not read.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_rl.specs import cut
from sparse_rl.train.observer import Observer

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from sparse_rl.train.sft import SFTTrainer
    from sparse_rl.train.trainer import Trainer


class Callbacks(Observer):
    """Calls on_train_begin, on_log, on_step_end, on_evaluate, on_save and on_train_end of each callback."""

    def __init__(self, report_to: tuple[str, ...] = (), callbacks: tuple[TrainerCallback, ...] = ()) -> None:
        try:
            import accelerate  # noqa: F401 - transformers' arguments need it
        except ImportError as error:
            raise ValueError("trainer.report_to and callbacks need accelerate; pip install accelerate.") from error
        self.callbacks: list[Any] = [*_integrations(report_to), *callbacks]

    def on_begin(self, trainer: Trainer | SFTTrainer) -> None:
        from transformers import TrainerControl, TrainerState, TrainingArguments

        config = trainer.config
        self.args = TrainingArguments(
            output_dir=config.output_dir, max_steps=config.steps, report_to=[], use_cpu=True, seed=config.seed
        )
        self.state = TrainerState(max_steps=config.steps, global_step=trainer.step, is_world_process_zero=True)
        self.control = TrainerControl()
        self.model = trainer.loaded.model
        self._call("on_train_begin")

    def on_log(self, metrics: dict[str, Any]) -> None:
        self.state.global_step = metrics["step"]
        logs = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        evaluation = {name: value for name, value in logs.items() if name.startswith("eval/")}
        self._call("on_log", logs=logs)
        if evaluation:
            self._call("on_evaluate", metrics=evaluation)
        if metrics["step"]:
            self._call("on_step_end")

    def on_save(self, folder: Path) -> None:
        self._call("on_save")

    def on_end(self) -> None:
        self._call("on_train_end")

    def _call(self, event: str, **more: Any) -> None:
        for callback in self.callbacks:
            try:
                getattr(callback, event)(self.args, self.state, self.control, model=self.model, **more)
            except Exception as error:  # whatever a tracker, its server or its network says
                said = f"{type(error).__name__} in {event}: {cut(str(error))}"
                raise ValueError(
                    f"the callback {type(callback).__name__} raised {said}; mend what it needs, or leave it out of "
                    "trainer.report_to or the callbacks, then resume."
                ) from error


def _integrations(report_to: tuple[str, ...]) -> list[Any]:
    from transformers.integrations.integration_utils import get_reporting_integration_callbacks

    built = []
    for name in report_to:
        try:
            built += [callback() for callback in get_reporting_integration_callbacks([name])]
        except (ValueError, RuntimeError, ImportError) as error:
            raise ValueError(f"trainer.report_to {name!r} cannot be used: {error}") from error
    return built
