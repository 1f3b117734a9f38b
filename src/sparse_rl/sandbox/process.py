# SPDX-License-Identifier: Apache-2.0
"""How confined processes are started, watched and ended, from the parent's side.

A child is a plain `subprocess.Popen` without a `preexec_fn` (safe beside CUDA and threads) that confines itself. It has
a clean environment, a private folder that goes with it, a process group of its own that is killed in every case, and no
open file but its three standard ones. The parent never decodes what a program wrote: it reads bytes, up to a limit.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sparse_rl.sandbox.child import PROGRAM, READY, TASK
from sparse_rl.sandbox.confine import Confinement, View
from sparse_rl.sandbox.encoding import MAX_FRAME
from sparse_rl.sandbox.files import common, package, places, view

MAX_OUTPUT = 16 << 20  # bytes a program may print
MAX_FOLDER, MAX_FILES = 64 << 20, 500  # bytes and files of a private folder
MAX_THREADS = 32
_EXCESS = ("started more", "filled its folder")
_LOOK_EVERY_S = 0.02
_START_S, _START_CPU_S = 60.0, 5  # that processes may take to get ready, on the clock and of processor time
_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_BOOT = f"import sys; sys.path.append({_PACKAGE!r}); from sparse_rl.sandbox.child import main; main()"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one run of a program may take.

    timeout_s: seconds on the clock from when its process is ready (and a few more of processor time)
    memory_mb: address space
    packages: installed packages that it may import beside the standard library, with what they need; None allows the
        usual ones
    """

    timeout_s: float = 10.0
    memory_mb: int = 1024
    packages: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not 0 < self.timeout_s < math.inf:
            raise ValueError(f"timeout_s is {self.timeout_s}; a program needs a number of seconds above 0.")
        if self.memory_mb < 128:
            raise ValueError(f"memory_mb is {self.memory_mb}; Python itself needs 128.")
        for name in self.packages or ():
            if not package(name):
                raise ValueError(f"packages names {name!r}, which is not installed; install it or leave it out.")


@dataclass(frozen=True, slots=True)
class Ran:
    """A script that ran: what it printed, and what ended it, "" when it did so itself."""

    started: bool
    output: bytes
    returncode: int
    stopped: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """passed, failed (the program's doing), broken (not its doing), or recorded (with values as detail).

    undecided: failed too, but the tests cannot judge what the program returned
    """

    word: str
    detail: str = ""
    values: bytes = b""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Where programs run. method: "landlock", "bwrap", or None for no more than limits (`isolation` knows)."""

    method: str | None
    limits: Limits

    def run(self, program: str, given: str) -> Ran:
        """Run a script with this text as its input."""
        with _folder() as folder:
            _write(folder, PROGRAM, program.encode(errors="surrogatepass"))
            with tempfile.TemporaryFile() as stdin:
                stdin.write(given.encode(errors="surrogatepass"))
                stdin.seek(0)
                with _child(self, "run", folder, stdin=stdin, stdout=subprocess.PIPE) as process:
                    assert process.stdout is not None
                    out, limit = process.stdout.fileno(), self.limits.timeout_s
                    output, stopped, deadline = _read(out, [(process, folder)], limit, MAX_OUTPUT)
                    if not stopped:
                        stopped = _ended(process, folder, deadline)
        started = output.startswith(READY)
        return Ran(started, output.removeprefix(READY), process.returncode, stopped)

    def check(self, program: str, task: bytes, timeout_s: float = 0.0) -> Verdict:
        """Let the checker of `checker.py` judge a program by a task; both are stopped after the longer time limit."""
        limit = max(timeout_s, self.limits.timeout_s)
        start = time.monotonic()
        with contextlib.ExitStack() as stack:
            mine, its = stack.enter_context(_folder()), stack.enter_context(_folder())
            _write(its, PROGRAM, program.encode(errors="surrogatepass"))
            _write(mine, TASK, task)
            calls_in, calls_out = os.pipe()
            replies_in, replies_out = os.pipe()
            try:
                candidate = stack.enter_context(_child(self, "answer", its, limit, stdin=calls_in, stdout=replies_out))
                checker = stack.enter_context(
                    _child(self, "check", mine, limit, stdin=replies_in, stdout=calls_out, stderr=subprocess.PIPE)
                )
            finally:
                for fd in (calls_in, calls_out, replies_in, replies_out):
                    os.close(fd)
            assert checker.stderr is not None
            children = [(checker, mine), (candidate, its)]
            output, stopped, deadline = _read(checker.stderr.fileno(), children, limit, MAX_FRAME + 4096)
            killed = not stopped and _ended(checker, mine, deadline) == "" and checker.returncode == -signal.SIGKILL
        return _verdict(output, stopped, killed, time.monotonic() - start)


def _verdict(output: bytes, stopped: str, killed: bool, seconds: float) -> Verdict:
    """What the checker said. It says READY when both processes are: later silence is the program's doing."""
    ready, said = output.startswith(READY), output.removeprefix(READY)[4:]  # a frame's length goes before its body
    ready = ready or stopped.startswith(_EXCESS)  # a program may begin before its checker does
    word, _, detail = said.partition(b"\n")
    if word.decode(errors="replace") in ("passed", "failed", "undecided", "broken"):
        return Verdict(word.decode(), detail.decode(errors="replace"), seconds=seconds)
    if word == b"recorded":
        return Verdict("recorded", values=detail, seconds=seconds)
    if not ready or killed:  # by the kernel, for want of memory
        return Verdict("broken", f"the checker {stopped or 'ended'}: {output[-200:].decode(errors='replace')}")
    return Verdict("failed", f"the program {stopped or 'gave answers that end its checker'}.", seconds=seconds)


@contextlib.contextmanager
def _folder() -> Iterator[str]:
    """A private folder. Confined children make neither folders nor links in it, and delete nothing."""
    path = os.path.realpath(tempfile.mkdtemp(prefix="sparse-rl-program-"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _write(folder: str, name: str, body: bytes) -> None:
    with open(os.path.join(folder, name), "wb") as file:
        file.write(body)


def _bwrap(folder: str, seen: View) -> list[str]:
    """bubblewrap, with the same files and one writable folder."""
    own = [os.path.join(_PACKAGE, "sparse_rl", name) for name in ("__init__.py", "sandbox")]
    interpreter = [sys.executable, os.path.realpath(sys.executable), os.path.join(sys.prefix, "pyvenv.cfg")]
    binds = [part for path in seen.shown for part in ("--ro-bind-try", path, path)]
    binds += [part for path in seen.hidden for part in ("--tmpfs", path)]
    binds += [part for path in (*seen.added, *interpreter, *own) for part in ("--ro-bind-try", path, path)]
    binds += [part for path in seen.hidden for part in ("--remount-ro", path)]
    apart = ["--unshare-all", "--die-with-parent", "--cap-drop", "ALL", "--dev", "/dev", "--tmpfs", "/tmp"]
    return [shutil.which("bwrap") or "bwrap", *apart, *binds, "--bind", folder, folder, "--chdir", folder, "--"]


@contextlib.contextmanager
def _child(
    sandbox: Sandbox,
    mode: str,
    folder: str,
    limit_s: float = 0.0,
    secret: str = "",
    *,
    stdin: Any,
    stdout: Any,
    stderr: Any = subprocess.DEVNULL,
) -> Iterator[subprocess.Popen[bytes]]:
    """A confined child in one of `child.py`'s modes; it is gone when the block is left."""
    allowed = sandbox.limits.packages
    seen = view(None if mode == "check" else common() if allowed is None else allowed)
    confinement = Confinement(
        folder=folder,
        view=seen,
        cpu_s=math.ceil(max(limit_s, sandbox.limits.timeout_s)) + _START_CPU_S,
        memory_bytes=sandbox.limits.memory_mb << 20,
        file_bytes=MAX_FOLDER // 8,
        parent=0 if sandbox.method == "bwrap" else os.getpid(),
        landlock=sandbox.method != "bwrap",
        strict=sandbox.method is not None,
    )
    settings = {
        "mode": mode,
        "package": _PACKAGE,
        "packages": places(),
        "secret": secret,
        "confinement": confinement._asdict(),
    }
    environment = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": folder, "TMPDIR": folder, "PYTHONHASHSEED": "0"}
    environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    if "LD_LIBRARY_PATH" in os.environ:  # some interpreters do not start without
        environment["LD_LIBRARY_PATH"] = os.environ["LD_LIBRARY_PATH"]
    python = [sys.executable, "-S", "-s", "-P", "-X", "utf8", "-c", _BOOT, json.dumps(settings)]
    process: subprocess.Popen[bytes] = subprocess.Popen(
        [*(_bwrap(folder, seen) if sandbox.method == "bwrap" else []), *python],
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        cwd=folder,
        env=environment,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # before it is reaped, so the number is still its own
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def _read(
    fd: int, children: list[tuple[subprocess.Popen[bytes], str]], limit_s: float, limit: int
) -> tuple[bytes, str, float]:
    """What comes until the other side closes, why reading stopped before, or "", and the time limit's end.

    The time limit starts with READY.
    """
    output, ready = bytearray(), False
    deadline = time.monotonic() + _START_S
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    look = 0.0
    while True:
        now = time.monotonic()
        if now >= deadline:
            late = "ran longer than its time limit" if ready else f"was not ready after {_START_S} s"
            return bytes(output), late, deadline
        if now >= look:
            look = now + _LOOK_EVERY_S
            for process, folder in children:
                if excess := _excess(process, folder):
                    return bytes(output), excess, deadline
        if poll.poll(1000 * min(_LOOK_EVERY_S, deadline - now)):
            chunk = os.read(fd, 1 << 16)
            if not chunk:
                return bytes(output), "", deadline
            output += chunk
            if not ready and output.startswith(READY):
                ready, deadline = True, time.monotonic() + limit_s
            if len(output) > limit:
                return bytes(output), f"printed more than {limit} bytes", deadline


def _excess(process: subprocess.Popen[bytes], folder: str) -> str:
    """What a running child has too much of."""
    with contextlib.suppress(OSError):
        if os.stat(f"/proc/{process.pid}/task").st_nlink - 2 > MAX_THREADS:
            return f"started more than {MAX_THREADS} threads"
    size = count = 0
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            count += 1
            size += entry.stat(follow_symlinks=False).st_blocks * 512
            if count > MAX_FILES or size > MAX_FOLDER:
                return f"filled its folder with {count} files and {size} bytes"
    return ""


def _ended(process: subprocess.Popen[bytes], folder: str, deadline: float) -> str:
    """Wait for a child that has closed its output."""
    while True:
        left = deadline - time.monotonic()
        try:
            process.wait(max(0.0, min(left, _LOOK_EVERY_S)))
            return ""
        except subprocess.TimeoutExpired:
            if left <= 0:
                return "ran longer than its time limit"
            if excess := _excess(process, folder):
                return excess


def probe(sandbox: Sandbox, secret: str) -> tuple[bytes, str]:
    """What a probing child said, and what stopped it."""
    with _folder() as folder:
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        with _child(sandbox, "probe", folder, secret=secret, stdin=nothing, stdout=pipe) as process:
            assert process.stdout is not None
            output, stopped, _ = _read(process.stdout.fileno(), [(process, folder)], 20.0, 1 << 16)
            return output, stopped
