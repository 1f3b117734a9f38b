# SPDX-License-Identifier: Apache-2.0
"""docs/evidence.md: the verdicts, then a table and a plot a part, all from the raw results.

The same results give the same bytes. What is missing is called missing.

The tables are made in `evidence_tables.py`, the plots in `evidence_plots.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from sparse_rl.report.evidence import CLEAR, LEARNS, LEAST, SEEDS, Evidence, read_evidence
from sparse_rl.report.evidence_claims import UNTESTED, number, verdicts
from sparse_rl.report.evidence_summary import in_short
from sparse_rl.report.evidence_tables import (
    alarms_table,
    arms_table,
    before_table,
    budgets_table,
    eps_table,
    lengths_table,
    matrix_table,
    plain,
    predictors_table,
    presets_table,
    tails_table,
    times_table,
    updates_table,
)
from sparse_rl.report.markdown import table
from sparse_rl.report.page import write

ABOUT = """Do the papers' claims hold on models that train here? Every number below comes from the raw results in
`{results}`, one line a cell, with its settings, seed, hardware and commit; this page and its plots are written by

    sparse-rl report --evidence {results} --output {output}

and any cell is run again by `python benchmarks/evidence/part_X.py --only CELL` (`--list` names them). ± is one standard
error over seeds ({seeds} where nothing else is said); that of an accuracy is at least its error over problems. Accuracy
is that of samples at temperature 1 (SmolLM2: 0.7) on held-out problems; "dense" and "sparse" accuracy are those of the
same weights with the dense cache and with the cache of the rollouts. KV saved is 1 - entries held / entries a dense
cache would hold, over decode steps. An arm is a `--correction.preset` on sparse rollouts, naive the preset `none`;
dense has dense rollouts. Budgets are R-KV's where no other policy is named. P05 is the 5th percentile over tokens. An
AUC is the chance that of two runs, one of which collapses, that one has the worse value: 0.5 is a coin."""
SMOLLM2 = """smollm2: SmolLM2-135M-Instruct after a supervised warm start, look-up among ten pairs, 32 prompts x 8 a
step. It has {steps} steps because in an earlier run of 60 every arm reached 1.0, where none can be told from another
(`benchmarks/results/smollm2_lookup.json`); that was settled before these cells ran."""


def write_evidence(results: Path, output: Path) -> None:
    """The page, and its plots in a folder of the same name beside it."""
    from sparse_rl.report.evidence_plots import draw

    evidence = read_evidence(results)
    plots = output.with_suffix("")
    drawn = draw(evidence, plots)
    write(output, page(evidence, results.as_posix(), output.as_posix(), plots.name, drawn))


def page(evidence: Evidence, results: str, output: str, plots: str, drawn: Sequence[str]) -> str:
    """The document as Markdown; `drawn` names the plots there are."""

    def plot(name: str, text: str) -> list[str]:
        return [f"![{text}]({plots}/{name}.png)"] if name in drawn else []

    short = "\n".join(in_short(evidence))
    parts = ["# Evidence", ABOUT.format(results=results, output=output, seeds=SEEDS)]
    parts += ["## In short", short, *_verdicts(evidence)]
    if not evidence.records:
        return "\n\n".join([*parts, "There are no results yet.", ""])
    parts += ["## Testbeds", _testbeds(evidence)]
    if "smollm2" in evidence.testbeds:
        parts.append(SMOLLM2.format(steps=evidence.bed("smollm2")["steps"]))
    for bed in evidence.testbeds:
        parts += [f"## Arms and budgets: {bed}", *plot(f"arms-{bed}", "accuracy after training by arm and budget")]
        parts += [*plot(f"curves-{bed}", "dense accuracy over the steps"), arms_table(evidence, bed)]
        parts += [presets_table(evidence, bed)] if len(evidence.arms(bed)) > 3 else []
    chains = [bed for bed in evidence.testbeds if "sweep" in evidence.bed(bed)]
    for bed in chains:
        parts.append(f"## Threshold, budget and length: {bed}")
        parts += [eps_table(evidence, bed), *plot(f"budget-{bed}", "accuracy after training by budget")]
        parts.append(budgets_table(evidence, bed))
        parts += [*plot(f"length-{bed}", "rejection by length against a constant hazard"), lengths_table(evidence, bed)]
    for bed in evidence.testbeds:
        parts += [f"## Sparsity-aware training: {bed}", *plot(f"matrix-{bed}", "accuracy by training and cache")]
        parts.append(matrix_table(evidence, bed))
    parts += ["## What predicts collapse", *plot("predictors", "change of accuracy against statistics before training")]
    parts += [before_table(evidence, chains), predictors_table(evidence), alarms_table(evidence, chains)]
    for bed in [bed for bed in chains if evidence.bed(bed).get("whole")]:
        parts += [
            f"## Holding the tail: {bed}",
            *plot(f"tails-{bed}", "accuracy against KV read"),
            tails_table(evidence, bed),
        ]
    parts += ["## Where time and memory go", *plot("time", "seconds of a step by stage"), times_table(evidence)]
    for bed in [bed for bed in chains if evidence.bed(bed).get("whole")]:
        parts += [f"## Four updates a rollout: {bed}", updates_table(evidence, bed)]
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
        f"Clearly is by more than {CLEAR} standard errors of the difference and by {LEAST} at least; surely, with as "
        f"many standard errors to spare. With {SEEDS} seeds each that is 97.5 % by Student's t, one-sided, and 95 % "
        "where all of the spread is one arm's."
    )
    written = (
        "They were written before the first results, but for three points: that part b's budgets count for the 3 %, "
        "and that an AUC must be above 0.5 to lead, came later and change no verdict; what is said of testbeds without "
        "schedules came after the long one's naive runs, and before the runs that it judges."
    )
    otherwise = f"Anything else, a missing run, or a dense arm that gains less than {LEARNS:.2f}: {UNTESTED}."
    parts = ["## Verdicts", table(("claim", "verdict"), rows), "The numbers:", "\n".join(numbers)]
    return [*parts, f"The rules. {clearly} {otherwise} {written}", "\n".join(rules)]


def _testbeds(evidence: Evidence) -> str:
    rows = []
    for bed in evidence.testbeds:
        learnt = evidence.gain(bed)
        state = "missing" if math.isnan(learnt.mean) else "yes" if learnt.mean >= LEARNS else "**no**"
        length = evidence.curve(bed, "dense", 0, "length", slice(None))
        settings = evidence.bed(bed)
        steps = f"{settings['updates']} x {settings['prompts'] * settings['n']}" if "updates" in settings else "below"
        rows.append(
            [bed, plain(length, ".0f"), steps, number(evidence.start(bed)), number(evidence.end(bed, "dense", 0))]
        )
        rows[-1] += [plain(learnt, "+.3f"), state]
    head = ("testbed", "tokens a completion", "steps x rollouts", "before", "dense arm, after", "gain", "learns")
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
