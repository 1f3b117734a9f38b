# SPDX-License-Identifier: Apache-2.0
"""An evaluation as files people look at: table.md, and report.html that needs nothing but itself.

What is in the tables' cells is made in `eval_table.py`.
"""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_rl.report.eval_table import (
    Numbers,
    Results,
    Text,
    details,
    groups,
    main_metric,
    markdown,
    mean,
    models,
    notes,
    of_model,
    overview,
    provenance,
)
from sparse_rl.report.page import Html, document, markup, picture, table
from sparse_rl.report.plots import as_svg, looks, plot_style
from sparse_rl.runfolder import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHOWN = 24  # samples, of as many cells
CUT = 1500  # characters of a sample

ABOUT = """Accuracy of language models that answer with a dense and with a compressed KV cache. Error bars and ± are one
standard error over problems; "against full" is the difference to the dense cache, paired by problem; KV saved is
1 - entries held / entries a dense cache would hold, summed over decode steps."""


def write_eval_report(results: Results, folder: Path) -> None:
    """table.md and report.html beside the results."""
    write_whole(folder / "table.md", markdown(results))
    write_whole(folder / "report.html", page(results, folder))


def page(results: Results, folder: Path) -> str:
    parts = [f'<p class="note">{markup(note)}</p>' for note in notes(results)]
    for model in models(results):
        parts += [f"<h2>{markup(model)}</h2>", picture(partial(draw, results, model)), _table(overview(results, model))]
        parts.append(_table(details(results, model)))
        folded = "\n".join(f"<p>{markup(text.title)}</p>\n{_table(text)}" for text in groups(results, model))
        if folded:
            parts.append(f"<details><summary>By level and subject</summary>\n{folded}\n</details>")
    parts += [_samples(results, folder), _settings(results)]
    title = f"Evaluation{' (partial)' if results['partial'] else ''}: {', '.join(models(results))}"
    return document(title, ABOUT, "\n".join(parts))


def draw(results: Results, model: str) -> str:
    """Accuracy by benchmark and cache, and accuracy against KV saved."""
    cells = of_model(results, model)
    benchmarks = list(dict.fromkeys(cell["benchmark"] for cell in cells))
    caches = list(dict.fromkeys(cell["cache"] for cell in cells))
    with plot_style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=(max(9.0, 3.6 + 0.9 * len(benchmarks)), 3.8), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(max(2.0, 0.45 * len(benchmarks)), 1.4))
        _by_benchmark(left, cells, benchmarks, caches)
        _against_saved(right, cells, caches)
        figure.legend(*left.get_legend_handles_labels(), loc="outside lower left", ncols=min(5, len(caches)))
        return as_svg(figure, f"model{models(results).index(model)}", "Accuracy by benchmark and cache")


def _by_benchmark(axes: Axes, cells: list[Numbers], benchmarks: list[str], caches: list[str]) -> None:
    step = 0.8 / len(caches)
    for i, (cache, (colour, marker)) in enumerate(zip(caches, looks(len(caches)), strict=True)):
        own = {cell["benchmark"]: cell for cell in cells if cell["cache"] == cache}
        found = [_accuracy(own[name]) if name in own else (math.nan, 0.0) for name in benchmarks]
        places = [place + (i - (len(caches) - 1) / 2) * step for place in range(len(benchmarks))]
        means, errors = [value for value, _ in found], [error for _, error in found]
        axes.errorbar(places, means, errors, color=colour, marker=marker, ls="", capsize=2, label=_literal(cache))
    turned = 30 if len(benchmarks) > 4 else 0
    axes.set_xticks(range(len(benchmarks)), [_literal(name) for name in benchmarks], rotation=turned)
    axes.set_title("Accuracy, % (± 1 s.e.)")
    _shown_from_0(axes)
    axes.grid(axis="x", visible=False)


def _against_saved(axes: Axes, cells: list[Numbers], caches: list[str]) -> None:
    """A point a cache: means over the benchmarks."""
    for cache, (colour, marker) in zip(caches, looks(len(caches)), strict=True):
        own = [cell for cell in cells if cell["cache"] == cache]
        found = [_accuracy(cell) for cell in own]
        accuracy = sum(value for value, _ in found) / len(found)
        error = math.sqrt(sum(error**2 for _, error in found)) / len(found)
        axes.errorbar([100 * mean(own, "kv_saved_frac")], [accuracy], [error], color=colour, marker=marker, capsize=2)
    axes.set_title("Mean accuracy, %")
    axes.set_xlabel("KV saved, %")
    _shown_from_0(axes)


def _shown_from_0(axes: Axes) -> None:
    """A share has no values below 0, and a part of a percent is no difference to look at."""
    axes.set_ylim(0, max(1.0, axes.get_ylim()[1]))


def _accuracy(cell: Numbers) -> tuple[float, float]:
    """Mean and standard error in percent, nan and 0 where there is none."""
    found = cell["metrics"][main_metric(cell)]
    value, error = found["mean"], found["se"]
    return (math.nan if value is None else 100 * value), (0.0 if error is None else 100 * error)


def _literal(text: str) -> str:
    """A dollar sign in a name is a dollar sign."""
    return text.replace("$", r"\$")


def _table(text: Text) -> Html:
    return table(text.head, text.rows, "summary")


def _samples(results: Results, folder: Path) -> Html:
    """The first sample of some cells."""
    found = []
    for cell in results["cells"][:SHOWN]:
        with open(folder / cell["samples_file"], encoding="utf-8") as file:
            sample: dict[str, Any] = json.loads(file.readline())
        score = f"grader failed: {sample['failure']}" if sample["score"] is None else f"score {sample['score']:g}"
        facts = f"{cell['model']}, {cell['benchmark']}, {cell['cache']}, problem {sample['problem']}: {score}"
        facts += f", {sample['tokens']} tokens, KV saved {100 * sample['kv_saved_frac']:.0f} %"
        text = sample["completion"]
        text = text if len(text) <= CUT else f"{text[: CUT // 2]} … {text[-CUT // 2 :]}"
        found.append(f"<p>{markup(facts)}</p>\n<pre>{markup(text)}</pre>")
    return Html(f"<details><summary>Some samples</summary>\n{''.join(found)}\n</details>")


def _settings(results: Results) -> Html:
    rows = [(name, json.dumps(value, ensure_ascii=False)) for name, value in results["settings"].items()]
    return Html(
        f"<h2>Where it comes from</h2>\n<p><code>{markup(results['command'])}</code><br>"
        f"{markup(provenance(results))}</p>\n<details><summary>All settings</summary>\n"
        f"{table(('setting', 'value'), rows)}\n</details>"
    )
