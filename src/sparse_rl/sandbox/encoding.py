# SPDX-License-Identifier: Apache-2.0
"""Plain values as text, and frames of it on a pipe. Nothing that is decoded can run code.

None, bool, float, str, lists and small integers are what JSON makes of them (nan and inf included); the rest is an
object of one key, its tag:

    (1, {2}) -> {"t": [1, {"s": [2]}]}        {1: b"x"} -> {"d": [[1, {"b": "78"}]]}        2**99 -> {"i": "0x8..."}

A subclass becomes its base, a numpy scalar or array what `tolist` makes of it. A few types of the standard library are
their name and what they are made from: {"k": ["decimal.Decimal", "0.1"]}. Anything else is opaque: its owner keeps it
and gives it a number, {"o": 7}, by which it can be named again but never looked into.

A request to a program is nested deeper than a reply, since what came from there may go back with more around it, and
its arrays stay arrays: {"a": [[1, 2], "int64"]}.
"""

from __future__ import annotations

import importlib
import json
import os
import struct
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 100  # twice that in a request
MAX_FRAME = 64 << 20  # bytes; HumanEval+ has a result of 34 million
_SMALL = 1 << 53
_TAGS: tuple[tuple[Any, str], ...] = ((tuple, "t"), (set, "s"), (frozenset, "f"))
_DAY, _CLOCK = ("year", "month", "day"), ("hour", "minute", "second", "microsecond")
# Types by name (to import them all would cost every child milliseconds), and the arguments that make a value again.
_KINDS: dict[str, Callable[[Any], list[Any]]] = {
    "builtins.range": lambda value: [value.start, value.stop, value.step],
    "builtins.slice": lambda value: [value.start, value.stop, value.step],
    "builtins.dict_keys": lambda value: [list(value)],
    "builtins.dict_values": lambda value: [list(value)],
    "builtins.dict_items": lambda value: [list(value)],
    "array.array": lambda value: [value.typecode, value.tolist()],
    "uuid.UUID": lambda value: [str(value)],
    "pathlib.PosixPath": lambda value: [str(value)],
    "pathlib.PurePosixPath": lambda value: [str(value)],
    "collections.deque": lambda value: [list(value), value.maxlen],
    "decimal.Decimal": lambda value: [str(value)],
    "fractions.Fraction": lambda value: [value.numerator, value.denominator],
    "datetime.timedelta": lambda value: [value.days, value.seconds, value.microseconds],
    "datetime.date": lambda value: [getattr(value, name) for name in _DAY],
    "datetime.time": lambda value: [getattr(value, name) for name in _CLOCK],
    "datetime.datetime": lambda value: [getattr(value, name) for name in _DAY + _CLOCK],
}
_VIEWS: dict[str, Callable[[list[Any]], Any]] = {  # types that have no name to call them by
    "builtins.dict_keys": lambda keys: dict.fromkeys(keys).keys(),
    "builtins.dict_values": lambda values: dict(enumerate(values)).values(),
    "builtins.dict_items": lambda items: dict(items).items(),
}


class Unreadable(ValueError):
    """Bytes that no encoder of ours wrote, or a value that does not go into them."""


def _no_opaque(value: Any) -> Any:
    raise Unreadable(f"a {type(value).__name__} is not plain data.")


def encode(value: Any, keep: Callable[[Any], int | str] = _no_opaque, *, request: bool = False) -> bytes:
    """The text of a value; `keep` gives the number or name of one that is not plain."""
    return json.dumps(_tagged(value, keep, request, _depth(request)), separators=(",", ":")).encode()


def _depth(request: bool) -> int:
    return 2 * MAX_DEPTH if request else MAX_DEPTH


def encode_fields(**fields: bytes) -> bytes:
    """A dict of values that are encoded already, and are put together unread."""
    return b'{"d":[' + b",".join(b"[%s,%s]" % (encode(name), text) for name, text in fields.items()) + b"]}"


def _tagged(value: Any, keep: Callable[[Any], int | str], request: bool, left: int) -> Any:
    kind = type(value)
    if value is None or kind is bool or kind is str or kind is float:
        return value
    if left < 0:
        raise Unreadable("a value is nested too deep.")
    if isinstance(value, int):
        number = int.__int__(value)
        return number if -_SMALL < number < _SMALL else {"i": hex(number)}
    if isinstance(value, list):
        return [_tagged(item, keep, request, left - 1) for item in list.__iter__(value)]
    for base, tag in _TAGS:
        if isinstance(value, base):
            return {tag: [_tagged(item, keep, request, left - 1) for item in base.__iter__(value)]}
    if isinstance(value, dict):
        return {"d": [[_tagged(part, keep, request, left - 1) for part in pair] for pair in dict.items(value)]}
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, bytes | bytearray):
        return {"b": value.hex()}
    if isinstance(value, complex):
        return {"c": [complex(value).real, complex(value).imag]}
    if kind.__module__ == "numpy" and hasattr(value, "tolist"):
        plain = _tagged(value.tolist(), keep, request, left - 1)
        return {"a": [plain, str(value.dtype)]} if request and value.shape and value.dtype.isbuiltin else plain
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name in _KINDS and getattr(value, "tzinfo", None) is None:
        return {"k": [name, *(_tagged(part, keep, request, left - 1) for part in _KINDS[name](value))]}
    return {"o": keep(value)}


def decode(text: bytes, opaque: Callable[[Any], Any] = _no_opaque, *, request: bool = False) -> Any:
    """The value of a text; `opaque` makes something of what `keep` gave. Unreadable for anything else."""
    try:
        return _plain(json.loads(text), opaque, request, _depth(request))
    except (ValueError, TypeError, LookupError, ArithmeticError, RecursionError) as error:
        raise Unreadable(f"this is not an encoded value: {str(error)[:80]}") from None


def _plain(given: Any, opaque: Callable[[Any], Any], request: bool, left: int) -> Any:
    if not isinstance(given, list | dict):
        return given
    if left < 0:
        raise Unreadable("too deep.")
    if isinstance(given, list):
        return [_plain(item, opaque, request, left - 1) for item in given]
    ((tag, body),) = given.items()
    if tag == "i":
        return int(body, 16)
    if tag == "b":
        return bytes.fromhex(body)
    if tag == "c":
        return complex(*body)
    if tag == "o":
        return opaque(body)
    if tag == "d":
        return dict([_plain(part, opaque, request, left - 1) for part in pair] for pair in body)
    items = [_plain(item, opaque, request, left - 1) for item in body]
    if tag == "a" and request:
        return importlib.import_module("numpy").array(*items)
    if tag == "k":
        kind, *parts = items
        if kind not in _KINDS:
            raise Unreadable("an unknown type.")
        module, name = kind.split(".")
        make = _VIEWS[kind] if kind in _VIEWS else getattr(importlib.import_module(module), name)
        return make(*parts)
    return {"t": tuple, "s": set, "f": frozenset}[tag](items)


def write_frame(fd: int, body: bytes) -> None:
    """Length and body, in full."""
    if len(body) > MAX_FRAME:
        raise Unreadable(f"a message of {len(body)} bytes is longer than {MAX_FRAME}.")
    left = memoryview(struct.pack("=I", len(body)) + body)
    while left:
        left = left[os.write(fd, left) :]


def read_frame(fd: int) -> bytes:
    """The next body; EOFError where the other side has gone."""
    (size,) = struct.unpack("=I", _read(fd, 4))
    if size > MAX_FRAME:
        raise Unreadable(f"a message of {size} bytes is longer than {MAX_FRAME}.")
    return _read(fd, size)


def _read(fd: int, size: int) -> bytes:
    body = bytearray()
    while len(body) < size:
        chunk = os.read(fd, min(size - len(body), 1 << 20))
        if not chunk:
            raise EOFError("the other side has gone.")
        body += chunk
    return bytes(body)
