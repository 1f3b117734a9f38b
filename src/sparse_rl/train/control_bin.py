# SPDX-License-Identifier: Apache-2.0
"""The search for the cheapest budget of one bin of context lengths; levels are places in the grid of budgets.

A budget passes or fails when the share of bad tokens is beyond chance on one side of the limit, or known to a fifth of
it. While it is not known where the two meet, a bin goes down by one level, by two if it is twice as good as asked for,
and up by up to four; then it stays at the cheapest that passed. It leaves that upwards if it fails by more than a tenth
and beyond chance, and tries the next cheaper one if it has long been twice as good, less and less often if that fails.

What bins do to each other is in `control.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sparse_rl.objective.tail import Evidence

UP, DOWN = 4, 2  # most grid steps at once
ENOUGH = 10  # bad tokens expected at the limit before a budget is judged
SURE, PRECISE = 2.0, 0.2  # then: standard errors from the limit, or a standard error that is this share of it
SLACK, SPARE = 1.1, 0.5  # of the limit: a held budget fails above the one, and may go down below the other
WAIT, LONGEST_WAIT = 20, 320  # judgements of a held budget between two tries of a cheaper one


@dataclass(slots=True, kw_only=True)
class BinState(Evidence):
    """Where a bin stands, and what speaks for it."""

    level: int
    failed: int = -1  # highest that did
    passed: int | None = None  # lowest that did, above the one that failed
    stride: int = 1
    seen: bool = False
    held: int = 0  # judgements since the cheapest was found
    wait: int = WAIT
    share: float = 0.0  # of bad tokens, in limits, when last judged; it fails above 1
    proof: list[int] = field(default_factory=list)  # levels of the bins up to this one when it last passed
    lifted: bool = False  # for a longer context, so that its own passing does not say that it could be cheaper
    measurements: float = 0.0

    def add(self, tokens: tuple[float, ...], bad: tuple[float, ...], limit: float) -> None:
        Evidence.add(self, tokens, bad, limit)
        self.measurements, self.seen = self.measurements + 1, True

    def fade(self, keep: float) -> None:
        Evidence.fade(self, keep)
        self.measurements *= keep

    def keep(self, level: int) -> None:
        """Stay there, as if the next cheaper one had failed."""
        self.level, self.failed, self.passed, self.held, self.stride = level, level - 1, level, 0, 1

    def judge(self, at: int, limit: float, patience: int) -> bool:
        """Whether it is known by now if the share of bad tokens at the level `at` is too much."""
        if self.measurements < patience or max(self.tokens * limit, self.bad / 2) < ENOUGH:
            return False
        above = self.above(limit)
        if abs(above) < SURE and self.error(limit) > PRECISE * limit * self.tokens:
            return False
        self.share = self.bad / self.tokens / limit
        if self.holds(at) and (self.share <= SLACK or above < SURE):
            self.share = min(self.share, 1.0)
        self.fade(0.5 if self.holds(at) else 0.0)
        return True

    def passes(self, at: int, worst: float) -> int:
        """The level to go to. worst: of its share and those of the bins that it answers for"""
        if self.holds(at):
            return self._hold(at, (worst if self.lifted else self.share) <= SPARE)
        return self._pass(at, worst <= SPARE) if at == self.level else self.level  # else a bin before it asks for more

    def holds(self, at: int) -> bool:
        return self.passed == at and self.failed == at - 1

    def _hold(self, at: int, spare: bool) -> int:
        self.held, self.stride = self.held + 1 if spare else 0, 1
        if self.held < self.wait or at == 0:
            return at
        self.held, self.wait, self.failed = 0, min(2 * self.wait, LONGEST_WAIT), at - 2
        self.fade(0.0)
        return at - 1

    def _pass(self, at: int, spare: bool) -> int:
        self.passed, self.held, self.failed = at, 0, min(self.failed, at - 1)  # it may have failed here before
        if not self.lifted:
            self.wait = WAIT
        if at - self.failed <= 1:
            self.stride = 1
            return at
        if self.failed < 0:
            step, self.stride = self.stride if spare else 1, min(2 * self.stride, DOWN)
            return max(at - step, 0)
        return max((self.failed + at) // 2, at - DOWN)

    def fails(self, at: int, top: int) -> int:
        """The level to go to."""
        self.failed, self.held = at, 0
        if self.passed is not None and self.passed > at:
            self.stride = 1
            return min((at + self.passed + 1) // 2, at + UP)
        self.passed = None
        step, self.stride = self.stride, min(2 * self.stride, UP)
        return min(at + step, top)
