# SPDX-License-Identifier: Apache-2.0
"""Chains are right, streams deterministic and apart from the held-out ones, and the embedded model can solve some."""

from __future__ import annotations

import hashlib
import json
import random
import re
from pathlib import Path

import pytest
import torch

import sparse_rl.model
from sparse_rl.kv import Full
from sparse_rl.model.load import load
from sparse_rl.model.tiny import tiny_tokenizer
from sparse_rl.rollout import Engine, EngineConfig, Sampling
from sparse_rl.tasks import Chain
from sparse_rl.tasks.chain import LETTERS, SYMBOLS, TOKEN, chain_tokenizer, right_answer

EMBEDDED = Path(sparse_rl.model.__file__).parent / "embedded"
SETTINGS = [
    Chain(),
    Chain(letters=2, steps=1, filler=0),
    Chain(letters=16, steps=100, filler=1),
    Chain(letters=3, steps=20, filler=7),
]


@pytest.fixture(scope="module")
def embedded():
    return load("embedded")


def text_of(ids: torch.Tensor) -> str:
    return "".join(SYMBOLS[i] for i in ids.tolist())


def solve(prompt: str, steps: int, filler: int) -> str:
    """The chain of a prompt, from its text alone."""
    table = {at: (to, int(increment)) for at, to, increment in re.findall(r"(\w)=(\w)(\d);", prompt)}
    at, total, chain = prompt[-2], 0, ""
    for left in reversed(range(steps)):
        to, increment = table[at]
        total = (total + increment) % 10
        chain += f"{at}?{increment}={total}>{to}{left:02d}" + "." * filler
        at = to
    return f"{chain}!{total}#"


@pytest.mark.parametrize("task", SETTINGS, ids=str)
def test_chains_follow_from_the_text_of_their_prompts(task, seed):
    problems = task.problems(50, torch.Generator().manual_seed(seed))
    for prompt, chain in zip(problems.prompts, problems.chains, strict=True):
        text = text_of(prompt)
        assert re.fullmatch(r"(\w=\w\d;)+\w\|", text)
        assert sorted(re.findall(r"(\w)=", text)) == list(LETTERS[: task.letters]), "each letter once"
        assert sorted(re.findall(r"=(\w)", text)) == list(LETTERS[: task.letters]), "each is somebody's successor"
        assert text_of(chain) == solve(text, task.steps, task.filler)
        assert (len(prompt), len(chain)) == (task.prompt_len, task.chain_len)


@pytest.mark.parametrize("task", SETTINGS, ids=str)
def test_the_right_chain_is_rewarded_and_nothing_else(task, seed):
    prompts = task.stream(0, 20, seed)
    for prompt in prompts:
        chain = solve(prompt.text, task.steps, task.filler).removesuffix("#")
        assert prompt.columns == {"answer": chain[-1]}
        endings = [chain[:-1] + digit for digit in "0123456789"]
        endings += [chain[:-1], chain + ".", chain[-1], chain[:-2] + chain[-1], ""]
        rewards = right_answer(completions=endings, **{"answer": [chain[-1]] * len(endings)}, prompts=None)
        assert rewards == [float(digit == chain[-1]) for digit in "0123456789"] + [0.0] * 5


@pytest.mark.parametrize("task", SETTINGS, ids=str)
def test_streams_are_deterministic_and_differ_by_seed_and_start(task, seed):
    prompts = task.stream(40, 20, seed)
    assert task.stream(40, 20, seed) == prompts
    assert len(prompts) == 20 and all(
        prompt.ids == tuple(TOKEN[symbol] for symbol in prompt.text) for prompt in prompts
    )
    assert task.stream(40, 20, seed + 1) != prompts
    assert task.stream(60, 20, seed) != prompts
    assert task.held_out(20) == task.held_out(20) != prompts


def test_a_stream_is_the_same_however_it_is_cut():
    assert Chain().stream(0, 2, 0) + Chain().stream(2, 2, 0) == Chain().stream(0, 4, 0)


def test_no_two_steps_of_a_run_and_no_two_seeds_share_a_prompt():
    texts = [
        prompt.text
        for seed in (0, 1, 16, 32)
        for start in range(0, 128, 16)
        for prompt in Chain().stream(start, 16, seed)
    ]
    assert len(set(texts)) == len(texts)


def test_held_out_prompts_are_in_no_training_stream(seed):
    held_out = {prompt.text for count in (16, 512) for prompt in Chain().held_out(count)}
    assert len(held_out) >= 512
    for training_seed in (0, 1, seed):
        streamed = {prompt.text for start in range(0, 512, 16) for prompt in Chain().stream(start, 16, training_seed)}
        assert len(streamed) == 512 and not streamed & held_out


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("letters", 1, "task.letters is 1; it must lie between 2 and 16"),
        ("letters", 17, "task.letters is 17"),
        ("steps", 0, "task.steps is 0; it must lie between 1 and 100"),
        ("steps", 101, "task.steps is 101"),
        ("filler", -1, "task.filler is -1; it must lie between 0 and 100"),
        ("filler", 101, "task.filler is 101"),
    ],
)
def test_settings_out_of_range_are_refused(name, value, message):
    with pytest.raises(ValueError, match=message):
        Chain(**{name: value})


def test_chains_are_for_the_tokenizer_they_are_written_in(embedded):
    assert Chain().build(embedded.tokenizer) == Chain()
    with pytest.raises(ValueError, match="embedded model's tokens"):
        Chain().build(tiny_tokenizer())


def test_the_tokenizer_gives_back_every_text(embedded, seed):
    generator = random.Random(seed)
    for tokenizer in (embedded.tokenizer, chain_tokenizer()):
        assert tokenizer.get_vocab() == TOKEN
        for length in (1, 2, 50, 300):
            text = "".join(generator.choices(SYMBOLS, k=length))
            ids = tokenizer(text).input_ids
            assert ids == [TOKEN[symbol] for symbol in text]
            assert tokenizer.decode(ids) == text
            assert tokenizer.decode(ids, skip_special_tokens=True) == text.replace("#", "").replace("_", "")
        assert (tokenizer.eos_token, tokenizer.pad_token) == ("#", "_")
        assert tokenizer.decode(tokenizer("x a\nb").input_ids) == "__a_b"


def test_the_embedded_model_is_small_and_the_one_that_was_trained(embedded):
    assert sum(parameter.numel() for parameter in embedded.model.parameters()) < 1_500_000
    assert sum(path.stat().st_size for path in EMBEDDED.iterdir()) < 4_000_000
    weights = (EMBEDDED / "model.safetensors").read_bytes()
    training = json.loads((EMBEDDED / "training.json").read_text())
    assert (training["sha256"], training["bytes"]) == (hashlib.sha256(weights).hexdigest(), len(weights))


def test_the_embedded_model_solves_more_than_half(embedded):
    engine, task = Engine(embedded, Full(), EngineConfig(rows=32)), Chain()
    rollouts = engine.generate(task.held_out(32), Sampling(n=1, max_tokens=task.chain_len, temperature=1.0))
    graded = task.rewards.grade(rollouts, embedded.tokenizer)
    assert 16 < graded.rewards.sum() < 32, "more than half, and there is something left to learn"
