# SPDX-License-Identifier: Apache-2.0
"""The process that judges: it runs a dataset's test code, or compares values, and calls the program in another process.

Standard input and output are the program's replies and the calls; the verdict goes to standard error, which the
program does not have. The task lies in the private folder, encoded:

{"kind": "code", "prelude": ..., "tests": [...], "names": [...], "classes": [...]}    trusted code, statements, and the
                                                            program's functions and classes that are known
{"kind": "calls", "function": ..., "inputs": [...], "expected": [...], "atol": ..., "oracle": ...}
{"kind": "record", "function": ..., "inputs": [...], "oracle": ...}    what a canonical solution returns

The verdict is one word and a detail: `passed`, `failed` (the program's doing), `broken` (the test's own), `recorded`,
or `undecided`: a failure too, but what the program returned is nothing that these tests can judge (`remote.py`).
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import importlib
import json
import os
import re
import sys
from typing import Any

from sparse_rl.sandbox.child import READY, TASK
from sparse_rl.sandbox.compare import as_expected, right
from sparse_rl.sandbox.encoding import decode, encode, write_frame
from sparse_rl.sandbox.remote import (
    Broken,
    Gone,
    Made,
    Opaque,
    OpaqueResult,
    Undecided,
    ask,
    asked,
    exceptions,
    number,
    told,
)
from sparse_rl.sandbox.statements import bound, fault, type_names, used_as_classes

# What tests say without importing it comes from here, never from the program: modules, what compares, and types whose
# equality decides. Names that a task may ask for (gcd, sqrt, permutations) are not among them.
_MODULES = {"np": "numpy", "numpy": "numpy", "pd": "pandas", "pytest": "pytest"}
_HELPERS = {
    "math": "isclose isnan isinf isfinite inf nan fabs pi",
    "numpy": "allclose array_equal array_equiv",
    "numpy.testing": "assert_allclose assert_almost_equal assert_array_equal assert_array_almost_equal assert_equal",
    "pytest": "approx raises",
    "datetime": "date datetime timedelta",
    "uuid": "UUID",
    "collections": "Counter OrderedDict defaultdict deque",
    "decimal": "Decimal",
    "fractions": "Fraction",
}
_FOUND_IN = {name: module for module, names in _HELPERS.items() for name in names.split()}
_CATCHES = ("raises", "assertRaises", "assertRaisesRegex", "suppress")
_OPERATORS = (ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare)
_VALUES = (ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.IfExp, ast.Subscript, ast.Slice)
_LONG = 1 << 20  # bytes of a result's text
_replies, _verdict = 0, 2


def check() -> None:
    """Judge, and write the verdict."""
    judge: _Code | _Calls | _Record
    with open(TASK, "rb") as file:
        task = decode(file.read(), request=True)
    kind = task.pop("kind")
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - test code may print
    try:
        judge = {"code": _Code, "calls": _Calls, "record": _Record}[kind](**task)
    except (Exception, Broken) as error:
        _say("broken", f"{type(error).__name__}: {error}")
        return
    try:
        hello = b""
        while len(hello) < len(READY) and (chunk := os.read(_replies, len(READY) - len(hello))):
            hello += chunk
        if hello != READY:
            _say("broken", "the program's process did not start.")
            return
        os.write(_verdict, READY)  # the program's time starts
        _say(*judge.verdict())
    except Broken as error:
        _say("broken", str(error))
    except (Exception, Gone, Undecided) as error:
        _say("failed", f"{type(error).__name__}: {error}")


def _say(verdict: str, detail: str | bytes) -> None:
    detail = detail if isinstance(detail, bytes) else detail[:2000].encode(errors="replace")
    write_frame(_verdict, verdict.encode() + b"\n" + detail)


class _Space(dict[str, Any]):
    """The names of test code. Those that nobody has are the program's: functions, classes, and globals as they are."""

    classes: set[str]
    functions: set[str]

    def named(self, name: str) -> Opaque:
        return Made(name) if name in self.classes else OpaqueResult(name)

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name) or name.startswith("__"):
            raise KeyError(name)
        value = OpaqueResult(name)._once("value")
        if isinstance(value, Opaque):
            self[name] = value = self.named(name)
            if name not in self.functions:
                told.append(name)  # it could have been plain
        return value


class _Code:
    """Statements, in the dataset's own words."""

    def __init__(self, prelude: str, tests: list[str], names: list[str], classes: list[str]) -> None:
        self.tests = [(text, compile(text, "tests", "exec")) for text in tests]
        own: dict[str, Any] = {"__name__": "tests"}
        exec(compile(prelude, "prelude", "exec"), own)
        trees = [ast.parse(text) for text in tests]
        nodes = [node for tree in trees for node in ast.walk(tree)]
        self.bound = {name for node in nodes for name in bound(node)}
        self.space = _Space(own | {"eval": self.evaluate, "exec": self.execute})
        self.space.classes = used_as_classes(nodes).union(classes)
        called = [node.func for node in nodes if isinstance(node, ast.Call)]
        self.space.functions = {name for node in nodes for name in _as_functions(node)}
        self.catch(nodes)
        self.space.update((name, self.space.named(name)) for name in names if name not in exceptions)
        self.texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        for node in (*called, *nodes):
            self.prepare(node)
        self.fault = fault(trees, self.space)

    def catch(self, nodes: list[ast.AST]) -> None:
        """The exceptions that tests name and do not make themselves are the program's."""
        for node in nodes:
            caught = node.type if isinstance(node, ast.ExceptHandler) else None
            if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in _CATCHES and node.args:
                caught = node.args[0]
            for name in type_names(caught) if caught else ():
                if name not in self.space and not hasattr(builtins, name) and name not in self.bound:
                    self.space[name] = exceptions[name] = type(name, (Exception,), {})

    def evaluate(self, text: object, *spaces: Any) -> Any:
        """`eval` of a text that the tests hold, or of arithmetic. Any other may be the program's own."""
        known = {name for space in spaces if isinstance(space, dict) and space is not self.space for name in space}
        if text not in self.texts and not (isinstance(text, str) and _arithmetic(text, known)):
            raise Undecided("the tests evaluate a text that the program may have written")
        frame = sys._getframe(1)
        return eval(text, *(spaces or (frame.f_globals, frame.f_locals)))

    def execute(self, text: object, *spaces: Any) -> None:
        """`exec` of a text that the tests hold."""
        if text not in self.texts:
            raise Undecided("the tests execute a text that the program may have written")
        frame = sys._getframe(1)
        exec(text, *(spaces or (frame.f_globals, frame.f_locals)))

    def prepare(self, node: ast.AST) -> None:
        """Modules and helpers that nobody imported; Broken for what cannot work."""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = node.value.id
            if name in sys.stdlib_module_names and name not in self.space and not hasattr(builtins, name):
                self.space[name] = importlib.import_module(name)
        if isinstance(node, ast.Name) and node.id not in self.space and node.id not in self.bound:
            if node.id in _MODULES:
                self.space[node.id] = importlib.import_module(_MODULES[node.id])
            elif node.id in _FOUND_IN:
                self.space[node.id] = getattr(importlib.import_module(_FOUND_IN[node.id]), node.id)
        if isinstance(node, ast.Compare) and any(isinstance(how, ast.Is | ast.IsNot) for how in node.ops):
            sides = [node.left, *node.comparators]
            types = (isinstance(side, ast.Name) and hasattr(builtins, side.id) for side in sides)
            if not any(types) and not any(isinstance(side, ast.Constant) for side in sides):
                text = ast.unparse(node)
                raise Broken(f"{text}: whether two things are one cannot be asked of a program in another process.")

    def verdict(self) -> tuple[str, str]:
        for i, (text, code) in enumerate(self.tests):
            where = f"statement {i + 1} of {len(self.tests)}: {text.strip()[:200]}"
            try:
                exec(code, self.space)
            except (Broken, Gone):
                raise
            except Undecided as error:
                return self.undecided(f"{error} in {where}")
            except SystemExit as end:
                if asked and end.code not in (None, 0):
                    return "failed", f"status {str(end.code)[:200]} in {where}"
                return self.undecided(f"the tests end their own process in {where}")
            except BaseException as error:  # pytest's own failures are no Exceptions
                text = _text(error)
                word = "undecided" if re.search("Opaque|'Made'", text) else "failed" if asked else "broken"
                return word, f"{text} in {where}"
        return ("passed", "") if asked else ("broken", "the tests never call the program.")

    def undecided(self, reason: str) -> tuple[str, str]:
        """The tests do not work. If the program has answered, its answers may be why, and it gets no way out of a 0."""
        return "undecided" if told and not self.fault else "broken", reason


def _as_functions(node: ast.AST) -> list[str]:
    """The names that a call or a definition uses as functions, or hands to one."""
    parts = [node.func, *node.args] if isinstance(node, ast.Call) else getattr(node, "decorator_list", [])
    return [part.id for part in parts if isinstance(part, ast.Name)]


def _arithmetic(text: str, known: set[str]) -> bool:
    """Whether a text is an expression of numbers, texts and known names, without a call or an attribute."""
    nodes = ast.walk(ast.parse(text.strip(), mode="eval"))
    allowed = (*_OPERATORS, *_VALUES, ast.expr_context)
    return all(isinstance(node, allowed) or (isinstance(node, ast.Name) and node.id in known) for node in nodes)


def _text(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except TypeError as reason:  # it holds a thing that has no text
        return f"{type(error).__name__}: {reason}"


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
                returned = _called(self.function, given)
                if kind == "digest":
                    good = digest(encode(returned, number)) == known[0]
                else:
                    good = right(returned, known[0], given, self.atol, self.oracle)
            except Exception as error:
                return "failed", f"{where} raised {type(error).__name__}: {error}"
            if not good:
                return "failed", f"{where} returned {_shown(returned)}, not {_shown(known[0])}"
        return "passed", ""


def _shown(value: Any) -> str:
    try:
        return repr(value)[:200]
    except TypeError as reason:  # as above
        return str(reason)


class _Record:
    """Calls whose results are wanted. Long ones are kept as digests; what no memory holds stays unknown."""

    def __init__(self, function: str, inputs: list[Any], oracle: str) -> None:
        self.function, self.inputs, self.oracle = function, inputs, oracle

    def verdict(self) -> tuple[str, bytes]:
        return "recorded", b"[" + b",".join(map(self.one, self.inputs)) + b"]"

    def one(self, given: Any) -> bytes:
        try:
            text = encode(as_expected(_called(self.function, given), self.oracle), number)
        except MemoryError:
            return encode(["unknown"])
        return encode(["digest", digest(text)]) if len(text) > _LONG else b'["value",' + text + b"]"


def digest(text: bytes) -> str:
    """Of an encoded value, in whatever order its sets and dicts are. Numbers have to be the same, not only close."""
    if any(tag in text for tag in (b'{"s"', b'{"f"', b'{"d"')):  # a text has \" in the place of "
        text = json.dumps(_sorted(json.loads(text))).encode()
    return hashlib.sha256(text).hexdigest()


def _sorted(part: Any) -> Any:
    if isinstance(part, list):
        return [_sorted(item) for item in part]
    if not isinstance(part, dict):
        return part
    ((tag, body),) = part.items()
    body = _sorted(body)
    return {tag: sorted(body, key=json.dumps) if tag in ("s", "f", "d") else body}


def _called(name: str, given: list[Any]) -> Any:
    """What a function returned, or for "Solution.solve" a method of a fresh object."""
    holder, _, method = name.rpartition(".")
    return ask("call", getattr(Made(holder)(), method) if holder else OpaqueResult(name), given, {})
