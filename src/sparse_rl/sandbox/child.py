# SPDX-License-Identifier: Apache-2.0
"""What runs in a confined process. Its arguments are one JSON object; everything else lies in its private folder.

run      the program is a script: it reads its input and prints
answer   the program is a module: its functions are called over standard input and output
check    the checker of `checker.py`
probe    try what must be refused (of `isolation.py`)

Each says READY on standard output once it is confined and before it reads a program, the checker on standard error once
it has heard it of the program's process. Its time starts there; what fails before is not the program's doing.
"""

from __future__ import annotations

import builtins
import contextlib
import json
import operator
import os
import sys
import types
from collections.abc import Callable
from itertools import islice, repeat
from typing import Any

from sparse_rl.sandbox.confine import Confinement, View, confine
from sparse_rl.sandbox.encoding import MAX_FRAME, decode, encode, read_frame, write_frame

READY = b"\0ready\n"
PROGRAM, TASK = "program.py", "task"  # their names in the private folders


def main() -> None:
    settings = json.loads(sys.argv.pop())
    sys.path[:] = [place for place in sys.path if place != settings["package"]] + settings["packages"]
    mode = settings["mode"]
    if mode == "check":
        from sparse_rl.sandbox.checker import check  # its imports come before the files are out of reach
    if mode == "probe":
        from sparse_rl.sandbox.probe import attempts
    wanted = settings["confinement"]
    try:
        confine(Confinement(**wanted | {"view": View(*wanted["view"])}))
    except (OSError, ValueError) as error:
        os.write(1, f"{error}".encode())
        os._exit(70)
    # -S leaves these out, and programs end with them
    builtins.exit = builtins.quit = sys.exit  # type: ignore[assignment]
    sys.argv = [PROGRAM]
    if mode == "run":
        _run()
    elif mode == "answer":
        _answer()
    elif mode == "check":
        check()
    else:
        os.write(1, READY + json.dumps(attempts(settings["secret"], settings["confinement"]["landlock"])).encode())


def _module(name: str) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__file__ = PROGRAM
    sys.modules[name] = module
    return module


def _source() -> str:
    with open(PROGRAM, encoding="utf-8", errors="surrogatepass") as file:
        return file.read()


def _run() -> None:
    source = _source()
    os.write(1, READY)
    exec(compile(source, PROGRAM, "exec"), _module("__main__").__dict__)


def _answer() -> None:
    """Answer calls until there are none left. Whatever is written here is a claim, judged in another process."""
    requests, replies = os.dup(0), os.dup(1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)
    source = _source()
    os.write(replies, READY)
    module = _module("candidate")
    try:
        exec(compile(source, PROGRAM, "exec"), module.__dict__)
    except Exception as error:
        with contextlib.suppress(EOFError):
            read_frame(requests)
            write_frame(replies, _raised(error))  # the answer to the first call, whatever it was
        return
    answers = _Answers(module)
    with contextlib.suppress(EOFError):
        while True:
            write_frame(replies, answers.reply(read_frame(requests)))


# what can be asked of a thing of the program's, besides a call
_VERBS: dict[str, Callable[..., Any]] = {
    "value": lambda thing: thing,
    "get": getattr,
    "set": setattr,
    "list": lambda thing: [True, []] if (items := iter(thing)) is thing else [False, list(islice(items, 1_000_000))],
    "take": lambda thing, count: list(islice(map(next, repeat(thing)), count)),  # iter(thing) might start it again
    "builtin": lambda thing, name, *rest: getattr(builtins, name)(thing, *rest),
    "operator": lambda thing, name, *rest: getattr(operator, name)(thing, *rest),
    "reflected": lambda thing, name, other: getattr(operator, name)(other, thing),
}


class _Answers:
    """Things by name or by number; what is returned and is not plain gets a number and stays here."""

    def __init__(self, module: types.ModuleType) -> None:
        self.module = module
        self.kept: list[Any] = []
        self.numbers: dict[int, int] = {}

    def keep(self, value: Any) -> int:
        number = self.numbers.setdefault(id(value), len(self.kept))
        if number == len(self.kept):
            self.kept.append(value)
        return number

    def named(self, number: int | str) -> Any:
        return self.kept[number] if isinstance(number, int) else getattr(self.module, number)

    def reply(self, request: bytes) -> bytes:
        """["value", value, the arguments if the call changed them] or ["raised", the type's names, its text]."""
        try:
            verb, target, *rest = decode(request, self.named, request=True)
            changed = None
            if verb == "call":
                value = target(*rest[0], **rest[1])
            elif verb == "call and show":
                before = encode(rest, self.keep, request=True)
                value = target(*rest[0], **rest[1])
                changed = rest if encode(rest, self.keep, request=True) != before else None
            else:
                value = _VERBS[verb](target, *rest)
            reply = encode(["value", value, changed], self.keep)
            if len(reply) > MAX_FRAME:
                raise MemoryError(f"a result of {len(reply)} bytes is longer than {MAX_FRAME}.")
            return reply
        except Exception as error:
            return _raised(error)


def _raised(error: Exception) -> bytes:
    return encode(["raised", [kind.__name__ for kind in type(error).__mro__], str(error)[:500]])
