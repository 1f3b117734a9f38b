# SPDX-License-Identifier: Apache-2.0
"""The code reward as a whole: real benchmarks, users' rows, failures, refusal."""

from __future__ import annotations

import ctypes
import gzip
import json
import os
import platform
import random
from pathlib import Path

import pytest

from sparse_rl.grading import Failed
from sparse_rl.grading.code import CodeReward, warn_unsafe
from sparse_rl.sandbox import isolation as module
from sparse_rl.sandbox.isolation import Isolation, isolation
from sparse_rl.sandbox.process import Limits, Sandbox
from sparse_rl.tasks.rewards import GradingConfig, build_reward

confined = pytest.mark.skipif(isolation().method is None, reason=f"no isolation on this machine: {isolation().reason}")


@pytest.fixture(scope="module")
def reward() -> CodeReward:
    return CodeReward.build(Limits(timeout_s=10.0), workers=2)


@pytest.fixture(scope="module")
def humaneval() -> list[dict]:
    with gzip.open(Path(__file__).parents[1] / "data" / "humaneval_plus_mini.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def score(reward: CodeReward, programs: list[str], **row: object) -> list[object]:
    return reward([""] * len(programs), programs, **{name: [value] * len(programs) for name, value in row.items()})


def both_ways(reward: CodeReward, rows: list[dict]) -> tuple[list[str], list[str]]:
    """The ids of canonical solutions that do not pass, and of programs without an answer that do."""
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    prompts = columns["problem"]
    right = reward(prompts, columns["answer"], **columns)
    wrong = reward(prompts, ["    return None\n"] * len(rows), **columns)
    ids = columns["id"]
    return [i for i, s in zip(ids, right, strict=True) if s != 1.0], [i for i, s in zip(ids, wrong, strict=True) if s]


@confined
def test_canonical_solutions_pass_and_empty_ones_do_not(reward, humaneval):
    """A fresh sample; the whole is `test_all_canonical_solutions`."""
    rows = random.sample(humaneval, 6)
    assert both_ways(reward, rows) == ([], [])


@pytest.mark.slow
@confined
def test_all_canonical_solutions(reward, humaneval):
    assert len(humaneval) == 164
    assert both_ways(reward, humaneval) == ([], [])


@confined
def test_rows_of_every_form(reward):
    double = "def f(x):\n    return 2 * x"
    triple = "def f(x):\n    return 3 * x"
    assert score(reward, [double, triple], test_list=["assert f(2) == 4", "assert f('a') == 'aa'"]) == [1.0, 0.0]
    assert score(reward, [double, triple], tests=[{"input": [2], "output": 4}], entry_point="f") == [1.0, 0.0]
    texts = [{"input": "2\n", "output": "4\n"}, {"input": "5", "output": "10"}]
    scripts = ["print(2 * int(input()))", "print(4)", "print(2 * int(input()))\nraise ValueError"]
    assert score(reward, scripts, tests=texts) == [1.0, 0.0, 0.0]
    functional = [{"input": "[1, 2]\n3", "output": "[4, 5]", "testtype": "functional"}]
    solution = "class Solution:\n    def add(self, xs: List[int], n: int):\n        return tuple(x + n for x in xs)"
    assert score(reward, [solution, "class Solution: pass"], public_tests=functional, fn_name="add") == [1.0, 0.0]
    setup = "root = Node(1)\nroot.left = Node(2)"
    node = "class Node:\n    def __init__(self, v):\n        self.v, self.left = v, None\n"
    tests = ["assert depth(root) == 2", "assert math.isclose(depth(root.left), 1)"]
    depth = node + "def depth(n):\n    return 1 + depth(n.left) if n else 0"
    assert score(reward, [depth, node + "def depth(n):\n    return 2"], test_list=tests, test_setup_code=setup) == [
        1.0,
        0.0,
    ]


# A program with something of everything, and tests that are right for it.
LIBRARY = """
import collections, datetime, decimal, fractions
X = 3
log = []
class MyE(ValueError): pass
class Vec:
    def __init__(self, x): self.x = x
    def __eq__(self, other): return isinstance(other, Vec) and self.x == other.x
    def __hash__(self): return hash(self.x)
    def __add__(self, other): return Vec(self.x + other.x)
    def __mul__(self, factor): return Vec(self.x * factor)
    __rmul__ = __mul__
    def __lt__(self, other): return self.x < other.x
    def __str__(self): return f"<{self.x}>"
    def __len__(self): return self.x
    def __getitem__(self, i): return [self.x][i]
def sort(xs): xs.sort(); log.append(xs[0])
def put(rows, more): rows[0].append(9); more["a"] = [1]; more.pop("b")
def library(): return [decimal.Decimal("0.1"), fractions.Fraction(1, 3), collections.deque([1]), range(3)]
def when(): return datetime.date(2020, 1, 2), datetime.timedelta(1)
def bad(): raise MyE("x")
def same(a): return a
def keys(d): return d.keys()
def others():
    import array, pathlib, uuid
    return [uuid.UUID(int=7), pathlib.Path("a/b"), array.array("i", [1, 2]), {1: 2}.items()]
def gen(): yield from (1, 2)
def stop(x): raise StopIteration
def later():
    import asyncio
    async def one():
        await asyncio.sleep(0.001)
        return await asyncio.to_thread(lambda: 1)
    return asyncio.run(one())
def temporary():
    import tempfile
    with tempfile.TemporaryFile() as a, tempfile.NamedTemporaryFile("w+") as b:
        return a.write(b"xy") + b.write("z")
"""
WORKS = [
    "assert X == 3 and X + 1 == 4 and [X for _ in 'ab'] == [3, 3]",
    "def check():\n    return X\nassert check() == 3",
    "a = [3, 1]\nsort(a)\nassert a == [1, 3] and log == [1]\nsort(a)\nassert len(log) == 2",
    "rows = [[1], [2]]\nrow, more = rows[0], {'b': 2}\nput(rows, more=more)\n"
    "assert row == [1, 9] and more == {'a': [1]}",
    "assert Vec(1) + Vec(2) == Vec(3) and Vec(1) != Vec(2) and 2 * Vec(2) == Vec(2) * 2 == Vec(4)",
    "assert str(Vec(1)) == f'{Vec(1)}' == '<1>' and len({Vec(1), Vec(1)}) == 1 and len(Vec(7)) == 7 and Vec(5)[0] == 5",
    "assert Vec(1) < Vec(2) and sorted([Vec(2), Vec(1)])[0].x == 1",
    "assert isinstance(Vec(1), Vec) and not isinstance(3, Vec)",
    "from decimal import *\nfrom fractions import *\nfrom collections import deque\n"
    "assert library() == [Decimal('0.1'), Fraction(1, 3), deque([1]), range(3)]",
    "import datetime\nassert when() == (datetime.date(2020, 1, 2), datetime.timedelta(1))",
    "try:\n    bad()\n    assert False\nexcept MyE as error:\n    assert str(error) == 'x'",
    "try:\n    bad()\n    assert False\nexcept (KeyError, ValueError):\n    pass",
    "g = gen()\nassert (next(g), next(g), next(g, 0)) == (1, 2, 0)",
    "assert type(same([])) is list and same(None) is None and gen() != [1, 2]",
    "assert 2 in keys({2: 1}) and list(keys({2: 1, 1: 1})) == [2, 1] and keys({1: 2}) == {1} and keys({1: 2}) != {3}",
    "import array, pathlib, uuid\n"
    "assert others() == [uuid.UUID(int=7), pathlib.Path('a/b'), array.array('i', [1, 2]), {1: 2}.items()]",
    "assert Vec(5)[0:1] == [5]",
    "assert later() == 1 and temporary() == 3",
]
WRONG = [
    "assert all(map(stop, [1]))",
    "assert gen() == [1, 2]",
    "assert keys({1: 2}) == [1]",
    "import uuid\nassert others()[0] == uuid.UUID(int=8)",
    "assert X == 4 or exit(1)",
    "assert Y == 3",
    "assert Vec(1) == 1",
    "try:\n    stop(1)\nexcept MyE:\n    pass",
    "a = [3, 1]\nsort(a)\nassert a == [3, 1]",
]
BROKEN = {
    "a = [1]\nassert same(a) is a": "one cannot be asked",
    "assert X == 3\nimport sys\nsys.exit(0)": "end their own process",
    "try:\n    same(lambda: 1)\nexcept Exception:\n    pass": "a function cannot be passed",
}


@confined
def test_what_tests_may_do_with_a_program(reward):
    """And what does not go over to another process is the grader's failure, with its reason, and never a 0."""
    passed = reward.judge(LIBRARY, {"tests": WORKS})
    assert passed.word == "passed", passed
    assert {test: reward.judge(LIBRARY, {"tests": [test]}).word for test in WRONG} == dict.fromkeys(WRONG, "failed")
    for test, reason in BROKEN.items():
        verdict = reward.judge(LIBRARY, {"tests": [test]})
        assert verdict.word == "broken" and reason in verdict.detail, (test, verdict)


@confined
def test_chats_and_exceptions(reward):
    tests = ["try:\n    f(0)\n    assert False\nexcept ZeroDivisionError:\n    pass"]
    chat = [{"role": "assistant", "content": "Sure.\n```python\ndef f(x):\n    return 1 / x\n```"}]
    assert reward(["?"], [chat], tests=[tests]) == [1.0]
    assert reward(["?"], ["def f(x):\n    raise ValueError"], tests=[tests]) == [0.0]
    lazy = "def f(n):\n    return (i for i in range(n))"
    assert score(reward, [lazy], tests=["assert list(f(3)) == [0, 1, 2]"]) == [1.0]
    assert score(reward, [lazy, "def f(n):\n    return range(n)"], tests=["assert f(3) == [0, 1, 2]"]) == [0.0, 0.0]
    assert score(reward, ["def f(n):\n    return range(n)"], tests=["assert len(f(3)) == 3 and f(3)[1] == 1"]) == [1.0]
    assert "SyntaxError" in reward.judge("def f(", {"tests": tests}).detail


@confined
def test_a_broken_test_is_a_failure_of_the_grader(reward):
    """Not of the program, which would otherwise get 0."""
    right = "def f():\n    return 1"
    for tests in (["assert f( == 1"], ["1 / 0"], ["assert True"], ["f(lambda: 1)"]):
        (found,) = score(reward, [right], tests=tests)
        assert isinstance(found, Failed), (tests, found)
    row = {
        "base_input": [[1]],
        "plus_input": [],
        "atol": 0,
        "entry_point": "f",
        "answer": "def f(x):\n    return 1 / 0",
    }
    (found,) = score(reward, [right], **row)
    assert isinstance(found, Failed) and "ZeroDivisionError" in found.reason


def test_a_child_that_cannot_start_is_a_failure_of_the_grader(tmp_path, monkeypatch):
    stand_in(tmp_path, monkeypatch, "exit 1")
    box = CodeReward(Sandbox("bwrap", Limits()), 1)
    for row in ({"tests": ["assert f() == 1"]}, {"tests": [{"input": "", "output": ""}]}):
        (found,) = score(box, ["def f():\n    return 1"], **row)
        assert isinstance(found, Failed), found


@confined
@pytest.mark.parametrize("row", [{"tests": ["assert f() == 1"]}, {"tests": [{"input": "", "output": "1"}]}])
@pytest.mark.some(1)
def test_the_clock_starts_when_the_process_is_ready(tmp_path, monkeypatch, row):
    """A machine under load: programs have their time when they get to start, and are not to blame when they do not."""
    box = CodeReward(Sandbox("bwrap", Limits(timeout_s=0.5)), 1)
    programs = ["def f():\n    return 1\nprint(1)", "import time\ntime.sleep(2)\ndef f():\n    return 1\nprint(1)"]
    stand_in(tmp_path, monkeypatch, 'while [ "$1" != "--" ]; do shift; done; shift; sleep 0.6; exec "$@"')
    assert score(box, programs, **row) == [1.0, 0.0]
    monkeypatch.setattr("sparse_rl.sandbox.process._START_S", 0.3)
    (found,) = score(box, programs[:1], **row)
    assert isinstance(found, Failed) and "not ready after 0.3 s" in found.reason


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """A bubblewrap of our own."""
    (folder / "bwrap").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bwrap").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@confined
def test_long_results_count_and_impossible_ones_are_passed_over(reward):
    """2 million letters are compared by digest; 100 million do not go through, of the canonical solution's either."""
    row = {
        "base_input": [[3], [2_000_000], [100_000_000]],
        "entry_point": "f",
        "answer": "def f(n):\n    return 'a' * n",
    }
    last = "def f(n):\n    return 'a' * (n - 1) + ('a' if n < 4 else 'b')"
    short = "def f(n):\n    return 'a' * n if n < 9**7 else ''"
    assert score(reward, [row["answer"], last, short], **row) == [1.0, 0.0, 1.0]


def test_rows_without_tests_are_refused_before_any_runs():
    reward = CodeReward(Sandbox(None, Limits()), 1)
    assert reward.check({"tests": ["assert f() == 1"], "test": ""}) is None
    assert reward.check({"base_input": [[1]], "plus_input": [], "entry_point": "f", "answer": "def f(x): ..."}) is None
    for row in ({"answer": "3"}, {"tests": []}, {"tests": "not JSON"}, {"tests": 3}, {"test": "", "entry_point": "f"}):
        assert reward.check(row).startswith("has no tests that can be read (")


@confined
def test_a_column_that_is_empty_in_a_row_is_none(reward):
    """Rows of several kinds in one file have each other's columns, with nothing in them."""
    row = {"tests": ["assert f() == 1"], "test_list": [], "public_tests": "", "base_input": [], "plus_input": None}
    assert reward.check(row) is None
    assert score(reward, ["def f():\n    return 1", "def f():\n    return 2"], **row) == [1.0, 0.0]


@confined
def test_long_results_are_the_same_in_any_order(reward):
    """Sets and dicts that are built the other way round, of over a million letters."""
    canonical = "def f(n):\n    return {'%099d' % i for i in range(n)}, {i: -i for i in range(n)}"
    other = canonical.replace("range(n)", "reversed(range(n))")
    wrong = canonical.replace("-i for", "i for")
    row = {"base_input": [[12_000]], "entry_point": "f", "answer": canonical}
    assert score(reward, [other, wrong], **row) == [1.0, 0.0]


def test_what_the_kernel_offers_is_used():
    """Where Landlock and seccomp are there, isolation must hold: otherwise every test of it would be passed over."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        pytest.skip("Linux on x86_64 or aarch64")
    libc = ctypes.CDLL(None)
    libc.syscall.restype = ctypes.c_long
    landlock = libc.syscall(ctypes.c_long(444), None, ctypes.c_long(0), ctypes.c_long(1)) >= 1
    if not landlock or not Path("/proc/sys/kernel/seccomp/actions_avail").exists():
        pytest.skip("the kernel has no Landlock or no seccomp")
    assert isolation() == Isolation("landlock")


@confined
def test_limits_are_the_users():
    slow = "import time\ndef f():\n    time.sleep(1)\n    return 1"
    big = "def f():\n    return len(bytearray(400 << 20)) and 1"
    tests = ["assert f() == 1"]
    narrow = build_reward("code:timeout_s=0.8,memory_mb=256", GradingConfig(workers=2))
    wide = build_reward("code:timeout_s=9,memory_mb=1024", GradingConfig(workers=2))
    assert score(narrow, [slow, big], tests=tests) == [0.0, 0.0]
    assert score(wide, [slow, big], tests=tests) == [1.0, 1.0]
    assert narrow.__name__ == "code"
    for wrong in ("code:timeout_s=0", "code:memory_mb=5"):
        with pytest.raises(ValueError, match=r"is 0|is 5"):
            build_reward(wrong)


def test_refuses_where_nothing_holds(monkeypatch, caplog):
    warn_unsafe.cache_clear()
    monkeypatch.setattr("sparse_rl.grading.code.isolation", lambda: Isolation(None, "no walls here"))
    with pytest.raises(ValueError, match=r"no walls here.*unsafe_code"):
        build_reward("code")
    unsafe = build_reward("code:timeout_s=5", GradingConfig(unsafe_code=True, workers=1))
    build_reward("code", GradingConfig(unsafe_code=True))
    (said,) = (record.getMessage() for record in caplog.records)  # of two benchmarks' graders, once
    assert said.startswith("UNSAFE") and "no walls here" in said
    assert score(unsafe, ["def f():\n    return 1", "def f():\n    return 2"], tests=["assert f() == 1"]) == [1.0, 0.0]


def test_a_bubblewrap_that_holds_nothing_back_is_found_out(tmp_path, monkeypatch):
    """A stand-in that drops its options and runs the rest: the probe gets out, and says how."""
    stand_in(tmp_path, monkeypatch, 'while [ "$1" != "--" ]; do shift; done; shift; exec "$@"')
    assert "read a file of its parent's" in module._failure("bwrap")
    stand_in(tmp_path, monkeypatch, "exit 1")
    assert "does not start" in module._failure("bwrap")


@confined
def test_no_warning_where_it_holds(caplog):
    CodeReward.build()
    assert not caplog.records


@confined
def test_numpy_and_threads_work(reward):
    program = (
        "import threading\nimport numpy as np\nthreading.stack_size(1 << 26)\n"
        "def work(out):\n    out.append(float(np.linalg.det(np.eye(3) * 2)))\n"
        "def f():\n    out = []\n    t = threading.Thread(target=work, args=(out,))\n"
        "    t.start()\n    t.join()\n    return out[0]"
    )
    assert score(reward, [program], tests=["assert round(f()) == 8"]) == [1.0]
    mean = "def f(x):\n    x[0] = 9\n    return x.mean(axis=0) + g(x.dtype.name)\ndef g(name):\n    return len(name)"
    tests = ["a = np.array([[3, 1], [5, 3]])\nassert np.allclose(f(a), [12, 11]) and a.tolist() == [[9, 9], [5, 3]]"]
    assert score(reward, [mean, mean.replace("+", "-")], tests=tests) == [1.0, 0.0]


@confined
def test_a_program_may_be_asked_for_a_helper(reward):
    """Where the row says that it is the program's; what the tests define is theirs."""
    own = "def isclose(a, b):\n    return abs(a - b) < 1"
    tests = ["assert isclose(1, 1.5)", "assert not isclose(1, 2)"]
    assert score(reward, [own], tests=tests, entry_point="isclose") == [1.0]
    assert score(reward, [own], tests=tests, answer=own) == [1.0]
    (found,) = score(reward, [own], tests=["assert isclose(1, 1)"])
    assert isinstance(found, Failed) and "never call the program" in found.reason
    theirs = "def approx(x):\n    return round(x)\nassert approx(f()) == 2"
    assert score(reward, ["def f():\n    return 1.9"], tests=[theirs]) == [1.0]
