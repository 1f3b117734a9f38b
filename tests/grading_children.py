# SPDX-License-Identifier: Apache-2.0
"""What test_workers has its children do."""

from __future__ import annotations

import os
import signal
import sys


def act(item):
    deed, value = item
    match deed:
        case "hang":
            while True:
                pass
        case "exit":
            os._exit(3)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise KeyError("no such thing")
        case "print":
            print("{}\n" * 1000)
            os.write(1, b'{"id": 1, "result": 0}\n')
        case "nonsense":
            for fd in range(3, 20):  # whichever the answers go to
                try:
                    os.write(fd, b"what?\n")
                except OSError:
                    continue
        case "memory":
            return len(bytes(8 << 30))
        case "deep":
            return act(["deep", value])
        case "pid":
            return os.getpid()
        case "modules":
            return [name for name in ("torch", "transformers", "numpy") if name in sys.modules]
    return value
