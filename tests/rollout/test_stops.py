# SPDX-License-Identifier: Apache-2.0
"""Where a sample ends: end tokens, stop strings, limits."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from small_engine import engine

from sparse_rl.kv import Full
from sparse_rl.rollout import Sampling
from sparse_rl.rollout.loop import Loop
from sparse_rl.rollout.rows import Drawn
from sparse_rl.rollout.sequence import Sequence
from sparse_rl.types import Prompt


def test_stop_ids_end_a_sample_and_are_part_of_it(tiny, prompts):
    loaded = tiny()
    free = engine(loaded).generate(prompts(5), Sampling(max_tokens=30, n=8, stop_ids=()))
    wanted = free[0].token_ids[12].item()
    for rollout, unstopped in zip(
        engine(loaded).generate(prompts(5), Sampling(max_tokens=30, n=8, stop_ids=(wanted,))), free, strict=True
    ):
        tokens = unstopped.token_ids.tolist()
        end = tokens.index(wanted) + 1 if wanted in tokens else 30
        assert rollout.token_ids.tolist() == tokens[:end]
        assert rollout.finish_reason == ("stop" if wanted in tokens else "length")


def test_the_models_own_end_tokens_stop_by_default(tiny, prompts):
    loaded = tiny()
    rollouts = engine(loaded).generate(prompts(5), Sampling(max_tokens=2000, n=2))
    assert all(r.finish_reason == "stop" and r.token_ids[-1] == loaded.tokenizer.eos_token_id for r in rollouts)


def test_stop_strings(tiny):
    """Strings longer than a token, beyond ASCII, never found in the prompt."""
    loaded = tiny()
    sampling = Sampling(max_tokens=60, n=6, stop_ids=())
    free = engine(loaded).generate(["ab"], sampling)
    texts = [loaded.tokenizer.decode(r.token_ids) for r in free]
    stop = next(
        t[i : i + 2] for t in texts for i in range(20, 40) if t[i : i + 2].isprintable() and "�" not in t[i : i + 2]
    )
    rollouts = engine(loaded).generate(["ab"], Sampling(max_tokens=60, n=6, stop_ids=(), stop=(stop, "ab")))
    ended = 0
    for rollout, text, unstopped in zip(rollouts, texts, free, strict=True):
        got = loaded.tokenizer.decode(rollout.token_ids)
        if rollout.finish_reason == "stop_string":
            ended += 1
            assert stop in got and stop not in loaded.tokenizer.decode(rollout.token_ids[:-1])
            assert rollout.token_ids.tolist() == unstopped.token_ids.tolist()[: len(rollout.token_ids)]
        else:
            assert stop not in text
    assert ended > 0


@pytest.mark.parametrize("stop", [("é" * 8,), ("z", "abcdefghijkl")])
def test_the_tail_searched_covers_the_longest_stop_string(stop, tiny):
    *before, last = list(("qq" + stop[-1]).encode())
    sequence = read(tiny(), Sampling(stop=stop, stop_ids=()), before)
    assert sequence.finish_reason is None and sequence.num_tokens == len(before)
    sequence = read(tiny(), Sampling(stop=stop, stop_ids=()), before, [last])
    assert sequence.finish_reason == "stop_string" and sequence.num_tokens == len(before) + 1


def test_of_several_tokens_the_one_that_completes_the_string_is_the_last(tiny):
    for text, expected in ((b"xcdcd", (6, "stop_string")), (b"dcd", (4, "stop_string")), (b"xxc", (6, None))):
        sequence = read(tiny(), Sampling(stop=("cd",), stop_ids=()), list(b"abc"), list(text))
        assert (sequence.num_tokens, sequence.finish_reason) == expected


def test_an_end_token_says_more_than_the_string_it_completes(tiny):
    sequence = read(tiny(), Sampling(stop=("b",), stop_ids=(98,)), [97, 98])
    assert (sequence.num_tokens, sequence.finish_reason) == (2, "stop")


def test_an_end_token_says_more_than_the_limit_it_reaches(tiny):
    sequence = read(tiny(), Sampling(stop_ids=(9,)), [97, 9], max_tokens=2)
    assert (sequence.num_tokens, sequence.finish_reason) == (2, "stop")


def test_a_stop_string_says_more_than_what_comes_after_it(tiny):
    sequence = read(tiny(), Sampling(stop=("b",), stop_ids=(9,)), [97, 98, 99, 9])
    assert (sequence.num_tokens, sequence.finish_reason) == (2, "stop_string")
    sequence = read(tiny(), Sampling(stop=("b",), stop_ids=()), [97, 98, 99], max_tokens=3)
    assert (sequence.num_tokens, sequence.finish_reason) == (2, "stop_string")


def test_the_newest_tokens_are_found_in_as_many_parts_as_it_takes(tiny):
    sequence = read(tiny(), Sampling(stop_ids=()), [1], [2, 3, 4], [5, 6])
    assert [sequence.newest(count) for count in (0, 1, 2, 3, 5, 9)] == [
        [], [6], [5, 6], [4, 5, 6], [2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6]
    ]  # fmt: skip


def read(loaded, sampling: Sampling, *fetched: list[int], max_tokens: int = 99) -> Sequence:
    """A sequence that has been given these tokens, fetch by fetch."""
    scheduler = SimpleNamespace(policy=Full(), finish=lambda _: None)
    loop = Loop(loaded, sampling, [], [], scheduler, None, None, None)
    sequence = Sequence(request=0, prompt_idx=0, prompt_len=1, max_tokens=max_tokens)
    for tokens in fetched:
        row = np.array([tokens])
        loop.read_flight([sequence], Drawn(row, np.zeros(row.shape, dtype=np.float32), None, None))
    return sequence


def test_a_prompts_own_limit(tiny, prompts):
    batch = [Prompt(ids=tuple(p), max_tokens=m) for p, m in zip(prompts(5, 5, 5), (3, 1, 50), strict=True)]
    rollouts = engine(tiny()).generate(batch, Sampling(max_tokens=8, stop_ids=()))
    assert [len(r.token_ids) for r in rollouts] == [3, 1, 8]


def test_a_context_limit_ends_a_sample(tiny, prompts):
    loaded = tiny(max_position_embeddings=32)
    (rollout,) = engine(loaded).generate(prompts(20), Sampling(max_tokens=100, stop_ids=()))
    assert len(rollout.token_ids) == 12 and rollout.finish_reason == "length"
