# SPDX-License-Identifier: Apache-2.0
"""The final answer is found where a reader would look for it, in time linear in the text."""

from __future__ import annotations

import time

import pytest

from sparse_rl.grading.answer import final_answer, last_boxed


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so \boxed{12}", "12"),
        (r"\boxed{3} no, \boxed{4}", "4"),
        (r"a \boxed{\frac{1}{\sqrt{2}}} b }", r"\frac{1}{\sqrt{2}}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{x \mid x > 2\right\}}", r"\left\{x \mid x > 2\right\}"),
        (r"$\boxed 5$.", "5"),
        (r"\boxed 3.5, I think", "3.5"),
        (r"\fbox{7}", "7"),
        (r"\boxed {8}", "8"),
        (r"\boxed{1} and then \boxed{2", "1"),  # cut off while writing
        ("The answer is 42. It was easy, 7 steps.", "42"),
        ("the answer is $\\frac{1}{2}$.", "$\\frac{1}{2}$"),
        ("The final answer is: **3.5**.\nI hope so.", "3.5"),
        ("Final Answer: $34\\text{ sq. units}$. Done", "$34\\text{ sq. units}$"),
        ("The answer is 3. No, the answer is 4.", "4"),
        ("The answer is\n\\[ x = 5. \\]", "x = 5"),
        ("The answer is that Tom has 5 apples in the end.", "5"),
        ("The answer is 5 because he gives 3 of 8 away.", "5"),
        ("The answer is $18 every day at the market.", "$18"),
        ("The answer is $x+1$, since $x$ has to be positive.", "x+1"),
        ("The answer is a necessary but not a sufficient condition.", "a necessary but not a sufficient condition"),
        ("The answer is therefore 42.", "42"),
        ("The answer is thus, simply, $x+1$.", "$x+1$"),
        ("about 1e5", "1e5"),
        ("the answer is two.", "two"),
        ("The answer is June 20.", "June 20"),
        ("Some steps\n#### 72", "72"),
        ("so she pays $1,200.50.", "1200.50"),
        ("first 7, then -8", "-8"),
        (r"answer is 3, so \boxed{4}", "4"),
        ("<think>3</think><answer>The answer is 18</answer>", "18"),
        (r"<think>3</think><answer>\frac{1}{2}</answer>", r"\frac{1}{2}"),
        ("<answer>4</answer> or <answer> x+1 </answer> in 9 steps", "x+1"),
        ("<answer> The answer is $A$ </answer>", "$A$"),
        ("<answer>\nWe add 5.\nSo Tom has 18.\n</answer>", "18"),
        ("<answer>The train needs 45 minutes to get there.</answer>", "45"),
        (r"<answer>\[\n7\n\]</answer>".replace(r"\n", "\n"), "\\[\n7\n\\]"),
        ("<answer>4</answer> <answer>12", "12"),  # cut off
        ("It is 5. <answer></answer>", "5"),
        (r"<answer>3</answer>, so \boxed{4}", "4"),
        ("The answer is 18</answer>", "18"),
        ("The answer is 18 because 3*6=18.", "18"),
        ("The answer is $\\frac{1}{2}$, since $a$ = 2", "$\\frac{1}{2}$"),
        ("The answer is 5 (five).", "5"),
        ("The answer is $x + 1$ (see above).", "$x + 1$"),
        ("The answer is 18 (cents).", "18 (cents)"),
        ("The answer is 3 (mod 7).", "3 (mod 7)"),
        ("The answer is:\n\n- 18", "18"),
        ("The answer is:\n\n-18", "-18"),
        ("The answer is - 18", "- 18"),
        ("", None),
        ("no idea", None),
        (r"\boxedfoo{3}", "3"),
    ],
)
def test_found(text, answer):
    assert final_answer(text) == answer


def test_an_empty_box_is_an_empty_answer():
    assert final_answer(r"It is 5. \boxed{}") == ""
    assert last_boxed("nothing") is None


@pytest.mark.parametrize(
    "piece",
    [
        "\\boxed{",
        "{",
        "}",
        "\\",
        "the answer is ",
        "1,",
        "$",
        ".",
        "#",
        "a 1/",
        "\\boxed",
        "*",
        "so ",
        "<answer>",
        "</",
        " ",
        "\n- ",
    ],
)
@pytest.mark.some(5)
def test_hostile_texts_take_no_time(piece):
    text = piece * (200_000 // len(piece))
    start = time.thread_time()
    final_answer(text)
    final_answer("the answer is " + text)
    final_answer("\\boxed{" + text)
    final_answer("<answer>" + text)
    final_answer("The answer is 5 (five" + text)
    assert time.thread_time() - start < 2
