# SPDX-License-Identifier: Apache-2.0
"""The process that judges: it runs a dataset's test code, or compares values, and calls the program in another process.

Standard input and output are the program's replies and the calls; the verdict goes to standard error, which the
program does not have. The task lies in the private folder, encoded:

{"kind": "code", "prelude": ..., "tests": [...], "names": [...]}    trusted code, statements, the program's functions
{"kind": "calls", "function": ..., "inputs": [...], "expected": [...], "atol": ..., "oracle": ...}
{"kind": "record", "function": ..., "inputs": [...], "oracle": ...}    what a canonical solution returns

The verdict is one word and a detail: `passed`, `failed` (the program's doing), `broken` (the test's own), `recorded`.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from sparse_rl.sandbox.compare import as_expected, right
from sparse_rl.sandbox.encoding import Unreadable, decode, encode, read_frame, write_frame

READY = b"\0ready\n"
TASK = "task"  # its name in the private folder
_LONG = 1 << 20  # bytes of a result's text
_replies, _calls, _verdict = 0, 1, 2
_asked: list[str] = []  # the calls so far: an error before the first one is not the program's


class Broken(Exception):
    """The test itself does not work."""


class CandidateError(Exception):
    """The program raised something that is not a built-in exception."""


class Gone(Exception):
    """The program's process has ended, or writes what nobody can read."""


class Remote:
    """A name or a thing of the program's. What is asked of it is asked over there; it equals nothing."""

    def __init__(self, target: str | int) -> None:
        object.__setattr__(self, "_target", target)

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return False

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return _ask("call", self, list(arguments), named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _ask("get", self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _ask("set", self, name, value)

    def __getitem__(self, key: Any) -> Any:
        return _ask("item", self, key)

    def __iter__(self) -> Iterator[Any]:
        return iter(_ask("list", self))

    def __len__(self) -> int:
        return _ask("len", self)

    def __bool__(self) -> bool:
        return True


def _number(value: Any) -> int:
    if isinstance(value, Remote) and isinstance(value.__dict__["_target"], int):
        return value.__dict__["_target"]
    raise Broken(f"a {type(value).__name__} cannot be passed to a program in another process.")


def _ask(verb: str, remote: Remote, *rest: Any) -> Any:
    target = remote.__dict__["_target"]
    request = encode([verb, target if isinstance(target, str) else remote, *rest], _number)
    _asked.append(verb)
    try:
        write_frame(_calls, request)
        reply = decode(read_frame(_replies), Remote)
    except (EOFError, OSError):
        raise Gone("the program ended before it answered.") from None
    except Unreadable as error:
        raise Gone(f"the program's answer cannot be read ({error}).") from None
    if isinstance(reply, list) and len(reply) == 2 and reply[0] == "value":
        return reply[1]
    if isinstance(reply, list) and len(reply) == 3 and reply[0] == "raised":
        kind = getattr(builtins, str(reply[1]), None)
        kind = kind if isinstance(kind, type) and issubclass(kind, Exception) else CandidateError
        if kind is CandidateError or issubclass(kind, UnicodeError):  # which wants more than a text
            raise CandidateError(f"{reply[1]}: {reply[2]}")
        raise kind(str(reply[2]))
    raise Gone("the program's answer has no form.")


def check() -> None:
    """Judge, and write the verdict."""
    judge: _Code | _Calls | _Record
    with open(TASK, "rb") as file:
        task = decode(file.read())
    kind = task.pop("kind")
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - test code may print
    try:
        judge = {"code": _Code, "calls": _Calls, "record": _Record}[kind](**task)
    except Exception as error:
        _say("broken", f"{type(error).__name__}: {error}")
        return
    os.write(_verdict, READY)
    try:
        hello = b""
        while len(hello) < len(READY) and (chunk := os.read(_replies, len(READY) - len(hello))):
            hello += chunk
        if hello != READY:
            _say("broken", "the program's process did not start.")
            return
        _say(*judge.verdict())
    except Broken as error:
        _say("broken", str(error))
    except Exception as error:
        _say("failed", f"{type(error).__name__}: {error}")


def _say(verdict: str, detail: str | bytes) -> None:
    detail = detail if isinstance(detail, bytes) else detail[:2000].encode(errors="replace")
    write_frame(_verdict, verdict.encode() + b"\n" + detail)


class _Code:
    """Statements, in the dataset's own words. Names that they use and nobody has are the program's."""

    def __init__(self, prelude: str, tests: list[str], names: list[str]) -> None:
        self.tests = [(text, compile(text, "tests", "exec")) for text in tests]
        self.space: dict[str, Any] = {"__name__": "tests"}
        exec(compile(prelude, "prelude", "exec"), self.space)
        self.space |= {name: Remote(name) for name in names}
        for node in (node for text in tests for node in ast.walk(ast.parse(text))):
            inner = node.value if isinstance(node, ast.Attribute) else node
            if isinstance(inner, ast.Name) and inner.id not in self.space and not hasattr(builtins, inner.id):
                is_module = inner is not node and inner.id in sys.stdlib_module_names
                self.space[inner.id] = importlib.import_module(inner.id) if is_module else Remote(inner.id)

    def verdict(self) -> tuple[str, str]:
        for i, (text, code) in enumerate(self.tests):
            try:
                exec(code, self.space)
            except Broken:
                raise
            except Exception as error:
                where = f"statement {i + 1} of {len(self.tests)}: {text.strip()[:200]}"
                return "failed" if _asked else "broken", f"{type(error).__name__}: {error} in {where}"
        return ("passed", "") if _asked else ("broken", "the tests never call the program.")


class _Calls:
    """Calls with known results: ["value", it], ["digest", of its text], or ["unknown"], which is passed over."""

    def __init__(self, function: str, inputs: list[Any], expected: list[Any], atol: float, oracle: str) -> None:
        self.function, self.inputs, self.atol, self.oracle = function, inputs, atol, oracle
        self.expected = expected
        if len(inputs) != len(expected) or all(kind == "unknown" for kind, *_ in expected):
            raise Broken(f"there are {len(inputs)} inputs and {len(expected)} results.")

    def verdict(self) -> tuple[str, str]:
        for i, (given, (kind, *known)) in enumerate(zip(self.inputs, self.expected, strict=True)):
            if kind == "unknown":
                continue
            where = f"call {i + 1} of {len(self.inputs)}"
            try:
                returned = _function(self.function)(*given)
            except (Broken, Gone):
                raise
            except Exception as error:
                return "failed", f"{where} raised {type(error).__name__}: {error}"
            if kind == "digest":
                good = digest(encode(returned, _number)) == known[0]
            else:
                good = right(returned, known[0], given, self.atol, self.oracle)
            if not good:
                return "failed", f"{where} returned {repr(returned)[:200]}, not {repr(known[0])[:200]}"
        return "passed", ""


class _Record:
    """Calls whose results are wanted. Long ones are kept as digests; what no memory holds stays unknown."""

    def __init__(self, function: str, inputs: list[Any], oracle: str) -> None:
        self.function, self.inputs, self.oracle = function, inputs, oracle

    def verdict(self) -> tuple[str, bytes]:
        return "recorded", b"[" + b",".join(map(self.one, self.inputs)) + b"]"

    def one(self, given: Any) -> bytes:
        try:
            text = encode(as_expected(_function(self.function)(*given), self.oracle), _number)
        except MemoryError:
            return encode(["unknown"])
        return encode(["digest", digest(text)]) if len(text) > _LONG else b'["value",' + text + b"]"


def digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()


def _function(name: str) -> Remote:
    """A function, or for "Solution.solve" a method of a fresh object."""
    holder, _, method = name.rpartition(".")
    return getattr(Remote(holder)(), method) if holder else Remote(name)
