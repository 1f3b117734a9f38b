# SPDX-License-Identifier: Apache-2.0
"""Programs that return objects, with tests that a wrong one can make unworkable, that judge them, and that cannot."""

from __future__ import annotations

# `make` should return something with a `count` of 3. A wrong result makes each of these tests unworkable.
STEERED = """
item = make()\\nassert use(item.count) == 3 and item.count == 3
assert use(getattr(make(), 'count')) == 3 and make().count == 3
assert use([make().count, 1]) == 3 and make().count == 3
assert use(k={'a': make().count}) == 3 and make().count == 3
item = make()\\nassert item.count == 3 or use(iter(item))
item = make()\\nassert item.count == 3 or use(type(item))
item = make()\\nassert use(item.count if hasattr(item, 'count') else print) == 3 and item.count == 3
assert make().count == 3 or exit()
import sys\\nif getattr(make(), 'count', 0) != 3: sys.exit(0)
if getattr(make(), 'count', 0) != 3: raise SystemExit(None)
if getattr(make(), 'count', 0) != 3: use(print)
if getattr(make(), 'count', 0) != 3: use(lambda: 1)
if getattr(make(), 'count', 0) != 3: raise KeyboardInterrupt
import os\\nif getattr(make(), 'count', 0) != 3: os.abort()
import unittest\\nif getattr(make(), 'count', 0) != 3: raise unittest.SkipTest
try:\\n assert make().count == 3\\nexcept AssertionError: use(print)
try:\\n use(make().count)\\n assert make().count == 3\\nexcept: use(print)
try:\\n assert make().count != 3\\n use(print)\\nexcept AssertionError: pass
""".strip().split("\n")
MAKES = """
class Item: count, index = 3, 4
def use(*given, **named): return 3
def make(): return RESULT
"""
WRONG = ["[1]", "'abc'", "None", "iter([1])", "make", "7", "object()", "type('X', (), {'count': len})()"]

# Right programs and tests that use their classes and objects.
OBJECTS = """
import dataclasses, enum
class Stack:
    def __init__(self): self.items = []
    def push(self, item): self.items.append(item)
    def pop(self): return self.items.pop()
    def is_empty(self): return not self.items
    def __len__(self): return len(self.items)
    def __iter__(self): return iter(self.items)
class Node:
    def __init__(self, val, left=None, right=None): self.val, self.left, self.right = val, left, right
def build(xs):
    m = len(xs) // 2
    return Node(xs[m], build(xs[:m]), build(xs[m + 1:])) if xs else None
def depth(node): return 1 + max(depth(node.left), depth(node.right)) if node else 0
def raise_by(node, n): node.val += n
class Color(enum.Enum): RED, BLUE = 1, 2
def favourite(): return Color.RED
@dataclasses.dataclass
class Place:
    x: int
def origin(): return Place(0)
class Vec:
    def __init__(self, x): self.x = x
    def __eq__(self, other): return self.x == other.x
    def __mul__(self, factor): return Vec(self.x * factor)
    def __str__(self): return f"<{self.x}>"
def compose(f, g): return lambda x: f(g(x))
def inc(x): return x + 1
def counter():
    n = 0
    def more():
        nonlocal n
        n += 1
        return n
    return more
def squares(n): yield from (i * i for i in range(n))
def values(d): return d.values()
"""
JUDGED = """
s = Stack()\\ns.push(1)\\ns.push(2)\\nassert s.pop() == 2 and not s.is_empty() and len(s) == 1
s = Stack()\\ns.push(1)\\nassert 1 in s and list(s) == [1]
root = build([1, 2, 3])\\nassert root.val == 2 and root.left.val == 1 and root.left.left is None and depth(root) == 2
root = build([1])\\nraise_by(root, 1)\\nassert root.val == 2\\nraise_by(root, 1)\\nassert root.val == 3
def walk(n): return walk(n.left) + [n.val] + walk(n.right) if n else []\\nassert walk(build([1, 2, 3])) == [1, 2, 3]
assert favourite() == Color.RED and favourite() != Color.BLUE and Color.RED.value == 1 and favourite().name == 'RED'
assert origin().x == 0 and Vec(2).x == 2
assert Vec(2) * 2 == Vec(4) and (Vec(2) * 2).x == 4 and str(Vec(1)) == '<1>' and isinstance(Vec(1), Vec)
assert compose(inc, inc)(3) == 5
c = counter()\\nassert (c(), c(), c()) == (1, 2, 3)
g = squares(4)\\nassert next(g) == 0 and next(g) == 1 and list(g) == [4, 9] and list(g) == []
g = squares(4)\\nfor x in g: break\\nassert sum(g) == 14
v = values({'a': 1, 'b': 2})\\nassert sorted(v) == [1, 2] and list(v) == [1, 2] and len(v) == 2
""".strip().split("\n")
# Right programs too, but their tests ask an object for what only it could say.
UNJUDGED = """
assert str(build([1])) != ''
assert len(str(origin())) > 0
assert origin() in [origin()]
assert not (Vec(2) * 2) or str(Vec(2) * 2) == '<4>'
assert build([1]) == build([1])
""".strip().split("\n")
