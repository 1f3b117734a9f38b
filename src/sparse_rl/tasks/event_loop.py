# SPDX-License-Identifier: Apache-2.0
"""Async reward functions: all of them at once, in one event loop that lives as long as the process.

The loop has a thread of its own, so this also works where a loop is running already, as in a notebook; and since it is
the same at every step, a client that a function keeps (an HTTP session, say) stays usable.

Plain functions are called in `base.py`, which also checks what any of them returns.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any


def run_together(awaitables: Sequence[Awaitable[Any]]) -> list[Any]:
    """What each of them gives; an exception stands in the place of one that raised."""

    async def outcome(awaitable: Awaitable[Any]) -> Any:
        try:
            return await awaitable
        except BaseException as error:  # what is no Exception would end more than this one, the loop's thread even
            return error

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(outcome(awaitable) for awaitable in awaitables))

    return asyncio.run_coroutine_threadsafe(all_of_them(), _loop()).result()


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=_run, args=(loop,), name="async rewards", daemon=True).start()
    return loop


def _run(loop: asyncio.AbstractEventLoop) -> None:
    while True:  # a task that a function leaves behind may stop the loop, or raise SystemExit
        with suppress(BaseException):
            loop.run_forever()
