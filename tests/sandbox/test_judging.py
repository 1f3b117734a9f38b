# SPDX-License-Identifier: Apache-2.0
"""What is taken for the program, and what for the right answer."""

from __future__ import annotations

import math
import time

import pytest

from sparse_rl.sandbox.compare import right, same_text
from sparse_rl.sandbox.evalplus import arguments, oracle
from sparse_rl.sandbox.extract import complete, extract_program
from sparse_rl.sandbox.seccomp import build_filter, packed
from sparse_rl.sandbox.suite import Calls, Statements, Texts, suite_of

PROMPT = 'import math\n\n\ndef f(x):\n    """Doubles."""\n'


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        ("x = 1", "x = 1"),
        ("Here:\n```python\nx = 1\n```\nor\n```python\nx = 2\n```\nDone.", "x = 2\n"),
        ("```python\nx = 1\n```\n```\nits output\n```", "x = 1\n"),
        ("```\nx = 1\n```", "x = 1\n"),
        ("```bash\nls\n```\n```Python3\nx = 1\n```", "x = 1\n"),
        ("Cut off:\n```py\nx = 1\ny =", "x = 1\ny ="),
        ("  ```python\n  def f():\n      pass\n  ```", "def f():\n    pass\n"),
        ('```python\ns = "``` not a fence"\n```', 's = "``` not a fence"\n'),
    ],
)
def test_the_program_in_a_completion(completion, program):
    assert extract_program(completion) == program


@pytest.mark.parametrize("part", ["a", "`", " ", "```", "\n```", "```py ", "\t```\n\n"])
def test_a_long_completion_is_read_at_once(part):
    """100 kB of anything: the parent reads it, and a time that grows with the square would be minutes."""
    start = time.monotonic()
    for head in ("", "```", "```python\n", "    "):
        extract_program(head + part * (100_000 // len(part)))
    assert time.monotonic() - start < 2


@pytest.mark.parametrize(
    "program",
    [
        "    return 2 * x\n",
        "return 2 * x",
        "y = x\n    return 2 * y",
        "if x:\n    return 2 * x\nreturn 0",
        "for _ in [0]:\n    return 2 * x",
        "def f(x):\n    return 2 * x",
        "def f(x):\n    return int(math.ldexp(x, 1))",
        "from __future__ import annotations\ndef f(x):\n    return 2 * x",
        "f = lambda x: 2 * x",
        "    return g(x)\n\n\ndef g(x):\n    return 2 * x\n",
    ],
)
def test_bodies_and_whole_functions(program):
    space: dict[str, object] = {}
    exec(complete(PROMPT, program, "f"), space)
    assert space["f"](21) == 42


def test_a_prompt_that_is_no_code_is_left_out():
    assert complete('"""Write a function."""', "def f(): pass", "f") == "def f(): pass"


@pytest.mark.parametrize(
    ("returned", "expected", "atol", "verdict"),
    [
        (1, 1, 0, True),
        ([1, 2], (1, 2), 0, False),  # as EvalPlus, which holds results as Python has them
        ("a", "b", 1e-3, False),
        (0.3, 0.1 + 0.2, 0, True),
        (0.30001, 0.3, 0, False),
        (0.3001, 0.3, 1e-3, True),
        ([0.5, 1 / 3], [0.5, 0.33333333], 0, True),
        ([0.5], [0.5, 0.5], 0, False),
        ((0.5 + 1e-9,), [0.5], 0, False),  # of another type
        (1, 1.0000000001, 0, False),  # neither equal nor a float
        (float("nan"), float("nan"), 0, False),  # numpy's allclose says so too
        (math.inf, math.inf, 0, True),
        (math.inf, 1.0, 1e-3, False),
        ([[1.0, 2.0]], [[1.0, 2.0 + 1e-5]], 1e-4, True),
        ([[1.0, 2.0]], [[1.0, 2.0 + 1e-5]], 0, False),  # a list of lists is not floats
        (None, 1.0, 0, False),
        (10**400, 1.0, 1e-3, False),
        (1 + 1e-8j, 1 + 0j, 1e-6, True),
    ],
)
def test_values(returned, expected, atol, verdict):
    assert right(returned, expected, [], atol, "") is verdict


@pytest.mark.parametrize(
    ("oracle_", "returned", "expected", "given_", "verdict"),
    [
        ("root", 1.00001, 0, [[-1, 1]], True),  # x - 1
        ("root", 1.1, 0, [[-1, 1]], False),
        ("root", None, 0, [[-1, 1]], False),
        ("set", [3, 1, 1], (1, 3), [], True),
        ("set", [3], (1, 3), [], False),
        ("set", 3, (1, 3), [], False),
        ("not_none", "match", True, [], True),
        ("not_none", None, False, [], True),
        ("not_none", False, False, [], True),
        ("not_none", True, False, [], False),
        ("or_zero", 0, 7, [], True),
        ("or_zero", 1, 7, [], False),
        ("any", "whatever", 7, [], True),
        ("json", (1, (2,)), [1, [2]], [], True),
        ("json", (1, 3), [1, 2], [], False),
        ("digit_distance", 1 + 2 + 0, 9, [123, 3], True),  # 123 against 003
        ("surface_area", 33, 0, [3, 4], False),
        ("surface_area", "35", 0, [3, 4], False),
        ("surface_area", 35, 0, [3, 4], True),  # 9 + 6 * sqrt(2.25 + 16) = 34.6
    ],
)
def test_tasks_with_more_than_one_answer(oracle_, returned, expected, given_, verdict):
    assert right(returned, expected, given_, 1e-4, oracle_) is verdict


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("1 2\n3\n", "1 2\n3", True),
        ("1  2 \r\n3 \n\n", "1 2\n3\n", True),
        ("1 2 3", "1 2\n3", False),
        ("0.50", "0.5", True),
        ("1e0", "1", True),
        ("YES", "yes", False),
        ("nan", "nan", True),
        ("sNaN", "1", False),
        ("", "", True),
        ("1\n2", "1", False),
        ("9" * 10**6, "1", False),
    ],
)
def test_printed_text(printed, expected, same):
    assert same_text(printed, expected) is same


def test_arguments_that_json_cannot_hold():
    assert arguments("Mbpp/2", [[[1], [2]]]) == [[(1,), (2,)]]
    assert arguments("Mbpp/63", [[[[1, 2]]]]) == [[[(1, 2)]]]
    assert arguments("Mbpp/75", [[[[1, 2]], 3]]) == [[[(1, 2)], 3]]
    assert arguments("Mbpp/106", [[[1], [2]]]) == [[[1], (2,)]]
    assert arguments("Mbpp/115", [[[[1], [], {}]]]) == [[[{1}, {}, {}]]]
    assert arguments("Mbpp/124", [["1", "2j"]]) == [[1.0, 2j]]
    assert arguments("Mbpp/307", [[[1], 2, 3]]) == [[(1,), 2, 3]]
    assert arguments("Mbpp/259", [[[[1]], [[2]]]]) == [[((1,),), ((2,),)]]
    assert arguments("Mbpp/278", [[[1, [2], 3]]]) == [[(1, (2,), 3)]]
    assert arguments("Mbpp/722", [[{"a": [1]}, 2]]) == [[{"a": (1,)}, 2]]
    assert arguments("Mbpp/252", [["1j"]]) == [[1j]]
    assert arguments("Mbpp/580", [[[1, [2, [3]]]]]) == [[(1, (2, (3,)))]]
    assert arguments("HumanEval/2", [[[1]]]) == [[[1]]]
    assert (oracle("HumanEval/32", "find_zero"), oracle("Mbpp/2", "similar_elements")) == ("root", "set")
    assert oracle("HumanEval/1", "similar_elements") == ""


def test_rows_by_their_columns():
    assert isinstance(suite_of({"test_list": ["assert f()"], "test_setup_code": ""}), Statements)
    assert isinstance(suite_of({"test": "def check(c): pass", "entry_point": "f", "problem": PROMPT}), Statements)
    assert isinstance(suite_of({"tests": '["assert f()"]', "test": None}), Statements)
    assert isinstance(suite_of({"tests": [{"input": "1", "output": "2"}]}), Texts)
    assert isinstance(suite_of({"tests": [{"input": [1], "output": 2}], "entry_point": "f"}), Calls)
    lcb = {"input": "[1]\n2", "output": "3", "testtype": "functional"}
    calls = suite_of({"public_tests": [lcb], "fn_name": "solve"})
    assert isinstance(calls, Calls) and calls.function == "Solution.solve" and calls.inputs == b"[[[1],2]]"
    assert isinstance(suite_of({"public_tests": [lcb | {"testtype": "stdin"}]}), Texts)
    with pytest.raises(ValueError, match=r"no tests: its columns are \['question'\]"):
        suite_of({"question": "?"})
    with pytest.raises(ValueError, match="empty"):
        suite_of({"tests": []})
    with pytest.raises(ValueError, match="input and an output"):
        suite_of({"tests": [{"input": "1"}]})
    with pytest.raises(ValueError, match="canonical"):
        suite_of({"base_input": [[1]], "entry_point": "f"})


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_decides_as_written(machine):
    """An interpreter of the filter's own: every jump lands, and calls are judged by their arguments."""
    program = build_filter(machine, pid=77)
    assert len(packed(program)) == 8 * len(program) and len(program) < 4096
    arm = machine == "aarch64"
    arch = 0xC00000B7 if arm else 0xC000003E

    def decide(nr: int, *given: int, arch: int = arch) -> int:
        data = {0: nr, 4: arch} | {16 + 8 * i: value for i, value in enumerate((*given, 0, 0, 0, 0, 0, 0)[:6])}
        at, value = 0, 0
        while True:
            code, yes, no, k = program[at]
            at += 1
            if code == 0x06:
                return k
            if code == 0x20:
                value = data[k] & 0xFFFFFFFF
            elif code == 0x54:
                value &= k
            else:
                at += yes if {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[code] else no

    allow, refuse, kill = 0x7FFF0000, 0x00050001, 0x80000000
    assert decide(63 if arm else 0) == allow  # read
    assert decide(198 if arm else 41) == refuse  # socket
    assert decide(221 if arm else 59) == refuse  # execve
    assert decide(435) == 0x00050026  # clone3: no such call
    clone, kill_, openat = (220, 129, 56) if arm else (56, 62, 257)
    assert decide(clone, 0x3D0F00) == allow  # a thread
    assert decide(clone, 17) == refuse  # a process
    assert decide(clone, 0x3D0F00 | 0x10000000) == refuse  # a thread with a namespace
    assert (decide(kill_, 77, 9), decide(kill_, 78, 9), decide(kill_, 0xFFFFFFFF, 9)) == (allow, refuse, refuse)
    assert (decide(openat, 0, 0, 0), decide(openat, 0, 0, 0o1000), decide(openat, 0, 0, 0o1001)) == (
        allow,
        refuse,
        allow,
    )
    fcntl, prlimit, ioctl = (25, 261, 29) if arm else (72, 302, 16)
    assert (decide(fcntl, 3, 1030), decide(fcntl, 3, 8)) == (allow, refuse)  # F_SETOWN
    assert (decide(prlimit, 0), decide(prlimit, 77), decide(prlimit, 1)) == (allow, allow, refuse)
    assert decide(ioctl, 0) == 0x00050019  # not a terminal
    assert decide(ioctl, 3, 0x5421) == allow  # FIONBIO
    unlink, pair = (35, 199) if arm else (263, 53)
    assert decide(unlink, 0, 0) == 0x00050000  # not done, and no error
    assert decide(276 if arm else 316) == refuse  # renameat2
    cloexec = 0o2000000
    assert decide(pair, 1, 1 | cloexec) == allow
    assert {decide(pair, 1, 2 | cloexec), decide(pair, 2, 1), decide(pair, 16, 3), decide(pair, 1, 5)} == {refuse}
    assert decide(openat, 0, 0, 0o20200002) == refuse  # O_TMPFILE
    assert decide(0, arch=0x40000003) == kill  # i386
    if not arm:
        assert decide(0x40000000) == kill  # x32


def test_an_unknown_machine_has_no_filter():
    with pytest.raises(ValueError, match="riscv64"):
        build_filter("riscv64", 1)
