# SPDX-License-Identifier: Apache-2.0
"""Rows to imitate: which tokens they become, and what is said of rows that are wrong."""

from __future__ import annotations

import json

import pytest

from sparse_rl.model.tiny import tiny_tokenizer
from sparse_rl.tasks.files import read_table
from sparse_rl.tasks.supervised import ExamplesConfig, make_example, make_examples

TOKENIZER = tiny_tokenizer()
EOS = TOKENIZER.eos_token_id


@pytest.fixture
def file(tmp_path):
    """file(rows or bytes): a JSONL file."""

    def write(content):
        path = tmp_path / "rows.jsonl"
        if not isinstance(content, bytes):
            content = "".join(json.dumps(row) + "\n" for row in content).encode()
        path.write_bytes(content)
        return path

    return write


def read_examples(path, tokenizer, end_ids, max_length):
    return make_examples(read_table(str(path)), tokenizer, end_ids, max_length, "raise data.max_length")


def example(completion, prompt="ab", tokenizer=TOKENIZER, end_ids=(EOS,)):
    return make_example({"prompt": prompt, "completion": completion, "level": 3}, "row 0", tokenizer, end_ids)


def test_a_completion_ends_with_the_end_token_once():
    assert example("cd").token_ids.tolist() == [99, 100, EOS]
    assert example("cd<eos>").token_ids.tolist() == [99, 100, EOS]
    assert example("c<eos>d").token_ids.tolist() == [99, EOS, 100, EOS]
    assert example("<eos>").token_ids.tolist() == [EOS]
    assert example("cd", end_ids=(7, 100)).token_ids.tolist() == [99, 100], "another of the model's end tokens"
    assert example("cd", end_ids=(7, EOS)).token_ids.tolist() == [99, 100, 7]
    assert example("cd").prompt.ids == (97, 98) and example("cd").num_tokens == 5


def test_a_chat_is_written_up_to_where_its_answer_begins(chatty):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    got = example("ho", messages, chatty)
    assert got.prompt.text == "<system>be brief<user>hi<assistant>"
    assert list(got.prompt.ids) == list(got.prompt.text.encode()) and got.token_ids.tolist() == [104, 111, EOS]
    with pytest.raises(ValueError, match="row 0 is a list of messages, but the model has no chat template"):
        example("ho", messages)


def test_a_chat_to_imitate_is_written_in_trl_s_ways(chatty, tmp_path):
    """As messages, as a prompt and a completion that are messages, from JSONL and from parquet."""
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    for row in ({"messages": messages}, {"prompt": messages[:1], "completion": messages[1:]}):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row))
        parquet = pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pytest.importorskip("pyarrow").Table.from_pylist([row]), tmp_path / "rows.parquet")
        for name in ("rows.jsonl", "rows.parquet"):
            (got,) = ExamplesConfig(train_file=str(tmp_path / name)).build(chatty, (EOS,), 100).train
            assert got.prompt.text == "<user>hi<assistant>" and got.token_ids.tolist() == [104, 111, EOS]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": messages[:1]}))
    with pytest.raises(ValueError, match=r'line 1 of .* has no "completion"'):
        ExamplesConfig(train_file=str(tmp_path / "rows.jsonl")).build(chatty, (EOS,), 100)


GOOD = b'{"prompt": "a", "completion": "b"}\n'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"prompt": "a"}', 'has no "completion" that is a string'),
        (b'{"prompt": "a", "completion": 3}', 'has no "completion" that is a string'),
        (b'{"prompt": "a", "completion": null}', 'has no "completion" that is a string'),
        (b'{"prompt": "a", "completion": ""}', "has an empty completion"),
        (b'{"prompt": "a", "completion": [{"role": "user", "content": "b"}]}', 'has no "completion" that is a string'),
        (b'{"prompt": "", "completion": "b"}', "is empty"),
        (b'{"completion": "b"}', 'has no "prompt"'),
        (b'{"prompt": 3, "completion": "b"}', 'has no "prompt"'),
        (b'["a", "b"]', r"is \['a', 'b'\]; a row is an object"),
        (b'{"prompt": "a", "completion": "b"', "is not JSON"),
        (b'{"prompt": "a", "completion": "\\ud800"}', "the tokenizer cannot read the completion"),
        (b'{"prompt": "\\ud800", "completion": "b"}', "the tokenizer cannot read it"),
        (b'{"prompt": [{"role": "user", "content": "a"}], "completion": "b"}', "no chat template"),
        (b'{"prompt": "\xff", "completion": "b"}', "is not text in UTF-8"),
    ],
    ids=lambda value: value.decode("latin-1") if isinstance(value, bytes) else "",
)
def test_a_wrong_row_is_named_by_its_line(line, message, file):
    path = file(GOOD + b"\n" + line + b"\n" + GOOD)
    with pytest.raises(ValueError, match=f"line 3 of {path}.*{message}"):
        read_examples(path, TOKENIZER, (EOS,), 100)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xef\xbb\xbf\n"])
def test_a_file_without_rows_is_refused(content, file):
    with pytest.raises(ValueError, match="has no rows"):
        read_examples(file(content), TOKENIZER, (EOS,), 100)


def test_long_rows_are_left_out_with_one_message(file, caplog):
    """A length of exactly max_length, end token included, is kept."""
    path = file([{"prompt": "p", "completion": "c" * (9 if i in (4, 7) else 8)} for i in range(20)])
    kept = read_examples(path, TOKENIZER, (EOS,), 10)
    assert len(kept) == 18 and {example.num_tokens for example in kept} == {10}
    (record,) = caplog.records
    message = f"2 of 20 rows have more than 10 tokens, the first in line 5 of {path}; they are left out."
    assert record.getMessage() == message


def test_more_than_a_tenth_too_long_is_an_error(file):
    path = file([{"prompt": "p", "completion": "c" * (9 if i in (4, 7, 9) else 8)} for i in range(20)])
    with pytest.raises(ValueError, match=r"3 of 20 rows .* first in line 5 of .*; raise data.max_length, or shorten"):
        read_examples(path, TOKENIZER, (EOS,), 10)


def test_the_settings_decide_the_files_and_the_length(file, tmp_path):
    path = file([{"prompt": "p", "completion": "cc"}])
    held_out = tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "q", "completion": "r"}\n' * 2)
    built = ExamplesConfig(train_file=str(path), eval_file=str(held_out)).build(TOKENIZER, (EOS,), 4)
    assert (len(built.train), len(built.eval)) == (1, 2)
    assert built.settings["train_file"] == str(path) and len(built.settings["train_sha256"]) == 16
    for limit, message in ((3, "1 of 1 rows have more than 3"), (5, "data.max_length is 5, but .* context is 4")):
        with pytest.raises(ValueError, match=message):
            ExamplesConfig(train_file=str(path), max_length=limit).build(TOKENIZER, (EOS,), 4)
    with pytest.raises(ValueError, match=r"have more than 3 tokens.*; give a model with a longer context"):
        ExamplesConfig(train_file=str(path)).build(TOKENIZER, (EOS,), 3)
    with pytest.raises(ValueError, match=r"data\.train_file is missing"):
        ExamplesConfig()
    with pytest.raises(ValueError, match=r"data\.max_length is 1"):
        ExamplesConfig(train_file="a", max_length=1)
