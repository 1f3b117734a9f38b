# SPDX-License-Identifier: Apache-2.0
"""An evaluation in the terminal: a line for every cell that is done, and a moving one for the one at hand."""

from __future__ import annotations

import time

from rich.console import Console

from sparse_rl.evaluate import EvalObserver, Status
from sparse_rl.report.progress import PLAIN_S, TERMINAL_S


class EvalLive(EvalObserver):
    """On standard error; where that is no terminal, the moving line is a new one every ten seconds."""

    def __init__(self) -> None:
        self.console, self.shown = Console(stderr=True), time.perf_counter()
        self.status = self.console.status("starting") if self.console.is_terminal else None

    def on_begin(self, num_cells: int, done: int, problems: int) -> None:
        before = f", {done:,} of them done before" if done else ""
        self._print(f"{num_cells} cells, {problems:,} problems{before}")
        if self.status is not None:
            self.status.start()

    def on_note(self, note: str) -> None:
        self._print(note)

    def on_status(self, status: Status) -> None:
        now = time.perf_counter()
        if now - self.shown < (PLAIN_S if self.status is None else TERMINAL_S):
            return
        self.shown = now
        if self.status is not None:
            self.status.update(describe(status))
        else:
            self._print(describe(status))

    def on_cell(self, status: Status) -> None:
        self._print(describe(status))

    def on_end(self) -> None:
        if self.status is not None:
            self.status.stop()

    def _print(self, line: str) -> None:
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def describe(status: Status) -> str:
    accuracy = "" if status.accuracy is None else f", accuracy {100 * status.accuracy:.1f} %"
    rate = f", {status.tokens_per_s:,.0f} tok/s" if status.tokens_per_s else ""
    cell = f", {duration(status.cell_left_s)} left" if status.cell_left_s else ""
    return (
        f"[{status.number}/{status.num_cells}] {status.cell}: {status.done}/{status.problems} problems"
        f"{accuracy}{rate}{cell}; all cells: {duration(status.left_s)} left"
    )


def duration(seconds: float | None) -> str:
    """1:02:03, or ?:?? where nobody knows."""
    if seconds is None:
        return "?:??"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
