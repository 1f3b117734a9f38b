# SPDX-License-Identifier: Apache-2.0
"""What a confined process must not be able to do, tried. Runs in the child that `isolation` starts.

What refuses it is in `confine.py`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable


def attempts(secret: str, landlock: bool) -> list[str]:
    """The attempts that succeeded; none should. What a root of its own hides says nothing of Landlock: "/" does."""
    tries: dict[str, Callable[[], object]] = {
        "read a file of its parent's": lambda: os.open(secret, os.O_RDONLY),
        "write beside its folder": lambda: os.open(secret + "2", os.O_WRONLY | os.O_CREAT),
        "read /etc/passwd": lambda: os.open("/etc/passwd", os.O_RDONLY),
        "list a folder of its parent's": lambda: os.listdir(os.path.dirname(secret)),
        "open a socket": lambda: socket.socket(),
        "open a local socket": lambda: socket.socket(socket.AF_UNIX),
        "start a process": _fork,
        "become a program": lambda: os.execv("/bin/true", ["true"]),
        "signal its parent": lambda: os.kill(os.getppid(), 0),
        "make a folder": lambda: os.mkdir("folder"),
    }
    if landlock:
        tries["list the root folder"] = lambda: os.listdir("/")
    done = []
    for name, attempt in tries.items():
        try:
            attempt()
        except OSError:
            continue
        done.append(name)
    return done


def _fork() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
