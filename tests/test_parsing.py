# SPDX-License-Identifier: Apache-2.0
"""Flags that take several values: side by side, repeated, as a list."""

from __future__ import annotations

import pytest

from sparse_rl.cli.eval import _parser as _evaluation
from sparse_rl.cli.parsing import parse
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
