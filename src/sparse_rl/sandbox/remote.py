# SPDX-License-Identifier: Apache-2.0
"""The program's things, as the checker's test code sees them: what is done to one is done in the program's process.

Plain values come over as themselves. Lists, dicts and sets that a call changed are changed here too, and an exception
is raised here as the built-in exceptions it derives from, or as one that the tests name.

A function that returns anything else returned an opaque result, and an opaque result decides no test. It may be passed
back to the program, called and iterated, and its attributes may be read; what comes of that is plain, or opaque again.
It has no methods, operators, length, items or text here, and it equals nothing but itself. So an object that says yes
to everything passes nothing that a plain record could not pass, and it never sees the value that a test expects.

A class is different, since there the program's own methods and operators are what is tested. Only the row's text says
what is a class (`statements.py`). What a test makes by calling one answers for itself. Of plain values it still equals
none and orders none, and its sum with one is a thing that only compares with others of the program's.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from typing import Any

from sparse_rl.sandbox.encoding import Unreadable, decode, encode, read_frame, write_frame

_replies, _calls = 0, 1
asked: list[str] = []  # what was asked so far: an error before the first is not the program's
told: list[str] = []  # and what the program answered, names apart: a test may go wrong because of it
exceptions: dict[str, type[Exception]] = {}  # the program's, by the names that tests catch them by
_read: dict[tuple[str | int, ...], Any] = {}  # attributes and items that were read since the program was last called


class Broken(BaseException):
    """The test itself does not work. (No `except Exception` of a test's may catch it.)"""


class Undecided(BaseException):
    """The test does not work with what the program answered, so it is the program that fails."""


class Gone(BaseException):
    """The program's process has ended, or gives what nobody can read or use."""


class CandidateError(Exception):
    """The program raised something that has no built-in type of its own."""


class Opaque:
    """A thing of the program's that decides nothing."""

    __slots__ = ("_rest", "_target")
    _target: str | int
    _rest: Iterator[Any] | None  # of an iterator: what it gave and nobody took yet

    def __init__(self, target: str | int) -> None:
        object.__setattr__(self, "_target", target)
        object.__setattr__(self, "_rest", None)

    def __eq__(self, other: object) -> bool:
        """A plain value is not shown to the program, and equals none of its things."""
        if isinstance(other, OpaqueThing):
            return NotImplemented
        if not isinstance(other, Opaque) or self._target == other._target:
            return isinstance(other, Opaque)
        raise TypeError(f"whether one {type(self).__name__} equals another, only the program could say")

    def __hash__(self) -> int:
        return hash((Opaque, self._target))  # not the hash of any number

    def __reduce__(self) -> tuple[type, tuple[str | int]]:
        return type(self), (self._target,)  # a copy is the same thing

    @property
    def __name__(self) -> str:
        """The one that the tests call it by."""
        if isinstance(self._target, str):
            return self._target
        raise AttributeError(f"{type(self).__name__} has no __name__")

    def __str__(self) -> str:
        raise TypeError(f"{type(self).__name__} has no text")

    __repr__ = __str__

    def __getattr__(self, name: str) -> Any:
        """Plain, or a thing that cannot be called: a method that says yes would stand in for a plain value's."""
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no {name}")
        value = self._once("get", name)
        return Opaque(value._target) if isinstance(value, Opaque) else value

    def _once(self, *what: str) -> Any:
        """The same answer until the program is called again, as a plain value would give."""
        key = (self._target, *what)
        if key not in _read:
            _read[key] = ask(what[0], self, *what[1:])
        return _read[key]

    def __setattr__(self, name: str, value: Any) -> None:
        ask("set", self, name, value)

    def __iter__(self) -> Iterator[Any]:
        if self._rest is None:
            ends, items = self._once("list")
            if not ends:
                return iter(items)
            object.__setattr__(self, "_rest", self._taken())
        assert self._rest is not None
        return self._rest

    def _taken(self) -> Iterator[Any]:
        """The items of an iterator, ever more at a time, since it may never end."""
        count = 1
        while items := ask("take", self, count):
            yield from items
            count = min(2 * count, 1 << 16)

    def __next__(self) -> Any:
        if self._rest is not None:
            return next(self._rest)
        try:
            return ask("builtin", self, "next")
        except CandidateError as error:
            raise StopIteration if error.args[0].startswith("StopIteration:") else error from None


class OpaqueResult(Opaque):
    """What a function or a method returned, or a function itself."""

    __slots__ = ()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return ask("call and show", self, list(arguments), named)


class OpaqueThing(OpaqueResult):
    """A thing or a member of a class that is tested. The program compares it with its other things, never with a plain
    value."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and ask("operator", self, "eq", other) is True

    __hash__ = Opaque.__hash__

    def __iter__(self) -> Iterator[Any]:
        raise TypeError(f"{type(self).__name__} has no items")

    __next__ = __iter__


class Made(OpaqueThing):
    """A class of the program's, or what a test made of one."""

    __slots__ = ()

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        value = super().__call__(*arguments, **named)
        return Made(value._target) if isinstance(self._target, str) and isinstance(value, Opaque) else value

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__} has no {name}")
        value = self._once("get", name)
        return OpaqueThing(value._target) if isinstance(self._target, str) and isinstance(value, Opaque) else value

    def __iter__(self) -> Iterator[Any]:
        ends, items = ask("list", self)
        return self._taken() if ends else iter(items)

    __next__ = Opaque.__next__

    def __contains__(self, item: object) -> bool:
        return ask("operator", self, "contains", item) is True

    def __instancecheck__(self, value: object) -> bool:
        return isinstance(value, Opaque) and ask("builtin", value, "isinstance", self) is True

    def __hash__(self) -> int:
        answer: int = ask("builtin", self, "hash")
        return answer

    def __bool__(self) -> bool:
        answer: bool = ask("builtin", self, "bool")
        return answer


def _plain_way(verb: str, name: str) -> Callable[..., Any]:
    return lambda self, *rest: ask(verb, self, name, *rest)


def _order(name: str) -> Callable[..., Any]:
    def method(self: OpaqueThing, other: Any) -> bool:
        return ask("operator", self, name, other) is True if isinstance(other, Opaque) else NotImplemented

    return method


def _arithmetic(verb: str, name: str) -> Callable[..., Any]:
    """With a plain operand it gives a thing again (a vector times 2), never a number (a result minus the right one)."""

    def method(self: OpaqueThing, other: Any) -> Any:
        value = ask(verb, self, name, other)
        if isinstance(self, Made) and isinstance(other, Made):
            return Made(value._target) if isinstance(value, Opaque) else value
        return OpaqueThing(value._target) if isinstance(value, Opaque) else NotImplemented

    return method


for _name in ("str", "repr", "len", "reversed"):
    setattr(Made, f"__{_name}__", _plain_way("builtin", _name))
for _name in ("neg", "abs", "getitem", "setitem", "delitem"):
    setattr(Made, f"__{_name}__", _plain_way("operator", _name))
for _name in ("lt", "le", "gt", "ge"):
    setattr(OpaqueThing, f"__{_name}__", _order(_name))
for _name in ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow"):
    setattr(OpaqueThing, f"__{_name}__", _arithmetic("operator", _name))
    setattr(OpaqueThing, f"__r{_name}__", _arithmetic("reflected", _name))


def number(value: Any) -> str | int:
    """What stands for a thing of the program's on its way back: its number, or its name."""
    if isinstance(value, Opaque):
        return value._target
    raise Unreadable(f"a {type(value).__name__} cannot be passed to a program in another process.")


def _opaque(number: Any) -> OpaqueResult:
    if not isinstance(number, int):
        raise Unreadable("a thing has no number.")
    return OpaqueResult(number)


def ask(verb: str, thing: Opaque, *rest: Any) -> Any:
    """What the program's process answers; raises what the program raised."""
    try:
        request = encode([verb, thing, *rest], number, request=True)
    except Unreadable as error:
        raise Undecided(str(error)) from None
    asked.append(verb)
    if verb not in ("get", "list", "take", "value"):
        _read.clear()
    try:
        write_frame(_calls, request)
        reply = decode(read_frame(_replies), _opaque)
    except (EOFError, OSError):
        raise Gone("the program ended before it answered.") from None
    except Unreadable as error:
        raise Gone(f"the program's answer cannot be read ({error}).") from None
    if not isinstance(reply, list) or len(reply) != 3:
        raise Gone("the program's answer has no form.")
    if verb != "value" or not isinstance(reply[1], Opaque):
        told.append(verb)
    if reply[0] == "value":
        if reply[2] is not None and verb == "call and show":
            _renew(list(rest), reply[2])
        return reply[1]
    if reply[0] == "raised" and isinstance(reply[1], list):
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
