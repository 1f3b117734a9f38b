# SPDX-License-Identifier: Apache-2.0
"""Flags that take several values: side by side, repeated, as a list; and what commands say on standard error."""

from __future__ import annotations

import json
import logging

import pytest
import yaml
from commands import assert_one_sentence, run

from sparse_rl.cli.eval import _parser as _evaluation
from sparse_rl.cli.parsing import parse, show_warnings
from sparse_rl.cli.train import train_parser


@pytest.fixture(scope="module")
def parser():
    return train_parser()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--task.rewards", "a.py:f", "math"],
        ["--task.rewards", "a.py:f", "--task.rewards", "math"],
        ["--task.rewards=a.py:f", "--trainer.steps", "3", "--task.rewards=math"],
        ["--task.rewards", "[a.py:f, math]"],
    ],
)
def test_several_values_are_one_list(parser, arguments):
    assert parse(parser, arguments).task.rewards == ["a.py:f", "math"]


def test_values_keep_their_kind(parser):
    given = parse(
        parser, ["--task.reward_weights", "1", "-0.5", "--sampling.stop", "1", "a, b", "--trainer.steps", "3"]
    )
    assert given.task.reward_weights == [1.0, -0.5]
    assert given.sampling.stop == ["1", "a, b"] and given.trainer.steps == 3
    assert parse(parser, ["--task.rewards", 'format:{"pattern": "a{1,2}, b"}', "math"]).task.rewards == [
        'format:{"pattern": "a{1,2}, b"}',
        "math",
    ]


def test_a_flag_for_one_value_takes_no_second(parser):
    with pytest.raises(ValueError, match="unknown option '4'"):
        parse(parser, ["--trainer.steps", "3", "4"])


def test_words_without_a_flag_stay_so():
    from sparse_rl.cli.generate import _parser

    given = parse(_parser(), ["--sampling.stop", "x", "Once upon a time", "--sampling.stop", "y"])
    assert given.prompt == ["Once upon a time"] and given.sampling.stop == ["x", "y"]


@pytest.mark.parametrize(
    "arguments",
    [["--models", "a", "b"], ["--models", "a", "--models", "b"], ["--model", "a", "--seed", "3", "--models=b"]],
)
def test_no_model_of_an_evaluation_is_lost(arguments):
    assert parse(_evaluation(), arguments).models == ["a", "b"]
    with pytest.raises(ValueError, match="expected at least one argument"):
        parse(_evaluation(), ["--models"])


def test_a_single_value_of_a_file_is_a_list_of_one():
    settings = yaml.safe_dump({"models": "tiny", "benchmarks": ["gsm8k"], "kv": "rkv:16"})
    given = parse(_evaluation(), ["--config", settings])
    assert (given.models, given.benchmarks, given.kv) == (["tiny"], ["gsm8k"], ["rkv:16"])


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        ("eval", ["--models", "tiny", "--kv.policy", "rkv"], "--kv.policy is not a setting here: --kv says it all"),
        ("inspect", ["--kv.policy=rkv"], "--kv.policy is not a setting here: --kv says it all"),
        ("calibrate", ["--kv.policy", "rkv"], "--kv.policy is not a setting here: --kv says it all"),
        ("generate", ["a", "--kv", "rkv:128"], "--kv is a section of settings; give them one by one, --kv.policy"),
        ("train", ["--kv=rkv:128"], "--kv is a section of settings; give them one by one, --kv.policy"),
        ("plan", ["--kv", "rkv:128"], "--kv is a section of settings; give them one by one, --kv.policy"),
    ],
)
def test_a_section_and_a_setting_are_not_mixed_up(command, arguments, message):
    assert_one_sentence(run(command, *arguments), message)


@pytest.mark.parametrize("command", ["generate", "eval", "calibrate", "sft", "train", "plan"])
@pytest.mark.parametrize(
    "settings", [{"config": {"seed": 3}}, {"config": "x.yaml"}, {"command": "sparse-rl eval", "settings": {}}]
)
def test_a_record_is_no_file_of_settings(command, settings, tmp_path):
    (tmp_path / "run.json").write_text(json.dumps(settings))
    assert_one_sentence(run(command, "--config", str(tmp_path / "run.json")), "run.json is not a file of settings")


def test_a_section_of_a_file_is_a_table_whatever_flags_say(tmp_path):
    (tmp_path / "a.yaml").write_text("sampling: 3\n")
    arguments = ["a", "--model", "tiny", "--sampling.max_tokens", "2", "--config", str(tmp_path / "a.yaml")]
    assert_one_sentence(run("generate", *arguments), "sampling is 3 in a file; it must be a table of keys and values")


def test_a_value_of_another_kind_is_shown_whole(tmp_path):
    for text, shown in (("[1, 2]", "'[1, 2]'"), ("{a: 1}", "\"{'a': 1}\"")):
        (tmp_path / "a.yaml").write_text(f"kv: {{policy: rkv, budget: {text}}}\n")
        found = run("train", "--config", str(tmp_path / "a.yaml"), "--dry-run")
        assert_one_sentence(found, f"kv.budget is {shown}, which is not of type int.")


def test_a_flag_by_the_beginning_of_its_name_and_one_without_a_value():
    assert_one_sentence(run("train", "--resume"), "'resume'; did you mean --trainer.resume_from_checkpoint?")
    assert_one_sentence(run("train", "--trainer.steps"), "--trainer.steps has no value; --help says which it takes.")


def test_a_base_that_does_not_belong_is_named_with_the_file_that_was_given(tmp_path):
    (tmp_path / "mine.yaml").write_text("base: qwen2.5-1.5b.yaml\n")
    found = run("sft", "--config", str(tmp_path / "mine.yaml"))
    assert_one_sentence(found, "mine.yaml, has task settings, which belong to `sparse-rl train`")


def test_what_the_hubs_client_prints_itself_is_not_said_again(capsys, monkeypatch):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    show_warnings()
    logging.getLogger("huggingface_hub.utils").warning("retrying")
    logging.getLogger("sparse_rl.tasks").warning("a row is odd")
    assert capsys.readouterr().err == "sparse-rl: WARNING: a row is odd\n"
