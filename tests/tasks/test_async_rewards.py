# SPDX-License-Identifier: Apache-2.0
"""Async rewards run at the same time in one loop; what a grader failed at is counted, left out, and said."""

from __future__ import annotations

import asyncio
import math
import warnings

import pytest
import torch
from small_run import CHAIN, small_trainer

from sparse_rl.grading import Failed
from sparse_rl.metrics import read_log
from sparse_rl.tasks import Rewards
from sparse_rl.tasks.chain import chain_tokenizer
from sparse_rl.types import KVStats, Prompt, Rollout

TOKENIZER = chain_tokenizer()
NO_KV = KVStats(held=(), full=0, hybrid=0.0, peak=0, peak_bytes=0, num_compressions=0)
ROLLOUTS = [
    Rollout(
        prompt=Prompt(ids=(1,), text="1", columns={"answer": i}),
        sample=0,
        token_ids=torch.tensor([i]),
        sampler_logprobs=torch.zeros(1),
        completion_mask=torch.ones(1, dtype=torch.bool),
        finish_reason="stop",
        kv=NO_KV,
    )
    for i in range(3)
]


def grade(*functions, weights=()):
    return Rewards(functions, weights).grade(ROLLOUTS, TOKENIZER)


def numbers(values):
    return [None if math.isnan(value) else value for value in values.tolist()]


# Async


def meeting(*names):
    """Async rewards that each wait until all of them have begun."""
    barrier = asyncio.Barrier(len(names))

    def make(name, value):
        async def reward(answer, **_):
            await asyncio.wait_for(barrier.wait(), timeout=20)
            return [value + right for right in answer]

        reward.__name__ = name
        return reward

    return [make(name, 10.0**i) for i, name in enumerate(names)]


def test_async_rewards_run_at_the_same_time_beside_plain_ones():
    def plain(answer, **_):
        return [float(right) for right in answer]

    first, second = meeting("first", "second")
    graded = grade(first, plain, second, weights=(1.0, 0.0, 2.0))
    assert list(graded.by_function) == ["first", "plain", "second"]
    assert numbers(graded.by_function["second"]) == [10, 11, 12] and numbers(graded.by_function["plain"]) == [0, 1, 2]
    assert numbers(graded.rewards) == [1 + 20, 2 + 22, 3 + 24]


def test_async_rewards_in_a_notebook():
    """A loop is running where the rewards are called."""

    async def cell():
        return grade(*meeting("first", "second"))

    assert numbers(asyncio.run(cell()).rewards) == [11, 13, 15]


def test_the_loop_stays_the_same():
    """What a function keeps open between steps stays open."""
    seen = []

    class Judge:
        async def __call__(self, answer, **_):
            seen.append(asyncio.get_running_loop())
            return [1.0] * len(answer)

    assert numbers(grade(Judge()).rewards) == numbers(grade(Judge()).rewards) == [1, 1, 1]
    assert seen[0] is seen[1] and not seen[0].is_closed()


@pytest.mark.parametrize("error", [KeyError("judge"), SystemExit(3), TimeoutError(), asyncio.CancelledError()])
def test_a_broken_async_reward_is_named_and_the_loop_lives(error):
    async def away(**_):
        raise error

    with pytest.raises(ValueError, match=rf"'away' raised {type(error).__name__}.*async_rewards.py, line \d+"):
        grade(*meeting("first"), away)
    assert numbers(grade(*meeting("first")).rewards) == [1, 2, 3]


def test_a_plain_reward_that_raises_leaves_no_async_one_behind():
    def broken(**_):
        raise RuntimeError("x")

    with warnings.catch_warnings():
        warnings.simplefilter("error")  # "coroutine ... was never awaited"
        with pytest.raises(ValueError, match="'broken' raised RuntimeError"):
            grade(*meeting("first"), broken)


# Failures


def test_a_completion_that_a_grader_failed_at_is_left_out_whatever_others_say():
    def hangs(**_):
        return [1.0, Failed("no answer in 5 s"), None]

    def one(answer, **_):
        return [1.0, 1.0, 1.0]

    graded = grade(hangs, one)
    assert numbers(graded.rewards) == [2, None, 1], "declined counts nothing, failed leaves out"
    assert graded.failures == {"hangs": {1: "no answer in 5 s"}, "one": {}}
    assert graded.metrics()["rewards/hangs/failed"] == 1 and graded.metrics()["rewards/one/failed"] == 0
    assert graded.metrics()["reward"] == 1.5


class Task:
    """Short chains whose grader fails."""

    def __init__(self, function):
        self.rewards = Rewards((function,))

    def stream(self, start, count, seed):
        return CHAIN.stream(start, count, seed)

    def held_out(self, count):
        return []


def run(folder, function, caplog):
    """The run's lines, its completions, what was said, and whether a weight moved."""
    trainer = small_trainer(folder, task=Task(function), log_completions=8, steps=2, save_every=0)
    before = [value.clone() for value in trainer.loaded.model.parameters()]
    trainer.train()
    moved = any(not torch.equal(a, b) for a, b in zip(before, trainer.loaded.model.parameters(), strict=True))
    lines = [line for line in read_log(folder / "metrics.jsonl") if line["step"]]
    return lines, read_log(folder / "completions.jsonl"), [r.getMessage() for r in caplog.records], moved


def test_a_step_in_which_every_grader_failed_is_said_and_goes_on(tmp_path, caplog):
    def fails(completions, **_):
        return [Failed("the judge is away")] * len(completions)

    lines, completions, said, moved = run(tmp_path / "run", fails, caplog)
    assert [line["step"] for line in lines] == [1, 2] and not moved
    assert all(line["rewards/fails/failed"] == 8 and line["reward"] is None for line in lines)
    assert all(record["advantage"] == 0 for record in completions)
    said = [message for message in said if "completions has a reward" in message]
    assert said == [
        "none of the step's 8 completions has a reward, so nothing was learnt: "
        "graders failed (fails 8 times, the first: the judge is away)."
    ]


def test_a_group_learns_from_what_was_graded(tmp_path, caplog):
    """Of each group of four one fails; the others are compared with one another."""

    def fails(completion_ids, **_):
        return [Failed("hung") if i % 4 == 0 else float(i % 4) for i in range(len(completion_ids))]

    lines, completions, said, moved = run(tmp_path / "run", fails, caplog)
    assert moved and all(line["rewards/fails/failed"] == 2 and line["reward"] == 2.0 for line in lines)
    assert [r["advantage"] for r in completions[:4]] == pytest.approx([0, -1, 0, 1], abs=1e-5)  # 1, 2, 3: std 1
    assert [m for m in said if "could not be graded" in m] == [
        "some completions could not be graded and are left out (fails 2 times, the first: hung); rewards/NAME/failed "
        "counts them."
    ]
