# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/evidence.md, in Markdown. What was not measured is said to be missing.

The verdicts are in `evidence_claims.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from sparse_rl.evaluate.statistics import Estimate, estimate
from sparse_rl.report.evidence import (
    ARMS,
    SEEDS,
    STATISTICS,
    Evidence,
    Record,
    alarmed,
    auc,
    by_bed,
    cases,
    collapsed,
    compare,
    held,
    interval,
    kv_read,
    over_seeds,
    survival,
    threshold,
)
from sparse_rl.report.evidence_claims import number
from sparse_rl.report.markdown import table

NONE = "–"
EPS = (1e-5, 1e-4, 1e-3, 1e-2)
FIRST, LAST = slice(0, 3), slice(-5, None)  # steps
HELD = """The overlap by budget and context length before training, and what comes of training with truncated weights
(tis): at constant budgets, on schedules calibrated for four targets of P05, with a budget that follows P05 as training
measures it (auto, from the lenient one), and with an adapter of the sampler's own beside that (auto_distill; its sparse
accuracy is with the adapter). 33@0+45@80 is 33 entries, and 45 from a context of 80 tokens on; of auto, what it
ended with. P05 in training is that of the lowest bin, at constant budgets that of all tokens."""

PREDICTED = """An AUC compares runs of the same testbed. The cut from which a statistic warns is one for all testbeds
and chosen on these very runs: on others it would be right less often."""

ALARM = """`alarm/anomalies`, the alarm for more than 15 % of the rollouts of ten steps with a token of xi < 1e-4, on
the curves of all these runs, whatever their budget, policy and threshold: how many it was on for, at some step."""

TIMES = """The shape {shape} with random weights, completions of full length behind prompts of {prompt} tokens, one run
each on a GPU of its own; the sparse cache has an interval of {interval}. Compiling and capturing are left out. Scoring
and updates are timed on some of the completions and told for all: {learnt}. A learner's forward has at most
{max_tokens:,} tokens, so a peak depends on how many completions that holds. Updates are corrected by reweight_only;
the correction itself is sparse_rl with its diagnostics, on log-probs that are there already."""


def arms_table(evidence: Evidence, bed: str) -> str:
    rows = []
    for budget in evidence.bed(bed)["budgets"]:
        for arm in evidence.arms(bed):
            rows.append([str(budget) if arm != "dense" else "all", arm, *_run(evidence, bed, arm, budget)])
    text = "First and last are means over the first three and the last five steps."
    text += " The dense arm's sparse accuracy is with the middle budget's cache."
    return f"{text}\n\n{table(('budget', 'arm', *RUN), [row for i, row in enumerate(rows) if row not in rows[:i]])}"


RUN = (
    *("dense accuracy", "sparse accuracy", "sparse before", "KV saved", "xi < 1e-4, first", "last"),
    *("KL, first", "last", "gradient norm", "length", "seeds"),
)


def _run(evidence: Evidence, bed: str, arm: str, budget: int, eps: float | None = None) -> list[str]:
    """A setting's numbers over its seeds."""
    runs = evidence.runs(bed, arm, budget, eps=eps)
    if not runs:
        return ["missing"] + [NONE] * (len(RUN) - 2) + [f"0 of {SEEDS}"]

    def curve(name: str, at: slice, form: str) -> str:
        return plain(evidence.curve(bed, arm, budget, name, at, eps=eps), form)

    ends = [number(evidence.end(bed, arm, budget, cache, eps=eps)) for cache in ("dense", "sparse")]
    return [
        *ends,
        number(sparse_before(evidence, bed, budget if arm != "dense" else _middle(evidence, bed))),
        curve("kv_saved", slice(None), ".0%"),
        *(curve("catastrophic", at, ".1%") for at in (FIRST, LAST)),
        *(curve("kl", at, ".4f") for at in (FIRST, LAST)),
        curve("grad_norm", slice(None), ".3f"),
        curve("length", LAST, ".0f"),
        f"{len(runs)} of {SEEDS}",
    ]


def _middle(evidence: Evidence, bed: str) -> int:
    """The budget between lenient and severe, or the only one."""
    budgets: list[int] = evidence.bed(bed)["budgets"]
    return (budgets[1:] or budgets)[0]


def sparse_before(evidence: Evidence, bed: str, budget: int) -> Estimate:
    """Accuracy of the rollouts with this budget before training."""
    found = [record["results"] for record in evidence.before(bed, "rkv", budget)]
    return over_seeds([[result["reward"], result["reward_se"]] for result in found if "reward" in result])


def presets_table(evidence: Evidence, bed: str) -> str:
    """Every correction against the paper's: what a default rests on."""
    budgets, rows = evidence.bed(bed)["budgets"], []
    for arm in [arm for arm in evidence.arms(bed) if arm not in ("dense", "sparse_rl")]:
        row = [arm]
        for budget in budgets:
            ours, theirs = evidence.end(bed, "sparse_rl", budget), evidence.end(bed, arm, budget)
            known = min(ours.count, theirs.count) >= SEEDS
            apart = f"{theirs.mean - ours.mean:+.3f} ± {math.hypot(ours.se, theirs.se):.3f}" if known else "missing"
            clear = known and "more" in (compare(ours, theirs), compare(theirs, ours))
            row.append(f"**{apart}**" if clear else apart)
        rows.append(row)
    text = (
        "Dense accuracy against that of sparse_rl, the paper's correction; bold where one is clearly above the other."
    )
    return f"{text}\n\n{table(('correction', *(f'budget {budget}' for budget in budgets)), rows)}"


def eps_table(evidence: Evidence, bed: str) -> str:
    rows = []
    for budget in evidence.bed(bed)["budgets"][1:]:
        for eps in EPS:
            given = None if eps == EPS[1] else eps
            curves = [
                evidence.curve(bed, "sparse_rl", budget, "rejection", at, eps=given) for at in (FIRST, slice(None))
            ]
            numbers = _run(evidence, bed, "sparse_rl", budget, eps=given)
            rejected = [plain(curve, ".1%") for curve in curves]
            rows.append([str(budget), f"{eps:g}", numbers[0], numbers[1], *rejected, numbers[-1]])
    head = ("budget", "veto below xi of", "dense accuracy", "sparse accuracy", "rejected, first", "in all", "seeds")
    return table(head, rows)


def budgets_table(evidence: Evidence, bed: str) -> str:
    settings = evidence.bed(bed)
    length = evidence.curve(bed, "dense", 0, "length", slice(None)).mean
    rows = []
    for budget in sorted({*settings["sweep"], *settings["budgets"]}):
        part = NONE if math.isnan(length) else f"{budget / length:.2f}"
        rows.append([str(budget), part, *_run(evidence, bed, "sparse_rl", budget)])
    return table(("budget", "of the length", *RUN), rows)


def lengths_table(evidence: Evidence, bed: str) -> str:
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


def matrix_table(evidence: Evidence, bed: str) -> str:
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


def before_table(evidence: Evidence, beds: Sequence[str]) -> str:
    """What R-KV does to the model before training, beside what training on it comes to."""
    rows = []
    for bed in beds:
        for budget in sorted({*evidence.bed(bed)["sweep"], *evidence.bed(bed)["budgets"]}, reverse=True):
            measured = evidence.before(bed, "rkv", budget)
            forms = {name: {"kl": ".4f", "rejection": ".1%"}.get(name, ".3f") for name in STATISTICS}
            known = [plain(estimate(r["results"][name] for r in measured), form) for name, form in forms.items()]
            ends = [number(evidence.end(bed, arm, budget)) for arm in ("naive", "sparse_rl")]
            rows.append([bed, str(budget), *known, *(NONE if end == "missing" else end for end in ends)])
    head = ("testbed", "budget", *(label for label, _ in STATISTICS.values()), "naive, after", "sparse_rl, after")
    return f"R-KV before training, and the dense accuracy after it.\n\n{table(head, rows)}"


def predictors_table(evidence: Evidence) -> str:
    tables = []
    for name, arms in (("naive", ["naive"]), ("sparse_rl", ["sparse_rl"]), ("all sparse arms", ARMS[1:])):
        found = cases(evidence, arms)
        failed = sum(case.failed for case in found)
        text = f"{name}: {failed} of {len(found)} runs collapse, by the rule above."
        if not failed or failed == len(found):
            tables.append(f"{text} There is nothing to tell apart.")
            continue
        rows = []
        for statistic, (label, sign) in STATISTICS.items():
            low, high = interval(found, partial(auc, name=statistic))
            cut, right = threshold(found, statistic)
            side = "below" if sign < 0 else "above"
            areas = [_share(None if math.isnan(area) else area, ".2f") for area in by_bed(found, statistic).values()]
            rows.append([label, f"{auc(found, statistic):.2f}", f"{low:.2f} to {high:.2f}", *areas])
            rows[-1] += [f"{side} {cut:.3g}", f"{right:.2f}"]
        beds = [f"{bed} alone" for bed in by_bed(found, "kl")]
        head = ("before training", "AUC", "95 %", *beds, "warns", "right, mean of both kinds")
        wrong = [bed for bed, area in by_bed(found, "overlap_mean").items() if area < 0.5]
        if wrong:
            text += " An AUC below 0.5 says the opposite of a warning: caches nearer to the dense model lose more"
            text += f" ({', '.join(wrong)})."
        tables.append(f"{text}\n\n{table(head, rows)}")
    return "\n\n".join([PREDICTED, *tables])


def alarms_table(evidence: Evidence, beds: Sequence[str]) -> str:
    rows = []
    total: dict[bool, list[bool]] = {True: [], False: []}  # by whether the run collapses
    for bed in beds:
        start = evidence.start(bed)
        trained = evidence.trained(bed)
        for arm in dict.fromkeys([*evidence.arms(bed), *(run["settings"]["arm"] for run in trained)]):
            runs = [run for run in trained if run["settings"]["arm"] == arm and arm != "dense"]
            for_each: dict[bool, list[bool]] = {True: [], False: []}
            for run in runs:
                for_each[collapsed(run, start)].append(alarmed(run))
                total[collapsed(run, start)].append(alarmed(run))
            if runs:
                rows.append([bed, arm, *(f"{sum(on)} of {len(on)}" for on in for_each.values())])
    if rows:
        rows.append(["all", "", *(f"{sum(on)} of {len(on)}" for on in total.values())])
    return f"{ALARM}\n\n{table(('testbed', 'arm', 'of runs that collapse', 'of others'), rows)}"


def tails_table(evidence: Evidence, bed: str) -> str:
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
        after = [plain(_tail(runs, at), ".2f") for at in (FIRST, LAST)]
        ends = [number(evidence.end(bed, arm, budget, cache, target=target)) for cache in ("dense", "sparse")]
        steps = ", ".join(dict.fromkeys(str(r["results"].get("budgets", budget)) for r in runs))
        given = results["schedules"].get(f"{target:g}") if arm == "schedule" else None
        accuracy = over_seeds([given["sparse"]]) if given else sparse_before(evidence, bed, budget)
        lost = f"{sum(collapsed(run, start) for run in runs)} of {len(runs)}" if start.count and runs else NONE
        rows.append([arm, NONE if target is None else f"{target:g}", steps or NONE])
        rows[-1] += [_share(_least(given["tails"]), ".2f") if given else NONE, *after]
        rows[-1] += [plain(kv_read(evidence, bed, arm, budget, target), ".0%"), *ends]
        rows[-1] += [NONE if arm.startswith("auto") else number(accuracy), lost, f"{len(runs)} of {SEEDS}"]
    names = (
        *("run", "P05 asked for", "budgets, from a context of", "P05 before, lowest bin", "in training, first", "last"),
        *("KV read", "dense accuracy", "sparse accuracy", "sparse before", "collapsed", "seeds"),
    )
    distilled = [r for r in evidence.trained(bed) if r["settings"]["arm"] == "auto_distill"]
    shared = [_last(distilled, name) for name in ("distill/overlap_p05", "distill/overlap_p05_without")]
    text = "P05 of some of auto_distill's last rollouts, over all tokens: {} with the adapter, {} without."
    text = text.format(*(plain(each, ".3f") for each in shared)) if distilled else ""
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


def times_table(evidence: Evidence) -> str:
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
    least = {r["settings"]["response"]: r["settings"]["learnt"] for r in records}
    some = [f"{count} of {response:,} tokens" for response, count in sorted(least.items())]
    text = TIMES.format(**records[0]["settings"] | {"learnt": ", ".join(some)})
    head = (
        *("completions", "cache", "rollout, s", "a scoring pass, s", "update, s", "update with correction, s"),
        *("correction itself, ms", "KV peak, GB", "rollout peak, GB", "update peak, GB"),
    )
    return f"{text}\n\n{table(head, rows)}"


def updates_table(evidence: Evidence, bed: str) -> str:
    changes, rows = four_updates(evidence, bed), []
    for arm, change in changes.items():
        one, four = _one_and_four(evidence, bed, arm)
        shown = NONE if arm == "dense" else plain(difference(change, changes["dense"]), "+.3f")
        rows.append([arm, number(one), number(four), plain(change, "+.3f"), shown])
    head = ("arm", "one update", "four updates", "change", "beyond the dense arm's change")
    return table(head, rows)


def four_updates(evidence: Evidence, bed: str) -> dict[str, Estimate]:
    """What they change, by arm; the dense arm's is what staleness does without sparsity."""
    arms = ("dense", "naive", "sparse_rl", "sparse_rl_release", "tis")
    return {arm: difference(*reversed(_one_and_four(evidence, bed, arm))) for arm in arms}


def _one_and_four(evidence: Evidence, bed: str, arm: str) -> list[Estimate]:
    return [evidence.end(bed, arm, _middle(evidence, bed), updates=updates) for updates in (1, 4)]


def difference(first: Estimate, second: Estimate) -> Estimate:
    return Estimate(first.mean - second.mean, math.hypot(first.se, second.se), min(first.count, second.count))


def plain(found: Estimate, form: str) -> str:
    """A mean and its error in a form of format()."""
    if not found.count or math.isnan(found.mean):
        return NONE
    mean = format(found.mean, form)
    if math.isnan(found.se):
        return mean.replace("%", " %")
    error = format(found.se, form.replace("+", ""))
    return f"{mean.removesuffix('%')} ± {error}".replace("%", " %")
