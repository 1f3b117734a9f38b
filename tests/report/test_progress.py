# SPDX-License-Identifier: Apache-2.0
"""The moving line: rewritten in a terminal, now and then a new line elsewhere, and always word by word."""

from __future__ import annotations

import io

from rich.console import Console

from sparse_rl.report import progress
from sparse_rl.report.progress import MovingLine

NAME = "[/bold] runs/[red]model[/x] 1/3"  # what rich would take for markup


def test_without_a_terminal_it_is_a_new_line_when_it_is_time(capsys, monkeypatch):
    line = MovingLine()
    line.start()
    line.move("too soon")
    line.print(NAME)
    monkeypatch.setattr(progress, "PLAIN_S", 0.0)
    line.move(f"late {NAME}")
    line.stop()
    assert capsys.readouterr().err.splitlines() == [NAME, f"late {NAME}"]


def test_in_a_terminal_it_is_rewritten(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=out, force_terminal=True, width=80))
    monkeypatch.setattr(progress, "TERMINAL_S", 0.0)
    line = MovingLine()
    line.start()
    for i in range(3):
        line.move(f"{NAME} {i}")
        line.status._live.refresh()
    line.stop()
    assert all(f"{NAME} {i}" in out.getvalue() for i in range(3)) and out.getvalue().count("\n") <= 1
