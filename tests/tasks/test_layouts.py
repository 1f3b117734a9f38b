# SPDX-License-Identifier: Apache-2.0
"""Rows as TRL, verl, slime and benchmarks write them become the same prompts and answers."""

from __future__ import annotations

import json
import logging

import pytest

from sparse_rl.model.tiny import tiny_tokenizer
from sparse_rl.tasks import RowsConfig
from sparse_rl.tasks.chain import chain_tokenizer
from sparse_rl.tasks.files import read_table
from sparse_rl.tasks.layouts import choose_layout
from sparse_rl.tasks.templates import TEMPLATES

USER = [{"role": "user", "content": "hi"}]
SHARED = [{"from": "human", "value": "hi"}]


@pytest.fixture
def build(tmp_path):
    """build(rows, tokenizer, **settings): the task of a file with these rows."""

    def make(rows, tokenizer, rewards=("small_run:digits",), context=None, **settings):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = RowsConfig(train_file=str(path), eval_file=str(path), rewards=rewards, **settings)
        return config.build(tokenizer, context=context)

    return make


VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": USER,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "7"},
    "extra_info": {"index": 3},
}
CASES = {  # row, layout, text of the prompt, columns beside those of the row
    "trl chat": ({"prompt": USER, "answer": "7"}, "trl", "<user>hi<assistant>", {}),
    "trl text": ({"prompt": "hi", "solution": 7}, "trl", "hi", {}),
    "trl with an answer and a label": ({"prompt": "hi", "answer": "7", "label": "x"}, "trl", "hi", {}),
    "trl with a question as well": ({"prompt": "hi", "question": "q", "answer": "7"}, "trl", "hi", {}),
    "messages": (
        {"messages": [*USER, {"role": "assistant", "content": "ho"}]},
        "trl",
        "<user>hi<assistant>",
        {"completion": "ho"},
    ),
    "verl": (VERL_ROW, "verl", "<user>hi<assistant>", {"answer": "7"}),
    "verl with a column answer": (VERL_ROW | {"answer": "#### 7"}, "verl", "<user>hi<assistant>", {"answer": "7"}),
    "slime": ({"prompt": "hi", "label": "7", "metadata": {"a": 1}}, "slime", "hi", {"answer": "7"}),
    "slime text": ({"text": USER, "label": 7}, "slime", "<user>hi<assistant>", {"answer": 7}),
    "benchmark": ({"id": 1, "problem": "hi", "answer": "7"}, "problem", "<user>hi<assistant>", {}),
    "word problem": ({"question": "hi", "answer": "7"}, "problem", "<user>hi<assistant>", {}),
}
PROMPT_KEYS = ("prompt", "messages", "text", "problem")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("named", [False, True], ids=["auto", "named"])
def test_a_layout_is_recognised_or_named(case, named, build, chatty):
    row, layout, text, more = CASES[case]
    task = build([row] * 2, chatty, layout=layout if named else "auto")
    key = next((key for key in PROMPT_KEYS if key in row), "question")
    assert [prompt.text for prompt in task.train] == [text] * 2
    assert task.train[0].columns == {name: value for name, value in row.items() if name != key} | more
    assert task.settings["layout"] == layout and task.eval == task.train


@pytest.mark.parametrize(
    ("prompt", "template", "said"), [("hi", None, True), ("hi", "plain", False), (USER, None, False)]
)
def test_strings_that_a_chat_model_gets_as_they_are_are_told_of(prompt, template, said, build, chatty, caplog):
    caplog.set_level("INFO", "sparse_rl.tasks")
    build([{"prompt": prompt}], chatty, template=template)
    assert caplog.text.count("--task.template chat") == said


def test_keys_that_are_named_lead_into_tables(build, chatty):
    row = {"input": {"text": "hi"}, "gold": {"final": "7"}, "a.b": "dotted", "answer": "old"}
    (prompt,) = build([row], chatty, prompt_key="input.text", answer_key="gold.final").train
    assert (prompt.text, prompt.columns["answer"]) == ("hi", "7")
    (prompt,) = build([row], chatty, prompt_key="a.b").train
    assert (prompt.text, prompt.columns["answer"]) == ("dotted", "old")
    (prompt,) = build([VERL_ROW], chatty, layout="verl", answer_key="extra_info.index").train
    assert prompt.columns["answer"] == 3


WRONG = {
    "no prompt at all": ({"input": "a"}, {}, "line 1 of .* has the columns input, which fit no layout; name them"),
    "misspelt prompt": ({"promt": "a", "answer": "1"}, {}, r"which fit no layout \(did you mean 'prompt'\?\); name"),
    "misspelt answer": ({"question": "a", "anwser": "1"}, {}, r"which fit no layout \(did you mean 'answer'\?\); name"),
    "messages as a text": ({"messages": '[{"role": "user"}]'}, {}, 'has "messages" that are a text, not a list'),
    "ShareGPT": ({"conversations": SHARED}, {}, 'has "conversations" of "from" and "value"; write them as "messages"'),
    "ShareGPT by its key": (
        {"chat": SHARED},
        {"prompt_key": "chat"},
        'message 1 has no "role"; a message needs a "role"',
    ),
    "no role": ({"prompt": [*USER, {"content": "hi"}]}, {}, 'message 2 has no "role"; a message needs a "role" and a'),
    "no content": ({"prompt": [{"role": "user"}]}, {}, 'message 1 has no "content"; a message needs a "role" and a'),
    "a number in a chat": ({"prompt": [1]}, {}, 'message 1 has no "role"'),
    "no columns": ({}, {}, "has the columns none at all"),
    "null ground truth": (VERL_ROW | {"reward_model": {"ground_truth": None}}, {}, 'no "reward_model.ground_truth"'),
    "no ground truth": ({"prompt": USER}, {"layout": "verl"}, 'no "reward_model.ground_truth".*the layout is verl'),
    "reward_model is text": ({"prompt": "a", "reward_model": "rule"}, {"layout": "verl"}, 'no "reward_model.ground'),
    "null label": ({"prompt": "a", "label": None}, {}, 'has no "label"'),
    "null answer": ({"question": "a", "answer": None}, {}, 'has no "answer"'),
    "problem is a chat": ({"problem": USER, "answer": "1"}, {}, 'has no "problem" that is a string; mend'),
    "misspelt question": ({"questoin": "a", "answer": "1"}, {"layout": "problem"}, 'no "problem" or "question" that'),
    "blank question": ({"question": " ", "answer": "1"}, {}, 'line 1 of .* has an empty "question"; mend or remove it'),
    "null prompt": ({"prompt": None, "answer": "1"}, {}, 'has no "prompt" that is a string or a list of messages'),
    "wrong key": ({"prompt": "a"}, {"prompt_key": "promt"}, 'has no "promt"'),
    "wrong answer key": ({"prompt": "a"}, {"answer_key": "gold"}, 'has no "gold"'),
    "empty problem": ({"prompt": ""}, {}, "line 1 of .*: the prompt is empty; mend"),
    "empty messages": ({"prompt": []}, {}, "is a chat without messages"),
    "completions": ({"prompt": "a", "completions": []}, {}, "has a column 'completions'"),
    "template and chat": ({"prompt": USER}, {"template": "boxed_chat"}, "a template takes a string"),
    "system and text": ({"prompt": "a"}, {"system": "s"}, "a system message needs a chat"),
    "system and plain": ({"prompt": "a"}, {"system": "s", "template": "plain"}, "no place for a system message"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_row_that_does_not_fit_is_named(case, build, chatty):
    row, settings, message = WRONG[case]
    with pytest.raises(ValueError, match=message) as caught:
        build([row], chatty, **settings)
    assert "line 1 of" in str(caught.value)


def test_a_csv_file_without_its_header_is_told_what_became_of_its_first_line(tmp_path):
    (tmp_path / "a.csv").write_text("a=b1,3\nc=d2,4\n")
    table = read_table(str(tmp_path / "a.csv"))
    said = r"line 2 of .* has the columns a=b1, 3 \(its first line is read as their names\), which fit no layout"
    with pytest.raises(ValueError, match=said):
        choose_layout("auto", None, None, table.rows[0])


def test_a_later_row_of_another_layout_is_named(build, chatty):
    with pytest.raises(ValueError, match=r'line 2 of .* has no "label"; mend or remove it \(the layout is slime\)'):
        build([{"prompt": "a", "label": "1"}, {"prompt": "a", "answer": "1"}], chatty)


# Templates


def test_the_papers_templates_word_by_word():
    """Sparse-RL's training file and its evaluation, Sparrow's prompt."""
    assert TEMPLATES["sparse-rl"].prompt("What is 2+{2}?") == [
        {"role": "system", "content": "You are a helpful assistant."},
        {
            "role": "user",
            "content": "What is 2+{2}?\nPlease reason step by step, and put your final answer within \\boxed{{}}.",
        },
    ]
    assert TEMPLATES["sparse-rl-eval"].prompt("Q?") == (
        "Q? Please reason step by step, and put your final answer within \\boxed{}.\n\n"
    )
    (turn,) = TEMPLATES["sparrow"].prompt("Q?")
    assert turn["content"] == (
        "Please solve the following math problem: Q?. The assistant first thinks about the reasoning process step by "
        "step and then provides the user with the answer. Return the final answer in \\boxed{} tags, for example "
        "\\boxed{1}. Let's solve this step by step. "
    )


def test_templates_by_name_and_as_text(build, chatty):
    row = {"problem": "2+2?", "answer": "4"}
    step = "Please reason step by step, and put your final answer within \\boxed{}."

    def text(**settings):
        return build([row], chatty, **settings).train[0].text

    assert text(template="boxed_chat") == f"<user>2+2?\n{step}<assistant>"
    assert text(template="plain") == "2+2?\n"
    assert text(template="Q: {problem}\nA:") == "<user>Q: 2+2?\nA:<assistant>"
    assert text(system="be brief") == "<system>be brief<user>2+2?<assistant>"
    assert text(template="sparse-rl", system="be brief").startswith("<system>be brief<user>2+2?\nPlease")
    assert text(template="sparse-rl").startswith("<system>You are a helpful assistant.<user>")
    assert text(chat_template_kwargs={"quiet": True}) == "<user>2+2?<assistant><quiet>"
    assert text(chat_template_kwargs={"add_generation_prompt": False}) == "<user>2+2?"
    (plain,) = build([row], tiny_tokenizer(), template="Q: {problem}\nA:").train
    assert (plain.text, plain.messages) == ("Q: 2+2?\nA:", ())
    with pytest.raises(ValueError, match=r"template 'boxd' is none of chat, plain.*\{problem\}"):
        text(template="boxd")


def test_without_a_chat_template_a_named_template_is_its_turns_as_lines(build, caplog):
    row = {"problem": "2+2?", "answer": "4"}

    def text(**settings):
        (prompt,) = build([row], tiny_tokenizer(), **settings).train
        assert prompt.messages == ()
        return prompt.text

    step = "Please reason step by step, and put your final answer within"
    assert text() == text(template="chat") == text(template="plain") == "2+2?\n"
    assert text(template="boxed_chat") == f"2+2?\n{step} \\boxed{{}}.\n"
    assert text(template="boxed_chat", system="be brief").startswith("be brief\n2+2?\n")
    assert text(template="sparse-rl").startswith("You are a helpful assistant.\n2+2?\n")
    assert "the model has no chat template: task.template sparse-rl is plain text here" in caplog.text
    with pytest.raises(ValueError, match="no place for a system message; leave it out"):
        text(template="Q: {problem}", system="be brief")


def test_a_system_message_replaces_the_row_s_own(build, chatty):
    own = [{"role": "system", "content": "old"}, *USER]
    texts = [prompt.text for prompt in build([{"prompt": own}, {"prompt": USER}], chatty, system="new").train]
    assert texts == ["<system>new<user>hi<assistant>"] * 2


# Lengths


def test_long_prompts_are_counted_and_left_out(build, caplog):
    """A prompt of exactly the limit stays; the context leaves room for one token."""
    rows = [{"prompt": "p" * (9 if i in (4, 7) else 8), "i": i} for i in range(20)]
    for settings in ({"max_prompt_tokens": 8}, {"context": 9}, {"max_prompt_tokens": 100, "context": 9}):
        caplog.clear()
        task = build(rows, tiny_tokenizer(), **settings)
        assert [prompt.columns["i"] for prompt in task.train] == [i for i in range(20) if i not in (4, 7)]
        said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert len(said) == 2, "one for each file"
        assert said[0].startswith("2 of 20 rows have more than 8 tokens, the first in line 5 of ")
    with pytest.raises(ValueError, match=r"20 of 20 rows have more than 7 tokens.*; raise task.max_prompt_tokens, or"):
        build(rows, tiny_tokenizer(), max_prompt_tokens=7)
    rows[9]["prompt"] = "p" * 9
    with pytest.raises(ValueError, match=r"3 of 20 rows have more than 8 tokens.*; give a model with a longer context"):
        build(rows, tiny_tokenizer(), context=9)
    with pytest.raises(ValueError, match="max_prompt_tokens is 0"):
        build(rows, tiny_tokenizer(), max_prompt_tokens=0)


# What rewards ask for


def test_a_column_that_a_reward_asks_for_is_there(build, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def needs(completions, gold, **_): return []\ndef may(completions, gold=None, **_): return []\n"
    )
    needs, may = (f"{tmp_path}/mine.py:{name}" for name in ("needs", "may"))
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "a", "level": 1}]
    for wrong, reward, message in (
        (
            rows,
            needs,
            "reward 'needs' asks for the column 'gold', which no row has: the columns are answer, level; rename",
        ),
        ([{"prompt": "a", "golds": 1}], needs, r"has \(did you mean 'golds'\?\): the columns are golds; rename one"),
        ([{"prompt": "a"}], needs, "the columns are none but the prompt; add it to the rows"),
        ([{"prompt": "a", "gold": 1}], "exact", "the columns are gold; say which of them it is with --task.answer_key"),
    ):
        with pytest.raises(ValueError, match=message):
            build(wrong, tiny_tokenizer(), rewards=(reward,))
    build([{"prompt": "a", "gold": 1}], tiny_tokenizer(), rewards=("exact",), answer_key="gold")
    build([{"prompt": "a"}, {"prompt": "a", "gold": 1}], tiny_tokenizer(), rewards=(needs,))
    build([{"prompt": "a"}], tiny_tokenizer(), rewards=(may, "overlong:limit=3,buffer=1"))


def test_a_row_that_a_reward_cannot_grade_is_named(build):
    good = {"prompt": "a", "nums": [1, 2], "target": 3, "answer": "x"}
    for reward, bad, message in (
        ("countdown", {"nums": "1 2"}, "line 2 of .* has nums '1 2' and target 3"),
        ("countdown", {"target": "3"}, "line 2 of .* has nums .* and target '3'"),
        ("exact", {"answer": None}, r'line 2 of .* has no "answer" .reward .exact.\); mend or remove it'),
        ("math", {"answer": None}, 'line 2 of .* has no right answer in "answer"'),
        ("math", {"answer": " "}, 'line 2 of .* has no right answer in "answer"'),
        ("last_number", {}, "line 1 of .* has the answer 'x', which is not a number"),
    ):
        with pytest.raises(ValueError, match=message):
            build([good, good | bad], tiny_tokenizer(), rewards=(reward,))


def test_text_that_the_tokenizer_does_not_know_is_refused(build):
    message = r"line 2 of .* has 'Q ', unknown to the model's tokenizer, which knows only '0123456789abcdefghijklmnop="
    with pytest.raises(ValueError, match=message):
        build([{"prompt": "a=b1;b=a2;a|"}, {"prompt": "aQ bQ"}], chain_tokenizer())
    build([{"prompt": "a_b"}], chain_tokenizer())  # its own symbol for what it does not know


def test_what_a_template_adds_is_not_blamed_on_the_row(build):
    row = {"question": "a=b1;b=a2;a|", "answer": "3"}
    with pytest.raises(
        ValueError, match=r"line 1 of .*: the template adds '\\n', unknown .* --task.template '{problem}'"
    ):
        build([row], chain_tokenizer())
    assert build([row], chain_tokenizer(), template="{problem}").train[0].text == "a=b1;b=a2;a|"
    with pytest.raises(ValueError, match=r"line 1 of .* has 'Q', unknown to the model's tokenizer"):
        build([{"question": "Q", "answer": "3"}], chain_tokenizer())


def test_a_chat_for_a_model_without_chats_names_the_remedy(build):
    with pytest.raises(
        ValueError, match="no chat template; give a model with one, such as smollm2, or prompts that are"
    ):
        build([{"prompt": USER}], tiny_tokenizer())


def test_a_message_that_calls_a_tool_needs_no_content(build, chatty):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert build([{"prompt": [*USER, call, *USER]}], chatty).train[0].messages[1] == call
