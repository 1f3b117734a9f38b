# SPDX-License-Identifier: Apache-2.0
"""A verdict for each claim of the papers, by rules that stand on the page beside the numbers.

"Clearly" means by more than 2.8 standard errors of the difference, over three seeds. Where the numbers allow neither
verdict, or some are missing, or the dense arm itself does not learn, a claim cannot be tested here.

Means and errors over seeds are made in `evidence.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from sparse_rl.evaluate.statistics import Estimate, estimate
from sparse_rl.report.evidence import (
    CLEAR,
    DROP,
    LEARNS,
    SEEDS,
    STATISTICS,
    SURE,
    THRESHOLD,
    Case,
    Evidence,
    auc,
    cases,
    collapsed,
    compare,
    interval,
    ratio,
)

HOLDS, FAILS, UNTESTED = "holds", "does not hold here", "cannot be tested here"
CLOSE, SAVED = 0.97, 0.35  # of dense accuracy, and KV saved: what the paper says of sparse_rl
EXTREME = 0.15  # of the mean length: the papers' 128 entries of about 800 tokens are 0.16
TAIL_MARGIN = 0.05  # of AUC
PERFECT = 0.95  # of AUC: two above it cannot be told apart
FEW = 4  # settings of either outcome that a predictor needs
RUNS = 2  # of the seeds at a budget, that make a collapse
SHORT = 0.03  # of P05, that a schedule may fall short of its target by
TAILS = ("overlap_p05", "overlap_p01", "overlap_min")


@dataclass(frozen=True, slots=True)
class Finding:
    state: str
    numbers: str


Judge = Callable[[Evidence, str], Finding | None]  # of a testbed; None where it has no such runs planned


@dataclass(frozen=True, slots=True)
class Verdict:
    claim: str
    rule: str
    findings: dict[str, Finding]  # by testbed

    @property
    def state(self) -> str:
        """One word where all testbeds agree, else a word each."""
        states = [finding.state for finding in self.findings.values()]
        if not states:
            return UNTESTED
        if len(set(states)) == 1:
            return states[0]
        return "; ".join(f"{finding.state} ({name})" for name, finding in self.findings.items())


def verdicts(evidence: Evidence) -> list[Verdict]:
    """All of them, in the order of the page."""
    found = []
    for claim, rule, judge in CLAIMS:
        judged = {bed: _judge(evidence, bed, judge) for bed in evidence.testbeds}
        found.append(Verdict(claim, rule, {bed: finding for bed, finding in judged.items() if finding is not None}))
    return [*found, Verdict(TAIL_CLAIM, TAIL_RULE, {"all testbeds": tail_beats_mean(evidence)})]


def naive_collapses(evidence: Evidence, testbed: str) -> Finding:
    start, counts, shown = evidence.start(testbed), [], []
    for budget in evidence.bed(testbed)["budgets"]:
        runs, end = evidence.runs(testbed, "naive", budget), evidence.end(testbed, "naive", budget)
        if len(runs) < SEEDS:
            return _missing(f"naive at budget {budget}", len(runs))
        counts.append(sum(collapsed(run, start) for run in runs))
        shown.append(f"{number(end)} at budget {budget} ({counts[-1]} of {len(runs)} collapse)")
    state = HOLDS if max(counts) >= RUNS else UNTESTED if any(counts) else FAILS
    return _decided(state, f"naive ends at {', '.join(shown)}; it starts at {number(start)}")


def within_three_percent(evidence: Evidence, testbed: str) -> Finding:
    dense, states, shown = evidence.end(testbed, "dense", 0), [], []
    planned, tried = evidence.bed(testbed)["budgets"], evidence.bed(testbed).get("sweep", ())
    for budget in sorted({*planned, *tried}, reverse=True):
        end = evidence.end(testbed, "sparse_rl", budget)
        if end.count < SEEDS and budget not in planned:
            continue
        if end.count < SEEDS:
            return _missing(f"sparse_rl at budget {budget}", end.count)
        saved = evidence.curve(testbed, "sparse_rl", budget, "kv_saved", slice(None)).mean
        kept = ratio(end, dense)
        if saved >= SAVED:
            states.append(_against(kept))
            shown.append(f"{share(kept)} of dense at {100 * saved:.0f} % saved")
    if not states:
        return Finding(UNTESTED, f"no budget saves {100 * SAVED:.0f} %")
    state = HOLDS if "above" in states else FAILS if set(states) == {"below"} else UNTESTED
    return _decided(state, ", ".join(shown))


def both_needed(evidence: Evidence, testbed: str) -> Finding | None:
    if "reject_only" not in evidence.arms(testbed):
        return None
    dense, states, shown = evidence.end(testbed, "dense", 0), [], []
    for budget in evidence.bed(testbed)["budgets"]:
        ends = {a: evidence.end(testbed, a, budget) for a in ("naive", "sparse_rl", "reject_only", "reweight_only")}
        for arm, end in ends.items():
            if end.count < SEEDS:
                return _missing(f"{arm} at budget {budget}", end.count)
        if compare(dense, ends["naive"]) != "more":
            continue  # nothing to correct
        needs = [compare(ends["sparse_rl"], ends[without]) for without in ("reweight_only", "reject_only")]
        states.append("both" if needs == ["more"] * 2 else "one" if "no more" in needs else "unclear")
        shown.append(
            f"budget {budget}: both {number(ends['sparse_rl'])}, rejection alone {number(ends['reject_only'])}, "
            f"reweighting alone {number(ends['reweight_only'])}, neither {number(ends['naive'])}"
        )
    if not states:
        return Finding(UNTESTED, "naive is nowhere clearly below dense: there is nothing to correct")
    state = HOLDS if "both" in states else FAILS if set(states) == {"one"} else UNTESTED
    return _decided(state, "; ".join(shown))


def sparse_trained_wins(evidence: Evidence, testbed: str) -> Finding:
    states, shown = [], []
    budgets = evidence.bed(testbed)["budgets"]
    for budget in budgets[1:] or budgets:
        cache = f"rkv:{budget}"
        ours = evidence.under(testbed, "sparse_rl", budget, cache)
        dense, naive = evidence.under(testbed, "dense", 0, cache), evidence.under(testbed, "naive", budget, cache)
        for arm, found in (("sparse_rl", ours), ("dense", dense)):
            if found.count < SEEDS:
                return _missing(f"{arm} under {cache}", found.count)
        states.append(compare(ours, dense))
        shown.append(f"under {cache} sparse_rl {number(ours)}, dense {number(dense)}, naive {number(naive)}")
    state = FAILS if set(states) == {"no more"} else UNTESTED
    if "more" in states and "no more" not in states:
        state = HOLDS
    return _decided(state, "; ".join(shown))


def extremes_fail(evidence: Evidence, testbed: str) -> Finding | None:
    if "sweep" not in evidence.bed(testbed):
        return None
    budgets = [r["settings"]["budget"] for r in evidence.trained(testbed) if r["settings"]["arm"] == "sparse_rl"]
    least = min(budgets, default=0)
    end, dense = evidence.end(testbed, "sparse_rl", least), evidence.end(testbed, "dense", 0)
    length = evidence.curve(testbed, "dense", 0, "length", slice(None)).mean
    if end.count < SEEDS:
        return _missing(f"sparse_rl at budget {least}", end.count)
    if not least <= EXTREME * length:
        return Finding(UNTESTED, f"the smallest budget, {least}, is {least / length:.2f} of the mean length")
    kept = ratio(end, dense)
    state = {"below": HOLDS, "above": FAILS}.get(_against(kept), UNTESTED)
    return _decided(state, f"at budget {least} of {length:.0f} tokens sparse_rl ends at {share(kept)} of dense")


def tail_decides(evidence: Evidence, testbed: str) -> Finding | None:
    calibrated = evidence.calibration(testbed)
    if calibrated is None:
        whole = evidence.bed(testbed).get("whole")
        return Finding(UNTESTED, "missing: the calibration") if whole else _tail_at_budgets(evidence, testbed)
    start, counts, shown = evidence.start(testbed), [], []
    targets = sorted(calibrated["settings"]["targets"])
    for target in targets:
        runs = evidence.runs(testbed, "schedule", 0, target=target)
        if len(runs) < SEEDS:
            return _missing(f"the schedule of {target:g}", len(runs))
        held = min(tail for tail in calibrated["results"]["schedules"][f"{target:g}"]["tails"] if tail is not None)
        if target >= THRESHOLD and held < target - SHORT:
            return Finding(UNTESTED, f"the schedule of {target:g} holds only {held:.3f}")
        counts.append(sum(collapsed(run, start) for run in runs))
        end = evidence.end(testbed, "schedule", 0, target=target)
        shown.append(f"{number(end)} at {target:g}, held {held:.2f} ({counts[-1]} of {len(runs)} collapse)")
    stable = [count for target, count in zip(targets, counts, strict=True) if target >= THRESHOLD]
    state = HOLDS if not any(stable) and counts[0] >= RUNS else UNTESTED
    if max(stable) >= RUNS or not any(counts):
        state = FAILS
    numbers = f"by P05 it ends at {', '.join(shown)}"
    if auto := evidence.runs(testbed, "auto", 0, target=THRESHOLD):
        lost, end = sum(collapsed(run, start) for run in auto), evidence.end(testbed, "auto", 0, target=THRESHOLD)
        numbers += f"; auto at {THRESHOLD}, which the rule does not count, ends at {number(end)}"
        numbers += f" ({lost} of {len(auto)} collapse)"
    return _decided(state, f"{numbers}; it starts at {number(start)}")


def _tail_at_budgets(evidence: Evidence, testbed: str) -> Finding | None:
    """Without schedules: whether `tis` collapses at a budget whose tail is long enough."""
    if "tis" not in evidence.arms(testbed):
        return None
    start, counts, shown = evidence.start(testbed), [], []
    for budget in evidence.bed(testbed)["budgets"]:
        runs, measured = evidence.runs(testbed, "tis", budget), evidence.before(testbed, "rkv", budget)
        if min(len(runs), len(measured)) < SEEDS:
            return _missing(f"tis at budget {budget}", min(len(runs), len(measured)))
        tail = estimate(record["results"]["overlap_p05"] for record in measured).mean
        if tail >= THRESHOLD:
            counts.append(sum(collapsed(run, start) for run in runs))
            end = number(evidence.end(testbed, "tis", budget))
            shown.append(f"{end} at budget {budget}, P05 {tail:.3f} ({counts[-1]} of {len(runs)} collapse)")
    if not counts:
        return Finding(UNTESTED, f"no budget has a P05 of {THRESHOLD} or more")
    numbers = f"no schedules here; tis ends at {', '.join(shown)}; it starts at {number(start)}"
    return Finding(FAILS if max(counts) >= RUNS else UNTESTED, numbers)


def tail_beats_mean(evidence: Evidence) -> Finding:
    """Over the naive runs of all testbeds: what tells those that lose accuracy from those that do not."""
    found = cases(evidence, ["naive"])
    failed = sum(case.failed for case in found)
    bad, good = _outcomes(found)
    if min(bad, good) < FEW:
        return Finding(UNTESTED, f"naive runs collapse in {bad} settings and not in {good}; {FEW} of each are needed")
    shown = [f"mean {auc(found, 'overlap_mean'):.2f}"]
    bounds = {}
    for name in TAILS:
        bounds[name] = interval(found, partial(_lead, name))
        low, high = bounds[name]
        label = STATISTICS[name][0].removeprefix("overlap, ")
        shown.append(f"{label} {auc(found, name):.2f} ({low:+.2f} to {high:+.2f} against the mean)")
    numbers = f"{failed} of {len(found)} naive runs collapse; AUC: {', '.join(shown)}"
    if min(auc(found, "overlap_mean"), auc(found, "overlap_p05")) > PERFECT:
        return Finding(UNTESTED, f"both predict nearly all and cannot be told apart: {numbers}")
    low, high = bounds["overlap_p05"]
    foretells = auc(found, "overlap_p05") > 0.5  # or it leads by warning of the wrong runs less often
    return _decided(HOLDS if low > 0 and foretells else FAILS if high < TAIL_MARGIN else UNTESTED, numbers)


def _outcomes(found: list[Case]) -> tuple[int, int]:
    """Settings most of whose runs fail, and the others."""
    runs: dict[tuple[str, str, int], list[bool]] = {}
    for case in found:
        runs.setdefault(case.setting, []).append(case.failed)
    bad = sum(2 * sum(own) > len(own) for own in runs.values())
    return bad, len(runs) - bad


def _lead(name: str, found: list[Case]) -> float:
    return auc(found, name) - auc(found, "overlap_mean")


def _judge(evidence: Evidence, testbed: str, judge: Judge) -> Finding | None:
    """None where the testbed has no such runs planned; one in which the dense arm does not learn says nothing."""
    learnt = evidence.gain(testbed)
    if not evidence.start(testbed).count:
        return Finding(UNTESTED, "missing: the accuracy before training")
    if learnt.count < SEEDS:
        return _missing("dense", learnt.count)
    if learnt.mean < LEARNS:
        return Finding(UNTESTED, f"the dense arm gains only {learnt.mean:+.3f}: the testbed is wrong")
    return judge(evidence, testbed)


def _against(kept: Estimate) -> str:
    """A share of dense accuracy against 97 %."""
    if kept.mean - CLEAR * kept.se >= CLOSE:
        return "above"
    return "below" if kept.mean + CLEAR * kept.se < CLOSE else "unclear"


def _decided(state: str, numbers: str) -> Finding:
    """With the numbers complete, neither verdict means that they are too close to call."""
    return Finding(state, numbers if state != UNTESTED else f"too close to call: {numbers}")


def _missing(what: str, count: int) -> Finding:
    return Finding(UNTESTED, f"missing: {what} has {count} of {SEEDS} seeds")


def number(found: Estimate) -> str:
    """0.945 ± 0.003, over seeds."""
    if not found.count:
        return "missing"
    return f"{found.mean:.3f}" if math.isnan(found.se) else f"{found.mean:.3f} ± {found.se:.3f}"


def share(found: Estimate) -> str:
    """96.8 ± 0.4 %."""
    if not found.count:
        return "missing"
    return f"{100 * found.mean:.1f} %" if math.isnan(found.se) else f"{100 * found.mean:.1f} ± {100 * found.se:.1f} %"


CLAIMS: tuple[tuple[str, str, Judge], ...] = (
    (
        "Naive sparse training collapses",
        f"A run collapses if it ends more than {DROP} and {SURE:g} standard errors (over problems) below where it "
        "started, or if its updates are no longer finite. Seeds differ in that, so runs are counted: holds if at some "
        f"budget {RUNS} of {SEEDS} collapse; does not hold if none does at any.",
        naive_collapses,
    ),
    (
        "sparse_rl stays within 3 % of dense at 35 % KV saved or more",
        "Of the budgets that save as much: holds if at one the share of dense accuracy is surely 97 % or more; "
        "does not hold if at all of them it is as surely below.",
        within_three_percent,
    ),
    (
        "Rejection and reweighting are both needed",
        "Of the budgets where naive is clearly below dense: holds if at one sparse_rl is clearly above either alone; "
        f"does not hold if at all of them one alone is surely less than {DROP} behind.",
        both_needed,
    ),
    (
        "Sparse-trained beats dense-trained under the same sparse inference",
        "R-KV at the budget trained with: holds if sparse_rl is clearly above dense-trained at one of the budgets and "
        f"does not surely lead by less than {DROP} at the other; does not hold if it surely leads by less at all.",
        sparse_trained_wins,
    ),
    (
        "Extreme budgets fail",
        f"The smallest budget, at most {EXTREME} of the mean length: holds if sparse_rl is there surely below 97 % of "
        "dense; does not hold if it is surely above.",
        extremes_fail,
    ),
    (
        f"Training is stable from a P05 of the overlap of {THRESHOLD} on, and collapses far below",
        "Schedules for four targets of P05, weights truncated (tis), a collapse as above: holds if no run collapses at "
        f"a target from {THRESHOLD} on, and {RUNS} of {SEEDS} do at the lowest; does not hold if {RUNS} of {SEEDS} "
        f"collapse at one from {THRESHOLD} on, or none anywhere. Before training, schedules from {THRESHOLD} on must "
        f"come within {SHORT} of their target in every bin of context length. Where no schedules were trained, it does "
        f"not hold if {RUNS} of {SEEDS} collapse at a constant budget with a P05 from {THRESHOLD} on. Sparrow's own "
        "runs, Qwen3 of 1.7B to 8B, fall behind at 0.75 and 0.80 and are stable at 0.86 and 0.92.",
        tail_decides,
    ),
)
TAIL_CLAIM = "The tail of the overlap predicts better than its mean"
TAIL_RULE = (
    "Naive runs that collapse against those of the same testbed that do not, all policies and budgets: holds if the "
    "AUC of P05 before training is above 0.5 and leads that of the mean in 97.5 % of bootstrap samples of whole "
    f"settings; does not hold if it leads by less than {TAIL_MARGIN} in as many. It takes {FEW} settings of either "
    f"outcome, and one of the two AUCs below {PERFECT}."
)
