# SPDX-License-Identifier: Apache-2.0
"""What a worker process runs: `python -m sparse_rl.grading.child module:function memory_bytes parent_id`.

It reads one JSON object a line from stdin and answers each with one on what was its stdout; whatever the function
prints goes nowhere. It says {"ready": true} once the module is imported and its `warm`, if it has one, has run.

Memory is bounded here; time is bounded by the parent, in `workers.py`.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import sys

SET_PARENT_DEATH_SIGNAL = 1  # prctl(2)


def main() -> None:
    target, memory_bytes, parent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    die_with(parent)
    limit(resource.RLIMIT_CORE, 0)
    if sys.platform == "linux":
        limit(resource.RLIMIT_AS, memory_bytes)

    def say(answer: dict[str, object]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        name, _, function_name = target.partition(":")
        module = importlib.import_module(name)
        function = getattr(module, function_name)
        getattr(module, "warm", lambda: None)()
    except Exception as error:
        say({"error": f"{type(error).__name__}: {error}"})
        return
    say({"ready": True})
    for line in sys.stdin.buffer:
        request = json.loads(line)
        try:
            say({"id": request["id"], "result": function(request["item"])})
        except Exception as error:  # RecursionError and MemoryError too
            say({"id": request["id"], "error": f"{type(error).__name__}: {str(error)[:200]}"})


def die_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends, even while it computes; stdin's end does for the rest."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def limit(kind: int, most: int) -> None:
    """Lower a limit; one that is lower already stays."""
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))


if __name__ == "__main__":
    main()
