# SPDX-License-Identifier: Apache-2.0
"""What a schedule holds when it is run as it is, and where that is too little, the cheapest one that holds.

What was evicted at short contexts is missing at longer ones, so a budget that holds a bin from the beginning may not
hold it after smaller ones. A constant budget does hold: the grid's own runs say which. From there budgets go down, the
first bin's first, each as far as all bins hold; in the end no bin can go one step of the grid lower by itself.

The runs themselves, and their files, are `calibrate.py`'s.
"""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any, Protocol

from sparse_rl.calibrate.analysis import contexts, described, met, tail_row, unreached
from sparse_rl.calibrate.config import CalibrationConfig
from sparse_rl.calibrate.search import as_schedule, lowered, raised, steps
from sparse_rl.calibrate.tokens import Tokens
from sparse_rl.kv.schedule import Schedule

TOLERANCE = 0.03  # below the target that a schedule may fall when it is run


class Runs(Protocol):
    left: int  # to come, for the time that is shown

    def of_schedule(self, schedule: Schedule) -> Tokens: ...


def verified(results: dict[str, Any], runs: Runs, config: CalibrationConfig, *, evicts: bool) -> dict[str, Any]:
    """What this changes of the results: the schedule, what it holds as run, all that were tried, the notes."""
    search = _Search(results, runs, config)
    found = search.least
    if search.short(found):
        found = search.constant() if evicts else search.raised()
        if not search.short(found):
            runs.left = min(search.rounds, sum(own > least for own, least in zip(found, search.least, strict=True)))
            found = lowered(found, search.least, search.budgets, lambda own: not search.short(own))
    schedule = search.schedule(found)
    return {
        "schedule": {**asdict(schedule), "met": met(schedule, results, config)},
        "verified": search.ran[tuple(found)],
        "tried": [{**asdict(search.schedule(own)), "tails": search.told(own)} for own in search.ran],
        "notes": results["notes"] + search.notes(found),
    }


class _Search:
    """Schedules as a budget a bin, each run at most once; constant ones are the grid's and cost nothing."""

    def __init__(self, results: dict[str, Any], runs: Runs, config: CalibrationConfig) -> None:
        self.runs, self.config, self.rounds = runs, config, config.verify
        self.bins, self.budgets, self.targets = results["bins"], results["budgets"], results["targets"]
        self.dense = tail_row(results["floor"], config)
        given = as_schedule(results["schedule"])
        self.least = [given.at(start) for start, _ in self.bins]
        self.alone = {run["budget"]: tail_row(run, config) for run in results["runs"]}
        # a bin whose target no budget meets must keep what the largest has; min() leaves out one without a measurement
        own = [self.alone[budget][i] for i, budget in enumerate(self.least)]
        self.needed = [min(tail, target) for tail, target in zip(own, self.targets, strict=True)]
        self.ran: dict[tuple[int, ...], dict[str, Any]] = {}
        self.refused = False  # to run a schedule, for want of rounds

    def schedule(self, own: list[int] | tuple[int, ...]) -> Schedule:
        return steps([start for start, _ in self.bins], own)

    def short(self, own: list[int]) -> list[int]:
        """The bins in which these budgets hold too little as run, or whose contexts they do not reach."""
        if tuple(own) not in self.ran:
            costs = len(set(own)) > 1
            if costs and not self.rounds:
                self.refused = True
                return list(range(len(own)))
            self.rounds -= costs
            self.ran[tuple(own)] = described(self.runs.of_schedule(self.schedule(own)), self.bins, self.config)
        return self._short(tail_row(self.ran[tuple(own)], self.config))

    def _short(self, tails: list[float]) -> list[int]:
        return [
            i
            for i, needed in enumerate(self.needed)
            if not math.isnan(needed) and not tails[i] >= needed - TOLERANCE  # nan is too little
        ]

    def constant(self) -> list[int]:
        """The smallest budget that holds all bins from the beginning on; the largest if none does."""
        enough = [b for b in self.budgets if b >= self.least[-1] and not self._short(self.alone[b])]
        return [min(enough, default=self.budgets[-1])] * len(self.bins)

    def raised(self) -> list[int]:
        """Where nothing is lost, each bin that holds too little has a step more, until none does."""
        own = self.least
        while short := self.short(own):
            more = raised(own, short, self.budgets)
            if more == own or not self.rounds:
                break
            own = more
        return own

    def told(self, own: tuple[int, ...]) -> list[float | None]:
        return [None if math.isnan(tail) else tail for tail in tail_row(self.ran[own], self.config)]

    def notes(self, found: list[int]) -> list[str]:
        """What the user should know of a search that ended with `found`."""
        notes, tails, first = [], tail_row(self.ran[tuple(found)], self.config), self.ran[tuple(self.least)]
        least = [min(dense, target) for dense, target in zip(self.dense, self.targets, strict=True)]
        low = [span for span, tail, need in zip(self.bins, tails, least, strict=True) if tail < need - TOLERANCE]
        if low:
            notes.append(
                "run as it is, the schedule's tail is below the target, or the dense cache's own where that is less, "
                f"by more than {TOLERANCE} in the contexts {contexts(low)}; give more rounds (--verify), more "
                "tokens, or a larger budget there."
            )
        elif self.refused:
            notes.append(
                f"after {self.config.verify} runs of schedules there are cheaper ones left to try, which may hold as "
                f"well; give more rounds (--verify {2 * self.config.verify} --resume), or larger bins."
            )
        missed = [i for i in unreached(first, self.config) if not math.isnan(self.needed[i])]
        if found != self.least and missed:
            notes.append(
                f"the cheapest budgets bin by bin, {self.schedule(self.least).text}, were not taken: run as they are, "
                f"their answers have too few tokens in the contexts {contexts([self.bins[i] for i in missed])}, and "
                "answers that get shorter are a warning sign."
            )
        elif found != self.least:
            tails = tail_row(first, self.config)
            short = [
                f"{start}-{end} ({tails[i]:.3f})" for i, (start, end) in enumerate(self.bins) if i in self._short(tails)
            ]
            notes.append(
                f"the cheapest budgets bin by bin, {self.schedule(self.least).text}, were not taken: run as they are, "
                f"they hold too little in the contexts {', '.join(short)}."
            )
        return notes
