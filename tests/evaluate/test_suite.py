# SPDX-License-Identifier: Apache-2.0
"""The prompts a model gets: as in training, with and without a chat template."""

from __future__ import annotations

import json
import random
from types import SimpleNamespace

import pytest
import small_eval
from small_eval import small, toy

from sparse_rl.evaluate import Evaluation
from sparse_rl.evaluate.suite import build_prompts, build_suites
from sparse_rl.model.tiny import tiny_tokenizer
from sparse_rl.tasks.rows import RowsConfig
from sparse_rl.tasks.templates import TEMPLATES

CHAT = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if think %}<think>{% endif %}"


@pytest.fixture
def data(tmp_path):
    toy(tmp_path / "data", seed=random.randrange(1 << 20))
    yield tmp_path / "data"
    del small_eval.BENCHMARKS["toy"]


def asked(data, chat, **more):
    """The prompts of an evaluation."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT if chat else None
    evaluation = small(data, **more)
    return build_prompts(
        build_suites(evaluation)["toy"], evaluation, SimpleNamespace(tokenizer=tokenizer, context=10_000)
    )


def trained(data, chat, **more):
    """The prompts of a task."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT if chat else None
    path = str(data / "toy/test.jsonl")
    return RowsConfig(train_file=path, rewards=("small_eval:grade",), **more).build(tokenizer).train


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("system", [None, "Be brief."])
def test_a_template_makes_the_same_prompt_in_training_and_in_evaluation(data, chat, system):
    refused = []
    for template in (*TEMPLATES, "Q: {problem} A:"):
        more = {"template": template, "system": system, "chat_template_kwargs": {"think": True}}
        try:
            prompts = trained(data, chat, **more)
        except ValueError:
            refused.append(template)
            with pytest.raises(ValueError, match="no place for a system message"):
                asked(data, chat, **more)
            continue
        found = asked(data, chat, **more).prompts
        assert [(p.ids, p.messages) for p in found] == [(p.ids, p.messages) for p in prompts], template
        assert system is None or system in prompts[0].text
    plain = [name for name, template in TEMPLATES.items() if not template.chat] + ["Q: {problem} A:"] * (not chat)
    assert refused == ([] if system is None else plain)


def test_a_chat_gets_the_system_prompt_and_the_templates_arguments(data):
    more = {"system": "Be brief.", "template": "Q: {problem}", "chat_template_kwargs": {"think": True}}
    made = asked(data, True, **more)
    text = made.prompts[0].text
    assert text.startswith("[system] Be brief.\n[user] Q: 0.") and text.endswith("+ <b>?\n<think>")
    assert bytes(made.prompts[0].ids).decode() == text and not made.plain  # nothing but the template's own tokens
    assert any("system prompt is 'Be brief.'" in said for said in small(data, **more).departures("toy"))


def test_without_a_chat_template_it_is_said(data):
    for template, plain in (("boxed_chat", True), ("Q: {problem}", True), ("plain", False)):
        assert asked(data, False, template=template).plain == plain and not asked(data, True, template=template).plain


def test_a_folder_in_the_home_is_found(data, monkeypatch):
    monkeypatch.setenv("HOME", str(data.parent))
    suites = [build_suites(small(folder))["toy"] for folder in (data, "~/data")]
    assert suites[0].digest == suites[1].digest


def test_what_is_not_as_published_is_a_departure(data):
    path = data / "toy/test.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0].replace('"answer": "0"', '"answer": ""'), *lines[1:6]]) + "\n")
    said = build_suites(small(data, problems=3))["toy"].departures[-3:]
    assert said == [
        "it has 6 rows here and 10 as published",
        "1 rows have no answer and are left out: toy-0",
        "3 of 5 problems are taken, a sample",
    ]
    assert "sample" not in build_suites(small(data, problems=5))["toy"].departures[-1]


def test_a_row_that_cannot_be_graded_is_named(data, monkeypatch):
    monkeypatch.setattr(
        small_eval.grade, "check", lambda row: "is odd" if row["id"] == "toy-3" else None, raising=False
    )
    with pytest.raises(ValueError, match=r"problem 'toy-3' of toy is odd \(reward 'grade'\); mend or remove it"):
        build_suites(small(data))


def test_countdown_needs_no_answer(tmp_path):
    (tmp_path / "countdown").mkdir()
    row = {"id": "a", "problem": "?", "answer": "", "nums": [1, 2], "target": 3}
    path = tmp_path / "countdown/test.jsonl"
    path.write_text(json.dumps(row) + "\n")
    evaluation = Evaluation(models=("tiny",), benchmarks=("countdown",), data_dir=str(tmp_path))
    suite = build_suites(evaluation)["countdown"]
    assert [row["id"] for row in suite.rows] == ["a"] and not any("no answer" in said for said in suite.departures)
    path.write_text(json.dumps(row | {"target": "3"}) + "\n")
    with pytest.raises(ValueError, match=r"test.jsonl is damaged: line 1 has nums \[1, 2\] and target '3'"):
        build_suites(evaluation)
