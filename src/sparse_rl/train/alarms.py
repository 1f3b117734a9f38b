# SPDX-License-Identifier: Apache-2.0
"""Signs that a run is going wrong, each said once when it begins, with what to change.

    reward      for three steps no completion was better or worse than the others of its prompt
    anomalies   more than 15 % of the completions of ten steps have a token that the dense model would not have written
    rejection   for three steps more than half of the completions were rejected
    tail        in some bin of context lengths the tail of overlap is more than 0.06 under its target, beyond chance and
                over 300 tokens or more, of as many steps as that takes
    length      completions have become a quarter shorter than they were, the first sign of a collapse
    kl          the mismatch KL still rises after 200 steps, by which it should have settled
    collapse    the held-out reward with the dense cache is clearly below where the run began

All but the first and the last are signs of a cache that is too sparse, and are looked for where it is sparse.
A sign is over after ten steps (that of the tail: measurements) without it, that of a collapse with the first evaluation
without it, and may then begin anew. `alarm/NAME` is 1 as long as it lasts.

An alarm changes nothing: it is `control.py` that moves the budget.
"""

from __future__ import annotations

import logging
import math
from typing import Any

from sparse_rl.metrics import ALARM_WINDOW, MANY_ANOMALOUS, REMEDIES
from sparse_rl.objective.tail import FAR, BinTail, Evidence

logger = logging.getLogger(__name__)

QUIET = 10  # steps without a sign after which it is over
EQUAL = 3  # steps without an advantage before they are no chance
WASTED, HALF = 3, 0.5  # steps that reject more than this share, before somebody should know
TAIL_TOKENS, SURE = 300, 2.0  # of a bin before it is judged; standard errors from what may be
SHORTER = 0.75  # of the longest mean length
DROP = 0.02  # of a reward that has fallen, beyond as many standard errors
SETTLED, KL_WINDOW, RISE, SMALL_KL = 200, 50, 1.25, 1e-3  # a KL below the last is rounding


class Alarms:
    """What was seen so far, and which alarms are on."""

    def __init__(self) -> None:
        self.on: dict[str, int] = {}  # steps since its sign was last seen
        self.equal = 0  # steps since a completion had an advantage
        self.anomalous: list[float] = []
        self.wasted = 0  # steps since half of the completions were accepted
        self.tails: dict[str, list[float]] = {}  # the evidence of a bin's tokens since it was judged
        self.far: dict[str, float] = {}  # bins that were judged bad, with their share of tokens far under the target
        self.lengths: list[float] = []
        self.longest = 0.0  # mean over a window
        self.kls: list[float] = []
        self.first: list[float] | None = None  # held-out reward with the dense cache and its error, when first seen
        self.held_out = ""  # what these are of
        self.fallen = False

    def look(
        self, step: int, metrics: dict[str, float], measured: list[BinTail] | None, target: float, quantile: float
    ) -> dict[str, float]:
        """Warn of what begins with a sparse cache; returns the `alarm/*` metrics. None: the step measured no tails."""
        signs = {
            "anomalies": self._anomalies(metrics),
            "rejection": self._rejection(metrics),
            "length": self._length(metrics),
            "kl": self._kl(step, metrics),
        }
        if measured is not None:  # or nothing is known of them that was not known before
            signs["tail"] = self._tail(measured, target, quantile)
        return self._raise(signs) | {"alarm/tail": int("tail" in self.on)}

    def look_at_rewards(self, differ: bool, mean: float) -> dict[str, float]:
        """The same with any cache: whether rewards differ where they are compared, and their mean, nan without any."""
        self.equal = 0 if differ else self.equal + 1
        now = "none" if math.isnan(mean) else f"{mean:.3g}"
        sign = f"for {EQUAL} steps all completions of a prompt had the same reward, whatever the prompt ({now} now)"
        return self._raise({"reward": f"{sign}, so nothing is learnt" if self.equal >= EQUAL else ""})

    def look_at_evaluation(self, reward: float, error: float, held_out: str = "") -> dict[str, float]:
        """The same of the model that is kept, at every evaluation: whether it is worse than it was.

        held_out: of what, others if a resumed run is evaluated in another way
        """
        if self.first is None or held_out != self.held_out:
            if self.first is not None:
                logger.warning("the evaluation is another than before: a fall is looked for from %.3f on.", reward)
            self.first, self.held_out = [reward, error], held_out
        began, least = self.first[0], max(DROP, SURE * math.hypot(error, self.first[1]))
        before, self.fallen = self.fallen, began - reward > least
        if self.fallen and not before:
            fell = f"the held-out reward with the dense cache has fallen from {began:.3f} to {reward:.3f}"
            logger.warning("%s; %s", fell, REMEDIES["alarm/collapse"])
        return {"alarm/collapse": int(self.fallen)}

    def _raise(self, signs: dict[str, str]) -> dict[str, float]:
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

    def _anomalies(self, metrics: dict[str, float]) -> str:
        """Whatever the correction does with them: one that rejects nothing is in more danger, not in less."""
        if "mismatch/catastrophic_rollout_frac" in metrics:
            self.anomalous = [*self.anomalous, metrics["mismatch/catastrophic_rollout_frac"]][-ALARM_WINDOW:]
        rate = sum(self.anomalous) / ALARM_WINDOW  # steps to come count as without: at first it takes more to be sure
        if rate <= MANY_ANOMALOUS:
            return ""
        rate = sum(self.anomalous) / len(self.anomalous)
        return (
            f"{rate:.0%} of the completions (above {MANY_ANOMALOUS:.0%}) have a token that the dense model would all "
            "but never have written"
        )

    def _rejection(self, metrics: dict[str, float]) -> str:
        """By the preset's own veto, which may be stricter than what `anomalies` counts."""
        rate = metrics.get("correction/rejection_rate", 0.0)
        self.wasted = self.wasted + 1 if rate > HALF else 0
        if self.wasted < WASTED:
            return ""
        return f"for {WASTED} steps more than half of the completions were rejected ({rate:.0%} now)"

    def _tail(self, measured: list[BinTail], target: float, quantile: float) -> str:
        for tail in measured:
            name = str(tail.start)
            evidence = Evidence(*self.tails.pop(name, ()))
            evidence.add(tail.tokens, tail.far, quantile)
            if evidence.tokens < TAIL_TOKENS:
                self.tails[name] = [evidence.tokens, evidence.bad, evidence.squares]
            elif evidence.above(quantile) > SURE:
                self.far[name] = evidence.bad / evidence.tokens
            else:
                self.far.pop(name, None)
        bad = [tail.start for tail in measured if str(tail.start) in self.far]
        worst = max(bad, key=lambda start: self.far[str(start)], default=None)
        if worst is None:
            return ""
        return (
            f"from {worst} tokens of context on, {100 * self.far[str(worst)]:.3g}% of the tokens have an overlap with "
            f"the dense model under {target - FAR:.2f}; all but {100 * quantile:g}% should have {target}"
        )

    def _length(self, metrics: dict[str, float]) -> str:
        self.lengths = [*self.lengths, metrics["completions/mean_length"]][-ALARM_WINDOW:]
        if len(self.lengths) < ALARM_WINDOW:
            return ""
        mean = sum(self.lengths) / ALARM_WINDOW
        self.longest = max(self.longest, mean)
        if mean >= SHORTER * self.longest:
            return ""
        return f"completions have shrunk from {self.longest:.0f} to {mean:.0f} tokens"

    def _kl(self, step: int, metrics: dict[str, float]) -> str:
        if math.isfinite(kl := metrics.get("rollout_corr/k3_kl", math.nan)):
            self.kls = [*self.kls, kl][-2 * KL_WINDOW :]
        if step < SETTLED or len(self.kls) < 2 * KL_WINDOW:
            return ""
        before, now = (sum(part) / KL_WINDOW for part in (self.kls[:KL_WINDOW], self.kls[KL_WINDOW:]))
        if now <= max(RISE * before, SMALL_KL):
            return ""
        return f"the mismatch KL still rises after {step} steps, from {before:.2g} to {now:.2g}"

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        return dict(vars(self))

    def restore(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)
