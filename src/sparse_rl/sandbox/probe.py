# SPDX-License-Identifier: Apache-2.0
"""What a confined process must not be able to do, tried. Runs in the child that `isolation` starts."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable


def attempts(secret: str) -> list[str]:
    """The attempts that succeeded; none should."""
    tries: dict[str, Callable[[], object]] = {
        "read a file of its parent's": lambda: open(secret).read(),
        "write beside its folder": lambda: open(os.path.join(os.path.dirname(secret), "written"), "w"),
        "read /etc/passwd": lambda: open("/etc/passwd").read(),
        "list the root folder": lambda: os.listdir("/"),
        "open a socket": lambda: socket.socket(),
        "open a local socket": lambda: socket.socket(socket.AF_UNIX),
        "start a process": _fork,
        "become a program": lambda: os.execv("/bin/true", ["true"]),
        "signal its parent": lambda: os.kill(os.getppid(), 0),
        "make a folder": lambda: os.mkdir("folder"),
    }
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
