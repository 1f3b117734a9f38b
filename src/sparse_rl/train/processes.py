# SPDX-License-Identifier: Apache-2.0
"""The processes of a run: one, or as many as torchrun started.

Every process knows the whole rollout batch and takes the same decisions from it; each samples, grades and learns from
its share alone. What a process must not do by itself (write files, decide what to resume) the first one does for all.

How work is dealt out is in `shares.py`, how weights are sharded in `shard.py`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from sparse_rl.specs import first_line

T = TypeVar("T")

TIMEOUT = timedelta(minutes=30)  # of one collective: the longest a process may keep the others waiting

FAILED = -1

GRACE_S = 15.0  # from SIGTERM until a process that still waits says so; torchrun kills it after 30


class Stopped(SystemExit):
    """The run was asked to stop; the exit code is 128 + the signal."""

    def __init__(self, by: signal.Signals) -> None:
        super().__init__(128 + by)
        self.by = by


class Dismissed(SystemExit):
    """Another process has failed and says why; this one leaves without a word."""


class Lost(ConnectionError):
    """Another process has gone without a word."""


@dataclass(frozen=True, slots=True)
class Processes:
    """This process among the others. One that torchrun did not start is alone, and every method is then trivial."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0  # on this machine: the number of its GPU
    grouped: bool = False  # torchrun started it: weights are sharded, be it over one process

    @property
    def first(self) -> bool:
        """Whether it is the one that writes and prints."""
        return self.rank == 0

    def device(self, kind: str) -> str:
        """Its own device of a kind; made the current one if it is a GPU."""
        if not self.grouped or torch.device(kind).type != "cuda":
            return kind
        if torch.device(kind).index is not None:
            raise ValueError(f"device is {kind}, but torchrun gives each process a GPU of its own; use cuda.")
        if self.local_rank >= torch.cuda.device_count():
            raise ValueError(
                f"process {self.local_rank} of this machine has no GPU: there are {torch.cuda.device_count()}; "
                "lower --nproc-per-node."
            )
        torch.cuda.set_device(self.local_rank)
        return f"cuda:{self.local_rank}"

    def share(self, count: int) -> slice:
        """Its part of `count` things; parts are in order, and differ by one at most."""
        each, more = divmod(count, self.size)
        start = self.rank * each + min(self.rank, more)
        return slice(start, start + each + (self.rank < more))

    def gather(self, value: T) -> list[T]:
        """What each process has, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def together(self, work: Callable[[], T]) -> T:
        """Its own result; if the work of any process fails, all stop, and the lowest of those that failed says why.

        A signal that stops the work of one stops that of all. Whatever is raised, all raise something here, and may go
        on to save what they have.
        """
        if self.size == 1:
            return work()
        result, error = None, None
        try:
            result = work()
        except (Exception, SystemExit) as raised:
            error = raised
        ends = self.gather(0 if error is None else error.by if isinstance(error, Stopped) else FAILED)
        failed = [rank for rank, end in enumerate(ends) if end == FAILED]
        if failed:
            raise known_to_all(error if error is not None and self.rank == failed[0] else Dismissed(2))
        if any(ends):
            raise known_to_all(Stopped(signal.Signals(max(ends))))
        return result  # type: ignore[return-value]

    def by_first(self, work: Callable[[], T]) -> T:
        """The result of the first process, in all of them."""
        result = self.together(lambda: work() if self.first else None)
        if self.size > 1:
            found = [result]
            dist.broadcast_object_list(found, src=0)
            result = found[0]
        return result  # type: ignore[return-value]

    @contextmanager
    def watched(self, run: str) -> Iterator[None]:
        """Say what happened, and how to go on, when another process has gone."""
        if self.size == 1:
            yield
            return
        ended = f"another of the {self.size} processes has ended"
        remedy = f"start {run} again with --trainer.resume_from_checkpoint true."
        late = f"sparse-rl: process {self.rank} cannot stop {GRACE_S:g} s after SIGTERM; if {ended}, {remedy}"
        try:
            with _heard_in_a_collective(late):
                yield
        except RuntimeError as error:
            if not is_lost(error):
                raise
            reason = "its connection is closed" if "by peer" in first_line(error) else first_line(error)
            raise Lost(f"{ended} ({reason}); {remedy}") from error


@contextmanager
def joined() -> Iterator[Processes]:
    """The processes that torchrun started, for as long as they are needed; or this one alone."""
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"} <= os.environ.keys():
        yield Processes()
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=TIMEOUT)
    processes = Processes(dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"]), True)
    try:
        yield processes
    except Lost:  # to take leave of the others would wait for the one that is gone
        raise
    except BaseException:
        dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def known_to_all(error: BaseException) -> BaseException:
    """The error, marked as one that every process of the run has met at the same place, in its own words."""
    error.__dict__["known_to_all"] = True
    return error


@contextmanager
def _heard_in_a_collective(words: str) -> Iterator[None]:
    """Say the words if SIGTERM comes and nothing follows: Python hears no signal while it waits for a GPU."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    done = threading.Event()

    def listen() -> None:
        while number := os.read(reading, 1):
            if number[0] == signal.SIGTERM and not done.wait(GRACE_S):
                print(words, file=sys.stderr, flush=True)
        os.close(reading)

    threading.Thread(target=listen, daemon=True).start()
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        done.set()
        os.close(writing)


def is_lost(error: Exception) -> bool:
    """Whether it tells of another process that has gone."""
    words = ("gloo", "nccl", "connection closed by peer", "connection reset by peer")
    return isinstance(error, dist.DistError | Lost) or any(word in str(error).lower() for word in words)
