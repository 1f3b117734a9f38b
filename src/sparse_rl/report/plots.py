# SPDX-License-Identifier: Apache-2.0
"""The plots of a report: which metrics share a pair of axes, and how they are drawn.

Several runs share each plot, a colour a run and a line style a metric; a single run has a colour a metric instead. Text
and axes take the colour of the page around them, so that one SVG serves light and dark.

Evaluations, calibrations and the rest draw their own plots, in this style.
"""

from __future__ import annotations

import io
import math
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sparse_rl.report.runs import LoggedRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # Okabe and Ito's, for any eyesight
MARKERS = {"o": "●", "s": "■", "^": "▲", "D": "◆"}  # with the seventh run the colours begin again, with the next marker
DASHES = ("-", "--", ":", "-.")
INK = "#1b1f24"
POINTS = 100  # of a line; a longer one is drawn as means over blocks of steps
SPAN = 0.05  # least of an axis of overlaps
FLOOR = 1e-8  # where smaller values stand on a log axis


@dataclass(frozen=True, slots=True)
class Plot:
    name: str
    title: str
    metrics: dict[str, str]  # and what each is called in the plot
    scale: Literal["linear", "zero", "share", "overlap", "log", "evaluation"] = "linear"
    compared: int = 4  # how many of the metrics are drawn for several runs
    target: str = ""  # setting that says where the values should be


XI = {f"mismatch/xi_{stat}": stat for stat in ("p01", "p05", "p50", "p99")}
REJECTED = {"correction/rejection_rate": "rejected", "mismatch/catastrophic_rollout_frac": "any xi < 1e-4"}
TAIL = {"tail/overlap_lowest": "5th percentile"}
OVERLAP = {f"mismatch/overlap_{stat}": stat for stat in ("mean", "p05", "p01")}
GRAD_NORM = Plot("grad_norm", "Gradient norm", {"grad_norm": "mean"})
PLOTS = (
    Plot("reward", "Training reward", {"reward": "mean"}),
    Plot("dense", "Held-out reward, dense cache (± 1 s.e.)", {"eval/dense/reward": "mean"}, "evaluation"),
    Plot("sparse", "Held-out reward, sparse cache (± 1 s.e.)", {"eval/sparse/reward": "mean"}, "evaluation"),
    Plot("rejection", "Rejected completions", REJECTED, "share"),
    Plot("xi", "Ratio xi", XI, "log", compared=1),
    Plot("overlap", "Overlap", OVERLAP, "overlap"),
    Plot("tail", "Lowest tail of overlap over contexts", TAIL, "overlap", target="control.target"),
    Plot("length", "Completion length, tokens", {"completions/mean_length": "mean"}, "zero"),
    Plot("kv", "KV, of a dense cache", {"kv/saved_frac": "saved", "kv/peak_frac": "peak"}, "share"),
    Plot("kl", "Mismatch KL", {"rollout_corr/kl": "k1", "rollout_corr/k3_kl": "k3"}),
    GRAD_NORM,
)
SUPERVISED_PLOTS = (
    Plot("loss", "Training loss", {"loss": "mean"}),
    Plot("held_out_loss", "Held-out loss", {"eval/loss": "mean"}),
    GRAD_NORM,
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
    "axes.formatter.useoffset": False,
    "grid.alpha": 0.15,
    "legend.frameon": False,
    "legend.handlelength": 1.6,
    "legend.columnspacing": 1.0,
    "lines.markersize": 4,
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color"), INK
    ),
}


def plots_of(runs: list[LoggedRun]) -> list[Plot]:
    """Those that these runs have something to draw of."""
    plots = SUPERVISED_PLOTS if runs[0].supervised else PLOTS
    return [plot for plot in plots if drawn(plot, runs)]


def target_of(plot: Plot, runs: list[LoggedRun]) -> float | None:
    """Where the values should be, if these runs say so with one voice."""
    asked = {run.settings.get(plot.target) for run in runs if any(map(run.series, plot.metrics))}
    try:
        (value,) = asked
        return None if value is None else float(value)
    except ValueError:  # several, or no number
        return None


def drawn(plot: Plot, runs: list[LoggedRun]) -> list[str]:
    """The metrics of the plot that these runs have something to draw of."""
    metrics = list(plot.metrics)[: plot.compared if len(runs) > 1 else None]
    return [metric for metric in metrics if any(run.series(metric) for run in runs)]


def looks(count: int) -> list[tuple[str, str]]:
    """Colour and marker of each run."""
    markers = list(MARKERS)
    return [(COLOURS[i % len(COLOURS)], markers[i // len(COLOURS) % len(markers)]) for i in range(count)]


def points(run: LoggedRun, metric: str) -> tuple[list[float], list[float], list[float] | None]:
    """Steps, values and, for an evaluation, standard errors; other metrics are averaged down to POINTS."""
    if metric.startswith("eval/"):
        found = run.with_error(metric)
        return [step for step, _, _ in found], [value for _, value, _ in found], [error for _, _, error in found]
    series = run.series(metric)
    size = max(1, math.ceil(len(series) / POINTS))
    blocks = [series[start : start + size] for start in range(0, len(series), size)]
    steps, values = ([sum(point[i] for point in block) / len(block) for block in blocks] for i in range(2))
    return steps, values, None


def draw_svg(plot: Plot, runs: list[LoggedRun]) -> str:
    """An element for a page that itself says which colour is which run."""
    with plot_style():
        return as_svg(_figure(plot, runs), plot.name, plot.title)


def draw_png(plot: Plot, runs: list[LoggedRun]) -> bytes:
    """A picture that stands alone, with its own legend of the runs."""
    with plot_style():
        figure = _figure(plot, runs)
        if len(runs) > 1:
            names = [run.name if len(run.name) <= 32 else f"{run.name[:31]}…" for run in runs]
            lines = [figure.axes[0].plot([], [], color=colour, marker=marker)[0] for colour, marker in looks(len(runs))]
            columns = 60 // (max(map(len, names)) + 6)
            legend = figure.legend(lines, ["run"] * len(runs), loc="outside upper left", ncols=columns, fontsize=9)
            for label, name in zip(legend.get_texts(), names, strict=True):
                label.set_parse_math(False)  # a dollar sign in a name is a dollar sign
                label.set_text(name)
        return as_png(figure)


class NoMatplotlib(ValueError):
    """Some pages do without their pictures."""


def plot_style() -> AbstractContextManager[None]:
    """`with plot_style()`: figures that are drawn and saved in it look alike."""
    try:
        import matplotlib.style
    except ImportError as error:
        raise NoMatplotlib("a report needs matplotlib; pip install 'sparse-rl[report]'.") from error
    return matplotlib.style.context(["default", STYLE])


def as_svg(figure: Figure, name: str, label: str) -> str:
    """An element of a page, in the page's own colour of text; `name` tells its ids from those of other pictures."""
    file = io.StringIO()
    nameless = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(file, format="svg", transparent=True, metadata=nameless)
    text = file.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor")
    for before in ('id="', 'href="#', "url(#"):
        text = text.replace(before, f"{before}{name}-")
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def as_png(figure: Figure, dpi: int = 200) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=dpi, metadata={"Software": None})
    return file.getvalue()


def _figure(plot: Plot, runs: list[LoggedRun]) -> Figure:
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

    figure = Figure(layout="constrained")
    axes = figure.add_subplot(title=plot.title, xlabel="step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    metrics, several = drawn(plot, runs), len(runs) > 1
    dashes = DASHES if several else ("-",) * len(metrics)
    for metric, dash, metric_look in zip(metrics, dashes, looks(len(metrics)), strict=False):
        for run, run_look in zip(runs, looks(len(runs)), strict=True):
            colour, marker = run_look if several else metric_look
            steps, values, errors = points(run, metric)
            if plot.scale == "log":
                values = [max(value, FLOOR) for value in values]
            if errors is None and len(steps) > 1 and len(runs) <= len(COLOURS):
                marker = ""  # where the line alone says it all
            every = 1 if errors else max(1, len(steps) // 8)
            axes.errorbar(steps, values, errors, color=colour, ls=dash, marker=marker, markevery=every, capsize=2)
        axes.plot([], [], color=INK if several else metric_look[0], ls=dash, label=plot.metrics[metric])
    if (target := target_of(plot, runs)) is not None:
        line = axes.axhline(target, color=INK, ls=(0, (6, 3)), lw=0.9, label=f"target {target:g}")
        axes.legend(handles=[line], loc="lower right", bbox_to_anchor=(1.02, 0.98))
    elif len(plot.metrics) > 1:
        axes.legend(loc="lower right", bbox_to_anchor=(1.02, 0.98), ncols=len(metrics))
    if plot.scale == "log":
        low, high = axes.dataLim.intervaly
        if low > 0.1 and high < 3 * low:  # a log axis would have ticks of many digits
            axes.ticklabel_format(axis="y", useOffset=False)
        else:
            axes.set_yscale("log")
            if high < 100 * low:  # too few decades for ticks of their own
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5, 7) if high < 10 * low else (1, 2, 5)))
                axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
                axes.yaxis.set_minor_formatter(NullFormatter())
    if plot.scale == "share":
        axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g} %")
    if plot.scale in ("zero", "share"):
        top = 1.05 * max(axes.dataLim.y1, 0.0) or 0.05
        axes.set_ylim(-0.03 * top, top)  # a line at 0 is seen beside the axis
    if plot.scale == "overlap":  # at most 1, and no noise as large as the plot
        low, high = axes.get_ylim()
        high = min(max(high, (low + high + SPAN) / 2), 1.005)
        axes.set_ylim(min(low, high - SPAN), high)
    if plot.scale == "evaluation":
        axes.set_ylim(_range(runs))
    return figure


def _range(runs: list[LoggedRun]) -> tuple[float, float]:
    """Of all evaluations, dense and sparse, so that their plots can be compared by eye."""
    metrics = [metric for plot in PLOTS if plot.scale == "evaluation" for metric in plot.metrics]
    found = [point for run in runs for metric in metrics for point in run.with_error(metric)]
    spans = [(value, 0.0 if math.isnan(error) else error) for _, value, error in found]
    low, high = min(value - error for value, error in spans), max(value + error for value, error in spans)
    margin = 0.05 * (high - low) or 0.05
    return low - margin, high + margin
