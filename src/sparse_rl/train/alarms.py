# SPDX-License-Identifier: Apache-2.0
"""Signs that a run is going wrong because of its sparse cache, each said once when it begins, with what to change.

    rejection   more than 15 % of the completions are rejected
    tail        in some bin of context lengths the tail of overlap is more than 0.06 under its target
    length      completions have become a quarter shorter than they were, the first sign of a collapse
    kl          the mismatch KL still rises after 200 steps, by which it should have settled

A sign is over after ten steps without it, and may then begin anew. `alarm/NAME` is 1 as long as it lasts.
"""

from __future__ import annotations

import logging
from typing import Any

from sparse_rl.metrics import HIGH_REJECTION, REMEDIES
from sparse_rl.objective.tail import BinTail

logger = logging.getLogger(__name__)

QUIET = 10  # steps without a sign after which it is over
TAIL_MARGIN = 0.06
LENGTH_WINDOW, SHORTER = 10, 0.75  # steps a mean length is taken over; of the longest such mean
SETTLED, KL_WINDOW, RISE, SMALL_KL = 200, 50, 1.25, 1e-3  # a KL below the last is rounding


class Alarms:
    """What was seen so far, and which alarms are on."""

    def __init__(self) -> None:
        self.on: dict[str, int] = {}  # steps since its sign was last seen
        self.lengths: list[float] = []
        self.longest = 0.0  # mean over a window
        self.kls: list[float] = []

    def look(self, step: int, metrics: dict[str, float], measured: list[BinTail], target: float) -> dict[str, float]:
        """Warn of what begins; returns the `alarm/*` metrics."""
        signs = {
            "rejection": self._rejection(metrics),
            "tail": self._tail(measured, target),
            "length": self._length(metrics),
            "kl": self._kl(step, metrics),
        }
        for name, sign in signs.items():
            if sign:
                if name not in self.on:
                    logger.warning("%s; %s", sign, REMEDIES[f"alarm/{name}"])
                self.on[name] = 0
            elif name in self.on:
                self.on[name] += 1
                if self.on[name] >= QUIET:
                    del self.on[name]
        return {f"alarm/{name}": int(name in self.on) for name in signs}

    def _rejection(self, metrics: dict[str, float]) -> str:
        rate = metrics.get("correction/rejection_rate", 0.0)
        if rate <= HIGH_REJECTION:
            return ""
        return f"{rate:.0%} of the completions were rejected (above {HIGH_REJECTION:.0%})"

    def _tail(self, measured: list[BinTail], target: float) -> str:
        worst = min(measured, key=lambda tail: tail.quantile, default=None)
        if worst is None or worst.quantile >= target - TAIL_MARGIN:
            return ""
        return (
            f"from {worst.start} tokens of context on, the tail of overlap with the dense model is "
            f"{worst.quantile:.2f}, far under the target of {target}"
        )

    def _length(self, metrics: dict[str, float]) -> str:
        self.lengths = [*self.lengths, metrics["completions/mean_length"]][-LENGTH_WINDOW:]
        if len(self.lengths) < LENGTH_WINDOW:
            return ""
        mean = sum(self.lengths) / LENGTH_WINDOW
        self.longest = max(self.longest, mean)
        if mean >= SHORTER * self.longest:
            return ""
        return f"completions have shrunk from {self.longest:.0f} to {mean:.0f} tokens"

    def _kl(self, step: int, metrics: dict[str, float]) -> str:
        if "rollout_corr/k3_kl" in metrics:
            self.kls = [*self.kls, metrics["rollout_corr/k3_kl"]][-2 * KL_WINDOW :]
        if step < SETTLED or len(self.kls) < 2 * KL_WINDOW:
            return ""
        before, now = (sum(part) / KL_WINDOW for part in (self.kls[:KL_WINDOW], self.kls[KL_WINDOW:]))
        if now <= max(RISE * before, SMALL_KL):
            return ""
        return f"the mismatch KL still rises after {step} steps, from {before:.2g} to {now:.2g}"

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"on": dict(self.on), "lengths": self.lengths, "longest": self.longest, "kls": self.kls}

    def restore(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
