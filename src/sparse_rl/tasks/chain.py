# SPDX-License-Identifier: Apache-2.0
"""A table in the prompt, then a long chain of look-ups with a running sum: what a small model can learn, and what a
cache that forgets the table gets wrong.

    prompt   c=a7;a=b2; ... h=d0;e|        each letter's successor and increment, in random order; then where to start
    chain    @e?4:=4>g29@g?1:=5>c28 ...    at e, increment 4, sum 4, go to g, 29 to go; at g, increment 1, sum 5, ...
    answer   !5#                           the last sum (mod 10), then the end

Half of a step is filler, it says how many are left, and letters come round again: a good policy has entries to drop.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sparse_rl.types import Prompt, Rollout

LETTERS = "abcdefghijklmnop"
SYMBOLS = "0123456789" + LETTERS + "=;|@?:>!"
PAD, EOS = "_", "#"
TOKEN = {symbol: i for i, symbol in enumerate(SYMBOLS + PAD + EOS)}
STEP = 11  # tokens a step
STEP_DIGITS = (3, 6)  # places of the increment and the sum in a step


def chain_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character."""
    tokenizer = Tokenizer(models.WordLevel(TOKEN, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=PAD)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problems:
    """n problems as token ids."""

    prompts: torch.Tensor  # (n, prompt length)
    chains: torch.Tensor  # (n, chain length), the right one
    answers: torch.Tensor  # (n,) 0 to 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The look-up chain.

    letters: size of the table, up to 16
    steps: look-ups to the answer, up to 100; eleven tokens each
    seed: decides every problem
    """

    letters: int = 8
    steps: int = 30
    seed: int = 0

    def __post_init__(self) -> None:
        if not 2 <= self.letters <= len(LETTERS):
            raise ValueError(f"chain.letters is {self.letters}; it must lie between 2 and {len(LETTERS)}.")
        if not 1 <= self.steps <= 100:
            raise ValueError(f"chain.steps is {self.steps}; it must lie between 1 and 100.")

    @property
    def max_tokens(self) -> int:
        """Room for a right chain and a few tokens more."""
        return STEP * self.steps + 3 + 13

    def problems(self, count: int, generator: torch.Generator) -> Problems:
        """Random problems on the generator's device."""
        device, size = generator.device, (count, self.letters)
        successor = torch.rand(size, generator=generator, device=device).argsort(1)
        increment = torch.randint(0, 10, size, generator=generator, device=device)
        order = torch.rand(size, generator=generator, device=device).argsort(1)
        current = torch.randint(0, self.letters, (count,), generator=generator, device=device)
        letter, symbol = TOKEN["a"], TOKEN

        def constant(name: str) -> torch.Tensor:
            return torch.full((count,), symbol[name], device=device)

        columns = []
        for j in range(self.letters):
            at = order[:, j : j + 1]
            columns += [letter + at[:, 0], constant("="), letter + successor.gather(1, at)[:, 0]]
            columns += [increment.gather(1, at)[:, 0], constant(";")]
        prompts = torch.stack([*columns, letter + current, constant("|")], dim=1)

        columns, total = [], torch.zeros_like(current)
        for left in range(self.steps - 1, -1, -1):
            step = increment.gather(1, current[:, None])[:, 0]
            total = (total + step) % 10
            following = successor.gather(1, current[:, None])[:, 0]
            columns += [constant("@"), letter + current, constant("?"), step, constant(":"), constant("=")]
            columns += [total, constant(">"), letter + following, *(constant(digit) for digit in f"{left:02d}")]
            current = following
        chains = torch.stack([*columns, constant("!"), total, constant(EOS)], dim=1)
        return Problems(prompts=prompts, chains=chains, answers=total)

    def sample(self, count: int, step: int) -> list[Prompt]:
        """The prompts of a training step; step -1 - k gives the k-th held-out set."""
        problems = self.problems(count, torch.Generator().manual_seed(1_000_003 * (self.seed + 1) + step))
        tokenizer = chain_tokenizer()
        return [
            Prompt(ids=tuple(ids), text=str(tokenizer.decode(ids)), columns={"answer": answer})
            for ids, answer in zip(problems.prompts.tolist(), problems.answers.tolist(), strict=True)
        ]


def reward(completion_ids: list[list[int]], answer: list[int], **columns: object) -> list[float]:
    """1 for a completion that ends in "!", the right digit, and the end token; else 0."""
    return [
        float(ids[-3:] == [TOKEN["!"], right, TOKEN[EOS]]) for ids, right in zip(completion_ids, answer, strict=True)
    ]


def rewards_of(rollouts: list[Rollout]) -> list[float]:
    """The reward of each rollout of a chain prompt."""
    return reward([r.token_ids.tolist() for r in rollouts], [r.prompt.columns["answer"] for r in rollouts])
