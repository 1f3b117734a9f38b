# SPDX-License-Identifier: Apache-2.0
"""The tests that belong to a dataset's row, found by its columns.

base_input, plus_input   EvalPlus (HumanEval+, MBPP+): calls, with the results of the canonical solution
public_tests             LiveCodeBench: texts to read and to print, or calls of a method of `Solution`
test_list                MBPP: assert statements, with `test_setup_code`
test, entry_point        HumanEval: a function `check(candidate)`
tests                    a user's own: assert statements, or {"input": ..., "output": ...}: texts for a script; with an
                         `entry_point` column, a list of arguments and a returned value

Statements run in a process beside the program's. They may call its functions, use its classes, read its globals, catch
its exceptions and look at lists, dicts and sets that it changed. Results are plain data, and Decimal, Fraction, deque,
array, range, slice, the views of a dict, UUID, paths, and dates without a zone. Any other object is opaque: it decides
nothing (`remote.py` has the rule). A test that fails over one scores 0 and is counted as undecided.

What tests do that cannot work with any program is the grader's failure, never a 0: a function passed to a function of
the program's, `f(a) is a`. Where it depends on what the program answered, it is a 0, and counted as undecided.

Names that tests do not define are the program's, but for modules and the usual helpers (np, isclose, approx, Counter,
date): those are the checker's, unless `entry_point` or the canonical solution has them. A helper of another name that
decides has to come with the tests, or the program will have one that says yes. Text that is evaluated has to come with
them too, unless it is arithmetic.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparse_rl.sandbox.compare import same_text
from sparse_rl.sandbox.encoding import encode, encode_fields
from sparse_rl.sandbox.evalplus import arguments, oracle
from sparse_rl.sandbox.extract import complete
from sparse_rl.sandbox.process import Sandbox, Verdict

# LiveCodeBench puts the usual imports before every program; LeetCode does so too.
_USUAL = """import bisect, collections, copy, datetime, functools, heapq, itertools, math, operator
import random, re, string, sys
from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """What a script reads and has to print."""

    tests: tuple[tuple[str, str], ...]
    usual: bool = False

    def judge(self, program: str, sandbox: Sandbox) -> Verdict:
        program = _USUAL + program if self.usual else program
        for i, (given, expected) in enumerate(self.tests):
            where = f"test {i + 1} of {len(self.tests)}"
            ran = sandbox.run(program, given)
            if not ran.started:
                return Verdict("broken", f"the program's process did not start ({ran.stopped or ran.output[:200]!r}).")
            if ran.stopped:
                return Verdict("failed", f"{where}: the program {ran.stopped}.")
            if ran.returncode:
                return Verdict("failed", f"{where}: the program ended with status {ran.returncode}.")
            if not same_text(printed := ran.output.decode(errors="replace"), expected):
                return Verdict("failed", f"{where}: it printed {printed[:200]!r}, not {expected[:200]!r}.")
        return Verdict("passed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Statements:
    """Test code. `prompt` is code that a completion goes on from; the tests see what it defines."""

    tests: tuple[str, ...]
    prompt: str = ""
    entry_point: str = ""
    names: tuple[str, ...] = ()  # functions known to be the program's; others are found by not being anyone's
    classes: tuple[str, ...] = ()  # those of them that are classes; others are found by how the tests use them

    def judge(self, program: str, sandbox: Sandbox) -> Verdict:
        program = complete(self.prompt, program, self.entry_point)
        prelude = f"{self.prompt.rstrip()}\n    pass\ndel {self.entry_point}" if self.prompt else ""
        known = {"names": list(self.names), "classes": list(self.classes)}
        return sandbox.check(program, encode({"kind": "code", "prelude": prelude, "tests": list(self.tests)} | known))


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Calls of one function, with the results that are known, or else those of a canonical solution."""

    function: str  # or "Solution.method"
    inputs: bytes  # encoded, as are the results: what the parent does not look into it does not decode
    expected: bytes | None  # in the forms of `checker`'s _Calls
    canonical: str = ""
    atol: float = 0.0
    oracle: str = ""
    prompt: str = ""
    entry_point: str = ""
    usual: bool = False

    def judge(self, program: str, sandbox: Sandbox) -> Verdict:
        expected, seconds = self.expected, 0.0
        if expected is None:
            known = _canonical.results(self, sandbox)
            if known.word != "recorded":
                return Verdict("broken", f"the canonical solution cannot be run: {known.detail}")
            expected, seconds = known.values, known.seconds
        program = _USUAL + program if self.usual else complete(self.prompt, program, self.entry_point)
        task = encode_fields(kind=encode("calls"), **self._asked(), expected=expected, atol=encode(float(self.atol)))
        return sandbox.check(program, task, timeout_s=4 * seconds)  # EvalPlus's factor

    def _asked(self) -> dict[str, bytes]:
        return {"function": encode(self.function), "inputs": self.inputs, "oracle": encode(self.oracle)}

    def record(self, sandbox: Sandbox) -> Verdict:
        """The canonical solution's results. Some take a minute: sums over 100 million numbers, one by one."""
        program = complete(self.prompt, self.canonical, self.entry_point)
        task = encode_fields(kind=encode("record"), **self._asked())
        return sandbox.check(program, task, timeout_s=12 * sandbox.limits.timeout_s)

    def key(self) -> bytes:
        parts = (self.prompt, self.canonical, self.function, self.oracle)
        return hashlib.sha256(encode(parts) + self.inputs).digest()


class _Canonical:
    """Results of canonical solutions, each worked out once; those that ask at the same time wait for the first."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.entries: dict[bytes, tuple[threading.Lock, list[Verdict]]] = {}

    def results(self, calls: Calls, sandbox: Sandbox) -> Verdict:
        with self.lock:
            lock, found = self.entries.setdefault(calls.key(), (threading.Lock(), []))
        with lock:
            if not found:
                verdict = calls.record(sandbox)
                if verdict.word != "recorded":
                    return verdict
                found.append(verdict)
            return found[0]


_canonical = _Canonical()
Suite = Texts | Statements | Calls


def suite_of(columns: Mapping[str, Any]) -> Suite:
    """A row's tests; ValueError for a row that has none. An empty column is none."""
    row = {key: value for key, value in columns.items() if value is not None and value != "" and value != []}
    problem = str(row.get("problem") or row.get("prompt") or "")
    entry = str(row.get("entry_point") or row.get("fn_name") or "")
    if "base_input" in row or "plus_input" in row:
        return _evalplus(row, problem, entry)
    if "public_tests" in row:
        tests = _loaded(row["public_tests"])
        method = re.search(r"def +(\w+) *\( *self", str(row.get("starter_code") or ""))
        entry = entry or (method[1] if method else "")
        if tests and entry and all(test.get("testtype") == "functional" for test in tests):
            inputs = [[json.loads(line) for line in test["input"].split("\n") if line.strip()] for test in tests]
            return Calls(
                function=f"Solution.{entry}",
                inputs=encode(inputs),
                expected=encode([["value", json.loads(test["output"])] for test in tests]),
                oracle="json",
                usual=True,
            )
        return Texts(tests=tuple((str(test["input"]), str(test["output"])) for test in _some(tests)), usual=True)
    if "test_list" in row:
        setup = [row["test_setup_code"]] if row.get("test_setup_code") else []
        names, classes = _defined(row)
        return Statements(tests=(*setup, *_some(_loaded(row["test_list"]))), names=names, classes=classes)
    if "test" in row and entry:
        prompt = problem if f"def {entry}" in problem else ""
        _, classes = _defined(row)
        return Statements(tests=(row["test"], f"check({entry})"), prompt=prompt, entry_point=entry, classes=classes)
    if "tests" in row:
        return _own(_some(_loaded(row["tests"])), row, entry)
    wanted = "tests, test_list, test with entry_point, public_tests, or base_input and plus_input"
    said = f"its columns are {sorted(columns)}; it needs {wanted}, and not empty"
    raise ValueError(f"a row for the code reward has no tests: {said}.")


def _evalplus(row: Mapping[str, Any], problem: str, entry: str) -> Calls:
    task = str(row.get("id") or row.get("task_id") or "")
    inputs = [*_loaded(row.get("base_input", [])), *_loaded(row.get("plus_input", []))]
    canonical = row.get("answer") or row.get("canonical_solution")
    if not entry or not canonical:
        raise ValueError(f"row {task!r} has EvalPlus's inputs but no entry_point or no canonical solution (answer).")
    return Calls(
        function=entry,
        inputs=encode(arguments(task, _some(inputs))),
        expected=None,
        canonical=str(canonical),
        atol=float(row.get("atol") or 0.0),
        oracle=oracle(task, entry),
        prompt=problem if f"def {entry}" in problem else "",
        entry_point=entry,
    )


def _own(tests: list[Any], row: Mapping[str, Any], entry: str) -> Suite:
    if all(isinstance(test, str) for test in tests):
        names, classes = _defined(row)
        return Statements(tests=tuple(tests), names=(*names, entry) if entry else names, classes=classes)
    if not all(isinstance(test, Mapping) and {"input", "output"} <= test.keys() for test in tests):
        raise ValueError("the column tests must hold assert statements, or objects with an input and an output.")
    if not entry:
        return Texts(tests=tuple((str(test["input"]), str(test["output"])) for test in tests))
    given = [test["input"] if isinstance(test["input"], list) else [test["input"]] for test in tests]
    expected = encode([["value", test["output"]] for test in tests])
    atol = float(row.get("atol") or 0.0)
    return Calls(function=entry, inputs=encode(given), expected=expected, atol=atol, oracle="json")


def _defined(row: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names that the canonical solution defines, which are the program's (one may be `sum`); its classes."""
    found = re.findall(r"^(def|class) +(\w+)", str(row.get("answer") or row.get("code") or ""), re.MULTILINE)
    return tuple(name for _, name in found), tuple(name for kind, name in found if kind == "class")


def _loaded(value: Any) -> list[Any]:
    return json.loads(value) if isinstance(value, str) else list(value)


def _some(tests: list[Any]) -> list[Any]:
    if not tests:
        raise ValueError("a row for the code reward has an empty list of tests; leave the row out.")
    return tests
