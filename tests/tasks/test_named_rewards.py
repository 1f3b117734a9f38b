# SPDX-License-Identifier: Apache-2.0
"""Rewards that have a name: hand-computed values, and what is said of settings that are wrong."""

from __future__ import annotations

import random
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparse_rl.tasks.countdown import compute, find_expression
from sparse_rl.tasks.rewards import REWARDS, build_reward


def chat(text):
    return [{"role": "assistant", "content": text}]


def score(spec, text, **columns):
    """The same for a text and for a chat."""
    reward = build_reward(spec)
    lists = {name: [value] for name, value in columns.items()}
    (as_text,), (as_chat,) = (reward(prompts=["p"], completions=[c], **lists) for c in (text, chat(text)))
    assert as_text == as_chat
    return as_text


# exact


def test_exact():
    assert score("exact", " Paris\n", answer="Paris") == 1
    assert score("exact", "Paris.", answer="Paris") == 0
    assert score("exact", "paris", answer="Paris") == 0
    assert score("exact:ignore_case=true", "PARIS ", answer="Paris") == 1
    assert score("exact", "7", answer=7) == 1
    assert score("exact", "", answer="Paris") == 0


# format


@pytest.mark.parametrize(
    ("spec", "text", "expected"),
    [
        ("format", "so it is \\boxed{\\frac{1}{2}}.", 1),
        ("format", "\\boxed{1} or \\boxed{2}", 0),
        ("format", "\\boxed{}", 0),
        ("format", "\\boxed{ }", 0),
        ("format", "\\boxed{1", 0),
        ("format", "it is 7", 0),
        ("format:kind=think", "<think>\nhm\n</think>\n7", 1),
        ("format:kind=think", "<think></think>7", 1),
        ("format:kind=think", "<think>hm</think>", 0),
        ("format:kind=think", "7 <think>hm</think> 7", 0),
        ("format:kind=think", "<think>hm</think> 7 <think>hm</think> 8", 0),
        ("format:kind=think", "<think>a<think>b</think>7", 0),
        ("format:kind=think_answer", "<think>hm</think>\n<answer>7</answer>", 1),
        ("format:kind=think_answer", "<think>hm</think> so <answer>7</answer>", 0),
        ("format:kind=think_answer", "<think>hm</think><answer>7</answer> indeed", 0),
        ("format:kind=think_answer", "<think>a</think><answer>7</answer><answer>8</answer>", 0),
        ("format:pattern=[ab]+=c", "aab=c", 1),
        ("format:pattern=[ab]+=c", "aab=cc", 0),
        ('format:{"pattern": "a{1,2}, b=c"}', "aa, b=c", 1),
        ('format:{"pattern": "a.b"}', "a\nb", 1),
    ],
)
def test_format(spec, text, expected):
    assert score(spec, text) == expected


# overlong


def test_overlong_is_dapo_s_penalty():
    """limit 10, buffer 4: free up to 6 tokens, then -1/4 a token, -1 from 10 on."""
    reward = build_reward("overlong:limit=10,buffer=4")
    got = reward(completions=None, completion_ids=[[0] * length for length in (0, 6, 7, 8, 9, 10, 11, 99)])
    assert got == [0, 0, -0.25, -0.5, -0.75, -1, -1, -1]


# countdown


@pytest.mark.parametrize(
    ("text", "nums", "target", "expected"),
    [
        ("<answer>(5 + 3) * 2</answer>", [3, 5, 2], 16, 1),
        ("<answer>(5 + 3) * 2 = 16</answer>", [3, 5, 2], 16, 1),
        ("so \\boxed{(5+3)\\times 2}", [3, 5, 2], 16, 1),
        ("first 5 + 3 = 8\n(5 + 3) * 2 = 16\n", [3, 5, 2], 16, 1),
        ("<answer>1+1</answer> no, <answer>(5+3)*2</answer>", [3, 5, 2], 16, 1),
        ("in <answer> tags: <answer>(5+3)*2</answer>, that is </answer>", [3, 5, 2], 16, 0),
        ("in <answer> tags: <answer>(5+3)*2</answer>", [3, 5, 2], 16, 1),
        ("<answer>(5+3)*2</answer> and <answer>", [3, 5, 2], 16, 1),
        ("</answer> (5+3)*2", [3, 5, 2], 16, 0),
        ("<answer>8/(3-8/3)</answer>", [8, 3, 8, 3], 24, 1),
        ("<answer>-3 + 5</answer>", [3, 5], 2, 1),
        ("<answer>8 * 2</answer>", [3, 5, 2], 16, 0),  # not all the numbers
        ("<answer>(5 + 3) * 2 * 2 / 2</answer>", [3, 5, 2], 16, 0),  # one too often
        ("<answer>5 + 3 + 2</answer>", [3, 5, 2], 16, 0),
        ("<answer>53 * 2</answer>", [5, 3, 2], 106, 0),
        ("<answer>16</answer>", [3, 5, 2], 16, 0),
        ("<answer>3 / (5 - 5)</answer>", [3, 5, 5], 0, 0),
        ("<answer>2 ** 4</answer>", [2, 4], 16, 0),
        ("<answer>7 // 2</answer>", [7, 2], 3, 0),
        ("<answer>7 2</answer>", [7, 2], 72, 0),
        ("<answer>__import__('os')</answer>", [1], 1, 0),
        ("<answer>1_0 + 2</answer>", [10, 2], 12, 0),
        ("<answer>010 + 2</answer>", [10, 2], 12, 0),
        ("<answer></answer>", [3], 3, 0),
        ("", [3], 3, 0),
        ("(" * 100_000, [3], 3, 0),
        ("<answer>" + "-" * 150 + "3</answer>", [3], 3, 1),
        ("<answer>" + "(" * 90 + "3" + ")" * 90 + "</answer>", [3], 3, 1),
    ],
)
def test_countdown(text, nums, target, expected):
    assert score("countdown", text, nums=nums, target=target) == expected


def test_countdown_may_pay_for_the_form():
    assert score("countdown:format_score=0.1", "<answer>5 + 3</answer>", nums=[3, 5, 2], target=16) == 0.1
    assert score("countdown:format_score=0.1", "<answer>3 / (5 - 5)</answer>", nums=[3, 5, 5], target=16) == 0.1
    assert score("countdown:format_score=0.1", "<answer>five</answer>", nums=[3, 5, 2], target=16) == 0
    assert score("countdown:format_score=0.1", "<answer>(5 + 3) * 2</answer>", nums=[3, 5, 2], target=16) == 1


@st.composite
def expressions(draw, depth=3):
    """An expression and its value, worked out beside it; values that divide by 0 are None."""
    if depth == 0 or draw(st.booleans()):
        number = draw(st.integers(0, 50))
        return str(number), Fraction(number), [number]
    left, left_value, left_used = draw(expressions(depth - 1))
    right, right_value, right_used = draw(expressions(depth - 1))
    sign = draw(st.sampled_from("+-*/"))
    text, used = f"({left} {sign} {right})", left_used + right_used
    if left_value is None or right_value is None or (sign == "/" and right_value == 0):
        return text, None, used
    a, b = left_value, right_value
    return text, {"+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b, "/": lambda: a / b}[sign](), used


@settings(max_examples=150, deadline=None)
@given(expressions())
def test_expressions_are_computed_exactly(made):
    text, value, used = made
    if len(text) <= 200:
        got, numbers = compute(text)
        assert got == value and (value is None or sorted(numbers) == sorted(used))


@settings(max_examples=300, deadline=None)
@given(st.text("0123456789+-*/() =\n.<>answer\\boxed{}", max_size=60))
def test_any_text_has_a_score(text):
    reward = build_reward("countdown")
    assert reward(completions=[text], nums=[[random.randrange(9)]], target=[3])[0] in (0.0, 1.0)
    found = find_expression(text)
    assert found is None or "=" not in found


# Names and settings

WRONG = {
    "unknown setting": ("exact:case=true", "'case' is not a setting of 'exact'; it takes ignore_case."),
    "a setting for none": ("last_number:x=1", "'x' is not a setting of 'last_number'; it takes none."),
    "missing setting": ("overlong:limit=3", "'buffer' is missing; write overlong:buffer=..."),
    "no settings": ("overlong", "'limit' is missing"),
    "not key=value": ("format:pattern=a{1,2}", "'2}' is not of the form key=value; where a value has a comma in it"),
    "not JSON": ('format:{"pattern": a}', "its settings are not JSON"),
    "unknown kind": ("format:kind=xml", "kind is 'xml'; choose one of boxed, think, think_answer"),
    "not a pattern": ("format:pattern=(", "is not a regular expression"),
    "buffer beyond limit": ("overlong:limit=3,buffer=4", "limit is 3 and buffer 4; give whole numbers"),
    "buffer 0": ("overlong:limit=3,buffer=0", "limit is 3 and buffer 0"),
    "limit is a word": ("overlong:limit=long,buffer=1", "limit is 'long'; it takes a whole number."),
    "unknown name": ("exakt", "did you mean 'exact'?"),
    "no such reward": ("zzz", "nor one of code"),
    "no such model": ("model:path=/no/such/folder", "reward model '/no/such/folder' cannot be loaded"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_spec_is_one_sentence(case):
    spec, message = WRONG[case]
    with pytest.raises(ValueError, match="reward") as caught:
        build_reward(spec)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_settings_have_their_types():
    assert score("exact:ignore_case=False", "paris", answer="Paris") == 0
    assert build_reward("overlong:limit=9,buffer=2") == build_reward('overlong:{"limit": 9, "buffer": 2}')
    for spec, said in (
        ("exact:ignore_case=no", "ignore_case is 'no'; it takes true or false."),
        ("countdown:format_score=high", "format_score is 'high'; it takes a number."),
        ("code:timeout_s=x", "timeout_s is 'x'; it takes a number."),
        ("code:memory_mb=1.5", "memory_mb is '1.5'; it takes a whole number."),
        ("overlong:limit=5,limit=9,buffer=2", "limit is given twice; give it once."),
    ):
        with pytest.raises(ValueError, match="reward") as caught:
            build_reward(spec)
        assert str(caught.value) == f"reward {spec!r}: {said}"


@pytest.mark.parametrize("name", sorted(set(REWARDS) - {"code", "math", "model"}))
def test_no_text_takes_long(name):
    """Those that grade here, without a time limit: 100 kB of what searches stumble over."""
    kinds = {"overlong": ["limit=9,buffer=2"], "format": ["kind=boxed", "kind=think", "kind=think_answer"]}
    rewards = [build_reward(f"{name}:{settings}") for settings in kinds.get(name, [])] or [build_reward(name)]
    parts = ["<answer>", "</answer>", "<think>", "</think>", "\\boxed{", "}", "9", " ", "\n", ",111", "-", "1/", "("]
    parts += ["</think><answer>", "<answer></answer>", random.choice(parts) + random.choice(parts)]
    for part in parts:
        for first, last in (("", "x"), ("<think>", "1")):
            text = first + part * (100_000 // len(part)) + last
            for reward in rewards:
                start = time.thread_time()
                reward(prompts=[""], completions=[text], completion_ids=[[0]], answer=["1"], nums=[[1]], target=[1])
                assert time.thread_time() - start < 1.5, (part, "0.05 s on a quiet core")
