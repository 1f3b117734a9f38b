# SPDX-License-Identifier: Apache-2.0
"""Values that go into a program's process and come out again."""

from __future__ import annotations

import contextlib
import datetime
import enum
import json
import math
import os
from collections import Counter, OrderedDict, deque, namedtuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_rl.sandbox.encoding import (
    MAX_DEPTH,
    MAX_FRAME,
    Unreadable,
    decode,
    encode,
    encode_fields,
    read_frame,
    write_frame,
)

days = st.dates() | st.datetimes() | st.times() | st.timedeltas()
made = days | st.decimals(allow_nan=False) | st.fractions() | st.builds(range, st.integers(), st.integers())
numbers = st.none() | st.booleans() | st.integers() | st.integers(-(2**200), 2**200) | st.floats(allow_nan=False)
atoms = made | numbers | st.text() | st.binary() | st.complex_numbers(allow_nan=False) | st.just("\ud800")
hashable = st.recursive(atoms, lambda inner: st.lists(inner).map(tuple) | st.frozensets(inner), max_leaves=6)
values = st.recursive(
    hashable | st.sets(hashable),
    lambda inner: (
        st.lists(inner)
        | st.builds(deque, st.lists(inner), st.just(9))
        | st.lists(inner).map(tuple)
        | st.dictionaries(hashable, inner)
    ),
    max_leaves=10,
)


def same(a: object, b: object) -> bool:
    """Equal, and of the same types throughout (1, True and 1.0 are equal to Python)."""
    if type(a) is not type(b):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(map(same, a.items(), b.items()))
    return a == b and (not isinstance(a, float) or math.copysign(1, a) == math.copysign(1, b))


@settings(max_examples=8, deadline=None)
@given(values)
def test_round_trip(value):
    assert same(decode(encode(value)), value)


@settings(max_examples=8, deadline=None)
@given(st.binary() | st.text().map(str.encode) | values.map(encode).flatmap(lambda b: st.just(b[: len(b) // 2])))
def test_nothing_but_values_or_an_error(text):
    with contextlib.suppress(Unreadable):
        encode(decode(text))


def test_what_is_no_number_stays_so():
    assert math.isnan(decode(encode(float("nan"))))
    assert decode(encode([math.inf, -math.inf])) == [math.inf, -math.inf]
    assert decode(encode(10**5000)) == 10**5000  # more digits than int() takes


def test_subclasses_become_their_bases():
    class Liar(list):
        def __iter__(self):
            return iter(["another"])

        def __eq__(self, other):
            return True

    pair = namedtuple("pair", "a b")
    kind = enum.IntEnum("kind", "one two")
    given_ = [
        Liar([1]),
        pair(1, 2),
        Counter("aab"),
        OrderedDict(x=1),
        kind.two,
        type("S", (str,), {})("s"),
        bytearray(b"x"),
    ]
    found = decode(encode(given_))
    assert found == [[1], (1, 2), {"a": 2, "b": 1}, {"x": 1}, 2, "s", b"x"]
    assert [type(value) for value in found] == [list, tuple, dict, dict, int, str, bytes]


def test_numpy_becomes_plain():
    found = decode(encode([np.int64(3), np.float32(0.5), np.bool_(True), np.arange(4).reshape(2, 2), np.float64(2)]))
    assert same(found, [3, 0.5, True, [[0, 1], [2, 3]], 2.0])


def test_opaque_things_keep_their_number():
    kept = []
    text = encode([1, object(), (print,)], lambda value: kept.append(value) or len(kept) - 1)
    assert decode(text, lambda number: f"thing {number}") == [1, "thing 0", ("thing 1",)]
    with pytest.raises(Unreadable, match="not plain"):
        encode(object())
    with pytest.raises(Unreadable):
        decode(text)
    aware = datetime.datetime.now(datetime.UTC)
    assert encode(aware, str) == encode([aware], str)[1:-1] == f'{{"o":"{aware}"}}'.encode()


def test_only_known_types_are_made():
    for body in (
        ["os.system", "true"],
        ["decimal.Decimal", "x"],
        ["fractions.Fraction", 1, 0],
        [["builtins.range"], 1],
    ):
        with pytest.raises(Unreadable):
            decode(json.dumps({"k": body}).encode())


def test_depth_is_limited():
    value: object = 0
    for _ in range(MAX_DEPTH):
        value = [value]
    assert decode(encode(value)) == value
    with pytest.raises(Unreadable, match="deep"):
        encode([[value]])
    with pytest.raises(Unreadable):
        decode(b"[" * 100_000)
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(Unreadable, match="deep"):
        encode(loop)


def test_fields_are_put_together_unread():
    assert decode(encode_fields(a=encode({1: (2,)}), b=encode("x"))) == {"a": {1: (2,)}, "b": "x"}


def test_frames():
    inward, outward = os.pipe()
    write_frame(outward, b"one")
    write_frame(outward, b"")
    assert (read_frame(inward), read_frame(inward)) == (b"one", b"")
    os.write(outward, (MAX_FRAME + 1).to_bytes(4, "little"))
    with pytest.raises(Unreadable, match="longer"):
        read_frame(inward)
    os.write(outward, b"\x05\0\0\0abc")
    os.close(outward)
    with pytest.raises(EOFError):
        read_frame(inward)
    os.close(inward)
