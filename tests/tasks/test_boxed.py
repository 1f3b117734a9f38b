# SPDX-License-Identifier: Apache-2.0
"""The boxed answer: found, compared as a number where it is one, never fooled by commas or hung by exponents."""

from __future__ import annotations

import pytest

from sparse_rl.tasks.boxed import boxed_answer, last_boxed


@pytest.mark.parametrize(
    ("text", "right", "reward"),
    [
        (r"so \boxed{12}", "12", 1.0),
        (r"\boxed{3} no, \boxed{4}", "4", 1.0),
        (r"\boxed{4} no, \boxed{3}", "4", 0.0),
        (r"\boxed{1/2}", "0.5", 1.0),
        (r"\boxed{1,234}", "1234", 1.0),
        (r"\boxed{12}", "1,2", 0.0),
        (r"\boxed{(12)}", "(1,2)", 0.0),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}", 1.0),
        (r"\boxed{ x + 1 }", "x+1", 1.0),
        (r"\boxed{$7$}", "7", 1.0),
        (r"\boxed{1/0}", "1/0", 1.0),
        (r"\boxed{1e999999999}", "1", 0.0),
        (r"\boxed{" + "9" * 10_000 + "}", "9", 0.0),
        (r"\boxed{12", "12", 0.0),
        ("12", "12", 0.0),
    ],
)
def test_rewards(text, right, reward):
    assert boxed_answer([text], [right]) == [reward]
    assert boxed_answer([[{"role": "assistant", "content": text}]], [right]) == [reward]


def test_braces_are_matched():
    assert last_boxed(r"a \boxed{\frac{1}{\sqrt{2}}} b }") == r"\frac{1}{\sqrt{2}}"
    assert last_boxed("nothing") is None
