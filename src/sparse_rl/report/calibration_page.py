# SPDX-License-Identifier: Apache-2.0
"""A calibration as files people look at: report.html, which needs nothing but itself, and report.png.

The numbers are those of results.json, the curves are drawn in `calibration_plots.py`.
"""

from __future__ import annotations

import json
import math
from contextlib import suppress
from functools import partial
from pathlib import Path

from sparse_rl.calibrate import CalibrationConfig
from sparse_rl.calibrate.search import as_schedule
from sparse_rl.report.calibration_plots import Results, asked, draw_png, draw_svg, tails
from sparse_rl.report.page import Html, document, markup, picture, table
from sparse_rl.report.plots import NoMatplotlib
from sparse_rl.runfolder import write_whole

ABOUT = """How near a sampler with a sparse KV cache is to its dense model, by budget and context length. Overlap is
sum_v min(p_dense, p_sparse) of the next-token distributions: 1 is as dense. top20 sums over tokens that are among the
best 20 of both sides, as Sparrow does; lower sums over the sampler's best ids and is exact up to 4096 of them. A
decision token is one whose dense entropy is above the threshold. Intervals are 95 %, from resampled rollouts. Where the
schedule had to be sure, the lower end of the interval is what is shown, with the statistic itself beside it. Rejected
are whole rollouts with any token of xi < 1e-4, as --correction.preset sparse_rl rejects them; strict rejects at 1e-2,
and so more. Hazard is rejections a token, were a rollout rejected at its first token with xi < 1e-4; of L tokens,
1 - exp(-hazard L) are."""
NONE = "–"


def write_calibration(results: Results, folder: Path) -> None:
    write_whole(folder / "report.html", page(results))
    with suppress(NoMatplotlib):  # the page says so
        write_whole(folder / "report.png", draw_png(results))


def page(results: Results) -> str:
    notes = [f'<p class="note">{markup(note)}</p>' for note in results["notes"]]
    parts = [
        *notes,
        "<h2>The schedule</h2>",
        table(*schedule_table(results), "summary"),
        f"<p><small>{markup(rejections(results))}</small></p>",
        f"<h2>Curves</h2>\n{picture(partial(draw_svg, results))}",
        f"<h2>{markup(asked(results))}</h2>",
        table(*tail_table(results), "summary"),
        "<h2>Budgets</h2>",
        table(*budget_table(results), "summary"),
        f"<h2>Beta fits, contexts {results['bins'][-1][0]}-{results['bins'][-1][1]}</h2>",
        table(*beta_table(results), "summary"),
        _settings(results),
    ]
    title = f"Calibration of {results['kv']['policy']} for {results.get('model', 'a model')}"
    return document(title, ABOUT, "\n".join(parts))


def summary_lines(results: Results) -> list[str]:
    """The schedule for the terminal."""
    head, rows = schedule_table(results)
    lines = [f"{asked(results)}, target {CalibrationConfig(**results['settings']).asks}"]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    for row in [head, *rows]:
        lines.append("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    return [*lines, rejections(results)]


def rejections(results: Results) -> str:
    """How many rollouts would be rejected: under the schedule as run, and under each of its budgets if constant."""
    alone = {run["budget"]: _percent(run["rejected_frac"]) for run in results["runs"]}
    constant = [f"{alone[budget]} at {budget}" for budget in dict.fromkeys(results["schedule"]["budgets"])]
    run = results.get("verified")
    as_run = f"{_percent(run['rejected_frac'])} of {run['rollouts']} with the schedule as run; " if run else ""
    return f"rollouts that a veto at xi < 1e-4 would reject: {as_run}with a constant budget, {', '.join(constant)}"


def schedule_table(results: Results) -> tuple[list[str], list[list[str]]]:
    """A row a bin: its budget measured by itself, the next cheaper one, the schedule as run."""
    schedule, budgets = as_schedule(results["schedule"]), results["budgets"]
    cells = [tail_cells(run, results) for run in results["runs"]]
    floor, verified = tails(results["floor"], results), results.get("verified")
    as_run = tail_cells(verified, results) if verified else [NONE] * len(floor)
    beside = results["settings"]["tail"] if results["settings"]["sure"] else "95 %"
    head = ["context", "budget", "target", f"alone ({beside})", "next cheaper", f"as run ({beside})", "dense"]
    rows = []
    for i, (start, end) in enumerate(results["bins"]):
        budget = schedule.at(start)
        place = budgets.index(budget)
        cheaper = tails(results["runs"][place - 1], results)[i] if place else math.nan
        measured = [_shown(results["targets"][i]), cells[place][i], _shown(cheaper), as_run[i], _shown(floor[i])]
        rows.append([f"{start}-{end}", str(budget), *measured])
    return head, rows


def tail_table(results: Results) -> tuple[list[str], list[list[str]]]:
    """A row a budget, a column a bin."""
    rows = [[name, *tail_cells(run, results)] for name, run in _named(results)]
    return ["budget", *(f"{start}-{end}" for start, end in results["bins"])], rows


def tail_cells(run: Results, results: Results) -> list[str]:
    """The tail of each bin with its interval; where that one's lower end decides, the end, and the tail beside it."""
    settings, cells = results["settings"], []
    for each, shown in zip(run["bins"], tails(run, results), strict=True):
        group = each[settings["overlap"]][settings["tokens"]] or {}
        span = group.get(f"{settings['tail']}_interval")
        beside = f"{group[settings['tail']]:.3f}" if settings["sure"] and group else ""
        beside = beside or (f"{span[0]:.3f}-{span[1]:.3f}" if span else "")
        cells.append(_shown(shown) + (f" ({beside})" if beside else ""))
    return cells


def budget_table(results: Results) -> tuple[list[str], list[list[str]]]:
    head = ["budget", "rollouts", "mean length", "rejected (xi < 1e-4)", "hazard a token", "KV saved", "KV read"]
    rows = []
    as_run = [("schedule", results["verified"])] if "verified" in results else []
    for name, run in [*_named(results), *as_run]:
        rejected, *shares = (_percent(run[key]) for key in ("rejected_frac", "kv_saved_frac", "kv_read_frac"))
        rows.append(
            [name, str(run["rollouts"]), f"{run['mean_length']:.0f}", rejected, f"{run['hazard']:.2g}", *shares]
        )
    return head, rows


def beta_table(results: Results) -> tuple[list[str], list[list[str]]]:
    settings = results["settings"]
    head = ["budget", "a", "b", "perfect (> 0.999)", "KS", "P05 of the fit", "P05", "P01", "mean"]
    rows = []
    for run in results["runs"]:
        group = run["bins"][-1][settings["overlap"]][settings["tokens"]]
        if group is None:
            rows.append([str(run["budget"]), *[NONE] * (len(head) - 1)])
            continue
        beta, few = group["beta"], group["perfect"] > 0.95
        fitted = "> 0.999" if few else NONE if beta is None else f"{beta['p05']:.3f}"
        parameters = [NONE] * 2 if beta is None else [f"{beta['a']:.2f}", f"{beta['b']:.2f}"]
        ks = NONE if beta is None else f"{beta['ks']:.3f}"
        measured = [_shown(group[name]) for name in ("p05", "p01", "mean")]
        rows.append([str(run["budget"]), *parameters, f"{100 * group['perfect']:.1f} %", ks, fitted, *measured])
    return head, rows


def _named(results: Results) -> list[tuple[str, Results]]:
    """The runs of the grid and the dense cache's, as tables call them."""
    return [*((str(run["budget"]), run) for run in results["runs"]), ("dense", results["floor"])]


def _settings(results: Results) -> Html:
    rows = [(name, json.dumps(value)) for name, value in {**results["sampled"], **results["settings"]}.items()]
    made = f"{results['hardware']}, commit {results['commit']}, {json.dumps(results['versions'])}, {results['started']}"
    return Html(
        f"<h2>Where it comes from</h2>\n<p><code>{markup(results['command'])}</code><br>{markup(made)}</p>\n"
        f"<details><summary>All settings</summary>\n{table(('setting', 'value'), rows)}\n</details>"
    )


def _shown(value: float) -> str:
    return NONE if math.isnan(value) else f"{value:.3f}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
