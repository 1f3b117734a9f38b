# SPDX-License-Identifier: Apache-2.0
"""One line that follows a call of the engine."""

from __future__ import annotations

import time

from rich.console import Console

from sparse_rl.rollout import Progress

TERMINAL_S, PLAIN_S = 0.1, 10.0  # between two updates


class ProgressLine:
    """On standard error, rewritten in place; where that is no terminal, a new line every ten seconds and at the end."""

    def __enter__(self) -> ProgressLine:
        self.console = Console(stderr=True)
        self.status = self.console.status("starting") if self.console.is_terminal else None
        self.shown = time.perf_counter()
        if self.status is not None:
            self.status.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.status is not None:
            self.status.stop()

    def show(self, progress: Progress) -> None:
        now = time.perf_counter()
        last = progress.num_finished == progress.num_requests
        if now - self.shown < (PLAIN_S if self.status is None else TERMINAL_S) and not last:
            return
        self.shown = now
        line = describe(progress)
        if self.status is not None:
            self.status.update(line)
        if self.status is None or last:
            self.console.print(line, highlight=False, soft_wrap=True)


def describe(progress: Progress) -> str:
    rate = progress.num_tokens / max(progress.elapsed_s, 1e-9)
    held = 100 * progress.held_so_far / progress.full_so_far if progress.full_so_far else 100.0
    return (
        f"{progress.num_finished}/{progress.num_requests} done, {progress.num_rows} rows in flight, "
        f"{progress.num_tokens:,} tokens, {rate:,.0f} tok/s, KV held {held:.0f} % of dense, "
        f"pages {progress.pages_used}/{progress.num_pages}"
    )
