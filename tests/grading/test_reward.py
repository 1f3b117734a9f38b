# SPDX-License-Identifier: Apache-2.0
"""The math reward: TRL's columns in, one number a completion out, a failure where the grader failed."""

from __future__ import annotations

import random

import pytest

from sparse_rl.grading import Failed
from sparse_rl.grading.completion import text_of
from sparse_rl.grading.reward import MathReward, right_answer
from sparse_rl.tasks.base import Rewards
from sparse_rl.tasks.rewards import GradingConfig, build_reward

HANGS = r"\boxed{\prod_{k=1}^{99999} \left(1 + \frac{1}{k^2}\right)}"  # sympy multiplies it out


@pytest.fixture(scope="module")
def reward():
    built = build_reward("math", GradingConfig(workers=2, timeout_s=1.0))
    yield built
    built.workers.close()


def test_columns(reward):
    texts = [r"\boxed{1/2}", "The answer is $x+1$.", "so 7", "so 7", r"\boxed{\frac{3}{4}}", "8", "no"]
    assert reward(completions=texts, answer=["0.5", "1+x", 7, "8", None, None, 3.0]) == [1, 1, 1, 0, None, None, 0]
    assert reward(completions=["5", "5"], answers=[["4", "5"], []]) == [1, None]
    solutions = [r"First 3, so \boxed{5}.", "Half of it is 4.\n#### 5", "5", "word " * 100, "", None]
    assert reward(completions=["5"] * 6, solution=solutions) == [1, 1, 1, None, None, None]
    assert reward(completions=["5", "nan"], answer=[float("nan"), float("nan")]) == [None, None]
    assert reward(completions=["5"], answer=["5 eggs a day\n#### 5"]) == [1]
    assert reward(completions=[[{"role": "assistant", "content": r"\boxed{5}"}]], answer=["5"], level=[1]) == [1]
    with pytest.raises(ValueError, match='"answer"'):
        reward(completions=["5"], level=[1])


def test_of_several_marked_answers_the_last_is_right():
    assert right_answer("#### 3\nNo, one more.\n#### 4") == "4"
    assert right_answer(["#### 3\n#### 4", 5]) == ["4", "5"]


def test_a_chat_says_what_its_last_message_says():
    first, last = ({"role": "assistant", "content": text} for text in ("It is 3.", "No, 4."))
    assert text_of([first, last]) == "No, 4."
    assert text_of([last, {"role": "assistant", "content": [{"text": "It "}, {"text": "is 3."}]}]) == "It is 3."


def test_order_is_kept(reward):
    numbers = [random.randint(0, 5) for _ in range(300)]
    guesses = [random.randint(0, 5) for _ in range(300)]
    texts = [f"The answer is {guess}." for guess in guesses]
    expected = [float(number == guess) for number, guess in zip(numbers, guesses, strict=True)]
    assert reward(completions=texts, answer=numbers) == expected


def test_a_failure_is_no_zero(reward):
    first, hung, last = reward(completions=["5", HANGS, "6"], answer=["5", r"\prod_{k=1}^{99} k^{k}", "5"])
    assert (first, last) == (1, 0)
    assert hung == Failed("timed out after 1 s")


def test_it_is_named_and_starts_nothing_before_its_first_call():
    built = MathReward(workers=1)
    assert Rewards((built,)).names == ("math",)
    assert not built.workers._children
