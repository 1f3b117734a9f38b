# SPDX-License-Identifier: Apache-2.0
"""Whatever a model may write, the grader neither crashes nor hangs nor pays for it."""

from __future__ import annotations

import random
import time

import pytest

from sparse_rl.grading import Failed
from sparse_rl.grading.reward import MathReward

PIECES = r"""
    \boxed{ \fbox{ { } ( ) [ ] \{ \} \left( \right] \frac \dfrac{ \sqrt \sqrt[3]{ ^ ^{ _ _{ ^{9 9^{9^{ 10^{10} ! !!
    \binom{ \begin{pmatrix} \end{pmatrix} & \\ \text{ \mathrm{cm} \pm \cup \cap \in \infty \pi \cdot \times
    \int_0^1 \sum_{k=1}^{n} \lim_{x\to0} \log_ \ln \sin^{-1} \mod = < > \le \ge | , ; : . - + / * % $ $$ \$
    \[ \] \( \) \, \! ~ x y n i e 0 1 2 7 12 3.14 1e9 1e999 999999999999 1,000 0.333 answer is final #### A (B)
    \text{or} \overline{ \boxed \degree ^\circ""".split()  # noqa: SIM905
UNICODE = ["\ud800", "\x00", "\u202e", "é", "∞", "½", "²", "𝟙", "中", "\u200b", "٣", "√", "π", "−", "\n", "\t", "\\"]
RIGHTS = ["5", r"\frac{1}{2}", "(1,2)", r"\{1,2,3\}", "[0,1)", r"x^2+1", "x=3", r"\text{odd}", "3.14", r"5\text{ cm}",
          r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}", r"1 \pm \sqrt{2}", "C", r"x \le 2", "64\\%"]  # fmt: skip


def fuzzed(rng: random.Random) -> str:
    """A completion: pieces of LaTeX in any order, a mangled right answer, a tower, unicode, or 100 kB of one thing."""
    kind = rng.random()
    if kind < 0.35:
        inside = "".join(rng.choice(PIECES) + rng.choice(["", " "]) for _ in range(rng.randint(1, 30)))
    elif kind < 0.65:
        chars = list(rng.choice(RIGHTS) * rng.randint(1, 3))
        for _ in range(rng.randint(1, 5)):
            at = rng.randrange(len(chars) + 1)
            chars[at : at + rng.randint(0, 2)] = rng.choice([*PIECES, *UNICODE])
        inside = "".join(chars)
    elif kind < 0.75:
        inside = "^{".join(str(rng.randint(2, 99)) for _ in range(rng.randint(2, 8))) + "}" * rng.randint(0, 8)
    elif kind < 0.8:
        inside = "(" * rng.randint(1, 3000) + "1" + "+1)" * rng.randint(1, 3000)
    elif kind < 0.9:
        inside = "".join(chr(rng.randrange(0x110000)) for _ in range(rng.randint(1, 200)))
    else:
        piece = "".join(rng.choice([*PIECES, *UNICODE]) for _ in range(rng.randint(1, 3)))
        inside = piece * (100_000 // len(piece))
    return rng.choice(["\\boxed{" + inside + "}", "the answer is " + inside, "the answer is $" + inside + "$.", inside])


def grade_all(count: int, seed: int, workers: int) -> tuple[list[float | Failed | None], list[str]]:
    rng = random.Random(seed)
    texts = [fuzzed(rng) for _ in range(count)]
    reward = MathReward(workers=workers, timeout_s=2.0)
    try:
        return reward(completions=texts, answer=[rng.choice(RIGHTS) for _ in texts]), texts
    finally:
        reward.workers.close()


def check(count: int, workers: int) -> None:
    seed = random.randrange(1 << 30)
    start = time.perf_counter()
    scores, texts = grade_all(count, seed, workers)
    failed = {i: score.reason for i, score in enumerate(scores) if isinstance(score, Failed)}
    shown = "\n".join(f"{why}: {texts[i][:200]!r}" for i, why in failed.items())
    print(f"seed {seed}: {count} in {time.perf_counter() - start:.0f} s, {len(failed)} failed\n{shown}")
    assert all(isinstance(score, Failed) or score in (0.0, 1.0) for score in scores), seed
    assert all("timed out" in why for why in failed.values()), f"seed {seed}: {shown}"
    assert len(failed) <= max(2, 0.01 * count), f"seed {seed}: {shown}"


def test_some():
    check(150, workers=1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_ten_thousand():
    check(10_000, workers=0)
