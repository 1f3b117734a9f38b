# SPDX-License-Identifier: Apache-2.0
"""The code reward: 1 for a program that passes its row's tests, 0 for one that does not.

How a program is kept apart is in sandbox/process.py, which tests a row has in sandbox/suite.py.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from sparse_rl.grading.completion import text_of
from sparse_rl.grading.outcome import Failed
from sparse_rl.grading.workers import worker_count
from sparse_rl.sandbox.extract import extract_program
from sparse_rl.sandbox.isolation import isolation
from sparse_rl.sandbox.process import Limits, Sandbox, Verdict
from sparse_rl.sandbox.suite import suite_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CodeReward:
    """Runs programs in a sandbox, several at a time. Build it with `CodeReward.build`, which asks for isolation."""

    sandbox: Sandbox
    workers: int
    counts: Counter[str] = field(default_factory=Counter, compare=False)  # verdicts by their word
    __name__ = "code"

    @classmethod
    def build(cls, limits: Limits | None = None, workers: int = 0, unsafe: bool = False) -> CodeReward:
        """ValueError where the machine cannot keep programs apart, unless that is accepted as `unsafe`."""
        found = isolation()
        if found.method is None and not unsafe:
            raise ValueError(
                "the code reward runs programs that nobody has read, and nothing on this machine keeps them apart "
                f"({found.reason}). "
                "Use Linux 5.13 or newer with Landlock, or install bubblewrap; "
                "grading.unsafe_code (--unsafe-code) runs them all the same, with your rights."
            )
        if found.method is None:
            warn_unsafe(found.reason)
        return cls(Sandbox(found.method, limits or Limits()), worker_count(workers))

    def judge(self, completion: str, row: dict[str, Any]) -> Verdict:
        """How one completion fares, and why."""
        return suite_of(row).judge(extract_program(completion), self.sandbox)

    def check(self, columns: dict[str, Any]) -> str | None:
        """What is wrong with a row, if anything."""
        try:
            suite_of(columns)
        except Exception as error:  # whatever a row may hold in place of tests
            return f"has no tests that can be read ({type(error).__name__}: {error})"
        return None

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], completion_ids: Any = None, **columns: Any
    ) -> list[float | Failed]:
        lists = {name: values for name, values in columns.items() if isinstance(values, list)}  # TRL adds what is none
        rows = [{name: values[i] for name, values in lists.items()} for i in range(len(completions))]
        suites = [suite_of(row) for row in rows]  # a row without tests is an error before anything runs
        pool = ThreadPoolExecutor(self.workers, thread_name_prefix="code")
        try:
            programs = [extract_program(text_of(completion)) for completion in completions]
            jobs = [
                pool.submit(suite.judge, program, self.sandbox) for suite, program in zip(suites, programs, strict=True)
            ]
            verdicts = [job.result() for job in jobs]
        finally:
            pool.shutdown(cancel_futures=True)
        self._count(verdicts)
        return [_reward(verdict) for verdict in verdicts]

    def _count(self, verdicts: list[Verdict]) -> None:
        """Warn of programs whose tests could not judge them: of the first, and whenever there are twice as many."""
        before = self.counts["undecided"]
        self.counts.update(verdict.word for verdict in verdicts)
        count = self.counts["undecided"]
        if count.bit_length() > before.bit_length():
            reason = next(verdict.detail for verdict in verdicts if verdict.word == "undecided")
            logger.warning(
                "%d of %d programs so far scored 0 because their tests cannot judge what they returned (%s). "
                "If right programs are among them, let the tests compare plain data, or give their rows a canonical "
                "solution (the column answer) that defines the class.",
                count,
                self.counts.total(),
                reason,
            )


@cache
def warn_unsafe(reason: str) -> None:
    """Once, however many rewards there are."""
    logger.warning("UNSAFE: programs written by the model run with your rights and reach your files (%s).", reason)


def _reward(verdict: Verdict) -> float | Failed:
    return Failed(verdict.detail) if verdict.word == "broken" else float(verdict.word == "passed")
