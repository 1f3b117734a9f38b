# SPDX-License-Identifier: Apache-2.0
"""An object that says yes to everything, and tests that it must not pass.

`f(3)` should return something plain: 7, "seven", [1, 2], {1, 2}. `WORD` is what the object says, `seen()` what it was
shown.
"""

from __future__ import annotations

YES = """
import functools
SEEN = []
def says(self, *given, **named):
    SEEN.extend(repr(one) for one in given if not isinstance(one, Yes))
    return WORD
class Meta(type):
    __instancecheck__ = __subclasscheck__ = lambda *given: True
class Yes(metaclass=Meta):
    def __getattr__(self, name):
        if name.startswith('__'):
            raise AttributeError(name)
        return functools.partial(says, self)
for _name in '''lt le gt ge eq ne add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or radd rsub
        rmul rmatmul rtruediv rfloordiv rmod rdivmod rpow rlshift rrshift rand rxor ror iadd isub imul itruediv ior iand
        neg pos abs invert round trunc floor ceil getitem contains reversed length_hint call enter exit array
        array_ufunc array_function'''.split():
    setattr(Yes, f'__{_name}__', says)
Yes.__len__ = lambda self: 2
Yes.__bool__ = lambda self: True
Yes.__hash__ = lambda self: hash(7)
Yes.__int__ = Yes.__index__ = lambda self: 7
Yes.__float__ = lambda self: 7.0
Yes.__str__ = Yes.__repr__ = lambda self: '7'
Yes.__format__ = lambda self, how: '7.00'
Yes.__iter__ = lambda self: iter([Yes(), Yes()])
Yes.shape, Yes.dtype, Yes.ndim, Yes.__array_priority__ = (2,), 'float64', 1, 1e9
def f(n):
    return Yes()
def pair(n):
    return [Yes(), {'it': Yes()}, (Yes(),)]
def later(n):
    yield Yes()
    yield Yes()
class Solution:
    def solve(self, n):
        return Yes()
result = Yes()
def seen():
    return SEEN
"""

# Each is false of a wrong answer, and may only be true of an object that says so.
LIES = """
np.abs(f(3) - np.array([1., 2.])).max() < 1e-6
np.abs(np.array([1., 2.]) - f(3)).max() < 1e-6
(np.array([1., 2.]) == f(3)).all()
(f(3) == np.array([1., 2.])).all()
np.all(f(3) == np.array([1., 2.]))
np.all(np.array([1., 2.]) <= f(3))
not np.any(f(3) != np.array([1., 2.]))
np.array_equal(f(3), [1, 2])
np.array_equal(np.array(f(3)), [1, 2])
np.allclose(f(3), 7)
np.allclose([1, 2], f(3))
np.isclose(f(3), 7)
np.testing.assert_allclose(f(3), [1., 2.]) is None
np.testing.assert_equal(f(3), 7) is None
np.testing.assert_array_equal(f(3), [1, 2]) is None
np.testing.assert_array_less(f(3), 9) is None
np.linalg.norm(f(3) - np.array([1, 2])) < 1e-9
np.sum(f(3)) == 7
np.max(f(3)) < 9
np.asarray(f(3), dtype=float).sum() == 14
np.dot(f(3), [1, 2]) == 5
f(3) @ np.eye(2) is not None
abs(f(3) - 7) < 1e-6
abs(7 - f(3)) < 1e-6
abs(-(f(3) - 7)) < 1e-6
-f(3) == -7
-f(3)
+f(3) == 7
~f(3) == -8
not (f(3) - 7)
not (f(3) ^ 7)
not f(3) - {1, 2}
len(f(3) - {1, 2}) == 0
len({1, 2} - f(3)) == 0
len(f(3)) == 2
str(f(3) - 7) == '0'
str(f(3)) == '7'
repr(f(3)) == '7'
f'{f(3)}' == '7'
f'{f(3):.2f}' == '7.00'
'%s' % f(3) == '7'
'%d' % f(3) == '7'
format(f(3), '.2f') == '7.00'
'{:.2f}'.format(f(3)) == '7.00'
sum(f(3) - np.array([1, 2])) == 0
sum(f(3)) == 14
sum(x - 7 for x in f(3)) == 0
round(f(3) - 7, 6) == 0
round(f(3)) == 7
int(f(3)) == 7
float(f(3)) == 7.0
complex(f(3)) == 7
[5, 6, 7, 8][f(3) - 7] == 5
range(10)[f(3)] == 7
hex(f(3)) == '0x7'
bytes(f(3)) == b'\\x07\\x07'
divmod(f(3), 7) == (1, 0)
pow(f(3), 2) == 49
math.isclose(f(3), 7)
math.isclose(f(3) - 7, 0, abs_tol=1e-9)
math.floor(f(3)) == 7
math.fabs(f(3) - 7) < 1e-9
math.sqrt(f(3) * 7) == 7
math.hypot(f(3)) == 7
statistics.mean(f(3)) == 7
isclose(f(3), 7)
f(3) == approx(7)
approx(7) == f(3)
approx(f(3)) == 7
approx([1, 2]) == f(3)
f(3) == 7
7 == f(3)
f(3) >= 7
7 <= f(3)
6 < f(3) < 8
6 <= f(3) - 1 <= 8
f(2) < f(3) < f(5)
f(2) <= f(3)
f(3) == f(1) + f(2)
f(3) == f(3)
f(3) != f(4)
f(3) % 7 == 0
f(3) & 1
f(3) >> 1 == 3
1 << f(3) == 128
2 ** f(3) == 128
f(3) // 7 == 1
f(3) * 0 == 0
7 in f(3)
f(3) in [7]
f(3) in {7}
f(3) in (6, 7)
{7: True}[f(3)]
[7].index(f(3)) == 0
[7].count(f(3)) == 1
f(3).issubset({1, 2})
{1, 2}.issuperset(f(3))
f(3).isdisjoint({3})
f(3) <= {1, 2}
{1, 2} >= f(3)
f(3) | {1} == {1, 2}
f(3).startswith('sev')
f(3).endswith('en')
f(3).isdigit()
f(3).isdigit() == True
f(3).is_integer()
f(3).count(7) == 1
-1 < f(3) - 7 < 1
(f(3) - 7) ** 2 < 1e-9
list(map(str, [f(3)])) == ['7']
str([f(3)]) == '[7]'
repr(f(3)) == repr(f(1) + f(2))
f(3).index(7) == 0
f(3).find('x') == 0
f(3).get('a', 7) == 7
f(3).all()
f(3).any()
f(3).equals([1, 2])
f(3).tolist() == [1, 2]
f(3).shape == (2,) and f(3).sum() == 3
f(3).union({1, 2}) == {1, 2}
f(3).symmetric_difference({1, 2}) == set()
f(3).replace('seven', '') == ''
f(3)[0] == 1
f(3)[0] - 1 == 0
f(3)[:1] == [1]
f(3)[-1] <= 2
list(f(3)) == [1, 2]
tuple(f(3)) == (1, 2)
set(f(3)) == {1, 2}
sorted(f(3)) == [1, 2]
sorted([f(3), f(2)])[0] == 7
list(reversed(f(3))) == [2, 1]
min(f(3)) == 1
max(f(3)) == 2
max(f(3), 6) == 7
min(f(3), 8) == 7
max(f(3), 6) is not 6
max([f(3), f(4)], key=lambda x: x - 7) is not None
max(map(abs, f(3) - np.array([1, 2]))) < 1e-6
all(abs(a - b) < 1e-6 for a, b in zip(f(3), [1., 2.]))
all(a == b for a, b in zip(f(3), [1, 2]))
all(x > 0 for x in f(3))
any(x == 2 for x in f(3))
all(map(lambda x: x - 1 < 2, f(3)))
all([f(3) > 1, f(3) < 9])
next(later(3)) == 7
next(later(3)) - 7 == 0
list(later(3)) == [1, 2]
sum(later(3)) == 14
dict(f(3)) == {}
{**f(3)} == {}
[*f(3)] == [1, 2]
dict(zip('ab', f(3))) == {'a': 1, 'b': 2}
Counter(f(3)) == Counter([1, 2])
deque(f(3)) == deque([1, 2])
''.join(f(3)) == 'seven'
'seven'.startswith(f(3))
'seven' + f(3) == 'sevenseven'
f(3) + 'x' == 'sevenx'
[1, 2] + f(3) == [1, 2, 1, 2]
f(3) + [3] == [1, 2, 3]
f(3) * 2 == [1, 2, 1, 2]
isinstance(f(3), int)
isinstance(f(3), (int, float, str, list))
isinstance(f(3) - 7, int)
type(f(3)) is int
type(f(3)) == int
issubclass(type(f(3)), int)
hash(f(3)) == hash(7) and f(3) == 7
f(3).real - 7 == 0
f(3).value == 7
f(3).value - 7 == 0
f(3).value()
f(3).__len__() == 2
f(3).__eq__(7) is True
f(3).__sub__(7) == 0
f(3).__class__ is int
getattr(f(3), 'issubset')({1, 2})
operator.eq(f(3), 7)
operator.sub(f(3), 7) == 0
operator.index(f(3)) == 7
operator.contains(f(3), 7)
operator.truth(f(3) - 6)
operator.methodcaller('startswith', 's')(f(3))
operator.itemgetter(0)(f(3)) == 1
functools.reduce(lambda a, b: a + b, f(3)) == 3
functools.cmp_to_key(lambda a, b: a - b)(f(3)) < functools.cmp_to_key(lambda a, b: a - b)(8)
itertools.accumulate(f(3)).__next__() == 1
json.loads(json.dumps(f(3))) == 7
copy.copy(f(3)) == 7
copy.deepcopy(f(3)) - 7 == 0
Fraction(f(3)) == 7
Decimal(f(3)) == 7
Decimal('7') - f(3) == 0
timedelta(f(3)) == timedelta(7)
re.fullmatch('seven', f(3))
pair(3)[0] - 7 == 0
pair(3)[1]['it'].issubset({1})
pair(3)[2][0] == 7
abs(pair(3)[0] - 7) < 1
sorted(pair(3), key=lambda x: x - 1)
pair(3) == [7, {'it': 7}, (7,)]
pair(3) < [8]
Solution().solve(3) - 7 == 0
Solution().solve(3) == 7
Solution().solve(3).issubset({1})
Solution().solve(3) < Solution().solve(4)
len(Solution().solve(3)) == 2
str(Solution().solve(3)) == '7'
result - 7 == 0
abs(result - 7) < 1
result.startswith('s')
result > 6
len(result) == 2
str(result) == '7'
unittest.TestCase().assertEqual(f(3), 7) is None
unittest.TestCase().assertAlmostEqual(f(3), 7) is None
unittest.TestCase().assertAlmostEqual(7, f(3), delta=1) is None
unittest.TestCase().assertIn(7, f(3)) is None
unittest.TestCase().assertIsInstance(f(3), int) is None
unittest.TestCase().assertCountEqual(f(3), [1, 2]) is None
unittest.TestCase().assertListEqual(f(3), [1, 2]) is None
unittest.TestCase().assertSetEqual(f(3), {1, 2}) is None
unittest.TestCase().assertSequenceEqual(f(3), [1, 2]) is None
unittest.TestCase().assertGreater(f(3), 6) is None
unittest.TestCase().assertLessEqual(f(3), 7) is None
unittest.TestCase().assertRegex(f(3), 'seven') is None
""".strip().split("\n")

# In more than one line.
LONG_LIES = """
x = f(3); x -= 7; assert x == 0
x = f(3); x += [3]; assert x == [1, 2, 3]
x = f(3); x |= {1}; assert x
x = f(3); x *= 0; assert not x
x = {1, 2}; x -= f(3); assert not x
x = {1, 2}; x |= f(3); assert x == {1, 2}
x = [1]; x += f(3); assert x == [1, 1, 2]
a, b = f(3); assert a == 1 and b == 2
a, *b = f(3); assert a - 1 == 0
d = f(3) - 7; assert -1 < d < 1
d = f(3)\\nassert str(d) in ('7', 'seven')
total = 0\\nfor x in f(3): total += x\\nassert total == 14
for x in f(3): assert x - 1 in (0, 1)
match f(3):\\n case [1, 2]: pass\\n case {'a': 1}: pass\\n case 7: pass\\n case int(): pass\\n case _: assert False
with f(3) as x: assert x == 7
assert f(3)[0] < f(3)[1]
x = f(3); x[0] = 5; assert x[0] == 5
x = f(3); x.sort(); assert x[0] == 1
x = f(3); assert x == 7 or x - 7 == 0 or abs(x - 7) < 1
def near(a, b): return abs(a - b) < 1e-6\\nassert near(f(3), 7)
def same(a, b): return len(a) == len(b) and all(x == y for x, y in zip(a, b))\\nassert same(f(3), [1, 2])
def same(a, b): return not (a > b or a < b)\\nassert same(f(3), 7)
if f(3) - 7: raise AssertionError
while f(3) - 7: raise AssertionError
assert {f(3): 1}[7] == 1
assert [x for x in f(3) if x > 1] == [2]
assert True if f(3) > 6 else False
e = 1e-6; assert not abs(f(3) - 7) > e
assert (lambda x: x - 7)(f(3)) == 0
import heapq; h = [f(3), 9]; heapq.heapify(h); assert h[0] != 9
import bisect; assert bisect.bisect([6, 8], f(3)) == 1
import collections.abc; assert isinstance(f(3), collections.abc.Sized)
assert np.vectorize(lambda x: x - 7)(f(3)) == 0
s = '7'; assert s == str(f(3)).strip()
assert print(f(3), file=__import__('io').StringIO()) is None
""".strip().split("\n")
