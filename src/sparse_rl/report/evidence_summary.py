# SPDX-License-Identifier: Apache-2.0
"""What docs/evidence.md comes to, in a few sentences at its top; each from the raw results, none where they are not.

The verdicts are in `evidence_claims.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from sparse_rl.evaluate.statistics import Estimate
from sparse_rl.report.evidence import (
    LEARNS,
    SEEDS,
    STATISTICS,
    Evidence,
    auc,
    by_bed,
    cases,
    collapsed,
    compare,
    ratio,
    survival,
    threshold,
)
from sparse_rl.report.evidence_claims import number
from sparse_rl.report.evidence_tables import EPS, difference, four_updates, plain

CHANCE = 0.6  # of AUC: at or below it nothing is foretold


def in_short(evidence: Evidence) -> list[str]:
    """Bullets, in the order of the page."""
    beds = [bed for bed in evidence.testbeds if evidence.gain(bed).mean >= LEARNS]
    chains = [bed for bed in beds if "sweep" in evidence.bed(bed)]
    parts = {
        "Of the dense arm's accuracy sparse_rl keeps": [_kept(evidence, bed) for bed in beds],
        "Runs that collapse, by the rule below, at the R-KV budgets that both were trained with": [
            _lost(evidence, bed) for bed in beds
        ],
        "Of the arms with the papers' veto, 1e-4 or none, the one that ends highest with sparse rollouts": [
            _best(evidence, bed) for bed in beds
        ],
        "Used with the same sparse cache, the dense-trained model leads the sparse_rl-trained one by": [
            _used(evidence, bed) for bed in beds
        ],
        "A veto at 1e-2 (the preset strict) instead of 1e-4 changes dense accuracy by": [
            _veto(evidence, bed) for bed in chains
        ],
        "Rollouts with a token xi < 1e-4, as a constant hazard foretells from their first half, and as seen": [
            _hazard(evidence, bed) for bed in chains
        ],
        "What, measured before training, best tells the runs that collapse": _foretold(evidence),
        "Four updates a rollout, beyond what they do to the dense arm, change accuracy by": [
            _updates(evidence, bed) for bed in chains
        ],
        "Not measured yet": list(_missing(evidence)),
    }
    said = {title: [text for text in texts if text] for title, texts in parts.items()}
    return [f"- **{title}:** {'; '.join(texts)}." for title, texts in said.items() if texts]


def _kept(evidence: Evidence, bed: str) -> str:
    dense, shown = evidence.end(bed, "dense", 0), []
    for budget in evidence.bed(bed)["budgets"]:
        kept = ratio(evidence.end(bed, "sparse_rl", budget), dense)
        saved = evidence.curve(bed, "sparse_rl", budget, "kv_saved", slice(None)).mean
        if kept.count >= SEEDS:
            shown.append(f"{100 * kept.mean:.0f} % with {100 * saved:.0f} % of KV saved")
    length = evidence.curve(bed, "dense", 0, "length", slice(None)).mean
    return _of(f"{bed} (completions of {length:.0f} tokens in the dense arm, over all steps)", shown)


def _lost(evidence: Evidence, bed: str) -> str:
    """Where both arms have all seeds: larger budgets, which only one was trained with, ruin nobody."""
    start, lost, count = evidence.start(bed), {"naive": 0, "sparse_rl": 0}, 0
    settings = evidence.bed(bed)
    for budget in {*settings["budgets"], *settings.get("sweep", ())}:
        runs = {arm: evidence.runs(bed, arm, budget) for arm in lost}
        if start.count and all(len(own) >= SEEDS for own in runs.values()):
            count += SEEDS
            for arm, own in runs.items():
                lost[arm] += sum(collapsed(run, start) for run in own)
    return _of(bed, [f"{arm} {failed} of {count}" for arm, failed in lost.items()] if count else [])


def _best(evidence: Evidence, bed: str) -> str:
    shown = []
    for budget in evidence.bed(bed)["budgets"]:
        ends = {arm: evidence.end(bed, arm, budget) for arm in evidence.arms(bed)[1:]}
        whole = {arm: end for arm, end in ends.items() if end.count >= SEEDS}
        if whole:
            best = max(whole, key=lambda arm: whole[arm].mean)
            clear = "sparse_rl" in whole and compare(whole[best], whole["sparse_rl"]) == "more"
            shown.append(
                f"{best} at budget {budget} ({number(whole[best])}{', clearly above sparse_rl' if clear else ''})"
            )
    return _of(bed, shown)


def _used(evidence: Evidence, bed: str) -> str:
    pairs = {}
    for budget in evidence.bed(bed)["budgets"]:
        own = [evidence.under(bed, arm, at, f"rkv:{budget}") for arm, at in (("dense", 0), ("sparse_rl", budget))]
        pairs[f"under rkv:{budget}"] = own
    return _of(bed, _apart(pairs))


def _veto(evidence: Evidence, bed: str) -> str:
    pairs = {}
    for budget in evidence.bed(bed)["budgets"]:
        pairs[f"at budget {budget}"] = [evidence.end(bed, "sparse_rl", budget, eps=eps) for eps in (EPS[-1], None)]
    return _of(bed, _apart(pairs))


def _hazard(evidence: Evidence, bed: str) -> str:
    """At part a's budgets, where there are enough to count."""
    shown = []
    for budget in evidence.bed(bed)["budgets"]:
        found = survival(evidence, bed, budget)
        if found is not None and found.hazard > 0:
            told, seen = (100 * (1 - left(found.length)) for left in (found.law, found.left))
            shown.append(f"{told:.0f} and {seen:.0f} % at budget {budget}")
    return _of(bed, shown)


def _foretold(evidence: Evidence) -> list[str]:
    texts = []
    for arm in ("naive", "sparse_rl"):
        found = cases(evidence, [arm])
        if len({case.failed for case in found}) < 2:
            continue
        runs = f"{sum(case.failed for case in found)} of {len(found)} runs"
        areas = {name: auc(found, name) for name in STATISTICS}
        most = max(area for area in areas.values() if not math.isnan(area))
        if most <= CHANCE:
            best = max(areas, key=lambda name: areas[name])
            alone = ", ".join(f"{bed} {area:.2f}" for bed, area in by_bed(found, best).items())
            texts.append(f"{arm}, {runs}: nothing does on all testbeds (AUC {most:.2f} at most: {alone})")
            continue
        equal = [name for name, area in areas.items() if area == most]
        name = max(equal, key=lambda name: threshold(found, name)[1])
        (label, sign), (cut, right) = STATISTICS[name], threshold(found, name)
        side = f"{'below' if sign < 0 else 'above'} {cut:.2g}"
        others = f", as have {len(equal) - 1} others" if len(equal) > 1 else ""
        hits = f"right in {100 * right:.0f} % of either kind, in the mean"
        texts.append(f"{arm}, {runs}: {label}, {side}, {hits} (AUC {most:.2f}{others})")
    return texts


def _updates(evidence: Evidence, bed: str) -> str:
    changes = four_updates(evidence, bed)
    alone = changes.pop("dense")
    return _of(bed, _apart({f"with {arm}": [change, alone] for arm, change in changes.items()}))


def _missing(evidence: Evidence) -> Iterator[str]:
    """Part a's arms, part b's thresholds and budgets; where time goes; the real model."""
    for bed in evidence.testbeds:
        settings, shown = evidence.bed(bed), []
        for arm in evidence.arms(bed):
            lacking = [str(b) for b in settings["budgets"] if len(evidence.runs(bed, arm, b)) < SEEDS]
            shown += [f"{arm} at {' and '.join(lacking)}"] if lacking else []
        if "sweep" in settings:
            lacking = [str(b) for b in settings["sweep"] if len(evidence.runs(bed, "sparse_rl", b)) < SEEDS]
            shown += [f"sparse_rl at {' and '.join(lacking)}"] if lacking else []
            strict = [evidence.runs(bed, "sparse_rl", b, eps=EPS[-1]) for b in settings["budgets"][1:]]
            shown += ["other thresholds of the veto"] if any(len(runs) < SEEDS for runs in strict) else []
        if shown:
            yield f"{bed}: {', '.join(shown)}"
    if not evidence.part("e"):
        yield "where time and memory go"
    if "smollm2" not in evidence.testbeds:
        yield "SmolLM2"


def _apart(pairs: dict[str, list[Estimate]]) -> list[str]:
    """+0.039 ± 0.011 (clearly) at budget 45: the first less the second, where both have all seeds."""
    shown = []
    for where, (first, second) in pairs.items():
        if min(first.count, second.count) >= SEEDS:
            clear = " (clearly)" if "more" in (compare(first, second), compare(second, first)) else ""
            shown.append(f"{plain(difference(first, second), '+.3f')}{clear} {where}")
    return shown


def _of(name: str, shown: list[str]) -> str:
    return f"{name}: {', '.join(shown)}" if shown else ""
