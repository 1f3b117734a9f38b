# SPDX-License-Identifier: Apache-2.0
"""docs/evidence.md: the verdicts, then a table and a plot a part, all from the raw results.

The same results give the same bytes. What is missing is called missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from sparse_rl.evaluate.statistics import Estimate, estimate
from sparse_rl.report.evidence import (
    ARMS,
    CLEAR,
    LEARNS,
    LEAST,
    SEEDS,
    STATISTICS,
    Evidence,
    Record,
    auc,
    cases,
    collapsed,
    held,
    interval,
    kv_read,
    over_seeds,
    read_evidence,
    survival,
    threshold,
)
from sparse_rl.report.evidence_claims import UNTESTED, number, verdicts
from sparse_rl.runfolder import write_whole

NONE = "–"
EPS = (1e-5, 1e-4, 1e-3, 1e-2)
FIRST, LAST = slice(0, 3), slice(-5, None)  # steps
ABOUT = """Do the papers' claims hold on models that train here? Every number below comes from the raw results in
`{results}`, one line a cell, with its settings, seed, hardware and commit; this page and its plots are written by

    sparse-rl report --evidence {results} --output {output}

and any cell is run again by `python benchmarks/evidence/part_X.py --only CELL` (`--list` names them). ± is one standard
error over seeds ({seeds} where nothing else is said); that of an accuracy is at least its error over problems. Accuracy
is that of samples at temperature 1 (SmolLM2: 0.7) on held-out problems; "dense" and "sparse" accuracy are those of the
same weights with the dense cache and with the cache of the rollouts. KV saved is 1 - entries held / entries a dense
cache would hold, over decode steps."""

HELD = """The overlap by budget and context length before training, and what comes of training with truncated weights
(tis): at constant budgets, on schedules calibrated for four targets of P05, with a budget that follows P05 as training
measures it (auto, from the lenient one), and with an adapter of the sampler's own beside that (auto_distill; its sparse
accuracy is with the adapter). 41@0+44@60 is 41 entries, and 44 from a context of 60 tokens on; of auto, those of the
last step. P05 in training is that of the lowest bin, at constant budgets that of all tokens."""


def write_evidence(results: Path, output: Path) -> None:
    """The page, and its plots in a folder of the same name beside it."""
    from sparse_rl.report.evidence_plots import draw

    evidence = read_evidence(results)
    plots = output.with_suffix("")
    drawn = draw(evidence, plots)
    write_whole(output, page(evidence, results.as_posix(), output.as_posix(), plots.name, drawn))


def page(evidence: Evidence, results: str, output: str, plots: str, drawn: Sequence[str]) -> str:
    """The document as Markdown; `drawn` names the plots there are."""

    def plot(name: str, text: str) -> list[str]:
        return [f"![{text}]({plots}/{name}.png)"] if name in drawn else []

    parts = ["# Evidence", ABOUT.format(results=results, output=output, seeds=SEEDS), *_verdicts(evidence)]
    if not evidence.records:
        return "\n\n".join([*parts, "There are no results yet.", ""])
    parts += ["## Testbeds", _testbeds(evidence)]
    for bed in evidence.testbeds:
        parts += [f"## Arms and budgets: {bed}", *plot(f"arms-{bed}", "accuracy after training by arm and budget")]
        parts += [*plot(f"curves-{bed}", "dense accuracy over the steps"), _arms(evidence, bed)]
    chains = [bed for bed in evidence.testbeds if "sweep" in evidence.bed(bed)]
    for bed in chains:
        parts.append(f"## Threshold, budget and length: {bed}")
        if evidence.bed(bed).get("whole"):
            parts += [_eps(evidence, bed), *plot(f"budget-{bed}", "accuracy after training by budget")]
            parts.append(_budgets(evidence, bed))
        parts += [*plot(f"length-{bed}", "rejection by length against a constant hazard"), _lengths(evidence, bed)]
    for bed in evidence.testbeds:
        parts += [f"## Sparsity-aware training: {bed}", *plot(f"matrix-{bed}", "accuracy by training and cache")]
        parts.append(_matrix(evidence, bed))
    parts += ["## What predicts collapse", *plot("predictors", "change of accuracy against statistics before training")]
    parts.append(_predictors(evidence))
    for bed in [bed for bed in chains if evidence.bed(bed).get("whole")]:
        parts += [
            f"## Holding the tail: {bed}",
            *plot(f"tails-{bed}", "accuracy against KV read"),
            _tails(evidence, bed),
        ]
    parts += ["## Where time and memory go", *plot("time", "seconds of a step by stage"), _times(evidence)]
    for bed in [bed for bed in chains if evidence.bed(bed).get("whole")]:
        parts += [f"## Four updates a rollout: {bed}", _updates(evidence, bed)]
    return "\n\n".join([*parts, "## Where it comes from", _provenance(evidence), ""])


def _verdicts(evidence: Evidence) -> list[str]:
    found = verdicts(evidence)
    rows = [[verdict.claim, f"**{verdict.state}**"] for verdict in found]
    rules = [f"- {verdict.claim}. {verdict.rule}" for verdict in found]
    numbers = []
    for verdict in found:
        numbers.append(f"- {verdict.claim}{'' if verdict.findings else ': missing'}")
        numbers += [f"  - {name}: {finding.numbers}" for name, finding in verdict.findings.items()]
    clearly = (
        f"Clearly is by more than {CLEAR} standard errors of the difference (with {SEEDS} seeds each about 95 % by "
        f"Student's t) and by {LEAST} at least; surely, with as many standard errors to spare."
    )
    otherwise = f"Anything else, a missing run, or a dense arm that gains less than {LEARNS:.2f}: {UNTESTED}."
    parts = ["## Verdicts", table(("claim", "verdict"), rows), "The numbers:", "\n".join(numbers)]
    return [*parts, f"The rules. {clearly} {otherwise}", "\n".join(rules)]


def _testbeds(evidence: Evidence) -> str:
    rows = []
    for bed in evidence.testbeds:
        learnt = evidence.gain(bed)
        state = "missing" if math.isnan(learnt.mean) else "yes" if learnt.mean >= LEARNS else "**no**"
        length = evidence.curve(bed, "dense", 0, "length", slice(None))
        settings = evidence.bed(bed)
        steps = f"{settings['updates']} x {settings['prompts'] * settings['n']}" if "updates" in settings else NONE
        rows.append(
            [bed, _plain(length, ".0f"), steps, number(evidence.start(bed)), number(evidence.end(bed, "dense", 0))]
        )
        rows[-1] += [_plain(learnt, "+.3f"), state]
    head = ("testbed", "tokens a completion", "steps x rollouts", "before", "dense arm, after", "gain", "learns")
    return table(head, rows)


def _arms(evidence: Evidence, bed: str) -> str:
    rows = []
    for budget in evidence.bed(bed)["budgets"]:
        for arm in evidence.arms(bed):
            rows.append([str(budget) if arm != "dense" else "all", arm, *_run(evidence, bed, arm, budget)])
    text = "First and last are means over the first three and the last five steps."
    text += " The dense arm's sparse accuracy is with the middle budget's cache."
    return f"{text}\n\n{table(('budget', 'arm', *RUN), [row for i, row in enumerate(rows) if row not in rows[:i]])}"


RUN = (
    *("dense accuracy", "sparse accuracy", "KV saved", "xi < 1e-4, first", "last", "KL, first", "last"),
    *("gradient norm", "length", "seeds"),
)


def _run(evidence: Evidence, bed: str, arm: str, budget: int, eps: float | None = None) -> list[str]:
    """A setting's numbers over its seeds."""
    runs = evidence.runs(bed, arm, budget, eps=eps)
    if not runs:
        return ["missing"] + [NONE] * (len(RUN) - 2) + [f"0 of {SEEDS}"]

    def curve(name: str, at: slice, form: str) -> str:
        return _plain(evidence.curve(bed, arm, budget, name, at, eps=eps), form)

    ends = [number(evidence.end(bed, arm, budget, cache, eps=eps)) for cache in ("dense", "sparse")]
    return [
        *ends,
        curve("kv_saved", slice(None), ".0%"),
        *(curve("catastrophic", at, ".1%") for at in (FIRST, LAST)),
        *(curve("kl", at, ".4f") for at in (FIRST, LAST)),
        curve("grad_norm", slice(None), ".3f"),
        curve("length", LAST, ".0f"),
        f"{len(runs)} of {SEEDS}",
    ]


def _eps(evidence: Evidence, bed: str) -> str:
    rows = []
    for budget in evidence.bed(bed)["budgets"][1:]:
        for eps in EPS:
            given = None if eps == EPS[1] else eps
            rejected = evidence.curve(bed, "sparse_rl", budget, "rejection", slice(None), eps=given)
            numbers = _run(evidence, bed, "sparse_rl", budget, eps=given)
            rows.append([str(budget), f"{eps:g}", numbers[0], numbers[1], _plain(rejected, ".1%"), numbers[-1]])
    return table(("budget", "eps", "dense accuracy", "sparse accuracy", "rejected", "seeds"), rows)


def _budgets(evidence: Evidence, bed: str) -> str:
    settings = evidence.bed(bed)
    length = evidence.curve(bed, "dense", 0, "length", slice(None)).mean
    rows = []
    for budget in sorted({*settings["sweep"], *settings["budgets"]}):
        part = NONE if math.isnan(length) else f"{budget / length:.2f}"
        rows.append([str(budget), part, *_run(evidence, bed, "sparse_rl", budget)])
    return table(("budget", "of the length", *RUN), rows)


def _lengths(evidence: Evidence, bed: str) -> str:
    """Rejection by length before training, against the law of a constant hazard."""
    settings, rows = evidence.bed(bed), []
    for budget in sorted({*settings["sweep"], *settings["budgets"]}):
        found = survival(evidence, bed, budget)
        if found is None:
            measured = evidence.before(bed, "rkv", budget)
            rows.append([str(budget), "never" if measured else "missing", *[NONE] * 6])
            continue
        seen = [f"{100 * (1 - found.left(token)):.1f} %" for token in (found.begin, found.middle)]
        for token in ((found.middle + found.length) / 2, found.length):
            seen.append(f"{100 * (1 - found.left(token)):.1f} % ({100 * (1 - found.law(token)):.1f} %)")
        rows.append([str(budget), f"{found.begin:.0f}", f"{found.hazard:.1e}", *seen, str(found.total)])
    head = (
        *("budget", "first eviction, token", "hazard a token", "by then", "half-way from there"),
        *("three quarters", "end", "rollouts"),
    )
    text = "Rollouts with a token xi < 1e-4 before training. A constant hazard is fitted from the first eviction to "
    text += "half-way from there to the end; in brackets what it foretells for the rest."
    return f"{text}\n\n{table(head, rows)}"


def _matrix(evidence: Evidence, bed: str) -> str:
    caches = dict.fromkeys(
        cache
        for record in evidence.records
        if "matrix" in record["results"] and record["settings"]["testbed"]["name"] == bed
        for cache in record["results"]["matrix"]
    )
    if not caches:
        return "missing"
    budgets = evidence.bed(bed)["budgets"]
    trained = [("start", 0), ("dense", 0)]
    trained += [(arm, budget) for budget in budgets[1:] or budgets for arm in ("naive", "sparse_rl")]
    rows = []
    for arm, budget in trained:
        name = "before training" if arm == "start" else f"{arm}, budget {budget}" if budget else arm
        rows.append([name, *(number(evidence.under(bed, arm, budget, cache)) for cache in caches)])
    return table(("trained", *(f"under {cache}" for cache in caches)), rows)


def _predictors(evidence: Evidence) -> str:
    tables = []
    for name, arms in (("naive", ["naive"]), ("sparse_rl", ["sparse_rl"]), ("all sparse arms", ARMS[1:])):
        found = cases(evidence, arms)
        failed = sum(case.failed for case in found)
        text = f"{name}: {failed} of {len(found)} runs lose dense accuracy, by the rule of a collapse above."
        if not failed or failed == len(found):
            tables.append(f"{text} There is nothing to tell apart.")
            continue
        rows = []
        for statistic, (label, sign) in STATISTICS.items():
            low, high = interval(found, partial(auc, name=statistic))
            cut, right = threshold(found, statistic)
            side = "below" if sign < 0 else "above"
            rows.append(
                [label, f"{auc(found, statistic):.2f}", f"{low:.2f} to {high:.2f}", f"{side} {cut:.3g}", f"{right:.2f}"]
            )
        head = ("before training", "AUC", "95 %", "warns", "right, mean of both kinds")
        tables.append(f"{text}\n\n{table(head, rows)}")
    return "\n\n".join(tables)


def _tails(evidence: Evidence, bed: str) -> str:
    """What holds which tail, at what price, and how its training ends."""
    calibrated = evidence.calibration(bed)
    if calibrated is None:
        return "missing"
    results, start = calibrated["results"], evidence.start(bed)
    head = [f"P05, {first} to {last} tokens" for first, last in results["bins"]]
    rows = []
    for budget, found in results["curve"].items():
        tails = [_share(tail, ".3f") for tail in (*found["p05"], _least(found["p01"]), _least(found["mean"]))]
        rows.append([budget, _share(found["kv_read"], ".0%"), _share(found["rejected"], ".1%"), *tails])
    curve = table(("budget", "KV read", "xi < 1e-4", *head, "P01, lowest bin", "mean, lowest bin"), rows)
    rows = []
    for arm, budget, target in held(evidence, bed):
        runs = evidence.runs(bed, arm, budget, target=target)
        after = [_plain(_tail(runs, at), ".2f") for at in (FIRST, LAST)]
        ends = [number(evidence.end(bed, arm, budget, cache, target=target)) for cache in ("dense", "sparse")]
        steps = ", ".join(dict.fromkeys(str(r["results"].get("budgets", budget)) for r in runs))
        given = results["schedules"].get(f"{target:g}") if arm == "schedule" else None
        before = [] if target is not None else evidence.before(bed, "rkv", budget)
        accuracy = [given["sparse"]] if given else [[r["results"]["reward"], r["results"]["reward_se"]] for r in before]
        lost = f"{sum(collapsed(run, start) for run in runs)} of {len(runs)}" if start.count and runs else NONE
        rows.append([arm, NONE if target is None else f"{target:g}", steps or NONE])
        rows[-1] += [_share(_least(given["tails"]), ".2f") if given else NONE, *after]
        rows[-1] += [_plain(kv_read(evidence, bed, arm, budget, target), ".0%"), *ends]
        rows[-1] += [number(over_seeds(accuracy)), lost, f"{len(runs)} of {SEEDS}"]
    names = (
        *("run", "P05 asked for", "budgets, from a context of", "P05 before, lowest bin", "in training, first", "last"),
        *("KV read", "dense accuracy", "sparse accuracy", "sparse before", "collapsed", "seeds"),
    )
    distilled = [r for r in evidence.trained(bed) if r["settings"]["arm"] == "auto_distill"]
    shared = [_last(distilled, name) for name in ("distill/overlap_p05", "distill/overlap_p05_without")]
    text = "P05 of some of auto_distill's last rollouts, over all tokens: {} with the adapter, {} without."
    text = text.format(*(_plain(each, ".3f") for each in shared)) if distilled else ""
    return "\n\n".join([HELD, curve, table(names, rows), *([text] if text else [])])


def _tail(runs: list[Record], at: slice) -> Estimate:
    """P05 in training over seeds, of the lowest bin of context lengths where it was measured."""
    found = []
    for run in runs:
        lowest = run["results"].get("bins", {}).get("tail/overlap_lowest")
        values = [value for value in (lowest or run["results"]["curves"]["overlap_p05"])[at] if value is not None]
        found.append(math.fsum(values) / len(values) if values else None)
    return estimate(found)


def _last(runs: list[Record], name: str) -> Estimate:
    """Over seeds, what was measured last of something that is measured now and then."""
    return estimate(
        next((v for v in reversed(r["results"]["bins"].get(name, [])) if v is not None), None) for r in runs
    )


def _least(values: Sequence[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


def _share(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form).replace("%", " %")


def _times(evidence: Evidence) -> str:
    records = evidence.part("e")
    if not records:
        return "missing"
    rows = []
    for record in sorted(records, key=lambda r: (r["settings"]["response"], r["settings"]["budget"])):
        own, found = record["settings"], record["results"]
        cache = f"rkv {own['budget']}" if own["budget"] else "dense"
        seconds = [found[f"{name}_s"] for name in ("rollout", "score", "update_plain", "update_corrected")]
        peaks = [found[f"{name}_peak_bytes"] / 1e9 for name in ("kv", "rollout", "update")]
        rows.append([f"{own['sequences']} x {own['response']}", cache, *(f"{value:.1f}" for value in seconds)])
        rows[-1] += [f"{1000 * found['correct_s']:.1f}", *(f"{value:.1f}" for value in peaks)]
    head = (
        *("completions", "cache", "rollout, s", "a scoring pass, s", "update, s", "update with correction, s"),
        *("correction itself, ms", "KV peak, GB", "rollout peak, GB", "update peak, GB"),
    )
    return table(head, rows)


def _updates(evidence: Evidence, bed: str) -> str:
    middle, rows = evidence.bed(bed)["budgets"][1], []
    alone: Estimate | None = None  # what staleness does without sparsity
    for arm in ("dense", "naive", "sparse_rl", "sparse_rl_release", "tis"):
        one, four = (evidence.end(bed, arm, middle, updates=updates) for updates in (1, 4))
        change = Estimate(four.mean - one.mean, math.hypot(one.se, four.se), min(one.count, four.count))
        alone = alone or change
        beyond = Estimate(change.mean - alone.mean, math.hypot(change.se, alone.se), min(change.count, alone.count))
        shown = NONE if arm == "dense" else _plain(beyond, "+.3f")
        rows.append([arm, number(one), number(four), _plain(change, "+.3f"), shown])
    head = ("arm", "one update", "four updates", "change", "beyond the dense arm's change")
    return table(head, rows)


def _provenance(evidence: Evidence) -> str:
    rows = []
    for part in dict.fromkeys(record["part"] for record in evidence.records):
        records = evidence.part(part)
        hours = sum(record["seconds"] for record in records) / 3600
        commits = ", ".join(sorted({str(record["commit"]) for record in records}))
        rows.append(
            [part, str(len(records)), f"{hours:.2f}", ", ".join(sorted({r["hardware"] for r in records})), commits]
        )
    return table(("part", "cells", "process hours", "hardware", "commit"), rows)


def _plain(found: Estimate, form: str) -> str:
    """A mean and its error in a form of format()."""
    if not found.count or math.isnan(found.mean):
        return NONE
    mean = format(found.mean, form)
    if math.isnan(found.se):
        return mean.replace("%", " %")
    error = format(found.se, form.replace("+", ""))
    return f"{mean.removesuffix('%')} ± {error}".replace("%", " %")


def table(head: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)
