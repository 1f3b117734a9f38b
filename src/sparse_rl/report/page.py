# SPDX-License-Identifier: Apache-2.0
"""One or several runs as one HTML page that needs nothing but itself.

Everything a run brings along is escaped by `markup`, through which all text goes; `Html` is what has been there.

Which metrics share a plot is in `plots.py`, what a run comes to in `runs.py`.
"""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable
from pathlib import Path

from sparse_rl.metrics import definition
from sparse_rl.report.plots import MARKERS, POINTS, NoMatplotlib, Plot, draw_png, draw_svg, drawn, looks, plots_of
from sparse_rl.report.runs import NONE, LoggedRun, Record, advice, differing, load_runs, summary
from sparse_rl.report.unlike import cut_apart, incomparable
from sparse_rl.runfolder import write_whole

REJECTED, COMPLETIONS = 6, 8  # shown in all, shared out among the runs
REJECTED_FACTS = ("step", "index", "sampler_logprob", "dense_logprob", "log_xi", "entries_held", "entries_dense")
COMPLETION_FACTS = ("step", "reward", "advantage", "accepted", "finish_reason", "lowest_log_xi")
UNSCORED = "lowest log xi not scored"

CSS = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 82rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.6rem; margin: 0; overflow-wrap: anywhere; } h2 { margin: 2rem 0 .5rem; }
p { max-width: 60rem; } small { opacity: .75; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .3rem 1rem .3rem 0; border-bottom: 1px solid #8884; }
td { min-width: 3rem; max-width: 32rem; overflow-wrap: anywhere; } .summary td { overflow-wrap: normal; }
td:first-child, .name { white-space: nowrap; }
.note { background: #e69f0033; padding: .5rem .8rem; border-radius: .4rem; }
.legend { position: sticky; top: 0; background: Canvas; max-height: 5rem; overflow-y: auto; padding: .4rem 0; }
.legend .name { margin-right: 1.4rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(23rem, 100%), 1fr)); gap: 1rem; }
svg { width: 100%; height: auto; } details { margin: .5rem 0; } summary { cursor: pointer; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #8881; padding: .6rem; margin: .2rem 0 1rem; }
pre { max-height: 16rem; overflow-y: auto; }
mark { background: #d55e0066; color: inherit; border-radius: .2rem; padding: 0 .15rem; }
"""

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{css}</style>
</head>
<body>
<h1>{title}</h1>
<p>{about}</p>
{body}
</body>
</html>
"""
ABOUT = """Reinforcement learning of a language model whose rollouts run on a sparse KV cache: what was learnt, how far
the sampler was from the dense model, and what the cache saved."""
ABOUT_SUPERVISED = """Supervised learning of completions, without rewards or a sparse cache: how unlikely the model
finds the tokens of completions to imitate, those that it learns from and those that are held out."""
SUMMARY = """Held-out reward is that of the first and of the last evaluation, ± one standard error over prompts; where
the task's reward is 0 or 1, it is accuracy. Rejected, KV saved and length are means over all steps,
tokens/s is their median."""
SUMMARY_SUPERVISED = """Losses are means over completion tokens of the negative log-likelihood. Held-out loss is that of
the first and of the last evaluation, – where nothing is held out (data.eval_file). Tokens/s, prompts included, is the
median over the updates."""
XI = """xi = pi_dense / pi_sparse of a sampled token: what the dense model gave it over what the sparse sampler gave it,
with the same weights. It is 1 where the cache changes nothing, and small where the sampler took what the dense model
hardly would."""
SAMPLES = """Not scored: its advantage is 0, so there was nothing to learn from it, and the dense model did not read it
(update.skip_zero_rows)."""


class Html(str):
    """Text that is markup already."""


def write_report(folders: list[Path], output: Path, png: Path | None = None) -> None:
    """Write the page of these run folders and, into the folder `png`, a picture of each of its plots."""
    runs = load_runs(folders)
    plots = plots_of(runs)
    write(output, page(runs, plots))
    if png is not None:
        for plot in plots:
            write(png / f"{plot.name}.png", draw_png(plot, runs))


def write(path: Path, content: str | bytes) -> None:
    """All of the file or nothing of it, in a folder that is made if it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, content, remedy="give another place for it")


def page(runs: list[LoggedRun], plots: list[Plot]) -> str:
    """The whole document."""
    parts = (*_notes(runs), _summary(runs), _plots(runs, plots), _settings(runs), _definitions(runs, plots))
    body = "\n".join((*parts, _rejected(runs), _completions(runs)))
    about = ABOUT_SUPERVISED if runs[0].supervised else ABOUT
    return document(_cut(", ".join(run.name for run in runs), 100, 0), about, body)


def document(title: str, about: str, body: str) -> str:
    """A page that needs nothing but itself."""
    return PAGE.format(title=markup(title), about=markup(about), css=CSS, body=body)


def markup(text: str) -> Html:
    return text if isinstance(text, Html) else Html(html.escape(text))


def table(head: Iterable[str], rows: Iterable[Iterable[str]], kind: str = "") -> Html:
    """A table that scrolls sideways where the screen is narrow."""
    top = "".join(f"<th>{markup(cell)}</th>" for cell in head)
    body = "\n".join("<tr>" + "".join(f"<td>{markup(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return Html(f'<div class="wide"><table class="{kind}">\n<tr>{top}</tr>\n{body}\n</table></div>')


def picture(draw: Callable[[], str]) -> Html:
    """What it draws, or in a small line why there is nothing."""
    try:
        return Html(draw())
    except NoMatplotlib as error:
        return Html(f"<p><small>{markup(str(error))}</small></p>")


def _notes(runs: list[LoggedRun]) -> list[Html]:
    """What the reader should know before the numbers."""
    notes = [f"{run.name}: {note}" for run in runs for note in advice(run)]
    if unlike := incomparable(runs):
        notes.insert(0, unlike)
    return [Html(f'<p class="note">{markup(note)}</p>') for note in notes]


def _summary(runs: list[LoggedRun]) -> Html:
    facts = [summary(run) for run in runs]
    rows = [(name, *fact.values()) for name, fact in zip(_names(runs), facts, strict=True)]
    said = [SUMMARY_SUPERVISED if runs[0].supervised else SUMMARY]
    if cut := cut_apart(runs):
        said.append(cut)
    head = ("run", *facts[0])
    return Html(f"<h2>Summary</h2>\n{table(head, rows, 'summary')}\n<p><small>{markup(' '.join(said))}</small></p>")


def _plots(runs: list[LoggedRun], plots: list[Plot]) -> Html:
    if not plots:
        return Html("<h2>Training</h2>\n<p>There is nothing to plot yet.</p>")
    legend = f'<div class="legend">{" ".join(_names(runs))}</div>\n' if len(runs) > 1 else ""
    drawings = "\n".join(f"<div>{draw_svg(plot, runs)}</div>" for plot in plots)
    blocks = ""
    if any(run.num_steps > POINTS for run in runs):
        blocks = f"<p><small>Training is drawn in at most {POINTS} points, means over blocks of steps.</small></p>\n"
    return Html(f'<section><h2>Training</h2>\n{blocks}{legend}<div class="plots">\n{drawings}\n</div></section>')


def _settings(runs: list[LoggedRun]) -> Html:
    def of(names: Iterable[str]) -> Html:
        head = ("setting", *(run.name for run in runs))
        return table(head, ((name, *(_cut(run.settings.get(name, NONE), 400, 0) for run in runs)) for name in names))

    every = dict.fromkeys(name for run in runs for name in run.settings)
    apart = [name for name in differing(runs) if name not in ("command", "folder", "started")]
    text = of(apart) if apart else Html("<p>None.</p>")
    return Html(
        (f"<h2>Settings that differ</h2>\n{text}\n" if len(runs) > 1 else "<h2>Settings</h2>\n")
        + f"<details><summary>All settings</summary>\n{of(every)}\n</details>"
    )


def _definitions(runs: list[LoggedRun], plots: list[Plot]) -> Html:
    shown = [metric for plot in plots for metric in drawn(plot, runs)]
    supervised = runs[0].supervised
    shown.append("train/tokens_per_s" if supervised else "rollout/tokens_per_s")
    rows = [(name, definition(name) or NONE) for name in shown]
    ratio = "" if supervised else f"<p>{markup(XI)}</p>\n"
    return Html(f"<h2>Metrics</h2>\n{ratio}{table(('metric', 'meaning'), rows)}")


def _rejected(runs: list[LoggedRun]) -> Html:
    found = []
    for run in runs:
        telling: dict[str, Record] = {}
        for record in sorted(run.rejected, key=_log_xi):
            telling.setdefault(_text(record, "prompt"), record)  # one a prompt
        for record in list(telling.values())[: max(1, REJECTED // len(runs))]:
            token, before, after = (_text(record, key) for key in ("token", "before", "after"))
            marked = f"<mark>{markup(token if token.strip() else repr(token))}</mark>"
            context = markup(_cut(before, 0, 240)) + marked + markup(_cut(after, 120, 0))
            found.append(_sample(run, record, REJECTED_FACTS, Html(context)))
    if not found:
        return Html("")
    return Html(
        "<h2>Rejected completions</h2>\n<p>The marked token has the completion's smallest xi: the sampler took it "
        "where the dense model hardly would. Shown are the most extreme.</p>\n" + "\n".join(found)
    )


def _completions(runs: list[LoggedRun]) -> Html:
    half = max(1, COMPLETIONS // len(runs) // 2)
    found = [
        _sample(run, record, COMPLETION_FACTS, _cut(_text(record, "completion"), 900, 400))
        for run in runs
        for record in run.completions[:half] + run.completions[half:][-half:]  # the first and the last
    ]
    if not found:
        return Html("")
    told = f"<p><small>{markup(SAMPLES)}</small></p>\n" if any(UNSCORED in each for each in found) else ""
    return Html(f"<h2>Samples</h2>\n<details><summary>Some completions</summary>\n{told}{''.join(found)}</details>")


def _sample(run: LoggedRun, record: Record, facts: tuple[str, ...], text: str) -> Html:
    said = ", ".join(_said(fact, record) for fact in facts if fact in record)
    prompt = markup(_cut(_text(record, "prompt"), 160, 240))
    return Html(f"<p>{markup(run.name)}: {markup(said)}</p>\n<pre><small>{prompt}</small>\n{markup(text)}</pre>\n")


def _said(fact: str, record: Record) -> str:
    if fact == "lowest_log_xi" and record[fact] is None and record.get("accepted"):  # rejected, it is minus infinity
        return UNSCORED
    return f"{fact.replace('_', ' ')} {_shown(record[fact])}"


def _names(runs: list[LoggedRun]) -> list[Html]:
    """Each run's name, behind its colour and marker where there are several."""
    if len(runs) == 1:
        return [markup(runs[0].name)]
    return [
        Html(f'<span class="name"><span style="color:{colour}">{MARKERS[marker]}</span> {markup(run.name)}</span>')
        for run, (colour, marker) in zip(runs, looks(len(runs)), strict=True)
    ]


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return NONE if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


def _text(record: Record, key: str) -> str:
    return str(record[key]) if record.get(key) is not None else ""


def _log_xi(record: Record) -> float:
    """Null stands for a number JSON has no name for: here, minus infinity."""
    value = record.get("log_xi")
    return float(value) if isinstance(value, int | float) else -math.inf


def _cut(text: str, head: int, tail: int) -> str:
    """The first and the last characters, with an ellipsis for what lies between."""
    return text if len(text) <= head + tail else f"{text[:head]}…{text[len(text) - tail :]}"
