# SPDX-License-Identifier: Apache-2.0
"""scripts/word_problems.py on a made-up folder: splits that share nothing, solutions that come out right."""

from __future__ import annotations

import importlib.util
import json
import random
import sys
from pathlib import Path

import pytest

from sparse_rl.model.tiny import tiny_tokenizer
from sparse_rl.tasks import RowsConfig
from sparse_rl.tasks.last_number import last_number

PATH = Path(__file__).parents[1] / "scripts" / "word_problems.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("word_problems", PATH)
    sys.modules["word_problems"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def made(script, tmp_path, monkeypatch, capsys):
    """made(*flags): what the script writes from the made-up folder, and what it prints."""
    one = {"problem": "Ann had 9 figs and ate 4. How many has she?", "answer": "5"}
    again = {"problem": "Ann had 9 figs and ate 4. How many has she now?", "answer": "5.0"}
    other = {"problem": "Ann had 9 figs and ate 3. How many has she?", "answer": "6"}
    solved = {"problem": "How many eggs?", "answer": "1,200", "solution": "They are 12*100=<<12*100=1200>>1200."}
    dozen = {"problem": "How many are a dozen?", "answer": "12"}
    equation = {"problem": "Bob has 3 and 4. How many?", "answer": "7", "equation": "x = 3 + 4"}
    colour = {"problem": "Which colour?", "answer": "red"}
    write(tmp_path / "data/svamp/train.jsonl", [one, other, colour, other])
    write(tmp_path / "data/svamp/test.jsonl", [again | {"answer": "5"}])
    write(tmp_path / "data/gsm8k/train.jsonl", [solved, dozen, equation])
    write(tmp_path / "data/gsm8k/test.jsonl", [{"problem": "What is 2 and 2?", "answer": "4"}])
    many = [{"problem": f"{i} birds and {i + 7} more, how many?", "answer": str(2 * i + 7)} for i in range(20, 320)]
    write(tmp_path / "data/singleop/train.jsonl", many)

    def run(*flags):
        monkeypatch.setattr(sys, "argv", ["word_problems.py", str(tmp_path / "data"), str(tmp_path / "out"), *flags])
        script.main()
        found = {name: read(tmp_path / "out" / f"{name}.jsonl") for name in ("train", "held_out", "warm")}
        return found, capsys.readouterr().out

    return run


def test_what_is_written(made, tmp_path):
    found, printed = made()
    warm = {row["prompt"][0]["content"]: row["completion"] for row in found["warm"]}
    assert [row["prompt"] for row in found["warm"]] == [
        [{"role": "user", "content": row["question"]}] for row in found["train"]
    ]
    assert warm["Ann had 9 figs and ate 3. How many has she?"] == "9 - 3 = 6\nThe answer is 6."
    assert warm["How many eggs?"] == "They are 12*100=1200.\nThe answer is 1200."
    assert warm["How many are a dozen?"] == "The answer is 12."
    assert warm["Bob has 3 and 4. How many?"] == "3 + 4 = 7\nThe answer is 7."
    assert "Ann had 9 figs and ate 4. How many has she?" not in warm, "held out in nearly the same words"
    for row, turn in zip(found["train"], found["warm"], strict=True):
        assert last_number(turn["completion"]) == row["answer"]
    questions = [row["question"] for rows in (found["train"], found["held_out"]) for row in rows]
    assert len({*questions}) == len(questions) and "Which colour?" not in questions
    sources = [row["source"] for row in found["held_out"]]
    assert sources.count("svamp") == sources.count("gsm8k") == 1
    assert 10 < sources.count("singleop") < 60, "a tenth of a set without a test split"
    assert printed.splitlines()[2].split() == ["svamp", "1", "1", "1"]
    assert printed.splitlines()[-1].split()[1] == str(len(found["train"]))
    out = tmp_path / "out"
    files = {"train_file": str(out / "train.jsonl"), "eval_file": str(out / "held_out.jsonl")}
    task = RowsConfig(**files, rewards=("last_number",)).build(tiny_tokenizer())
    assert len(task.train) == len(found["train"])


def test_the_same_again_and_by_set(made):
    found, _ = made()
    assert made()[0] == found
    chosen, printed = made("--sets", "svamp")
    assert {row["source"] for row in chosen["train"] + chosen["held_out"]} == {"svamp"} and "singleop" not in printed


def test_a_folder_without_sets_is_refused(script, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["word_problems.py", str(tmp_path), str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        script.main()
    assert "has none of gsm8k, svamp" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("numbers", "answer", "line"),
    [
        (["290", "2", "87"], "145", "290 / 2 = 145"),
        (["2", "2"], "4", ""),  # a sum or a product
        (["3", "4", "5"], "35", "(3 + 4) * 5 = 35"),
        (["3", "4", "5"], "17", ""),  # 3 * 4 + 5, or 4 * 5 - 3
        (["3", "4", "50"], "62", "3 * 4 + 50 = 62"),
        (["0.5", "3"], "1.5", "0.5 * 3 = 1.5"),
        (["7", "0"], "99", ""),
        (["7"], "7", ""),
        ([], "7", ""),
    ],
)
def test_the_one_way_to_the_answer(script, numbers, answer, line):
    assert script.search(numbers, answer) == line


def test_lines_that_are_found_are_true(script):
    draw = random.Random(seed := random.randrange(1 << 20))
    found = 0
    for _ in range(100):
        numbers = [str(draw.randint(1, 99)) for _ in range(draw.randint(2, 4))]
        reached = int(numbers[0]) + int(numbers[1])
        line = script.search(numbers, str(draw.choice([reached, draw.randint(1, 150)])))
        found += bool(line)
        left, _, right = line.partition(" = ")
        assert not line or abs(eval(left) - int(right)) < 1e-9, (seed, line)
    assert found > 5
