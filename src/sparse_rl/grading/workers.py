# SPDX-License-Identifier: Apache-2.0
"""Child interpreters that call one function, each call with a hard time limit.

Graders hang: a formula can keep sympy busy for ever, in C code that no signal interrupts. So calls run in processes
that are killed and replaced when the time is up. These are fresh interpreters, since the parent has CUDA and threads,
which do not survive a fork. A pool that is itself forked starts children of its own.

    with Workers("sparse_rl.grading.math:grade", count=2, timeout_s=5) as workers:
        workers.map([{"completion": "It is \\\\boxed{2/4}.", "right": "1/2"}])  # [1.0]
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from sparse_rl.grading.outcome import Failed

MOST_WORKERS = 8
START_S = 120.0  # for a child to import its module, on a busy machine
LONGEST_ANSWER = 1 << 20  # bytes


class Workers:
    """A pool of children that call `target` ("module:function") with items that JSON can hold.

    A call that takes longer than `timeout_s`, takes more than `memory_bytes`, raises or kills its process gives a
    `Failed`; the other calls go on. Children start with the first call. Any thread may submit.
    """

    def __init__(self, target: str, *, count: int = 0, timeout_s: float = 5.0, memory_bytes: int = 4 << 30) -> None:
        if count < 0 or not 0 < timeout_s <= threading.TIMEOUT_MAX:
            raise ValueError(
                f"workers: count is {count}, timeout_s is {timeout_s}; they must be at least 0, and above 0 and finite."
            )
        self.count = worker_count(count)
        self._spec = _Spec(target, timeout_s, memory_bytes)
        self._closed = False
        self._begin()
        _pools.add(self)

    def _begin(self) -> None:
        """The state of a pool that has no children yet."""
        self._calls: _Calls = queue.SimpleQueue()
        self._children: list[_Child] = []
        self._started = False
        self._lock = threading.Lock()
        self._finalizer = weakref.finalize(self, _stop, self._calls, self._children, self.count)

    def _after_fork(self) -> None:
        """The threads stayed with the parent, and so do the children."""
        self._finalizer.detach()
        self._begin()

    def submit(self, item: Any) -> Future[Any]:
        """A future of the result, or of a `Failed`."""
        future: Future[Any] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the workers are closed; make new ones.")
            if not self._started:
                self._started = True
                worked = threading.Event()
                for _ in range(self.count):
                    child = _Child(self._spec, worked)
                    self._children.append(child)
                    threading.Thread(target=_serve, args=(self._calls, child), daemon=True, name="grader").start()
            self._calls.put((item, future))
        return future

    def map(self, items: Iterable[Any]) -> list[Any]:
        """The results in order, a `Failed` in the place of each that has none."""
        futures = [self.submit(item) for item in items]
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the children; calls that have no result yet are cancelled or `Failed`."""
        with self._lock:
            self._closed = True
        self._finalizer()

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_Calls = queue.SimpleQueue[tuple[Any, Future[Any]] | None]
_pools: weakref.WeakSet[Workers] = weakref.WeakSet()


def _forked() -> None:
    for pool in list(_pools):
        pool._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def worker_count(asked: int) -> int:
    """As many as were asked for; for 0 one a core that this process may use, at most 8."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return asked or min(MOST_WORKERS, cores)


@dataclass(frozen=True, slots=True)
class _Spec:
    target: str
    timeout_s: float
    memory_bytes: int


class _Child:
    """One child process at a time, and a new one after each that had to be killed.

    worked: set by the first child of the pool that starts, after which one that does not is no error of the user's
    """

    def __init__(self, spec: _Spec, worked: threading.Event) -> None:
        self.spec = spec
        self.worked = worked
        self.process: subprocess.Popen[bytes] | None = None
        self.closed = False
        self._lock = threading.Lock()  # between starting a process and closing
        self._number = 0

    def call(self, item: Any) -> Any:
        """The function's result or a `Failed`; raises only if no child of the pool could ever be started."""
        try:
            process = self.process or self._restart()
        except (RuntimeError, OSError) as error:
            if not self.worked.is_set():
                raise
            return Failed(str(error))
        self._number += 1
        line = json.dumps({"id": self._number, "item": item}).encode() + b"\n"
        answer = self._exchange(process, line, self.spec.timeout_s)
        if isinstance(answer, Failed):
            self._end()
            return answer
        if answer.get("id") != self._number or ("result" not in answer and "error" not in answer):
            self._end()
            return Failed("the grader's process answered nonsense")
        return answer["result"] if "result" in answer else Failed(f"the grader raised {answer['error']}")

    def close(self) -> None:
        with self._lock:
            self.closed = True
        self._end()

    def _restart(self) -> subprocess.Popen[bytes]:
        try:
            return self._start()
        except (RuntimeError, OSError):
            if not self.worked.is_set():
                raise
            return self._start()

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "sparse_rl.grading.child", self.spec.target]
        with self._lock:
            if self.closed:
                raise RuntimeError("the workers are closed; make new ones.")
            self.process = process = subprocess.Popen(
                [*command, str(self.spec.memory_bytes), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # Ctrl-C is the parent's: it may want to grade what it has
            )
        answer = self._exchange(process, b"", START_S)
        if isinstance(answer, Failed) or "ready" not in answer:
            self._end()
            reason = answer.reason if isinstance(answer, Failed) else answer.get("error")
            raise RuntimeError(f"no worker for {self.spec.target!r} could be started: {reason}.")
        self.worked.set()
        return process

    def _exchange(self, process: subprocess.Popen[bytes], line: bytes, limit_s: float) -> dict[str, Any] | Failed:
        """Send a line, wait for one. The timer kills the child, which ends both waits."""
        assert process.stdin is not None and process.stdout is not None
        decided = threading.Lock()  # whoever takes it first decides: the timer or the answer

        def expire() -> None:
            if decided.acquire(blocking=False):
                process.kill()

        timer = threading.Timer(limit_s, expire)
        timer.daemon = True
        timer.start()
        try:
            process.stdin.write(line)
            process.stdin.flush()
            answer = process.stdout.readline(LONGEST_ANSWER)
        except OSError:  # a broken pipe
            answer = b""
        finally:
            in_time = decided.acquire(blocking=False)
            timer.cancel()
        if not in_time:
            return Failed(f"timed out after {limit_s:g} s")
        if not answer:
            process.kill()  # it closed its pipe, which only its end should do
            return Failed(f"the grader's process ended with status {process.wait()}")
        try:
            parsed = json.loads(answer)
        except ValueError:
            parsed = None
        return parsed if isinstance(parsed, dict) else Failed("the grader's process answered nonsense")

    def _end(self) -> None:
        process, self.process = self.process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                try:
                    assert pipe is not None
                    pipe.close()
                except OSError:  # what was not sent
                    pass


def _serve(calls: _Calls, child: _Child) -> None:
    """What each thread does: one call after the other, until told to stop."""
    while (call := calls.get()) is not None:
        item, future = call
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(child.call(item))
        except BaseException as error:
            future.set_exception(error)
        del item, future, call


def _stop(calls: _Calls, children: list[_Child], count: int) -> None:
    with contextlib.suppress(queue.Empty):
        while True:
            if (call := calls.get_nowait()) is not None:
                call[1].cancel()
    for _ in range(count):
        calls.put(None)
    for child in children:
        child.close()
