# SPDX-License-Identifier: Apache-2.0
"""Word problems to train on (with the reward last_number) and for a supervised warm start, from sets in a folder.

    python scripts/word_problems.py DATA OUTPUT [--sets svamp asdiv ...] [--warm-only gsm8k]

DATA/SET/train.jsonl has rows with "problem" (or "question") and "answer", and may have a "solution" or an "equation";
DATA/SET/test.jsonl, where there is one, is held out, else a tenth of the rows, by the hash of the question. Written are

    train.jsonl, held_out.jsonl    {"question": ..., "answer": "7", "source": "svamp"}, in an order that mixes the sets
    warm.jsonl                     {"prompt": [chat], "completion": "3 + 4 = 7\\nThe answer is 7."}, of the train rows

A row whose answer is not a number is left out, and so is a training row that asks what a held-out one asks in nearly
the same words (the MAWPS sets share problems). A solution loses its <<...>> calculator marks. Without solution or
equation the worked line is searched for: the one way to get the answer from two or three numbers of the question by one
or two operations; where there is none, or several, the answer stands alone.

Mind the licences: GSM8K and SVAMP are MIT, ASDiv is CC BY-NC, the MAWPS family states none.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import operator
import re
from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from itertools import permutations
from pathlib import Path
from typing import Any

from sparse_rl.grading.answer import last_number
from sparse_rl.grading.numbers import parse_number, without_thousands
from sparse_rl.tasks.files import read_table

SETS = ("gsm8k", "svamp", "asdiv", "multiarith", "addsub", "singleop", "singleeq")
SPELT = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
NUMBERS = re.compile(r"\d[\d,]*(?:\.\d+)?|\b(?:" + "|".join(SPELT) + r")\b", re.IGNORECASE)
MARKS = re.compile(r"<<.*?>>")
ALIKE = 0.7  # share of common words from which two questions with the same numbers and answer are the same
MOST = 6  # numbers in a question; with more, a way to the answer is chance
SIGNS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv}


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    question: str
    answer: str
    source: str
    worked: str  # a solution or an equation, if the set has one

    @property
    def numbers(self) -> list[str]:
        """The numbers of the question, in their order, as digits."""
        found = [number.strip(",").replace(",", "") for number in NUMBERS.findall(self.question)]
        return [str(SPELT.index(number.lower())) if number.isalpha() else number for number in found]

    @property
    def order(self) -> str:
        return hashlib.sha256(self.question.encode()).hexdigest()

    @property
    def words(self) -> frozenset[str]:
        return frozenset(re.findall(r"\w+", self.question.lower()))

    def completion(self) -> str:
        worked = MARKS.sub("", self.worked) or search(self.numbers, self.answer)
        if worked and "\n" not in worked and "=" in worked and worked.lower().startswith("x"):
            worked = worked.partition("=")[2].strip() + f" = {self.answer}"  # "x = 3 + 4", as MAWPS writes it
        return f"{worked}\nThe answer is {self.answer}." if worked else f"The answer is {self.answer}."


def search(numbers: list[str], answer: str) -> str:
    """The one way to get the answer from two numbers, else from three; or nothing."""
    for count in (2, 3):
        found = {}
        for chosen in permutations(numbers, count) if len(numbers) <= MOST else ():
            for line, total, what in ways(chosen):
                if total == Fraction(answer):
                    found.setdefault(what, f"{line} = {answer}")
        if found:
            return next(iter(found.values())) if len(found) == 1 else ""
    return ""


def ways(numbers: tuple[str, ...]) -> list[tuple[str, Fraction, Fraction]]:
    """Each way to work from left to right: the line, its value, and its value were the numbers others.

    The latter tells ways apart: 3 + 4 and 4 + 3 are one, 2 + 2 and 2 * 2 are two.
    """
    found = [(numbers[0], Fraction(numbers[0]), other(numbers[0]))]
    for number in numbers[1:]:
        found = [
            (
                f"({line}) {sign} {number}" if sign in "*/" and {"+", "-"} & {*line} else f"{line} {sign} {number}",
                *values,
            )
            for line, total, what in found
            for sign, apply in SIGNS.items()
            if sign != "/" or Fraction(number)
            for values in [(apply(total, Fraction(number)), apply(what, other(number)))]
        ]
    return found


def other(number: str) -> Fraction:
    return Fraction(int(hashlib.sha256(number.encode()).hexdigest()[:8], 16) + 1)


def read(path: Path, source: str) -> list[Problem]:
    """The rows whose answer is a number."""
    problems = []
    for place in read_table(str(path)).rows:
        row = place.columns
        question = row.get("problem", row.get("question"))
        if not isinstance(question, str):
            raise ValueError(f'{place.where} has no "problem"; mend or remove it.')
        answer = without_thousands(str(row.get("answer", "")).strip("$ "))
        if parse_number(answer) and last_number(answer) == answer:
            worked = row.get("solution") or row.get("equation") or ""
            problems.append(Problem(question=question, answer=answer, source=source, worked=worked.strip()))
    return problems


def split(folder: Path, name: str) -> tuple[list[Problem], list[Problem]]:
    """The rows of a set to train on and those held out."""
    train = read(folder / name / "train.jsonl", name)
    if (folder / name / "test.jsonl").exists():
        return train, read(folder / name / "test.jsonl", name)
    held_out = [problem for problem in train if int(problem.order, 16) % 10 == 0]
    return [problem for problem in train if int(problem.order, 16) % 10], held_out


def apart(problems: list[Problem], others: list[Problem]) -> list[Problem]:
    """The problems that are like none of the others, nor like one another."""
    seen = defaultdict(list)
    for other in others:
        seen[other.answer, *sorted(other.numbers)].append(other.words)
    kept = []
    for problem in problems:
        alike = seen[problem.answer, *sorted(problem.numbers)]
        words = problem.words
        if all(len(words & known) < ALIKE * len(words | known) for known in alike):
            kept.append(problem)
            alike.append(words)
    return kept


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, help="folder with a folder for each set")
    parser.add_argument("output", type=Path, help="folder to write to")
    parser.add_argument("--sets", nargs="+", default=[], help=f"which sets; all that are there of {', '.join(SETS)}")
    parser.add_argument("--warm-only", nargs="+", default=[], help="sets whose problems go to warm.jsonl alone")
    args = parser.parse_args()
    sets = args.sets or [name for name in SETS if (args.data / name / "train.jsonl").exists()]
    if not sets:
        parser.error(f"{args.data} has none of {', '.join(SETS)}; each is a folder with train.jsonl")
    pairs = [split(args.data, name) for name in sets]
    held_out = apart([problem for _, rows in pairs for problem in rows], [])
    train = apart([problem for rows, _ in pairs for problem in rows], held_out)
    args.output.mkdir(parents=True, exist_ok=True)
    for name, problems in (("train", train), ("held_out", held_out)):
        problems.sort(key=lambda problem: problem.order)
        kept = [row for row in problems if row.source not in args.warm_only]
        rows = [{"question": row.question, "answer": row.answer, "source": row.source} for row in kept]
        write(args.output / f"{name}.jsonl", rows)
    turns = [([{"role": "user", "content": row.question}], row.completion()) for row in train]
    write(args.output / "warm.jsonl", [{"prompt": prompt, "completion": text} for prompt, text in turns])
    print(f"{'set':12} {'train':>6} {'worked':>6} {'held out':>8}")
    for name in [*sets, "all"]:
        chosen = [row for row in train if name in (row.source, "all")]
        worked = sum("=" in row.completion() for row in chosen)
        print(f"{name:12} {len(chosen):6} {worked:6} {sum(name in (row.source, 'all') for row in held_out):8}")


if __name__ == "__main__":
    main()
