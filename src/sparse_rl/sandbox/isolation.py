# SPDX-License-Identifier: Apache-2.0
"""Whether this machine can keep a program apart, found out by trying rather than by version numbers.

What must fail is in `probe.py`, what makes it fail in `confine.py`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from functools import cache

from sparse_rl.sandbox.child import READY
from sparse_rl.sandbox.process import Limits, Sandbox, probe


@dataclass(frozen=True, slots=True)
class Isolation:
    """method: "landlock" or "bwrap", None where neither holds; reason: why not, for each that was tried."""

    method: str | None
    reason: str = ""


@cache
def isolation() -> Isolation:
    """What keeps programs apart on this machine. The first call starts a child that tries to get out."""
    if not sys.platform.startswith("linux"):
        return Isolation(None, f"{sys.platform} has no Landlock, no seccomp and no bubblewrap")
    reasons = []
    for method in ("landlock", "bwrap"):
        failure = _failure(method)
        if not failure:
            return Isolation(method)
        reasons.append(f"{method}: {failure}")
    return Isolation(None, "; ".join(reasons))


def _failure(method: str) -> str:
    """Why a method does not hold here, "" if it does."""
    if method == "bwrap" and shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    with tempfile.TemporaryDirectory() as folder:
        secret = os.path.join(folder, "secret")
        with open(secret, "w") as file:
            file.write("secret")
        try:
            output, stopped = probe(Sandbox(method, Limits()), secret)
        except OSError as error:
            return str(error)
    if stopped or not output.startswith(READY):
        return f"a confined process does not start ({stopped or output[:200].decode(errors='replace') or 'no reason'})"
    done = json.loads(output.removeprefix(READY))
    return f"a confined process could {', '.join(done)}" if done else ""
