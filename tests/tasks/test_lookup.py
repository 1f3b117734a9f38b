# SPDX-License-Identifier: Apache-2.0
"""Look-ups follow from their text, streams are deterministic and endless, and only the right value is rewarded."""

from __future__ import annotations

import re

import pytest

from sparse_rl.model.tiny import tiny_tokenizer
from sparse_rl.tasks import Lookup
from sparse_rl.tasks.lookup import WORDS, RightValue

SETTINGS = [Lookup(), Lookup(pairs=2, digits=1), Lookup(pairs=70), Lookup(pairs=300, keys="codes", digits=6)]
CHATML = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}<assistant>"


def tokenizer(chat: bool = True):
    made = tiny_tokenizer()
    made.chat_template = CHATML if chat else None
    return made


@pytest.mark.parametrize("config", SETTINGS, ids=str)
def test_the_answer_follows_from_the_text(config, seed):
    for prompt in config.build(tokenizer()).stream(0, 20, seed):
        (message,) = prompt.messages
        pairs = dict(re.findall(r"^The value of the (\w+) is (\d+)\.$", message["content"], flags=re.MULTILINE))
        (asked,) = re.findall(r"\n\nWhat is the value of the (\w+)\? Answer in one sentence\.$", message["content"])
        assert len(pairs) == len({*pairs.values()}) == config.pairs, "each key and each value once"
        assert prompt.columns == {"answer": pairs[asked]}
        assert all(len(value) == config.digits for value in pairs.values())
        assert all((key in WORDS) == (config.keys == "words") for key in pairs)
        assert prompt.text == f"<user>{message['content']}<assistant>"


def test_every_place_of_the_list_is_asked_for(seed):
    task = Lookup(pairs=4).build(tokenizer())
    places = [
        re.findall(r"is (\d+)", prompt.text).index(prompt.columns["answer"]) for prompt in task.stream(0, 99, seed)
    ]
    assert {*places} == {0, 1, 2, 3}


def test_streams_are_deterministic_endless_and_apart(seed):
    config = Lookup(pairs=5)
    task = config.build(tokenizer())
    prompts = task.stream(0, 200, seed)
    assert config.build(tokenizer()).stream(0, 200, seed) == prompts
    assert task.stream(0, 70, seed) + task.stream(70, 130, seed) == prompts
    assert task.stream(10**12, 1, seed)
    held_out = task.held_out(200)
    assert task.held_out(50) == held_out[:50]
    texts = {prompt.text for prompt in [*prompts, *held_out, *task.stream(0, 200, seed + 1)]}
    assert len(texts) == 600
    assert task.settings == {"name": "lookup", "pairs": 5, "keys": "words", "digits": 2}


def test_without_a_chat_template_the_text_is_plain(seed):
    with_chat, plain = (Lookup().build(tokenizer(chat)).stream(0, 1, seed)[0] for chat in (True, False))
    assert plain.text == with_chat.messages[0]["content"] + "\n" and plain.messages == ()


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("41", 1.0),
        ("The value of the lemon is 41.", 1.0),
        ("It is 41, yes: 41", 1.0),
        ("41 or 86", 1.0),
        ("86 or 41", 0.0),
        ("86", 0.0),
        ("410", 0.0),
        ("4 1", 0.0),
        ("forty-one", 0.0),
        ("", 0.0),
    ],
)
def test_rewards(text, reward):
    assert RightValue()([text], ["41"]) == RightValue()([text], [41]) == [reward]
    assert RightValue()([[{"role": "assistant", "content": text}]], answer=["41"], prompts=None) == [reward]


@pytest.mark.parametrize("columns", [{}, {"answer": None}, {"answer": ""}, {"answer": "lemon"}, {"answer": -4}])
def test_a_row_without_a_whole_number_is_refused(columns):
    assert RightValue().check({"answer": "41"}) is RightValue().check({"answer": 41}) is None
    assert "which is no whole number" in RightValue().check(columns)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pairs": 1}, "task.pairs is 1; with keys words and digits 2 it must lie between 2 and 70"),
        ({"pairs": 71}, "between 2 and 70"),
        ({"pairs": 10, "digits": 1}, "digits 1 it must lie between 2 and 9"),
        ({"pairs": 91, "keys": "codes"}, "keys codes and digits 2 it must lie between 2 and 90"),
        ({"keys": "names"}, "task.keys is 'names'; choose one of words, codes"),
        ({"digits": 0}, "task.digits is 0; it must lie between 1 and 6"),
        ({"digits": 7}, "task.digits is 7"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Lookup(**settings)
