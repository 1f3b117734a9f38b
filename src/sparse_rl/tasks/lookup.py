# SPDX-License-Identifier: Apache-2.0
"""A list of keys and values, then a question about one of them: right only if the cache still has that pair.

    The value of the lemon is 41.
    The value of the tiger is 86.
    ...
    What is the value of the tiger? Answer in one sentence.

It is a turn of a chat where the tokenizer has a chat template, else plain text. There is no end of them: each is drawn
from the seed and its number.
"""

from __future__ import annotations

import random
import re
from dataclasses import asdict, dataclass
from string import ascii_uppercase
from typing import Any, ClassVar, Literal, get_args

import transformers

from sparse_rl.grading.completion import text_of
from sparse_rl.tasks.base import Rewards
from sparse_rl.tasks.prompts import as_turn, make_prompt
from sparse_rl.types import Prompt

Keys = Literal["words", "codes"]
THINGS = """
anchor apple basket blanket bottle bridge camera candle castle cloud desert doctor dragon eagle engine feather flower
forest garden hammer island jacket kitten ladder lemon magnet mirror needle ocean orange pencil pepper piano rabbit
ribbon river saddle silver stone table ticket tiger turtle violin whistle window zebra bell coin door drum farm fish
glass hat horse key lamp map moon nest pond ring rope ship shoe spoon star tree wheel
"""
WORDS = THINGS.split()
PAIR, QUESTION = "The value of the {key} is {value}.", "What is the value of the {key}? Answer in one sentence."
NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookup:
    """Key-value look-up.

    pairs: pairs in the list, at least 2; a pair takes about ten tokens
    keys: "words" (at most 70 pairs) or "codes" of three letters
    digits: of a value, 1 to 6
    """

    name: ClassVar[str] = "lookup"

    pairs: int = 10
    keys: Keys = "words"
    digits: int = 2

    def __post_init__(self) -> None:
        if self.keys not in get_args(Keys):
            raise ValueError(f"task.keys is {self.keys!r}; choose one of {', '.join(get_args(Keys))}.")
        if not 1 <= self.digits <= 6:
            raise ValueError(f"task.digits is {self.digits}; it must lie between 1 and 6.")
        most = min(len(self.values), len(WORDS) if self.keys == "words" else 1000)
        if not 2 <= self.pairs <= most:
            raise ValueError(
                f"task.pairs is {self.pairs}; with keys {self.keys} and digits {self.digits} it must lie between 2 and "
                f"{most}."
            )

    @property
    def values(self) -> range:
        return range(10 ** (self.digits - 1), 10**self.digits)

    def build(self, tokenizer: transformers.PreTrainedTokenizerBase, **_: Any) -> LookupTask:
        return LookupTask(self, tokenizer)

    def problem(self, name: str) -> tuple[str, str]:
        """The text and the answer that a name stands for."""
        draw = random.Random(name)
        keys = draw.sample(WORDS, self.pairs) if self.keys == "words" else _codes(draw, self.pairs)
        values = draw.sample(self.values, self.pairs)
        asked = draw.randrange(self.pairs)
        lines = [PAIR.format(key=key, value=value) for key, value in zip(keys, values, strict=True)]
        return "\n".join([*lines, "", QUESTION.format(key=keys[asked])]), str(values[asked])


class LookupTask:
    """The look-ups as prompts for a tokenizer."""

    def __init__(self, config: Lookup, tokenizer: transformers.PreTrainedTokenizerBase) -> None:
        self.config, self.tokenizer = config, tokenizer
        self.settings = {"name": config.name, **asdict(config)}
        self.rewards = Rewards((RightValue(),))

    def stream(self, start: int, count: int, seed: int) -> list[Prompt]:
        return [self._prompt(f"train {seed} {i}") for i in range(start, start + count)]

    def held_out(self, count: int) -> list[Prompt]:
        return [self._prompt(f"held out {i}") for i in range(count)]

    def _prompt(self, name: str) -> Prompt:
        text, answer = self.config.problem(name)
        return make_prompt({"prompt": as_turn(text, self.tokenizer), "answer": answer}, name, self.tokenizer)


class RightValue:
    """1 where the completion's first number is the value that was asked for, else 0: to list them all is no answer."""

    __name__ = "right_value"

    def __call__(self, completions: list[Any], answer: list[str | int], **columns: Any) -> list[float]:
        firsts = [NUMBER.search(text_of(completion)) for completion in completions]
        pairs = zip(firsts, answer, strict=True)
        return [float(first is not None and first[0] == str(right)) for first, right in pairs]

    def check(self, columns: dict[str, Any]) -> str | None:
        """What is wrong with a row, if anything."""
        answer = columns.get("answer")
        return None if NUMBER.fullmatch(str(answer)) else f"has the answer {answer!r}, which is no whole number"


def _codes(draw: random.Random, count: int) -> list[str]:
    """Different codes of three letters."""
    return [
        "".join(ascii_uppercase[i // 26**place % 26] for place in range(3)) for i in draw.sample(range(26**3), count)
    ]
