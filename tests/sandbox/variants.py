# SPDX-License-Identifier: Apache-2.0
"""Tests that are honest, with programs that do not solve them and found a way around once."""

from __future__ import annotations

from typing import Any

# Runs in the program's process, so it may send any reply.
_REPLIES = """
import sys
child, encoding = (sys.modules["sparse_rl.sandbox." + name] for name in ("child", "encoding"))
child._Answers.reply = lambda self, request: encoding.encode(REPLY)
"""
_YES = "type('Yes', (), {'__eq__': lambda *given: True})()"
_ROOT = "def find_zero(xs):\n    return -xs[0] / xs[1]"
_DISTANCE = "def digit_distance_nums(a, b):\n    return 14"


def _evalplus(task: str, function: str, given: list[Any], canonical: str) -> dict[str, Any]:
    return {"id": task, "entry_point": function, "base_input": [given], "atol": 1e-6, "answer": canonical}


# what it does: (row, a program that solves it, one that does not)
VARIANTS: dict[str, tuple[dict[str, Any], str, str]] = {
    "changes the polynomial that its root is put into": (
        _evalplus("HumanEval/32", "find_zero", [[-6.0, 2.0]], _ROOT),
        _ROOT,
        "def find_zero(xs): return 0.0" + _REPLIES.replace("REPLY", "['value', 0.0, [[[0.0]], {}]]"),
    ),
    "changes the numbers whose distance it is asked for": (
        _evalplus("Mbpp/558", "digit_distance_nums", [123, 2563], _DISTANCE),
        _DISTANCE,
        "def digit_distance_nums(a, b): return 0" + _REPLIES.replace("REPLY", "['value', 0, [[0, 0], {}]]"),
    ),
    "a global with another value at every look": (
        {"tests": ["assert sorted(result) == [1, 2] and result[0] <= result[1]"]},
        "result = [1, 2]",
        "looks = []\ndef __getattr__(name):\n    looks.append(name)\n    return [[2, 1], [0, 0]][len(looks) > 1]",
    ),
    "an attribute of a class with another value at every look": (
        {"tests": ["s = Sorter([2, 1])\nassert sorted(s.out) == [1, 2] and s.out[0] <= s.out[1]"]},
        "class Sorter:\n    def __init__(self, xs): self.out = sorted(xs)",
        "class Sorter:\n    n = 0\n    def __init__(self, xs): pass\n    @property\n    def out(self):\n"
        "        self.n += 1\n        return [[2, 1], [0, 0]][self.n > 1]",
    ),
    "text that answers for itself once it is evaluated": (
        {"tests": ["assert eval(f([1, 2])) == [1, 2]"]},
        "def f(xs): return repr(xs)",
        f'def f(xs): return "{_YES}"',
    ),
    "text that names the right answer": (
        {"tests": ["right = 7\nassert eval(f(3)) == right"]},
        "def f(n): return '3 + 4'",
        "def f(n): return 'right'",
    ),
    "text that is executed": (
        {"tests": ["found = {}\nexec(f(3), found)\nassert found['g'](2) == 4"]},
        "",
        f'def f(n): return "g = lambda x: {_YES}"',
    ),
    "a date of its own": (
        {"tests": ["assert f('2020-01-02') == date(2020, 1, 2)"]},
        "import datetime\ndef f(text): return datetime.date.fromisoformat(text)",
        "date = lambda *given: 0\ndef f(text): return 0",
    ),
    "a datetime of its own": (
        {"tests": ["assert f('2020-01-02') == datetime(2020, 1, 2) == datetime.fromisoformat('2020-01-02')"]},
        "from datetime import datetime\ndef f(text): return datetime.fromisoformat(text)",
        "datetime = lambda *given: 0\ndef f(text): return 0",
    ),
    "pi and fabs of its own": (
        {"tests": ["assert fabs(f(1) - pi) < 1e-6"]},
        "import math\ndef f(r): return math.pi * r",
        "pi = 0\nfabs = abs\ndef f(r): return 0",
    ),
    "a function with a capital whose path says yes": (
        {"tests": ["from pathlib import Path\nassert Below('a/b').is_relative_to('a')"]},
        "",
        "class Below:\n    def __init__(self, path): pass\n    def is_relative_to(self, other): return True",
    ),
    "a global that makes the tests end": (
        {"tests": ["import sys\nif X != 3:\n    sys.exit(0)\nassert X == 3"]},
        "X = 3",
        "X = object()",
    ),
}

# Right programs, with tests that users write.
HONEST_PROGRAM = """
class Empty(Exception): pass
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def pop(self):
        if not self.items: raise Empty("nothing there")
        return self.items.pop()
class Trie:
    def __init__(self): self.words = set()
    def put(self, word): self.words.add(word)
    def __contains__(self, word): return word in self.words
class Vec:
    def __init__(self, x, y): self.x, self.y = x, y
    def __abs__(self): return (self.x ** 2 + self.y ** 2) ** 0.5
    def norm(self): return abs(self)
class CountTo:
    def __init__(self, stop): self.stop = stop
    def __iter__(self):
        self.i = 0
        return self
    def __next__(self):
        if self.i == self.stop: raise StopIteration
        self.i += 1
        return self.i
def fibonacci():
    a, b = 0, 1
    while True:
        yield a
        a, b = b, a + b
def fails(): raise Empty("nothing there")
def parse(text):
    import json
    return json.loads(text)
def calculate(text): return eval(text)
def curve(): return "3 * x"
n = 0
def more():
    global n
    n += 1
"""
HONEST = """
s = Stack()\\ns.push(1)\\nassert s.pop() == 1\\nwith pytest.raises(Empty, match='nothing'):\\n s.pop()
import unittest\\nunittest.TestCase().assertRaises(Empty, fails)
try:\\n fails()\\n assert False\\nexcept Empty:\\n pass
try:\\n parse('x')\\n assert False\\nexcept (json.JSONDecodeError, ValueError):\\n pass
t = Trie()\\nt.put('abc')\\nassert 'abc' in t and 'ab' not in t
v = Vec(3, 4)\\nassert abs(v) == 5 and v.norm() == 5
c = CountTo(3)\\nassert list(c) == [1, 2, 3] and sum(c) == 6 and c.stop == 3
from itertools import islice\\nassert list(islice(fibonacci(), 10)) == [0, 1, 1, 2, 3, 5, 8, 13, 21, 34]
for a, b in zip(fibonacci(), [0, 1, 1, 2]): assert a == b
g = fibonacci()\\nassert next(g) == 0\\nfor x in g:\\n if x > 4: break\\nassert next(g) == 8
for text in ('1 + 2', '(3 - 4) * 5'): assert calculate(text) == eval(text)
for i in range(3): assert calculate(f'{i} + 1') == eval(f'{i} + 1')
assert eval(curve(), {'x': 5}) == 15
assert eval('max(1, 2)') == 2 and n == 0\\nmore()\\nassert n == 1
""".strip().split("\n")
