# SPDX-License-Identifier: Apache-2.0
"""A table in the prompt, then a long chain of look-ups with a running sum: what a small model can learn, and what a
cache that forgets gets wrong.

    prompt   c=a7;a=b2;b=c0;a|             each letter's successor and increment, in random order; then where to start
    chain    a?2=2>b15..b?0=2>c14.. ...    at a, increment 2, sum 2, go to b, 15 to go; at b, increment 0, sum 2, ...
    answer   !5#                           the last sum (mod 10), then the end

The chain restates the table, it has filler, and letters come round again: a good policy has entries to drop.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from sparse_rl.tasks.base import Rewards
from sparse_rl.types import Prompt

LETTERS = "abcdefghijklmnop"
PAD, EOS = "_", "#"
SYMBOLS = "0123456789" + LETTERS + "=;|?>.!" + PAD + EOS
TOKEN = {symbol: i for i, symbol in enumerate(SYMBOLS)}
STEP = 9  # tokens a step, filler apart
INCREMENT, TOTAL = 2, 4  # their places in a step


@dataclass(frozen=True, slots=True, kw_only=True)
class Problems:
    """n problems as token ids."""

    prompts: torch.Tensor  # (n, prompt length)
    chains: torch.Tensor  # (n, chain length), the right one


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """The look-up chain.

    letters: size of the table, 2 to 16
    steps: look-ups to the answer, 1 to 100; nine tokens each, and the filler
    filler: tokens of filler a step
    """

    name: ClassVar[str] = "chain"

    letters: int = 8
    steps: int = 16
    filler: int = 2

    def __post_init__(self) -> None:
        for name, least, most in (("letters", 2, len(LETTERS)), ("steps", 1, 100), ("filler", 0, 100)):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"task.{name} is {getattr(self, name)}; it must lie between {least} and {most}.")

    @property
    def prompt_len(self) -> int:
        return 5 * self.letters + 2

    @property
    def chain_len(self) -> int:
        """Tokens of a right chain with its answer."""
        return (STEP + self.filler) * self.steps + 3

    def problems(self, count: int, generator: torch.Generator) -> Problems:
        """Random problems on the generator's device."""
        successor, increment, order, current = self._draw(count, generator)

        def constant(symbol: str) -> torch.Tensor:
            return torch.full((count,), TOKEN[symbol], device=generator.device)

        columns = []
        for j in range(self.letters):
            at = order[:, j : j + 1]
            columns += [TOKEN["a"] + at[:, 0], constant("="), TOKEN["a"] + successor.gather(1, at)[:, 0]]
            columns += [increment.gather(1, at)[:, 0], constant(";")]
        prompts = torch.stack([*columns, TOKEN["a"] + current, constant("|")], dim=1)

        path = [current]
        for _ in range(self.steps):
            path.append(successor.gather(1, path[-1][:, None])[:, 0])
        letters = torch.stack(path, dim=1)  # where each step is, and the last one leads
        steps = increment.gather(1, letters[:, :-1])
        totals = steps.cumsum(dim=1) % 10
        left = torch.arange(self.steps - 1, -1, -1, device=generator.device).expand_as(steps)
        a, ask, equal, go, dot = (torch.full_like(steps, TOKEN[symbol]) for symbol in "a?=>.")
        columns = [a + letters[:, :-1], ask, steps, equal, totals, go, a + letters[:, 1:], left // 10, left % 10]
        written = torch.stack([*columns, *[dot] * self.filler], dim=2).flatten(1)
        end = torch.stack([constant("!"), totals[:, -1], constant(EOS)], dim=1)
        return Problems(prompts=prompts, chains=torch.cat([written, end], dim=1))

    @property
    def rewards(self) -> Rewards:
        return Rewards((right_answer,))

    def build(self, tokenizer: transformers.PreTrainedTokenizerBase, **_: Any) -> Chain:
        """Itself, if the tokenizer is the one its problems are written in."""
        if tokenizer.get_vocab() != TOKEN:
            raise ValueError(
                "the task chain is written in the embedded model's tokens; for others give prompts of "
                "your own (train: --task.train_file and --task.rewards; calibrate: --prompts or --benchmarks)."
            )
        return self

    def stream(self, start: int, count: int, seed: int) -> list[Prompt]:
        return [self._prompt(f"train {seed} {i}") for i in range(start, start + count)]

    def held_out(self, count: int) -> list[Prompt]:
        return [self._prompt(f"held out {i}") for i in range(count)]

    def _draw(self, count: int, generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        """Each letter's successor and increment, the order they are written in, and where to start."""
        device, size = generator.device, (count, self.letters)
        successor = torch.rand(size, generator=generator, device=device).argsort(1)
        increment = torch.randint(0, 10, size, generator=generator, device=device)
        order = torch.rand(size, generator=generator, device=device).argsort(1)
        return successor, increment, order, torch.randint(0, self.letters, (count,), generator=generator, device=device)

    def _prompt(self, name: str) -> Prompt:
        """The problem that a name stands for; as `problems` has it, without writing the chain."""
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
        drawn = self._draw(1, torch.Generator().manual_seed(seed))
        successor, increment, order, (current,) = (values.flatten().tolist() for values in drawn)
        table = "".join(f"{LETTERS[i]}={LETTERS[successor[i]]}{increment[i]};" for i in order)
        text, total = f"{table}{LETTERS[current]}|", 0
        for _ in range(self.steps):
            total, current = (total + increment[current]) % 10, successor[current]
        return Prompt(ids=tuple(TOKEN[symbol] for symbol in text), text=text, columns={"answer": str(total)})


def right_answer(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """1 for a completion that ends in "!" and the right digit, else 0."""
    return [float(text.endswith(f"!{right}")) for text, right in zip(completions, answer, strict=True)]


def chain_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """One token a character."""
    tokenizer = Tokenizer(models.WordLevel(TOKEN, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=PAD, clean_up_tokenization_spaces=False
    )
