# SPDX-License-Identifier: Apache-2.0
"""A picture of a command and the lines it leaves in a terminal, for the README.

python scripts/terminal.py docs/terminal.svg sparse-rl train --trainer.output_dir runs/picture --trainer.steps 10
"""

from __future__ import annotations

import io
import os
import pty
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

WIDTH = 118
MOVING = re.compile("[\u2800-\u28ff]")  # what a spinner is made of
FONT = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)  # at an address
CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def main() -> None:
    path, command = Path(sys.argv[1]), sys.argv[2:]
    start = [sys.executable, "-m", "sparse_rl"] if command[0] == "sparse-rl" else command[:1]
    os.environ["COLUMNS"] = "200"  # so that the moving line is one line
    shown, status = run([*start, *command[1:]])
    if status:
        sys.exit(shown)
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    console.print(Text("$ " + " ".join(command), style="bold"), soft_wrap=True)
    console.print(Text("\n".join(left(shown))))
    picture = console.export_svg(title="sparse-rl", theme=MONOKAI)
    path.write_text(FONT.sub("", picture))  # a page asks nobody for anything


def run(command: list[str]) -> tuple[str, int]:
    """What it writes to a terminal, and its exit status."""
    written = []

    def read(descriptor: int) -> bytes:
        written.append(os.read(descriptor, 1 << 16))
        return written[-1]

    status = os.waitstatus_to_exitcode(pty.spawn(command, read))
    return b"".join(written).decode(errors="replace"), status


def left(shown: str) -> list[str]:
    """The lines that stay: what comes after the last return of each, without colours and the moving one."""
    lines = (CONTROL.sub("", line).rstrip("\r").rpartition("\r")[2] for line in shown.split("\n"))
    return [line for line in lines if line.strip() and not MOVING.match(line)]


if __name__ == "__main__":
    main()
