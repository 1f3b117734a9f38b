# SPDX-License-Identifier: Apache-2.0
"""Children that hang, die, print, lie or eat memory fail alone; nothing is left behind."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError

import pytest

from sparse_rl.grading import Failed
from sparse_rl.grading import workers as module
from sparse_rl.grading.workers import Workers, worker_count
from sparse_rl.tasks import GradingConfig

MISBEHAVE = "grading_children:act"


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] != "Z"


def wait_until(condition):
    end = time.monotonic() + 10.0
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


@pytest.fixture(scope="module")
def workers():
    with Workers(MISBEHAVE, count=2, timeout_s=1.0, memory_bytes=1 << 30) as pool:
        yield pool


def test_failures_stay_where_they_are(workers):
    acts = ["echo", "hang", "echo", "exit", "raise", "print", "echo", "nonsense", "memory", "kill", "deep", "echo"]
    results = workers.map([[act, i] for i, act in enumerate(acts)])
    good = {i for i, act in enumerate(acts) if act in ("echo", "print")}
    for i, result in enumerate(results):
        assert result == i if i in good else isinstance(result, Failed), (acts[i], result)
    reasons = {act: result.reason for act, result in zip(acts, results, strict=True) if isinstance(result, Failed)}
    assert reasons["hang"] == "timed out after 1 s"
    assert "status 3" in reasons["exit"] and "KeyError" in reasons["raise"] and "nonsense" in reasons["nonsense"]
    assert "MemoryError" in reasons["memory"] and "status -9" in reasons["kill"] and "Recursion" in reasons["deep"]


def test_a_pool_of_hanging_calls_takes_its_turns_and_lives():
    with Workers(MISBEHAVE, count=2, timeout_s=0.3) as pool:
        start = time.monotonic()
        results = pool.map([["hang", 0]] * 4 + [["echo", 9]])
        assert time.monotonic() - start < 8
    assert [type(result) for result in results[:4]] == [Failed] * 4 and results[4] == 9


def test_any_text_passes(workers):
    for text in ["x" * 300_000, "\ud800 lone", "\x00\n\r\u2028", "é∞"]:
        assert workers.map([["echo", text]]) == [text]


def test_threads_may_share_a_pool(workers):
    found: dict[int, list[int]] = {}

    def use(k: int) -> None:
        found[k] = workers.map([["echo", 1000 * k + i] for i in range(50)])

    threads = [threading.Thread(target=use, args=(k,)) for k in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert found == {k: [1000 * k + i for i in range(50)] for k in range(4)}


def test_imports_are_not_charged_to_the_first_item():
    with Workers("grading_children_slow:act", count=1, timeout_s=0.4) as pool:
        assert pool.map([1]) == [1]  # its import takes 0.8 s


def test_children_import_no_torch(workers):
    assert workers.map([["modules", None]]) == [[]]


def test_close_ends_children_and_cancels_what_waits():
    pool = Workers(MISBEHAVE, count=1, timeout_s=30)
    (pid,) = pool.map([["pid", None]])
    running, waiting = pool.submit(["hang", 0]), pool.submit(["echo", 1])
    assert wait_until(running.running)
    pool.close()
    assert isinstance(running.result(timeout=5), Failed)
    with pytest.raises(CancelledError):
        waiting.result(timeout=5)
    assert not alive(pid)
    pool.close()
    with pytest.raises(RuntimeError, match="closed"):
        pool.submit(["echo", 1])


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_children_die_with_their_parent(how):
    script = (
        "import sys, time\n"
        "from sparse_rl.grading.workers import Workers\n"
        f"pool = Workers({MISBEHAVE!r}, count=1, timeout_s=60)\n"
        "print(pool.map([['pid', None]])[0], flush=True)\n"
        "pool.submit(['hang', 0])\n"
        "time.sleep(0.3)\n"
        "print('hangs', flush=True)\n" + ("" if how == "exit" else "time.sleep(60)\n")
    )
    path = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
    ) as parent:
        pid = int(parent.stdout.readline())
        assert parent.stdout.readline() == "hangs\n"
        if how == "kill":
            assert alive(pid)
            parent.send_signal(signal.SIGKILL)
        parent.wait(timeout=10)
    assert wait_until(lambda: not alive(pid))


def test_a_forked_pool_starts_children_of_its_own():
    """And leaves its parent's alone, also when it ends."""
    script = (
        "import os, signal\n"
        "from sparse_rl.grading.workers import Workers\n"
        f"pool = Workers({MISBEHAVE!r}, count=1, timeout_s=5)\n"
        "before = pool.map([['pid', None]])\n"
        "child = os.fork()\n"
        "signal.alarm(20)\n"
        "after = pool.map([['pid', None]])\n"
        "if not child:\n"
        "    raise SystemExit(after == before)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert before == after == pool.map([['pid', None]])\n"
    )
    path = os.pathsep.join(filter(None, sys.path))
    ran = subprocess.run(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("failures", [1, 2])
def test_a_worker_that_cannot_be_restarted_is_tried_again_and_then_fails_alone(monkeypatch, failures):
    with Workers(MISBEHAVE, count=1, timeout_s=5) as pool:
        assert isinstance(pool.map([["exit", 0]])[0], Failed)
        start, left = module._Child._start, [OSError("no memory")] * failures

        def sometimes(child):
            if left:
                raise left.pop()
            return start(child)

        monkeypatch.setattr(module._Child, "_start", sometimes)
        first, second = pool.map([["echo", 1], ["echo", 2]])
        assert first == 1 if failures == 1 else isinstance(first, Failed) and "no memory" in first.reason
        assert second == 2


def test_a_timer_that_comes_after_the_answer_does_nothing(monkeypatch):
    """It fires just before it is cancelled, when the answer is there."""

    class Late(threading.Timer):
        def cancel(self):
            self.function()
            super().cancel()

    monkeypatch.setattr(module.threading, "Timer", Late)
    with Workers(MISBEHAVE, count=1, timeout_s=5) as pool:
        assert pool.map([["echo", i] for i in range(3)]) == [0, 1, 2]


def test_stopping_waits_for_nobody():
    """Another thread may take the last call between a look at the queue and the taking."""

    class Taken(queue.Queue):
        def empty(self):
            return False

    stopper = threading.Thread(target=module._stop, args=(Taken(), [], 1), daemon=True)
    stopper.start()
    stopper.join(5)
    assert not stopper.is_alive()


def test_a_worker_a_core():
    assert worker_count(3) == 3
    assert worker_count(0) == min(8, len(os.sched_getaffinity(0)))


def test_a_function_that_is_not_there_is_an_error():
    with Workers("grading_children:missing", count=1) as pool, pytest.raises(RuntimeError, match="missing"):
        pool.map([1])
    with pytest.raises(ValueError, match=r"timeout_s is inf; .* above 0 and finite"):
        Workers(MISBEHAVE, timeout_s=float("inf"))
    with pytest.raises(ValueError, match=r"grading.timeout_s is inf; it must be above 0 and finite"):
        GradingConfig(timeout_s=float("inf"))
    with pytest.raises(ValueError, match="timeout_s is 0"):
        Workers(MISBEHAVE, timeout_s=0)
