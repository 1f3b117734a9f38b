# SPDX-License-Identifier: Apache-2.0
"""Code of the user's inside a run: what it changes of torch's and the process's global state is put back.

A reward file may call torch.set_grad_enabled(False), and a reward function may close standard error. Both are the
process's, and training goes on in it.

Random states are not here: every random number of a run has a generator of its own.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from functools import cache
from typing import Any

import torch

logger = logging.getLogger(__name__)

Setting = tuple[Callable[[], Any], Callable[[Any], object]]  # how it is read, and how it is set


def _autocast(device: str) -> Setting:
    def read() -> tuple[bool, torch.dtype]:
        return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)

    def put_back(before: tuple[bool, torch.dtype]) -> None:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])
        torch.clear_autocast_cache()

    return read, put_back


def _precision() -> str | None:
    with suppress(RuntimeError):  # it was set in two ways that torch does not mix
        return torch.get_float32_matmul_precision()
    return None


def _folder() -> str | None:
    with suppress(FileNotFoundError):
        return os.getcwd()
    return None


def _timer() -> str | None:
    return None if any(signal.getitimer(signal.ITIMER_REAL)) else "stopped"  # None: one runs, and is left alone


def _handler(number: signal.Signals) -> Setting:
    return lambda: signal.getsignal(number), lambda handler: signal.signal(number, handler)


GLOBAL: dict[str, Setting] = {
    "torch's gradient mode": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch's default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch's default device": (
        torch.get_default_device,
        lambda device: torch.set_default_device(None if device.type == "cpu" else device),
    ),
    "torch's deterministic mode": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "torch's anomaly mode": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    "torch's number of threads": (torch.get_num_threads, torch.set_num_threads),
    "torch's precision of products": (_precision, torch.set_float32_matmul_precision),
    "autocast on the CPU": _autocast("cpu"),
    "autocast on the GPU": _autocast("cuda"),
    "the current GPU": (
        lambda: torch.cuda.current_device() if torch.cuda.is_initialized() else None,
        torch.cuda.set_device,
    ),
    "the working folder": (_folder, os.chdir),
    "the alarm clock": (_timer, lambda _: signal.setitimer(signal.ITIMER_REAL, 0)),
    "the handler of SIGINT": _handler(signal.SIGINT),
    "the handler of SIGTERM": _handler(signal.SIGTERM),
}


@contextmanager
def preserved(whose: str) -> Iterator[None]:
    """Put back whatever the code inside changes, and say so the first time; whose: "the reward function 'f'", say.

    For one thread: what others change in the meantime is put back as well.
    """
    before = {name: read() for name, (read, _) in GLOBAL.items()}
    with torch.inference_mode(torch.is_inference_mode_enabled()):  # which ends one that the code leaves open
        torch.set_grad_enabled(before["torch's gradient mode"])
        try:
            yield
        finally:
            changed = _changed(before)
            for name in changed:
                GLOBAL[name][1](before[name])
            if changed:
                _say(whose, ", ".join(changed))
        if kept := _changed(before):
            raise ValueError(f"{whose} changed {kept[0]}, which cannot be put back; leave it as it is there.")


def _changed(before: dict[str, Any]) -> list[str]:
    return [name for name, (read, _) in GLOBAL.items() if before[name] is not None and read() != before[name]]


@cache
def _say(whose: str, changed: str) -> None:
    logger.warning("%s changed %s, which the run needs as it was: it is put back each time.", whose, changed)


class _Open:
    """A stream that can be written to and not closed."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    @property
    def buffer(self) -> _Open:  # which whoever wraps it anew closes in the end
        return _Open(self._stream.buffer)

    def close(self) -> None:
        self._stream.flush()


@contextmanager
def open_streams() -> Iterator[None]:
    """Whatever the code inside closes or replaces, standard output and error are as they were when it ends."""
    copies = {}
    with ExitStack() as stack:
        for descriptor in (1, 2):
            with suppress(OSError):  # closed before
                copies[descriptor] = os.dup(descriptor)
                stack.callback(os.close, copies[descriptor])
        for stream, redirected in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            stack.enter_context(redirected(stream and _Open(stream)))
        try:
            yield
        finally:
            for descriptor, copy in copies.items():
                with suppress(OSError):
                    if os.path.sameopenfile(descriptor, copy):
                        continue
                os.dup2(copy, descriptor)


@contextmanager
def one_process() -> Iterator[None]:
    """Where the code inside forks, the copy ends here: it would go on with the run in the same folder."""
    process = os.getpid()
    try:
        yield
    finally:
        if os.getpid() != process:
            os._exit(1)
