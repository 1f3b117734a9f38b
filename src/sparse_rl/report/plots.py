# SPDX-License-Identifier: Apache-2.0
"""The plots of a report: which metrics share a pair of axes, and how they are drawn.

Several runs share each plot, a colour a run and a line style a metric; a single run has a colour a metric instead. Text
and axes take the colour of the page around them, so that one SVG serves light and dark.
"""

from __future__ import annotations

import io
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sparse_rl.report.runs import Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito's, for any eyesight
MARKERS = {"o": "●", "s": "■", "^": "▲", "D": "◆"}  # with the seventh run the colours begin again, with the next marker
DASHES = ("-", "--", ":", "-.")
INK = "#1b1f24"
POINTS = 100  # of a line; a longer one is drawn as means over blocks of steps
FLOOR = 1e-12  # where smaller values stand on a log axis


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    name: str
    title: str
    metrics: dict[str, str]  # and what each is called in the plot
    scale: Literal["linear", "share", "log"] = "linear"
    compared: int = 4  # how many of the metrics are drawn for several runs


PLOTS = (
    Plot(name="reward", title="Training reward", metrics={"reward": "mean"}),
    Plot(name="dense", title="Held-out reward, dense cache (± 1 s.e.)", metrics={"eval/dense/reward": "mean"}),
    Plot(name="sparse", title="Held-out reward, sparse cache (± 1 s.e.)", metrics={"eval/sparse/reward": "mean"}),
    Plot(name="rejection", title="Rejected completions", metrics={"correction/rejection_rate": "share"}, scale="share"),
    Plot(
        name="xi",
        title="xi, dense over sampler",
        metrics={f"mismatch/xi_{stat}": stat for stat in ("p01", "p05", "p50", "p99")},
        scale="log",
        compared=1,
    ),
    Plot(
        name="overlap",
        title="Overlap of sampler and dense",
        metrics={f"mismatch/overlap_{stat}": stat for stat in ("mean", "p05", "p01")},
    ),
    Plot(name="length", title="Completion length, tokens", metrics={"completions/mean_length": "mean"}),
    Plot(
        name="kv",
        title="KV entries, of a dense cache's",
        metrics={"kv/saved_frac": "saved", "kv/peak_frac": "peak"},
        scale="share",
    ),
    Plot(name="kl", title="Mismatch KL", metrics={"rollout_corr/kl": "k1", "rollout_corr/k3_kl": "k3"}),
    Plot(name="grad_norm", title="Gradient norm", metrics={"grad_norm": "mean"}),
)

STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "sparse-rl",
    "figure.figsize": (4.8, 3.0),
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.15,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.0,
    "lines.markersize": 4,
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color"), INK),
}


def drawn(plot: Plot, runs: list[Run]) -> list[str]:
    """The metrics of the plot that these runs have something to draw of."""
    metrics = list(plot.metrics)[: plot.compared if len(runs) > 1 else None]
    return [metric for metric in metrics if any(run.series(metric) for run in runs)]


def looks(count: int) -> list[tuple[str, str]]:
    """Colour and marker of each run."""
    markers = list(MARKERS)
    return [(COLOURS[i % len(COLOURS)], markers[i // len(COLOURS) % len(markers)]) for i in range(count)]


def svg(plot: Plot, runs: list[Run]) -> str:
    """An element for a page that itself says which colour is which run."""
    file = io.StringIO()
    with _style():
        nameless = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        _figure(plot, runs).savefig(file, format="svg", transparent=True, metadata=nameless)
    text = file.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    for before in ('id="', 'href="#', "url(#"):  # ids are unique in a page of several plots
        text = text.replace(before, f"{before}{plot.name}-")
    return text.replace("<svg", f'<svg role="img" aria-label="{plot.title}"', 1)


def png(plot: Plot, runs: list[Run]) -> bytes:
    """A picture that stands alone, with its own legend of the runs."""
    file = io.BytesIO()
    with _style():
        figure = _figure(plot, runs)
        if len(runs) > 1:
            handles = [figure.axes[0].plot([], [], color=colour, marker=marker)[0] for colour, marker in looks(len(runs))]
            legend = figure.legend(handles, ["run"] * len(runs), loc="outside upper left", ncols=2, fontsize=9)
            for label, run in zip(legend.get_texts(), runs, strict=True):
                label.set_parse_math(False)  # a dollar sign in a name is a dollar sign
                label.set_text(run.name if len(run.name) <= 32 else f"{run.name[:31]}…")
        figure.savefig(file, format="png", dpi=200, metadata={"Software": None})
    return file.getvalue()


def _style() -> AbstractContextManager[None]:
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError("a report needs matplotlib; pip install 'sparse-rl[report]'.") from error
    import matplotlib.style

    return matplotlib.style.context(["default", STYLE])


def _figure(plot: Plot, runs: list[Run]) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    figure = Figure(layout="constrained")
    axes = figure.add_subplot(title=plot.title, xlabel="step")
    metrics, several = drawn(plot, runs), len(runs) > 1
    for metric, dash, own_look in zip(metrics, DASHES, looks(len(metrics)), strict=False):
        dash = dash if several else "-"
        for run, run_look in zip(runs, looks(len(runs)), strict=True):
            colour, marker = run_look if several else own_look
            steps, values, errors = _points(run, metric)
            if plot.scale == "log":
                values = [max(value, FLOOR) for value in values]
            every = 1 if errors else max(1, len(steps) // 8)
            axes.errorbar(steps, values, errors, color=colour, ls=dash, marker=marker, markevery=every, capsize=2)
        axes.plot([], [], color=INK if several else own_look[0], ls=dash, label=plot.metrics[metric])
    if len(plot.metrics) > 1:
        axes.legend(loc="lower right", bbox_to_anchor=(1.02, 0.98), ncols=len(metrics))
    if plot.scale == "log":
        axes.set_yscale("log")
    if plot.scale == "share":
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _points(run: Run, metric: str) -> tuple[list[float], list[float], list[float] | None]:
    """Steps, values and, for an evaluation, standard errors; other metrics are averaged down to POINTS."""
    if metric.startswith("eval/"):
        points = run.with_error(metric)
        return [step for step, _, _ in points], [value for _, value, _ in points], [error for _, _, error in points]
    series = run.series(metric)
    size = max(1, math.ceil(len(series) / POINTS))
    blocks = [series[start : start + size] for start in range(0, len(series), size)]
    steps, values = ([sum(point[i] for point in block) / len(block) for block in blocks] for i in range(2))
    return steps, values, None
