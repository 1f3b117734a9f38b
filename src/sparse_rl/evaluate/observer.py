# SPDX-License-Identifier: Apache-2.0
"""Who watches an evaluation, and what there is to see.

The one in the terminal is in report/eval_live.py; those of training are in train/observer.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparse_rl.evaluate.plan import Cell


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Where an evaluation stands."""

    cell: Cell
    number: int  # of the cell, from 1
    num_cells: int
    done: int  # problems of the cell
    problems: int
    accuracy: float | None  # of what is graded
    tokens_per_s: float
    cell_left_s: float | None
    left_s: float | None  # of all cells, at the pace so far


class EvalObserver:
    """Sees nothing; subclasses do."""

    def on_begin(self, num_cells: int, done: int, problems: int) -> None:
        """`done` of `problems`, over all cells, are on disk from before."""

    def on_note(self, note: str) -> None:
        """Something the user should know."""

    def on_status(self, status: Status) -> None:
        """After a decode step."""

    def on_cell(self, status: Status) -> None:
        """All of a cell is generated."""

    def on_partial(self, results: dict[str, Any]) -> None:
        """It ends early; results.json, of what is on disk."""

    def on_end(self) -> None:
        """Nothing more will come."""
