# SPDX-License-Identifier: Apache-2.0
"""The program's things, as the checker's test code sees them: what is done to one is done in the program's process.

Plain values come over as themselves. Lists, dicts and sets that a call changed are changed here too, and an exception
is raised here as the built-in exceptions it derives from, or as one that the tests name.

What decides is never left to the program: no thing of its own equals a plain value, is more or less than one, holds one
(`in` looks through its items here) or stands for a number. Otherwise an object that says yes to everything would pass.
Nor can it say that it is not to be judged: only what a test does of itself is Broken.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from typing import Any

from sparse_rl.sandbox.encoding import Unreadable, decode, encode, read_frame, write_frame

_replies, _calls = 0, 1
asked: list[str] = []  # what was asked so far: an error before the first is not the program's
exceptions: dict[str, type[Exception]] = {}  # the program's, by the names that tests catch them by


class Broken(BaseException):
    """The test itself does not work. (No `except Exception` of a test's may catch it.)"""


class Gone(BaseException):
    """The program's process has ended, or gives what nobody can read or use."""


class CandidateError(Exception):
    """The program raised something that has no built-in type of its own."""


class Remote:
    """A name or a thing of the program's."""

    def __init__(self, target: str | int) -> None:
        object.__setattr__(self, "_target", target)

    def __eq__(self, other: object) -> bool:
        """Things of the program's are compared over there. A plain value is not shown to it, and equals none."""
        return isinstance(other, Remote) and bool(ask("operator", self, "eq", other))

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return ask("call and show", self, list(arguments), named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        ask("set", self, name, value)

    def __iter__(self) -> Iterator[Any]:
        return iter(ask("list", self))

    def __next__(self) -> Any:
        try:
            return ask("builtin", self, "next")
        except CandidateError as error:
            raise StopIteration if error.args[0].startswith("StopIteration:") else error from None

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, Remote) and bool(ask("builtin", value, "isinstance", self))

    def __hash__(self) -> int:
        answer: int = ask("builtin", self, "hash")
        return answer

    def __bool__(self) -> bool:
        answer: bool = ask("builtin", self, "bool")
        return answer


def _plain_way(verb: str, name: str) -> Callable[..., Any]:
    return lambda self, *rest: ask(verb, self, name, *rest)


def _order(name: str) -> Callable[..., Any]:
    return lambda self, other: ask("operator", self, name, other) if isinstance(other, Remote) else NotImplemented


def _arithmetic(verb: str, name: str) -> Callable[..., Any]:
    """With a plain operand it gives a thing again (a vector times 2), never a number (a result minus the right one)."""

    def method(self: Remote, other: Any) -> Any:
        value = ask(verb, self, name, other)
        return value if isinstance(other, Remote) or isinstance(value, Remote) else NotImplemented

    return method


for _name in ("str", "repr", "len", "reversed"):
    setattr(Remote, f"__{_name}__", _plain_way("builtin", _name))
for _name in ("neg", "getitem", "setitem", "delitem"):
    setattr(Remote, f"__{_name}__", _plain_way("operator", _name))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", _order(_name))
for _name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"):
    setattr(Remote, f"__{_name}__", _arithmetic("operator", _name))
    setattr(Remote, f"__r{_name}__", _arithmetic("reflected", _name))


def number(value: Any) -> str | int:
    """What stands for a thing of the program's on its way back: its number, or its name."""
    if isinstance(value, Remote):
        target: str | int = value.__dict__["_target"]
        return target
    raise Unreadable(f"a {type(value).__name__} cannot be passed to a program in another process.")


def _remote(number: Any) -> Remote:
    if not isinstance(number, int):
        raise Unreadable("a thing has no number.")
    return Remote(number)


def ask(verb: str, remote: Remote, *rest: Any) -> Any:
    """What the program's process answers; raises what the program raised."""
    try:
        request = encode([verb, remote, *rest], number, request=True)
    except Unreadable as error:
        # What a function is called with is the tests' doing; that a result is a thing, and not a list, the program's.
        raise (Broken if isinstance(number(remote), str) else Gone)(str(error)) from None
    asked.append(verb)
    try:
        write_frame(_calls, request)
        reply = decode(read_frame(_replies), _remote)
    except (EOFError, OSError):
        raise Gone("the program ended before it answered.") from None
    except Unreadable as error:
        raise Gone(f"the program's answer cannot be read ({error}).") from None
    if isinstance(reply, list) and len(reply) == 3 and reply[0] == "value":
        if reply[2] is not None:
            _renew(list(rest), reply[2])
        return reply[1]
    if isinstance(reply, list) and len(reply) == 3 and reply[0] == "raised" and isinstance(reply[1], list):
        raise _exception([str(name) for name in reply[1]], str(reply[2]))
    raise Gone("the program's answer has no form.")


def _exception(names: list[str], text: str) -> Exception:
    """An exception of all the types that it has here; not StopIteration, which would end a loop of the tests."""
    own = [exceptions[name] for name in names if name in exceptions]
    for name in names:
        kind = getattr(builtins, name, None)
        if isinstance(kind, type) and issubclass(kind, Exception) and kind not in (Exception, StopIteration):
            try:
                error: Exception = (type(names[0], (*own, kind), {}) if own else kind)(text)
                return error
            except TypeError:  # a type that wants more than a text
                continue
    return own[0](text) if own else CandidateError(f"{names[0] if names else 'nothing'}: {text}")


def _renew(old: Any, new: Any) -> Any:
    """The value `new`, in the very lists, dicts, sets and arrays of `old` as far as they go together."""
    if type(old).__module__ == "numpy" and isinstance(new, list):
        old[...] = new
        return old
    if type(old) is not type(new) or not isinstance(old, list | dict | set | tuple):
        return new
    if isinstance(old, tuple):
        for a, b in zip(old, new, strict=False):
            _renew(a, b)
        return new if len(old) != len(new) else old
    if isinstance(old, list):
        old[:] = [_renew(old[i], item) if i < len(old) else item for i, item in enumerate(new)]
    elif isinstance(old, dict):
        renewed = {key: _renew(old.get(key), item) for key, item in new.items()}
        old.clear()
        old.update(renewed)
    else:
        old.clear()
        old.update(new)
    return old
