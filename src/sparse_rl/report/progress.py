# SPDX-License-Identifier: Apache-2.0
"""One moving line in the terminal, for whatever takes long.

What it says of a run, an evaluation, a calibration is in `live.py`, `eval_live.py`, `calibration_live.py`.
"""

from __future__ import annotations

import time

from rich.console import Console
from rich.text import Text

from sparse_rl.rollout import Progress

TERMINAL_S, PLAIN_S = 0.1, 10.0  # between two updates


class MovingLine:
    """On standard error, rewritten in place; where that is no terminal, it is a new line every ten seconds."""

    def __init__(self) -> None:
        self.console, self.shown = Console(stderr=True), time.perf_counter()
        self.status = self.console.status("starting") if self.console.is_terminal else None

    def start(self) -> None:
        if self.status is not None:
            self.status.start()

    def stop(self) -> None:
        if self.status is not None:
            self.status.stop()

    def move(self, line: str) -> None:
        """Show the line, if it is time for one."""
        now = time.perf_counter()
        if now - self.shown < (PLAIN_S if self.status is None else TERMINAL_S):
            return
        self.shown = now
        if self.status is not None:
            self.rewrite(line)
        else:
            self.print(line)

    def rewrite(self, line: str) -> None:
        """Show the line at once in a terminal, and nowhere else."""
        if self.status is not None:
            self.status.update(Text(line))  # a name may hold what rich takes for markup

    def print(self, line: str) -> None:
        """A line that stays."""
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


class ProgressLine(MovingLine):
    """`with ProgressLine() as line`: follows a call of the engine, whose end stays."""

    def __enter__(self) -> ProgressLine:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def say(self, text: str) -> None:
        """What comes next, in a line that stays."""
        self.print(f"sparse-rl: {text}")

    def show(self, progress: Progress) -> None:
        if progress.num_finished == progress.num_requests:
            self.print(describe(progress))
        else:
            self.move(describe(progress))


def describe(progress: Progress) -> str:
    rate = progress.num_tokens / max(progress.elapsed_s, 1e-9)
    held, read = (
        100 * entries / progress.full_so_far if progress.full_so_far else 100.0
        for entries in (progress.held_so_far, progress.read_so_far)
    )
    chosen = f", read {read:.0f} %" if progress.read_so_far < progress.held_so_far else ""
    return (
        f"{progress.num_finished}/{progress.num_requests} done, {progress.num_rows} rows in flight, "
        f"{progress.num_tokens:,} tokens, {rate:,.0f} tok/s, KV held {held:.0f} % of dense{chosen}, "
        f"pages {progress.pages_used}/{progress.num_pages}"
    )


def duration(seconds: float | None) -> str:
    """1:02:03, or ?:?? where nobody knows."""
    if seconds is None:
        return "?:??"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
