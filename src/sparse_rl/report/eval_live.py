# SPDX-License-Identifier: Apache-2.0
"""An evaluation in the terminal: a line for every cell that is done, and a moving one for the one at hand.

The tables, also of one that ends early, are made in `eval_page.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparse_rl.evaluate import EvalObserver, Status
from sparse_rl.report.eval_page import write_eval_report
from sparse_rl.report.progress import MovingLine, duration


class EvalLive(EvalObserver):
    """Lines on standard error, and a moving one; the folder gets tables of an evaluation that ends early."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.line = folder, MovingLine()

    def on_begin(self, num_cells: int, done: int, problems: int) -> None:
        before = f", {done:,} of them done before" if done else ""
        self.line.print(f"{num_cells} cells, {problems:,} problems{before}")
        self.line.start()

    def on_note(self, note: str) -> None:
        self.line.print(note)

    def on_status(self, status: Status) -> None:
        self.line.move(describe(status))

    def on_cell(self, status: Status) -> None:
        self.line.print(describe(status))

    def on_partial(self, results: dict[str, Any]) -> None:
        write_eval_report(results, self.folder)
        self.line.print(f"{self.folder / 'table.md'} and report.html hold what is done. {results['partial']}")

    def on_end(self) -> None:
        self.line.stop()


def describe(status: Status) -> str:
    accuracy = "" if status.accuracy is None else f", accuracy {100 * status.accuracy:.1f} %"
    rate = f", {status.tokens_per_s:,.0f} tok/s" if status.tokens_per_s else ""
    cell = f", {duration(status.cell_left_s)} left" if status.cell_left_s else ""
    return (
        f"[{status.number}/{status.num_cells}] {status.cell}: {status.done}/{status.problems} problems"
        f"{accuracy}{rate}{cell}; all cells: {duration(status.left_s)} left"
    )
