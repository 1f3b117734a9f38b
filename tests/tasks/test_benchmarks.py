# SPDX-License-Identifier: Apache-2.0
"""Benchmarks from a folder, the package, the hub (a stand-in) and the generator; damaged files are named."""

from __future__ import annotations

import json
import logging
import random
import sys
from types import SimpleNamespace

import pytest

from sparse_rl.tasks.benchmark_rows import Hub, renamed
from sparse_rl.tasks.benchmarks import BENCHMARKS, LOOKUPS, PACKAGED, find, look, read_problems
from sparse_rl.tasks.rewards import build_reward

# what the hub's sets look like, a row each, and what becomes of it
HUB_ROWS = {
    "math500": (
        {
            "problem": "1 + 1?",
            "solution": "It is 2.",
            "answer": "2",
            "subject": "Algebra",
            "level": 1,
            "unique_id": "test/algebra/1.json",
        },
        {"id": "math500-test/algebra/1.json", "problem": "1 + 1?", "answer": "2", "subject": "Algebra", "level": 1},
    ),
    "minerva_math": (
        {"question": "How far?", "answer": "1.6"},
        {"id": "minerva-0", "problem": "How far?", "answer": "1.6"},
    ),
    "olympiadbench": (
        {
            "id": 1606,
            "question": "Which?",
            "solution": ["..."],
            "final_answer": ["$69$", "$84$"],
            "context": None,
            "is_multiple_answer": True,
            "unit": None,
            "answer_type": "Numerical",
            "subfield": "Combinatorics",
        },
        {
            "id": "olympiadbench-1606",
            "problem": "Which?",
            "answer": "$69$,$84$",
            "subject": "Combinatorics",
            "answer_type": "Numerical",
            "is_multiple_answer": True,
            "unit": None,
        },
    ),
    "aime24": (
        {"id": 60, "problem": "Aya walks.", "solution": "...", "answer": "204", "url": "", "year": "2024"},
        {"id": "aime24-60", "problem": "Aya walks.", "answer": "204"},
    ),
    "amc23": (
        {"id": 3, "question": "Cities A and B?", "answer": 27.0, "url": ""},
        {"id": "amc23-0", "problem": "Cities A and B?", "answer": "27"},
    ),
    "aime25": ({"problem": "Bases?", "answer": "70"}, {"id": "aime25-0", "problem": "Bases?", "answer": "70"}),
    "aime26": (
        {"problem_idx": 1, "problem": "Patrick walks.", "answer": 277},
        {"id": "aime26-1", "problem": "Patrick walks.", "answer": "277"},
    ),
    "hmmt25_feb": (
        {"problem_idx": 1, "problem": "Sum?", "answer": "103", "problem_type": ["Number Theory"]},
        {"id": "hmmt25feb-1", "problem": "Sum?", "answer": "103"},
    ),
    "humaneval": (
        {
            "task_id": "HumanEval/0",
            "prompt": "def f():\n",
            "canonical_solution": "    pass\n",
            "test": "def check(candidate): ...",
            "entry_point": "f",
        },
        {
            "id": "HumanEval/0",
            "problem": "def f():\n",
            "answer": "    pass\n",
            "test": "def check(candidate): ...",
            "entry_point": "f",
        },
    ),
    "mbpp": (
        {
            "task_id": 11,
            "text": "Write f.",
            "code": "def f(): ...",
            "test_list": ["assert f() == 1", "assert f() == 2"],
            "test_setup_code": "",
            "challenge_test_list": [],
        },
        {
            "id": "mbpp-11",
            "problem": "Write f.\nYour code must pass these tests:\nassert f() == 1\nassert f() == 2",
            "answer": "def f(): ...",
            "test_list": ["assert f() == 1", "assert f() == 2"],
            "test_setup_code": "",
        },
    ),
}


def write(folder, name, rows):
    path = folder / name / "test.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
    return path


def problems(name, folder=None):
    return read_problems(name, folder)[0]


def made(count, **more):
    return [{"id": f"row-{i}", "problem": f"What is {i} + 1?", "answer": str(i + 1)} | more for i in range(count)]


@pytest.fixture
def hub(monkeypatch):
    """A stand-in for `datasets`: sets by path; what is not there cannot be reached."""
    sets, asked = {}, []

    def load_dataset(path, config=None, *, split):
        asked.append((path, config, split))
        if path not in sets:
            raise ConnectionError("no route\nto the hub")
        return sets[path]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return SimpleNamespace(sets=sets, asked=asked)


def test_the_catalogue_is_whole():
    names = """gsm8k math500 gaokao2023en minerva_math olympiadbench aime24 amc23 aime25 aime26 hmmt25_feb humaneval
        humaneval_plus humaneval_plus_mini mbpp mbpp_plus livecodebench_v1 svamp asdiv multiarith addsub singleeq
        singleop countdown lookup"""
    assert list(BENCHMARKS) == names.split()
    for name, benchmark in BENCHMARKS.items():
        assert benchmark.name == name and benchmark.rows > 0 and benchmark.licence and benchmark.source
        assert "NC" not in benchmark.licence or benchmark.restriction == "research only"
        own = {"code": "code", "countdown": "countdown", "lookup": "right_value"}
        assert benchmark.reward == own.get(benchmark.kind, "math")
        assert benchmark.columns or benchmark.kind not in ("code", "countdown")


@pytest.mark.parametrize(("name", "rows"), [("gsm8k", 1319), ("svamp", 300)])
def test_what_the_package_has(name, rows, caplog):
    found = look(BENCHMARKS[name])
    assert found.where == "package" and len(found.rows) == BENCHMARKS[name].rows == rows and not found.complaints
    given = problems(name)
    assert len({row["problem"] for row in given}) == rows and not caplog.records
    licence = (PACKAGED / name / "LICENSE").read_text()
    assert "MIT License" in licence and "Copyright (c) 2021" in licence
    answers = [row["answer"] for row in given]
    assert sum(build_reward("last_number")(completions=[f"so {answer}" for answer in answers], answer=answers)) == rows


def test_a_folder_comes_first(tmp_path, caplog):
    rows = made(3, level=2, subject="Algebra")
    write(tmp_path, "gsm8k", rows)
    assert problems("gsm8k", tmp_path) == problems("gsm8k", str(tmp_path)) == rows
    assert "gsm8k: it has 3 rows here and 1319 as published." in caplog.text
    assert len(problems("svamp", tmp_path)) == 300  # still the package's
    with pytest.raises(ValueError, match="the data folder 'nowhere' is not there"):
        problems("gsm8k", "nowhere")


def test_rows_without_an_answer_are_left_out_and_said(tmp_path, caplog):
    rows = made(385, subject="2023BJ/01Q.en")
    rows[7]["answer"], rows[200]["answer"] = "", None
    write(tmp_path, "gaokao2023en", rows)
    given = problems("gaokao2023en", tmp_path)
    assert len(given) == 383 and {row["subject"] for row in given} == {"2023BJ"}
    assert caplog.messages == ["gaokao2023en: 2 rows have no answer and are left out: row-7, row-200."]


def test_answers_and_ids_become_strings(tmp_path):
    write(tmp_path, "aime24", [{"id": i, "problem": "?", "answer": 10 * i} for i in range(30)])
    assert [(row["id"], row["answer"]) for row in problems("aime24", tmp_path)][:2] == [("0", "0"), ("1", "10")]


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ('{"id": 1, "problem": ', "line {} is not JSON"),
        ("[1, 2]", "line {} is [1, 2]; a row is an object"),
        ('{"id": 1, "id": 2, "problem": "?", "answer": "2"}', "line {} is not JSON (the key 'id' stands there twice)"),
        ({"id": "x", "problem": "?"}, "line {} has no answer"),
        ({"answer": "2"}, "line {} has no id, problem"),
        ({"id": "x", "problem": " ", "answer": "2"}, "line {} has no problem that is a text"),
        ({"id": "x", "problem": ["?"], "answer": "2"}, "line {} has no problem that is a text"),
        ({"id": "x", "problem": "?", "answer": ["2"]}, "line {} has the answer"),
        ({"id": "x", "problem": "?", "answer": True}, "line {} has the answer 'True'"),
        ({"id": "row-0", "problem": "?", "answer": "2"}, "line {} has the id 'row-0' of line "),
    ],
)
def test_damage_is_named(tmp_path, row, complaint):
    rows = made(12)
    place = random.randrange(1, 12)
    path = write(tmp_path, "amc23", [*rows[:place], row, *rows[place:]])
    found = look(BENCHMARKS["amc23"], tmp_path)
    assert len(found.complaints) == 1 and found.complaints[0].startswith(complaint.format(place + 1))
    with pytest.raises(ValueError, match=f"{path} is damaged: .* Mend it or fetch it again"):
        problems("amc23", tmp_path)


def test_much_damage_is_counted(tmp_path):
    write(tmp_path, "amc23", ["{"] * 10)
    with pytest.raises(ValueError, match=r"line 1 is .*; line 3 is .*; and 7 more\."):
        problems("amc23", tmp_path)
    for content, complaint in (
        (b"", "it has no rows"),
        (b"\n\n", "it has no rows"),
        (b'{"\xff', "line 1 of test.jsonl is not text in UTF-8"),
    ):
        (tmp_path / "amc23" / "test.jsonl").write_bytes(content)
        assert look(BENCHMARKS["amc23"], tmp_path).complaints[0].startswith(complaint)


def test_columns_of_a_reward_are_asked_for(tmp_path):
    write(tmp_path, "countdown", made(5, nums=[1, 2]))
    with pytest.raises(ValueError, match="line 1 has no target; line 2"):
        problems("countdown", tmp_path)
    rows = made(3, test="def check(f): ...", entry_point="f")
    for empty in (None, "", []):
        write(tmp_path, "humaneval", [*rows[:2], rows[2] | {"test": empty}])
        assert look(BENCHMARKS["humaneval"], tmp_path).complaints == ("line 3 has nothing in test",)
    write(tmp_path, "mbpp_plus", made(3, entry_point="f", base_input=[[1]], plus_input=[], atol=0))
    assert look(BENCHMARKS["mbpp_plus"], tmp_path).complaints == ()


def test_code_problems_say_what_their_tests_expect(tmp_path):
    tests = [{"input": "1", "output": "2", "testtype": "stdin"}]
    rows = made(2, public_tests=tests)
    rows[1]["starter_code"] = "class Solution:\n    def f(self, x):\n        "
    write(tmp_path, "livecodebench_v1", rows)
    stdin, starter = problems("livecodebench_v1", tmp_path)
    assert stdin["problem"] == "What is 0 + 1?\n\nRead the input from stdin and print the output to stdout."
    assert starter["problem"].endswith("Complete this code:\n```python\nclass Solution:\n    def f(self, x):\n```")
    assert starter["public_tests"] == tests


@pytest.mark.parametrize("name", [name for name, benchmark in BENCHMARKS.items() if benchmark.hub])
def test_rows_of_the_hub(name, hub, caplog):
    theirs, ours = HUB_ROWS[name]
    known = BENCHMARKS[name].hub
    hub.sets[known.path] = [theirs]
    caplog.set_level(logging.WARNING)
    assert problems(name) == [ours]
    assert hub.asked == [(known.path, known.config, known.split)]
    assert f"{name}: it has 1 rows here" in caplog.text
    hub.sets[known.path] = [{"question_text": "?"}]
    with pytest.raises(ValueError, match=r"hub:.* has no column '"):
        problems(name)


def test_a_folder_spares_the_hub(tmp_path, hub):
    write(tmp_path, "aime24", made(30))
    assert len(problems("aime24", tmp_path)) == 30 and not hub.asked


def test_rows_of_the_hub_are_checked(hub):
    hub.sets["HuggingFaceH4/aime_2024"] = [{"id": 1, "problem": "?", "answer": "2"}] * 2
    with pytest.raises(ValueError, match=r"aime24 of the hub is damaged: row 2 of .* has the id 'aime24-1' of row 1"):
        problems("aime24")


def test_what_cannot_be_found_is_said_with_the_remedy(tmp_path, hub, monkeypatch):
    with pytest.raises(ValueError, match="no data folder is given") as error:
        problems("aime24")
    assert "HuggingFaceH4/aime_2024:train cannot be read from the hub (ConnectionError: no route)" in str(error.value)
    assert "Write its 30 rows (id, problem, answer; " in str(error.value) and "give --data-dir" in str(error.value)
    with pytest.raises(ValueError, match=f"there is no {tmp_path}/mbpp_plus/test.jsonl") as error:
        problems("mbpp_plus", tmp_path)
    assert "(id, problem, answer, entry_point, base_input, plus_input, atol; " in str(error.value)
    assert "no set of the hub" in str(error.value)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'sparse-rl\[data\]'"):
        problems("aime24")


def test_conversions_keep_answers_readable():
    convert = renamed("x-", id="key", answer="value")
    for value, answer in ((3.0, 3), (2.5, 2.5), (["1"], "1"), (["1", "2"], "1,2"), ("3.0", "3.0")):
        assert convert({"key": 4, "value": value}, 9) == {"id": "x-4", "answer": answer}
    assert Hub("a/b", None, "test", convert).config is None


@pytest.mark.parametrize("spec", ["lookup", "lookup:pairs=15", "lookup:pairs=60,keys=codes", "lookup:pairs=60"])
def test_lookups_are_generated(spec):
    pairs = int(spec.partition("pairs=")[2].partition(",")[0] or 10)
    rows = problems(spec)
    assert len(rows) == LOOKUPS == len({row["id"] for row in rows}) == len({row["problem"] for row in rows})
    assert problems(spec) == rows and find(spec).name == spec
    for row in random.sample(rows, 20):
        *lines, _, question = row["problem"].split("\n")
        key = question.partition("value of the ")[2].partition("?")[0]
        place = lines.index(f"The value of the {key} is {row['answer']}.")
        assert len(lines) == pairs and row["subject"] == f"fifth {5 * place // pairs + 1} of the list"
    answers = [row["answer"] for row in rows]
    right = build_reward(find(spec).reward)
    assert sum(right(completions=[f"It is {answer}." for answer in answers], answer=answers)) == LOOKUPS


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gsm9k", "did you mean 'gsm8k'"),
        ("zzz", "choose one of gsm8k, math500"),
        ("gsm8k:pairs=2", "gsm8k takes no settings"),
        ("lookup:pairs=1", "pairs is 1; .* it must lie between 2 and"),
        ("lookup:pairs=71", "it must lie between 2 and 70"),
        ("lookup:pairs=x", "benchmark .lookup:pairs=x.: pairs is 'x'; it takes a whole number"),
        ("lookup:rows=3", "'rows' is not a setting of 'lookup'; it takes pairs, keys, digits"),
        ("lookup:15", "'15' is not of the form key=value"),
        ("lookup:", "nothing follows the colon"),
        ("lookup:pairs=15,pairs=20", "pairs is given twice"),
        ("lookup:keys=names", "keys is 'names'"),
        ("../gsm8k", "is unknown"),
    ],
)
def test_wrong_names(name, message):
    with pytest.raises(ValueError, match=message):
        problems(name)
