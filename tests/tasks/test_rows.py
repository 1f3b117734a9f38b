# SPDX-License-Identifier: Apache-2.0
"""Rows come from files, each once an epoch; a wrong line or reward is named in one sentence."""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys

import pytest
from small_run import small_trainer

from sparse_rl.evaluate import EvalConfig
from sparse_rl.metrics import read_log
from sparse_rl.model.load import load
from sparse_rl.model.tiny import tiny_tokenizer
from sparse_rl.tasks import Rewards, Rows, RowsConfig
from sparse_rl.tasks.chain import chain_tokenizer
from sparse_rl.tasks.rewards import import_function

TOKENIZER = chain_tokenizer()


def zero(completions, **_):
    return [0.0 for _ in completions]


def rows(size: int) -> Rows:
    return Rows([{"prompt": "a" * (i + 1), "number": i} for i in range(size)], Rewards((zero,)), TOKENIZER)


def order(task: Rows, start: int, count: int, seed: int = 0) -> list[int]:
    return [prompt.columns["number"] for prompt in task.stream(start, count, seed)]


def read(path, tokenizer=TOKENIZER, **settings):
    """The prompts of a file, in its order."""
    config = RowsConfig(train_file=str(path), rewards=("small_run:digits",), **settings)
    return config.build(tokenizer).train


BAD_FILES = {
    "no prompt": (b'{"prompt": "a"}\n{"question": "b"}\n', 'line 2 of .* has no "prompt"'),
    "prompt is null": (b'{"prompt": null}\n', 'line 1 of .* has no "prompt"'),
    "prompt is a number": (b'\n{"prompt": 3}\n', 'line 2 of .* has no "prompt"'),
    "prompt is a table": (b'{"prompt": {"role": "user"}}\n', 'line 1 of .* has no "prompt"'),
    "not an object": (b'{"prompt": "a"}\n"prompt"\n', "line 2 of .* is 'prompt'; a row is an object"),
    "not JSON": (b'{"prompt": "a"}\n\n{"prompt": "b"\n', "line 3 of .* is not JSON"),
    "single quotes": (b"{'prompt': 'a'}\n", "line 1 of .* is not JSON"),
    "nested": (b'{"prompt": "a"}\n' + b"[" * 100_000, "line 2 of .* is not JSON"),
    "empty": (b"", "has no rows"),
    "blank lines": (b"\n \n\n", "has no rows"),
    "not UTF-8": (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "line 2 of .* is not text in UTF-8"),
    "UTF-16": ('{"prompt": "a"}\n'.encode("utf-16"), "not text in UTF-8"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_wrong_line_is_named(case, tmp_path):
    content, message = BAD_FILES[case]
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read(tmp_path / "rows.jsonl")
    assert "rows.jsonl" in str(caught.value) and "\n" not in str(caught.value)


UNNAMED = {
    "empty prompt": b'{"prompt": "a"}\n\n{"prompt": ""}\n',
    "a chat without a template": b'{"prompt": "a"}\n\n{"prompt": [{"role": "user", "content": "a"}]}\n',
    "a long number": b'{"prompt": "a"}\n\n{"prompt": "b", "number": ' + b"1" * 5000 + b"}\n",
    "not UTF-8": b'{"prompt": "a"}\n\n{"prompt": "\xff"}\n',
}


@pytest.mark.parametrize("case", UNNAMED)
def test_the_line_is_named_whatever_is_wrong_with_it(case, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(UNNAMED[case])
    with pytest.raises(ValueError, match=r"line 3 of .*rows\.jsonl"):
        read(tmp_path / "rows.jsonl")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(OSError, match=r"nowhere\.jsonl"):
        read(tmp_path / "nowhere.jsonl")


def test_rows_survive_unusual_files(tmp_path):
    """A byte-order mark, CRLF, no newline at the end, separators that are no newline."""
    (tmp_path / "rows.jsonl").write_bytes('\ufeff{"prompt": "a\u2028b"}\r\n\r\n{"prompt": "ü", "x": [1]}'.encode())
    found = read(tmp_path / "rows.jsonl", tiny_tokenizer())
    assert [(prompt.text, prompt.columns) for prompt in found] == [("a\u2028b", {}), ("ü", {"x": [1]})]


def test_every_row_comes_once_an_epoch_in_another_order():
    size, seed = random.randint(20, 40), random.randrange(1 << 30)
    task = rows(size)
    epochs = [order(task, epoch * size, size, seed) for epoch in range(5)]
    assert all(sorted(epoch) == list(range(size)) for epoch in epochs), (size, seed)
    assert len({tuple(epoch) for epoch in epochs}) == 5, (size, seed)
    assert order(task, 0, size, seed + 1) != epochs[0]
    flat = [number for epoch in epochs for number in epoch]
    for count in (1, 3, 16, size, 2 * size + 1):  # whatever the batches, across the ends of epochs too
        got = [number for start in range(0, len(flat), count) for number in order(task, start, count, seed)]
        assert got[: len(flat)] == flat, (size, seed, count)


def test_a_batch_may_be_larger_than_the_file():
    assert sorted(order(rows(3), 0, 9)) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert order(rows(1), 5, 4) == [0, 0, 0, 0]


def test_a_task_from_files(tmp_path):
    for name, letters in (("train", "abc"), ("eval", "defg")):
        lines = [json.dumps({"prompt": letter, "answer": ord(letter)}) for letter in letters]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    (tmp_path / "mine.py").write_text("def one(completions, **_): return [1.0 for _ in completions]\n")
    config = RowsConfig(
        train_file=str(tmp_path / "train.jsonl"),
        eval_file=str(tmp_path / "eval.jsonl"),
        rewards=(f"{tmp_path}/mine.py:one", "small_run:digits"),
        reward_weights=(1.0, 0.5),
    )
    task = config.build(TOKENIZER)
    assert sorted(prompt.text for prompt in task.stream(0, 3, 0)) == ["a", "b", "c"]
    assert [prompt.text for prompt in task.held_out(2)] == ["d", "e"]
    assert [prompt.columns for prompt in task.held_out(99)] == [{"answer": ord(letter)} for letter in "defg"]
    assert (task.rewards.names, task.rewards.weights) == (("one", "digits"), (1.0, 0.5))
    without = RowsConfig(train_file=str(tmp_path / "train.jsonl"), rewards=("small_run:digits",)).build(TOKENIZER)
    assert without.held_out(4) == []


def test_settings_that_are_missing():
    with pytest.raises(ValueError, match=r"task\.train_file is missing"):
        RowsConfig(rewards=("math:hypot",))
    with pytest.raises(ValueError, match=r"task\.rewards is missing"):
        RowsConfig(train_file="train.jsonl")
    with pytest.raises(ValueError, match="no rows to train on"):
        Rows([], Rewards((zero,)), TOKENIZER)


def test_a_chat_is_written_with_the_template_and_kept_as_messages():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    messages = [{"role": "user", "content": "hi"}]
    (prompt,) = Rows([{"prompt": messages}], Rewards((zero,)), tokenizer).stream(0, 1, 0)
    assert prompt.text == "<user>hi<assistant>" and list(prompt.messages) == messages
    tokenizer.chat_template = "{{ raise_exception('only\nusers here') }}"
    with pytest.raises(ValueError, match="row 0: the model's chat template refuses it"):
        Rows([{"prompt": messages}], Rewards((zero,)), tokenizer)


def test_rewards_of_chats_are_told_what_they_get(tmp_path, caplog):
    caplog.set_level("INFO")
    (tmp_path / "rows.jsonl").write_text('{"prompt": [{"role": "user", "content": "a"}], "answer": "b"}\n')
    (tmp_path / "mine.py").write_text(
        "def own(completions, **_):\n    return [text.count('a') for text in completions]\n"
    )
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    said = 'gets each completion as a list, [{"role": "assistant", "content": ...}]'
    for rewards, told in ((("exact",), False), ((f"{tmp_path}/mine.py:own",), True)):
        RowsConfig(train_file=str(tmp_path / "rows.jsonl"), rewards=rewards).build(tokenizer)
        assert (said in caplog.text) == told


def test_a_row_without_what_a_reward_asks_for_is_named(tmp_path, caplog):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b"}\n{"prompt": "a"}\n')
    (tmp_path / "mine.py").write_text("def own(completions, answer, **_):\n    return [0.0 for _ in completions]\n")
    RowsConfig(train_file=str(tmp_path / "rows.jsonl"), rewards=(f"{tmp_path}/mine.py:own",)).build(TOKENIZER)
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith("line 2 of ") and said.endswith(" has no 'answer': reward 'own' gets None for it.")


def test_functions_come_from_modules_and_files(tmp_path, monkeypatch):
    assert import_function("math:hypot") is math.hypot
    (tmp_path / "sparse_rl_test_rewards.py").write_text("def one(**_): return 1\ndef two(**_): return 2\n")
    path = tmp_path / "sparse_rl_test_rewards.py"
    assert import_function(f"{path}:one")() == 1
    monkeypatch.syspath_prepend(tmp_path)
    assert import_function("sparse_rl_test_rewards:two")() == 2
    monkeypatch.chdir(tmp_path)
    assert import_function("sparse_rl_test_rewards.py:two")() == 2, "a path from where the command runs"
    path.write_text("def one(**_): return 'mended'\n")
    assert import_function(f"{path}:one")() == "mended"


def test_a_file_may_hold_whatever_looks_its_own_module_up(tmp_path):
    """As a dataclass does for annotations that are texts, and pickle for a class."""
    path = tmp_path / "graded.py"
    path.write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nimport pickle\n\n"
        "@dataclass\nclass Score:\n    value: int = 3\n\n"
        "def f(**_): return pickle.loads(pickle.dumps(Score())).value\n"
    )
    assert import_function(f"{path}:f")() == 3


WRONG_FUNCTIONS = {
    "missing module": ("no_such_module:f", "'no_such_module:f' cannot be imported: ModuleNotFoundError"),
    "missing function": ("math:no_such_function", "math has no function 'no_such_function'"),
    "not a function": (
        "{folder}/fine.py:N",
        r"fine.py has no function 'N' \(it is 3, which cannot be called\); it has f",
    ),
    "no colon": ("hypot", "is not of the form .*, nor one of code"),
    "nearly a name": ("last_numbr", "did you mean 'last_number'"),
    "nearly a name with settings": ("overlog:limit=3,buffer=1", "did you mean 'overlong'"),
    "no function": ("math:", "is not of the form"),
    "no module": (":f", "is not of the form"),
    "missing file": ("{folder}/nowhere.py:f", "nowhere.py; check the path"),
    "missing in the file": ("{folder}/fine.py:g", "fine.py has no function 'g'; it has "),
    "syntax error": ("{folder}/syntax.py:f", "syntax.py:f' cannot be imported: SyntaxError"),
    "raises": ("{folder}/raises.py:f", "raises.py:f' cannot be imported: ZeroDivisionError"),
}


@pytest.mark.parametrize("case", WRONG_FUNCTIONS)
def test_a_wrong_function_is_named(case, tmp_path):
    (tmp_path / "fine.py").write_text("N = 3\ndef f(**_): return []\n")
    (tmp_path / "syntax.py").write_text("def f(:\n")
    (tmp_path / "raises.py").write_text("1 / 0\n")
    path, message = WRONG_FUNCTIONS[case]
    with pytest.raises(ValueError, match=message) as caught:
        import_function(path.format(folder=tmp_path))
    assert str(caught.value).startswith("reward '")


def test_a_file_named_like_a_module_does_not_take_its_place(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "colorsys", __import__("colorsys"))
    before = sys.modules["colorsys"]
    (tmp_path / "colorsys.py").write_text("def f(**_): return []\n")
    import_function(f"{tmp_path}/colorsys.py:f")
    assert sys.modules["colorsys"] is before


def test_a_resumed_run_goes_on_at_the_next_row(tmp_path):
    """Seven rows, two a step, so that an epoch ends inside a step."""
    lines = [json.dumps({"prompt": f"a=b{i};b=a{i};a|", "number": i}) for i in range(7)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    config = RowsConfig(train_file=str(tmp_path / "rows.jsonl"), rewards=("small_run:digits",))

    def train(folder, **settings):
        loaded = load("embedded")
        task = config.build(loaded.tokenizer, context=loaded.context)
        parts = {"eval": EvalConfig(every=0)}
        small_trainer(folder, task=task, loaded=loaded, parts=parts, log_completions=8, **settings).train()
        return task, [record["prompt"] for record in read_log(folder / "completions.jsonl")][::4]

    task, seen = train(tmp_path / "run", steps=2, save_every=1)
    assert seen == [prompt.text for prompt in task.stream(0, 4, 0)]
    task, seen = train(tmp_path / "run", steps=5, save_every=1, resume_from_checkpoint=True)
    assert seen == [prompt.text for prompt in task.stream(0, 10, 0)] and len(set(seen[:7])) == 7
    digest = hashlib.sha256((tmp_path / "rows.jsonl").read_bytes()).hexdigest()
    recorded = json.loads((tmp_path / "run" / "run.json").read_text())["config"]["task"]
    assert (recorded["train_sha256"], recorded["layout"]) == (digest[:16], "trl")


@pytest.mark.parametrize("asked", ["trainer_state", "log_extra", "log_metric"])
def test_what_only_trl_gives_needs_a_default(tmp_path, asked):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}\n')
    file = tmp_path / "mine.py"
    config = RowsConfig(train_file=str(tmp_path / "rows.jsonl"), rewards=(f"{file}:score",))
    file.write_text(f"def score(completions, {asked}, **kwargs): return [0.0] * len(completions)\n")
    with pytest.raises(ValueError, match=rf"asks for '{asked}', which only TRL's trainer has; .*{asked}=None"):
        config.build(tiny_tokenizer())
    file.write_text(f"def score(completions, {asked}=None, **kwargs): return [0.0] * len(completions)\n")
    config.build(tiny_tokenizer())


def test_a_function_that_does_not_take_every_column_is_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "1", "level": 2}\n')
    file = tmp_path / "mine.py"
    config = RowsConfig(train_file=str(tmp_path / "rows.jsonl"), rewards=(f"{file}:score",))
    file.write_text("def score(prompts, completions, completion_ids, answer): return [0.0]\n")
    with pytest.raises(ValueError, match=r"'score' does not take level; .* add \*\*kwargs"):
        config.build(tiny_tokenizer())
