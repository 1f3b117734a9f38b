# SPDX-License-Identifier: Apache-2.0
"""Grade the right answers of every math set of a data folder, in five forms: nearly all must be taken for right.

    python scripts/check_graders.py --data-dir DIR

DIR has a folder a set with test.jsonl or train.jsonl, rows with "answer". A row that fails in any form is printed.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

from sparse_rl.grading import Failed
from sparse_rl.grading.reward import MathReward
from sparse_rl.report.progress import ProgressLine
from sparse_rl.tasks.files import read_table

SETS = [
    "gsm8k", "math500", "math", "gaokao2023en", "minerva_math", "olympiadbench", "aime24", "aime25", "aime26", "amc23",
    "hmmt25_feb", "svamp", "asdiv", "multiarith", "addsub", "singleeq", "singleop", "simplerl_hard",
]  # fmt: skip
FORMS = ("boxed", "sentence", "respelled", "with unit", "in tags")
BAR = 0.99
CHUNK = 500


def forms(answer: str) -> list[str]:
    """Completions that end in the answer: in a box, in a sentence, spelled otherwise, with a unit, in tags."""
    bare = answer.strip().strip("$") if answer.count("$") <= 2 else answer
    in_sentence = f"${bare}$" if "$" not in bare.replace("\\$", "") else bare
    named = f"{bare} \\text{{ units}}" if re.fullmatch(r"-?[\d.,]+|-?\\frac\{\d+\}\{\d+\}", bare) else f"\\, {bare} ."
    return [
        f"We find $\\boxed{{{answer}}}$.",
        f"Adding all of it up, the answer is {in_sentence}.",
        f"Thus \\[ \\boxed{{{respelled(bare)}}} \\] as was asked.",
        f"Final answer: $\\boxed{{{named}}}$",
        f"<think>There are 7 of 9.</think>\n<answer> The answer is {in_sentence} </answer>",
    ]


def respelled(answer: str) -> str:
    """The same answer as another author would write it."""
    if re.fullmatch(r"-?\d+", answer):
        return f"{int(answer):,}" if len(answer.strip("-")) > 3 else f"{answer}.0"
    if re.fullmatch(r"-?\d*\.\d+", answer):
        return answer + "0"
    if re.fullmatch(r"-?\\[dt]?frac\{\d+\}\{\d+\}", answer):
        return re.sub(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}", r"\1/\2", answer)
    swapped = {"\\frac": "\\dfrac", "\\dfrac": "\\frac", "\\tfrac": "\\frac", "\\le": "\\leq", "\\leq": "\\leqslant"}
    answer = re.sub(r"\\[A-Za-z]+", lambda match: swapped.get(match.group(), match.group()), answer)
    if "\\left" not in answer and all(answer.count(a) == answer.count(b) for a, b in ("()", "[]")):
        answer = re.sub(r"(?<![\\A-Za-z])\(", r"\\left(", answer)
        answer = answer.replace(")", r"\right)") if answer.count("\\left(") == answer.count(")") else answer
        answer = answer if answer.count("\\left") == answer.count("\\right") else answer.replace("\\left", "")
    return re.sub(r"(?<=[\w}])\s*([+=])\s*(?=[\w\\])", r" \1 ", answer)


def rows_of(folder: Path) -> list[str]:
    """The right answers of a set's test split, or of its training split where it has no other."""
    path = next(
        (folder / f"{split}.jsonl" for split in ("test", "train") if (folder / f"{split}.jsonl").exists()), None
    )
    rows = read_table(str(path)).rows if path else []
    return [answer for answer in (row.columns["answer"] for row in rows) if answer.strip()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=5.0)
    arguments = parser.parse_args()
    reward = MathReward(arguments.workers, arguments.timeout_s)
    table, exceptions, short = [], [], False
    with ProgressLine() as line:
        for name in arguments.sets:
            answers = rows_of(arguments.data_dir / name)
            if not answers:
                line.print(f"{name}: nothing in {arguments.data_dir / name}")
                continue
            start, right = time.perf_counter(), dict.fromkeys(FORMS, 0)
            for begin in range(0, len(answers), CHUNK):
                chunk = answers[begin : begin + CHUNK]
                for form, texts in zip(FORMS, zip(*map(forms, chunk), strict=True), strict=True):
                    for answer, text, score in zip(chunk, texts, reward(completions=texts, answer=chunk), strict=True):
                        right[form] += score == 1.0
                        if score != 1.0:
                            why = score.reason if isinstance(score, Failed) else "taken for wrong"
                            exceptions.append(f"{name}, {form}: {why}: {answer!r} in {text!r}")
                line.move(f"{name}: {begin + len(chunk)} of {len(answers)}")
            shares = [right[form] / len(answers) for form in FORMS]
            short |= min(shares) < BAR
            cells = " | ".join(f"{100 * share:.2f}" for share in shares)
            table.append(f"| {name} | {len(answers)} | {cells} | {time.perf_counter() - start:.1f} |")
    print(f"| set | answers | {' | '.join(f'{form} %' for form in FORMS)} | s |", "|---" * 8 + "|", *table, sep="\n")
    print(f"\n{len(exceptions)} exceptions", *exceptions, sep="\n")
    return 1 if short or not table else 0


if __name__ == "__main__":
    sys.exit(main())
