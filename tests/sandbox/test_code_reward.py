# SPDX-License-Identifier: Apache-2.0
"""The code reward as a whole: real benchmarks, users' rows, failures, refusal."""

from __future__ import annotations

import gzip
import json
import os
import random
import warnings
from pathlib import Path

import pytest

from sparse_rl.grading import Failed
from sparse_rl.grading.code import CodeReward
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
    rows = random.SystemRandom().sample(humaneval, 12)
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
def test_limits_are_the_users():
    slow = "import time\ndef f():\n    time.sleep(1.5)\n    return 1"
    big = "def f():\n    return len(bytearray(400 << 20)) and 1"
    tests = ["assert f() == 1"]
    narrow = build_reward("code:timeout_s=1,memory_mb=256", GradingConfig(workers=2))
    wide = build_reward("code:timeout_s=9,memory_mb=1024", GradingConfig(workers=2))
    assert score(narrow, [slow, big], tests=tests) == [0.0, 0.0]
    assert score(wide, [slow, big], tests=tests) == [1.0, 1.0]
    assert narrow.__name__ == "code"
    for wrong in ("code:timeout_s=0", "code:memory_mb=5"):
        with pytest.raises(ValueError, match=r"is 0|is 5"):
            build_reward(wrong)


def test_refuses_where_nothing_holds(monkeypatch):
    monkeypatch.setattr("sparse_rl.grading.code.isolation", lambda: Isolation(None, "no walls here"))
    with pytest.raises(ValueError, match=r"no walls here.*unsafe_code"):
        build_reward("code")
    with pytest.warns(RuntimeWarning, match="UNSAFE"):
        unsafe = build_reward("code:timeout_s=5", GradingConfig(unsafe_code=True, workers=1))
    assert score(unsafe, ["def f():\n    return 1", "def f():\n    return 2"], tests=["assert f() == 1"]) == [1.0, 0.0]


def test_a_bubblewrap_that_holds_nothing_back_is_found_out(tmp_path, monkeypatch):
    """A stand-in that drops its options and runs the rest: the probe gets out, and says how."""
    stand_in(tmp_path, monkeypatch, 'while [ "$1" != "--" ]; do shift; done; shift; exec "$@"')
    assert "read a file of its parent's" in module._failure("bwrap")
    stand_in(tmp_path, monkeypatch, "exit 1")
    assert "does not start" in module._failure("bwrap")


@confined
def test_no_warning_where_it_holds():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        CodeReward.build()


@confined
def test_numpy_and_threads_work(reward):
    program = (
        "import threading\nimport numpy as np\nthreading.stack_size(1 << 26)\n"
        "def work(out):\n    out.append(float(np.linalg.det(np.eye(3) * 2)))\n"
        "def f():\n    out = []\n    t = threading.Thread(target=work, args=(out,))\n"
        "    t.start()\n    t.join()\n    return out[0]"
    )
    assert score(reward, [program], tests=["assert round(f()) == 8"]) == [1.0]
