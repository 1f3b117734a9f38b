# SPDX-License-Identifier: Apache-2.0
"""The last number of a completion is found however it is written; wrong rows are named by their line."""

from __future__ import annotations

import json
import random
from fractions import Fraction
from pathlib import Path

import pytest

from sparse_rl.model.tiny import tiny_tokenizer
from sparse_rl.tasks import RowsConfig
from sparse_rl.tasks.last_number import LastNumber, last_number

last_number_right = LastNumber()
SVAMP = Path(__file__).parents[1] / "data" / "svamp.jsonl"


@pytest.mark.parametrize(
    ("text", "right", "reward"),
    [
        ("3 + 4 = 7\nThe answer is 7.", "7", 1.0),
        ("first 7, then 8", "7", 0.0),
        ("first 8, then 7", 7, 1.0),
        ("it costs $1,200.", "1200", 1.0),
        ("1200", "1,200", 1.0),
        ("it costs $ 5.00", "5", 1.0),
        ("5.0", 5, 1.0),
        ("5", 5.0, 1.0),
        ("5.5 metres", "5.5", 1.0),
        ("5.5.", "5.5", 1.0),
        ("half of it, .5", "1/2", 1.0),
        ("1/2 cup", "0.5", 1.0),
        ("minus -4 degrees", "-4", 1.0),
        ("\N{MINUS SIGN}4", "-4", 1.0),
        ("-$4", "-4", 1.0),
        ("10-4", "4", 1.0),
        ("10-4", "-4", 0.0),
        ("12cm", "12", 1.0),
        ("**12**", "12", 1.0),
        ("50%", "50", 1.0),
        ("7 litres of CO2", "7", 1.0),
        ("3,4", "4", 1.0),
        ("She has 2.", "He has 1+1=<<1+1=2>>2.\n#### 2", 1.0),
        ("it costs $1,200.", "#### 3\n#### $1,200\n", 1.0),
        ("1", "1+1=2\n#### 2", 0.0),
        ("12", "1", 0.0),
        ("twelve", "12", 0.0),
        ("", "0", 0.0),
        ("4/0", "4", 0.0),
        ("9" * 10_000, "9", 0.0),
    ],
)
def test_rewards(text, right, reward):
    assert last_number_right([text], [right]) == [reward]
    assert last_number_right([[{"role": "assistant", "content": text}]], answer=[right], prompts=None) == [reward]


def test_numbers_survive_their_ways_of_being_written():
    draw = random.Random(seed := random.randrange(1 << 20))
    for _ in range(200):
        value = Fraction(draw.randint(-(10**7), 10**7), draw.choice((1, 10, 100)))
        text = draw.choice(("{:,.2f}", "{:.2f}", "${:.2f}", "{:.3f}00")).format(float(value))
        said = f"{draw.choice(('so 3', 'is', '4*5 ='))} {text}{draw.choice(('.', ' apples.', '%', ''))}"
        assert Fraction(last_number(said)) == value, (seed, said)


def words(path, **settings):
    return RowsConfig(train_file=path, rewards=("last_number",), **settings)


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_questions_become_prompts_with_and_without_a_chat_template(tmp_path):
    rows = [{"question": f"How many are {i} and 1?", "answer": i + 1, "source": "x"} for i in range(3)]
    path = write(tmp_path / "rows.jsonl", *rows)
    tokenizer = tiny_tokenizer()
    task = words(path).build(tokenizer)
    assert {(prompt.text, prompt.columns["answer"]) for prompt in task.stream(0, 3, 0)} == {
        (f"How many are {i} and 1?\n", i + 1) for i in range(3)
    }
    assert task.held_out(5) == [] and task.settings["layout"] == "problem" and len(task.settings["train_sha256"]) == 16
    tokenizer.chat_template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"
    held_out = words(path, eval_file=path).build(tokenizer).held_out(2)
    assert [prompt.text for prompt in held_out] == [f"[user]How many are {i} and 1?[assistant]" for i in range(2)]
    assert held_out[1].messages == ({"role": "user", "content": "How many are 1 and 1?"},)
    assert held_out[1].columns == {"answer": 2, "source": "x"}


def test_a_published_set_loads_and_its_own_answers_are_right():
    prompts = words(str(SVAMP), eval_file=str(SVAMP)).build(tiny_tokenizer()).held_out(100)
    answers = [prompt.columns["answer"] for prompt in prompts]
    assert len(prompts) == 30
    assert last_number_right([f"The answer is {answer}." for answer in answers], answers) == [1.0] * 30
    assert last_number_right([f"The answer is 9{answer}." for answer in answers], answers) == [0.0] * 30


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"answer": "3"}, 'line 2 of .*rows.jsonl has no "problem"'),
        ({"question": ["a"], "answer": "3"}, 'line 2 of .* has no "question"'),
        ({"question": "a"}, 'line 2 of .* has no "answer"'),
        ({"question": "a", "answer": "3 apples"}, "has the answer '3 apples', which is not a number"),
        ({"question": "a", "answer": "2 #### two"}, "has the answer '2 #### two', which is not a number"),
        ({"question": "a", "answer": True}, "has the answer True"),
        ({"question": "a", "answer": float("nan")}, "has the answer nan"),
        ({"question": "a", "answer": 1, "prompts": 2}, "has a column 'prompts'"),
    ],
)
def test_a_wrong_row_is_named(row, message, tmp_path):
    path = write(tmp_path / "rows.jsonl", {"question": "a", "answer": "1"}, row)
    with pytest.raises(ValueError, match=message):
        words(path).build(tiny_tokenizer())
