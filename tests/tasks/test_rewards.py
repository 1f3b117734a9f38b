# SPDX-License-Identifier: Apache-2.0
"""Rewards are called as TRL calls them, add up by weight, may decline, and stop the run in one sentence if broken."""

from __future__ import annotations

import math
import statistics
from fractions import Fraction

import numpy as np
import pytest
import small_run
import torch
from small_run import CHAIN, small_trainer, without_times

from sparse_rl.metrics import read_log
from sparse_rl.model.tiny import tiny_tokenizer
from sparse_rl.tasks import Rewards
from sparse_rl.tasks.chain import chain_tokenizer
from sparse_rl.tasks.prompts import make_prompt
from sparse_rl.train import checkpoint
from sparse_rl.types import KVStats, Prompt, Rollout

TOKENIZER = chain_tokenizer()
NO_KV = KVStats(held=(), full=0, hybrid=0.0, peak=0, peak_bytes=0, num_compressions=0)


def rollout(prompt: Prompt, text: str, tokenizer=TOKENIZER) -> Rollout:
    ids = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)
    return Rollout(
        prompt=prompt,
        sample=0,
        token_ids=ids,
        sampler_logprobs=torch.zeros(len(ids)),
        completion_mask=torch.ones(len(ids), dtype=torch.bool),
        finish_reason="stop",
        kv=NO_KV,
    )


PROMPTS = [make_prompt({"prompt": text, "answer": i, "why": None}, "row", TOKENIZER) for i, text in enumerate("abcd")]
ROLLOUTS = [rollout(prompt, text) for prompt, text in zip(PROMPTS, ("!1#", "!22#", "", "ab?#"), strict=True)]


def gives(value, name="gives"):
    """A reward function that returns this."""

    def reward(**_):
        return value

    reward.__name__ = name
    return reward


def grade(*functions, weights=()):
    return Rewards(functions, weights).grade(ROLLOUTS, TOKENIZER)


def numbers(values: torch.Tensor) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]


def test_rewards_add_up_by_weight_without_those_who_declined():
    one, two = gives([1, 2, None, None], "one"), gives([10.0, None, 20.0, None], "two")
    graded = grade(one, two, weights=(2.0, -0.5))
    assert numbers(graded.rewards) == [2 - 5, 4, -10, None]
    assert numbers(graded.by_function["one"]) == [1, 2, None, None]
    assert numbers(graded.by_function["two"]) == [10, None, 20, None]
    assert graded.metrics() == {
        "reward": pytest.approx(-3.0),
        "reward_std": pytest.approx(7.0),  # of -3, 4 and -10
        "rewards/one/mean": pytest.approx(1.5),
        "rewards/one/std": pytest.approx(math.sqrt(0.5)),
        "rewards/one/failed": 0,
        "rewards/two/mean": pytest.approx(15.0),
        "rewards/two/std": pytest.approx(math.sqrt(50)),
        "rewards/two/failed": 0,
    }
    assert numbers(grade(one, two).rewards) == [11, 2, 20, None], "weights are 1 each if none are given"
    assert numbers(grade(one, two, weights=(0.0, 1.0)).rewards) == [10, 0, 20, None]


def test_a_batch_that_nobody_grades_has_no_reward():
    metrics = grade(gives([None] * 4)).metrics()
    assert math.isnan(metrics["reward"]) and math.isnan(metrics["reward_std"])


def test_functions_are_called_with_keywords_and_every_column():
    calls = []

    def reward(**inputs):
        calls.append(inputs)
        return [0.0] * 4

    grade(reward)
    assert calls == [
        {
            "prompts": ["a", "b", "c", "d"],
            "completions": ["!1", "!22", "", "ab?"],  # without the end token
            "completion_ids": [rollout.token_ids.tolist() for rollout in ROLLOUTS],
            "answer": [0, 1, 2, 3],
            "why": [None] * 4,
        }
    ]
    assert all(type(token) is int for ids in calls[0]["completion_ids"] for token in ids)


def chat_inputs():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    prompt = make_prompt({"prompt": messages, "answer": "x"}, "row", tokenizer)
    calls = []

    def reward(**inputs):
        calls.append(inputs)
        return [0.0]

    Rewards((reward,)).grade([rollout(prompt, "hello", tokenizer)], tokenizer)
    return calls[0], messages


def test_chats_are_graded_as_messages():
    inputs, messages = chat_inputs()
    assert [list(prompt) for prompt in inputs["prompts"]] == [messages]
    assert inputs["completions"] == [[{"role": "assistant", "content": "hello"}]]
    assert inputs["answer"] == ["x"]


def test_a_chat_and_its_completion_add_up_to_a_conversation():
    inputs, messages = chat_inputs()
    conversation = inputs["prompts"][0] + inputs["completions"][0]
    assert conversation == [*messages, {"role": "assistant", "content": "hello"}]


@pytest.mark.parametrize("column", ["prompts", "completions", "completion_ids"])
def test_a_column_with_the_name_of_what_was_sampled_is_refused(column):
    with pytest.raises(ValueError, match=f"row has a column '{column}', a name that reward functions know otherwise"):
        make_prompt({"prompt": "a", column: "mine"}, "row", TOKENIZER)


def test_a_column_that_only_some_rows_have_is_none_for_the_others():
    prompts = [make_prompt(row, "row", TOKENIZER) for row in ({"prompt": "a"}, {"prompt": "b", "answer": "1"})]
    seen = []

    def reward(answer=None, **_):
        seen.append(answer)
        return [0.0, 0.0]

    Rewards((reward,)).grade([rollout(prompt, "!1") for prompt in prompts], TOKENIZER)
    assert seen == [[None, "1"]]


def raises(**_):
    raise KeyError("answer")


BROKEN = {
    "raises": (raises, "'raises' raised KeyError: 'answer'"),
    "nan": (gives([0.0, math.nan, 0.0, 0.0]), "'gives' returned nan for completion 1"),
    "inf": (gives([0.0, 0.0, math.inf, 0.0]), "'gives' returned inf for completion 2"),
    "minus inf": (gives([-math.inf] * 4), "'gives' returned -inf for completion 0"),
    "a string": (gives([0.0, 0.0, 0.0, "1"]), "'gives' returned '1' for completion 3"),
    "a list each": (gives([[1.0]] * 4), r"'gives' returned \[1.0\] for completion 0"),
    "a tensor each": (gives([torch.ones(2)] * 4), r"'gives' returned tensor\(\[1., 1.\]\) for completion 0"),
    "an array each": (gives([np.ones(2)] * 4), r"'gives' returned array\(\[1., 1.\]\) for completion 0"),
    "complex": (gives([1j] * 4), "'gives' returned 1j for completion 0"),
    "too few": (gives([1.0] * 3), "'gives' returned 3 rewards for 4 completions"),
    "too many": (gives([1.0] * 5), "'gives' returned 5 rewards for 4 completions"),
    "nothing": (gives(None), "'gives' returned NoneType; it must return a list"),
    "a number": (gives(1.0), "'gives' returned float; it must return a list"),
    "text": (gives("1111"), "'gives' returned str; it must return a list"),
    "a dict": (gives(dict.fromkeys(range(4), 1.0)), "'gives' returned dict; it must return a list"),
    "a scalar tensor": (gives(torch.tensor(1.0)), "'gives' returned float; it must return a list"),
    "a matrix": (gives(torch.ones(4, 1)), r"'gives' returned \[1.0\] for completion 0"),
    "a tensor with nan": (gives(torch.tensor([0.0, 0.0, 0.0, math.nan])), "'gives' returned nan for completion 3"),
    "an array with nan": (gives(np.array([0.0, 0.0, 0.0, math.nan])), "'gives' returned "),
    "unknown keyword": (
        lambda completions: [0.0] * 4,
        "'<lambda>' does not take prompts, completion_ids; .* add \\*\\*kwargs",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_reward_is_named_in_one_sentence(case):
    function, message = BROKEN[case]
    with pytest.raises(ValueError, match=f"reward function {message}") as caught:
        grade(gives([0.0] * 4, "fine"), function)
    assert "\n" not in str(caught.value) and str(caught.value).endswith(".")


def test_a_reward_that_takes_a_chat_for_a_text_is_told_so():
    def strips(completions, **_):
        return [len(text.strip()) for text in completions]

    prompt = Prompt(text="a", ids=(1,), messages=({"role": "user", "content": "a"},))
    with pytest.raises(ValueError, match=r"AttributeError: .* \(prompts are chats here, and each completion a list, "):
        Rewards((strips,)).grade([rollout(prompt, "ab")], TOKENIZER)


@pytest.mark.parametrize("functions", [abs, "abs", (3,)])
def test_what_is_no_tuple_of_functions_is_refused(functions):
    with pytest.raises(ValueError, match=r"give a tuple of functions, Rewards\(\(mine,\)\)"):
        Rewards(functions)


def test_a_number_beyond_any_float_is_named_too():
    with pytest.raises(ValueError, match="reward function 'gives' returned"):
        grade(gives([10**400] * 4))


@pytest.mark.parametrize(
    "value",
    [
        [True, False, True, True],
        (1, 0, 1, 1),
        [Fraction(1), 0, np.float32(1), np.int64(1)],
        torch.tensor([1.0, 0.0, 1.0, 1.0], requires_grad=True),
        torch.tensor([True, False, True, True]),
        torch.tensor([1, 0, 1, 1], dtype=torch.bfloat16),
    ],
    ids=["bools", "tuple", "mixed", "tensor", "bool tensor", "bfloat16"],
)
def test_every_kind_of_number_is_a_reward(value):
    assert numbers(grade(gives(value)).rewards) == [1, 0, 1, 1]


@pytest.mark.parametrize(
    "value",
    [
        np.array([1.0, 0.0, 1.0, 1.0]),
        [np.True_, np.False_, np.True_, np.True_],
        list(torch.tensor([1, 0, 1, 1])),
    ],
    ids=["array", "array bools", "scalar tensors"],
)
def test_what_trl_accepts_besides_lists_of_numbers_is_a_reward(value):
    assert numbers(grade(gives(value)).rewards) == [1, 0, 1, 1]


def test_functions_and_weights_must_match():
    with pytest.raises(ValueError, match=r"two reward functions share a name \(one, one\); rename one"):
        Rewards((gives(0, "one"), gives(1, "one")))
    with pytest.raises(ValueError, match="2 reward functions and 1 weights"):
        Rewards((gives(0, "one"), gives(1, "two")), (1.0,))
    with pytest.raises(ValueError, match="at least one"):
        Rewards(())


@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_weights_must_be_finite(weight):
    with pytest.raises(ValueError, match="weight"):
        grade(gives([1.0] * 4), weights=(weight,))


def test_a_callable_object_is_named_after_its_class():
    class Judge:
        def __call__(self, completions, **_):
            return [0.5 for _ in completions]

    assert set(grade(Judge()).by_function) == {"Judge"}


class Task:
    """Short chains with rewards of one's own."""

    def __init__(self, *functions):
        self.rewards = Rewards(functions)

    def stream(self, start, count, seed):
        return CHAIN.stream(start, count, seed)

    def held_out(self, count):
        return CHAIN.held_out(count)


def sometimes(completion_ids, **_):
    """Declines a third of the completions."""
    return [None if sum(ids) % 3 == 0 else (sum(ids) % 7) / 7 for ids in completion_ids]


def test_advantages_leave_out_what_nobody_graded(tmp_path):
    small_trainer(tmp_path / "run", task=Task(sometimes), log_completions=8, save_every=0).train()
    records, ungraded = read_log(tmp_path / "run" / "completions.jsonl"), 0
    metrics = {line["step"]: line for line in read_log(tmp_path / "run" / "metrics.jsonl")}
    for step in range(1, 5):
        batch = [record for record in records if record["step"] == step]
        declined = [record for record in batch if record["reward"] is None]
        known = [record["reward"] for record in batch if record["reward"] is not None]
        ungraded += len(declined)
        assert len(batch) == 8
        assert all(record["advantage"] == 0.0 and record["rewards"] == {"sometimes": None} for record in declined)
        assert metrics[step]["completions/ungraded_frac"] == len(declined) / 8
        assert metrics[step]["reward"] == pytest.approx(statistics.mean(known))
        for group in (batch[:4], batch[4:]):
            graded = [record for record in group if record["reward"] is not None]
            rewards = [record["reward"] for record in graded]
            if len(set(rewards)) > 1:
                scale = statistics.stdev(rewards) + 1e-6
                expected = [(reward - statistics.mean(rewards)) / scale for reward in rewards]
                assert [record["advantage"] for record in graded] == pytest.approx(expected, rel=1e-5)
            else:
                assert all(record["advantage"] == 0.0 for record in graded)
    assert 0 < ungraded < 32


def test_a_run_that_nobody_grades_changes_nothing(tmp_path):
    trainer = small_trainer(tmp_path / "run", task=Task(lambda completions, **_: [None] * len(completions)), steps=1)
    before = {name: value.clone() for name, value in trainer.loaded.model.state_dict().items()}
    trainer.train()
    assert all(torch.equal(value, before[name]) for name, value in trainer.loaded.model.state_dict().items())
    line = read_log(tmp_path / "run" / "metrics.jsonl")[-1]
    assert line["reward"] is None and line["completions/ungraded_frac"] == 1.0
    assert line["eval/dense/reward"] is None


def digits(breaks_at: int | None):
    """The small run's reward; it raises in a training step."""
    steps = []

    def digits(completions, **_):
        steps.extend([1] if len(completions) == 8 else [])  # evaluation has four
        if len(steps) == breaks_at:
            raise RuntimeError("the judge is away")
        return small_run.digits(completions)

    return digits


def test_nothing_is_lost_when_a_reward_fails(tmp_path):
    run, whole = tmp_path / "run", tmp_path / "whole"
    small_trainer(whole, task=Task(digits(None)), steps=2).train()
    with pytest.raises(ValueError, match="reward function 'digits' raised RuntimeError: the judge is away"):
        small_trainer(run, task=Task(digits(2)), steps=2).train()
    assert without_times(run) == without_times(whole)[:2], "steps 0 and 1"
    for name in ("completions.jsonl", "rejected.jsonl"):
        kept = (run / name).read_bytes()
        assert (whole / name).read_bytes().startswith(kept)
    assert (run / "completions.jsonl").read_bytes()
    assert [path.name for path in checkpoint.checkpoints(run)] == ["checkpoint-1"]
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match="resume it with"):
        small_trainer(run, task=Task(digits(None)), steps=2).train()
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before

    small_trainer(run, task=Task(digits(None)), steps=2, resume_from_checkpoint=True).train()
    assert without_times(run) == without_times(whole)
    for name in ("completions.jsonl", "rejected.jsonl"):
        assert (run / name).read_bytes() == (whole / name).read_bytes()
    ours, theirs = (checkpoint.read_masters(folder / "checkpoint-2") for folder in (run, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
