# SPDX-License-Identifier: Apache-2.0
"""What a program returns that is no plain data: it decides no test, and it gets no program left out."""

from __future__ import annotations

import ast
import random

import pytest
from sandbox.objects import JUDGED, MAKES, OBJECTS, STEERED, UNJUDGED, WRONG
from sandbox.opaque import LIES, LONG_LIES, YES
from sandbox.variants import HONEST, HONEST_PROGRAM, VARIANTS

from sparse_rl.grading.code import CodeReward
from sparse_rl.sandbox.isolation import isolation
from sparse_rl.sandbox.process import Limits, Sandbox, Verdict
from sparse_rl.sandbox.statements import fault, used_as_classes

confined = pytest.mark.skipif(isolation().method is None, reason=f"no isolation on this machine: {isolation().reason}")
IMPORTS = (
    "import copy, functools, itertools, json, math, operator, re, statistics, unittest\n"
    "import numpy as np\nfrom datetime import timedelta\npassed = []\n"
)
USED = "def never():\n    Solution().solve, isclose, approx, Counter, deque, Fraction, Decimal\n"


@pytest.fixture(scope="module")
def reward() -> CodeReward:
    return CodeReward.build(Limits(timeout_s=20.0), workers=2)


def lines(text: str) -> str:
    return text.replace("\\n", "\n")


def tried(tests: list[str]) -> str:
    """Test code that collects those that hold."""
    counted = (f"try:\n    exec({test!r})\n    passed.append({test!r})\nexcept Exception:\n    pass" for test in tests)
    return IMPORTS + USED + "\n".join(counted)


@confined
@pytest.mark.parametrize("word", ["self", "0", "0.0", "True", "1", "''", "'7'", "[]", "[1, 2]", "(given or [7])[0]"])
@pytest.mark.some(2)
def test_an_object_that_says_yes_to_everything_passes_nothing(reward, word):
    """It is not even shown what the tests compare it with."""
    every = [f"assert {test}" for test in LIES] + [lines(test) for test in LONG_LIES]
    tests = [tried(every), "assert seen() == [], seen()", "assert passed == [], passed"]
    verdict = reward.judge(YES.replace("WORD", word), {"tests": tests})
    assert verdict.word == "passed", verdict


@confined
def test_the_program_is_judged_for_a_test_that_its_result_makes_unworkable(reward):
    for test in random.sample(STEERED, 3):
        row = {"tests": [lines(test)]}
        assert reward.judge(MAKES.replace("RESULT", "Item()"), row).word == "passed", test
        verdict = reward.judge(MAKES.replace("RESULT", random.choice(WRONG)), row)
        assert verdict.word in ("failed", "undecided"), (test, verdict)


@confined
def test_a_program_that_is_stopped_before_its_checker_is_ready_has_failed(reward):
    """The checker imports what the tests name, and that takes longer than to write too many files."""
    program = "import time\nfor i in range(600):\n    open(str(i), 'w').close()\ntime.sleep(1)\ndef f():\n    return 1"
    verdict = reward.judge(program, {"tests": ["assert f() == pytest.approx(1)"]})
    assert verdict.word == "failed" and "filled its folder" in verdict.detail, verdict


@pytest.mark.slow
@confined
def test_every_such_test_with_every_result(reward):
    for test in STEERED:
        words = {reward.judge(MAKES.replace("RESULT", it), {"tests": [lines(test)]}).word for it in WRONG}
        assert words <= {"failed", "undecided"}, (test, words)


@confined
def test_objects_are_used_as_the_tests_like(reward):
    verdict = reward.judge(OBJECTS, {"tests": [lines(test) for test in JUDGED]})
    assert verdict.word == "passed", verdict


@confined
def test_what_only_an_object_could_say_is_undecided(reward):
    for test in random.sample(UNJUDGED, 2):
        verdict = reward.judge(OBJECTS, {"tests": [test, "assert isinstance(Vec(1), Vec)"]})
        assert verdict.word == "undecided" and "Opaque" in verdict.detail, (test, verdict)


@confined
def test_what_is_read_of_a_result_stays_the_same(reward):
    """As a plain value's would. An object that made it up as it goes could sort, or place eight queens."""
    program = """
class Moody:
    n = 0
    def __getattr__(self, name):
        self.n += 1
        return self.n
    def __iter__(self):
        self.n += 1
        return iter([self.n])
def f(): return Moody()
def g(x): return 0
"""
    tests = [
        "r = f()\nassert r.a == r.a and list(r) == list(r) and r.b != r.a",
        "r = f()\na = r.a\ng(r)\nassert r.a != a",
    ]
    verdict = reward.judge(program, {"tests": tests})
    assert verdict.word == "passed", verdict


@pytest.mark.parametrize(
    ("tests", "classes"),
    [
        ("s = Stack()\ns.push(1)", {"Stack"}),
        ("self.s = Stack()\nself.s.push(1)", {"Stack"}),
        ("a, b = Vec(1), Vec(2)\nassert a.norm() == 1", {"Vec"}),
        ("assert Color.RED", {"Color"}),
        ("assert Stack().is_empty()", {"Stack"}),
        ("try:\n    f()\nexcept MyError:\n    pass", {"MyError"}),
        ("assert isinstance(x, (Node, Edge | Path))", {"Node", "Edge", "Path"}),
        ("assert isinstance(x, type(f(2)))", set()),
        ("assert Diff([1], [2]).issubset({1})", set()),
        ("d = Diff(a, b)\nassert d.all() and d.total_seconds() == 1 and d.count(1) == 2", set()),
        ("assert f(3).is_fine()", set()),
        ("x = f(3)\nassert x.is_fine()", set()),
        ("assert np.abs(f(3) - X).max() < 1", set()),
        ("assert Diff(3).__sub__(3) == 0", set()),
    ],
)
def test_the_tests_say_what_is_a_class(tests, classes):
    assert used_as_classes(list(ast.walk(ast.parse(tests)))) == classes


@pytest.mark.parametrize(
    ("tests", "found"),
    [
        ("assert f(lambda x: x) == 1", True),
        ("def key(x):\n    return x\nassert f([key], 1) == 1", True),
        ("assert 1 == f(len)", True),
        ("assert f(k=math.sqrt) == 1", True),
        ("try:\n    f(print)\nexcept ValueError:\n    pass", True),
        ("assert f(1) == 1\nexit()", True),
        ("assert f(math.pi, str('x'), key) == 1", False),
        ("assert sorted(f(1), key=lambda x: x) == 1", False),
        ("if f(1):\n    f(print)", False),
        ("assert f(1) == 1 or f(print)", False),
        ("assert f(1) == 1 or exit()", False),
        ("try:\n    f(1)\n    f(print)\nexcept ValueError:\n    pass", False),
        ("def never():\n    f(print)", False),
        ("assert [f(print) for _ in g(1)] == []", False),
        ("x = g() if g() else f(print)", False),
    ],
)
def test_faults_of_the_tests_own(tests, found):
    import math

    assert fault([ast.parse(tests)], {"math": math}) is found


def test_programs_that_cannot_be_judged_are_counted(caplog, monkeypatch):
    """At the first, and whenever there are twice as many."""
    reward = CodeReward(Sandbox(None, Limits()), 1)
    words = iter(["undecided", "passed", "failed", *["undecided"] * 3, "broken", "undecided"])
    monkeypatch.setattr(Sandbox, "check", lambda *given: Verdict(next(words), "for a reason"))
    for count in (1, 3, 4):
        reward([""] * count, ["x"] * count, tests=[["assert f() == 1"]] * count)
    said = [record.getMessage() for record in caplog.records]
    assert [message[:17] for message in said] == ["1 of 1 programs s", "2 of 4 programs s", "5 of 8 programs s"]
    assert all("(for a reason)" in message and "answer" in message for message in said)


@confined
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.some(4)
def test_no_variant_gets_around_its_tests(reward, name):
    """And none is left out. `eval` and `exec` of what a program wrote are not run at all."""
    row, solves, avoids = VARIANTS[name]
    assert not solves or reward.judge(solves, row).word == "passed"
    verdict = reward.judge(avoids, row)
    assert verdict.word in ("failed", "undecided"), verdict


@confined
@pytest.mark.parametrize("canonical", ["", HONEST_PROGRAM])
def test_what_users_ask_of_programs(reward, canonical):
    verdict = reward.judge(HONEST_PROGRAM, {"tests": [lines(test) for test in HONEST], "answer": canonical})
    assert verdict.word == "passed", verdict


@confined
def test_a_program_may_define_eval(reward):
    row = {"tests": ["assert eval('7') == 8"], "entry_point": "eval"}
    verdicts = [reward.judge(f"def eval(text): return int(text) + {n}", row).word for n in (1, 0)]
    assert verdicts == ["passed", "failed"]


@confined
def test_a_thing_that_cannot_do_what_is_asked_is_undecided(reward):
    verdict = reward.judge(HONEST_PROGRAM, {"tests": ["v = Vec(1, 2)\nassert v.norm() > 0 and v | v"]})
    assert verdict.word == "undecided" and "Made" in verdict.detail, verdict
