# SPDX-License-Identifier: Apache-2.0
"""A calibration in the terminal: a line for every run that is done, and a moving one for the one at hand.

The files at its end are made in `calibration_page.py`.
"""

from __future__ import annotations

from sparse_rl.calibrate import CalibrationObserver
from sparse_rl.report.progress import MovingLine, describe, duration
from sparse_rl.rollout import Progress


class CalibrationLive(CalibrationObserver):
    """`with CalibrationLive() as live`: lines on standard error."""

    def __init__(self) -> None:
        self.line = MovingLine()

    def __enter__(self) -> CalibrationLive:
        self.line.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.line.stop()

    def on_begin(self, budgets: list[int], done: int) -> None:
        before = f", {done} of them done before" if done else ""
        self.line.print(f"{len(budgets)} budgets{before}: {', '.join(map(str, budgets))}")

    def on_step(self, run: str, finished: int, rollouts: int, progress: Progress) -> None:
        self.line.move(f"{run}: {finished}/{rollouts} samples; {describe(progress)}")

    def on_run(self, run: str, seconds: float, left_s: float) -> None:
        self.line.print(f"{run}: done in {duration(seconds)}; about {duration(left_s)} left")

    def on_note(self, note: str) -> None:
        self.line.print(note)
