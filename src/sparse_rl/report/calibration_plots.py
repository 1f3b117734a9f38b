# SPDX-License-Identifier: Apache-2.0
"""The curves of a calibration as one picture: imperfect tokens, tails by context and by budget, schedules.

The panels are those of Sparrow's figures 1(b), 2(b), 3 and 4, on one's own model.

Tables of the same are in `calibration_page.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from sparse_rl.calibrate import CalibrationConfig
from sparse_rl.calibrate.analysis import tail_row
from sparse_rl.calibrate.beta import PERFECT, density
from sparse_rl.calibrate.search import as_schedule
from sparse_rl.report.plots import COLOURS, INK, MARKERS, as_png, as_svg, plot_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Results = dict[str, Any]
SHOWN = 6  # budgets or bins drawn in one panel
LAYERS: tuple[Any, ...] = ("-", (0, (3, 2)), (0, (2, 2.5)), (0, (1.2, 1.8)))  # where lines coincide, each is seen


def draw_svg(results: Results) -> str:
    """The picture as an element of a page."""
    with plot_style():
        return as_svg(_figure(results), "curves", "Overlap by budget and context length")


def draw_png(results: Results) -> bytes:
    """The picture by itself."""
    with plot_style():
        return as_png(_figure(results), dpi=160)


def _figure(results: Results) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13.5, 7.4), layout="constrained")
    panels: list[Callable[[Axes, Results], None]] = [
        _imperfect, _by_context, _by_budget, _held, _schedules, _vetoed
    ]  # fmt: skip
    for axes, panel in zip(figure.subplots(2, 3).flat, panels, strict=True):
        panel(axes, results)
        columns = 1 if panel is _imperfect else 3
        axes.legend(loc="upper left", bbox_to_anchor=(-0.04, -0.16), ncols=columns, fontsize=8)  # it covers no line
    return figure


def tails(run: Results, results: Results) -> list[float]:
    """What the schedule was chosen by, bin by bin; nan where there is none."""
    return tail_row(run, CalibrationConfig(**results["settings"]))


def asked(results: Results) -> str:
    """The statistic that `tails` has, in words."""
    return CalibrationConfig(**results["settings"]).statistic


def _some(items: list[Any], most: int = SHOWN) -> list[Any]:
    """At most so many, spread over all of them."""
    if len(items) <= most:
        return items
    return [items[i] for i in np.linspace(0, len(items) - 1, most).round().astype(int)]


def _middles(results: Results) -> list[float]:
    return [(start + end) / 2 for start, end in results["bins"]]


def _imperfect(axes: Axes, results: Results) -> None:
    """Figure 1(b)."""
    settings = results["settings"]
    place = len(results["bins"]) - 1
    found = []
    for run in results["runs"]:
        group = run["bins"][place][settings["overlap"]][settings["tokens"]]
        if group is not None and group["beta"] is not None and sum(group["histogram"]):
            found.append((run["budget"], group))
    x, chosen = np.linspace(0.005, 0.995, 200), results["schedule"]["budgets"][-1]
    own = [each for each in found if each[0] == chosen]
    others = [each for each in found if each[0] != chosen]
    shown = sorted([*own, *_some(others, 3 - len(own))], key=lambda each: each[0])
    for (budget, group), colour in zip(shown, COLOURS, strict=False):
        beta, bars = group["beta"], np.array(group["histogram"])
        edges = np.linspace(0.0, PERFECT, len(bars) + 1)
        heights = np.where(bars > 0, bars / bars.sum() / np.diff(edges), np.nan)  # none at all is no step
        axes.stairs(heights, edges, baseline=None, color=colour, lw=1)
        name = f"budget {budget}, chosen" if budget == chosen else f"budget {budget}"
        label = f"{name}: Beta({beta['a']:.2f}, {beta['b']:.2f}), KS {beta['ks']:.3f}, {beta['perfect']:.0%} perfect"
        axes.plot(PERFECT * x, density(x, beta["a"], beta["b"]) / PERFECT, color=colour, label=label)
    if not own:
        axes.plot([], [], ls="", label=f"budget {chosen}, chosen: too few imperfect tokens")
    start, end = results["bins"][place]
    axes.set_title(f"Imperfect tokens, contexts {start}-{end}")
    axes.set_xlabel("overlap")
    axes.set_ylabel("density (steps: measured)")
    axes.set_yscale("log")
    axes.set_ylim(1e-3, 1e2)


def _by_context(axes: Axes, results: Results) -> None:
    """Figures 2(b) and 4(a)."""
    x, floor = _middles(results), tails(results["floor"], results)
    apart = [run for run in results["runs"] if np.nanmax(np.subtract(floor, tails(run, results)), initial=0.0) > 0.01]
    for run, colour in zip(_some(apart or results["runs"]), COLOURS, strict=False):
        axes.plot(x, tails(run, results), color=colour, marker="o", label=f"budget {run['budget']}")
    axes.plot(x, floor, color=INK, ls=":", marker="s", label="dense")
    axes.plot(x, results["targets"], color=INK, ls="--", label="target")
    axes.set_title(f"{asked(results)}, by context")
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("overlap")


def _by_budget(axes: Axes, results: Results) -> None:
    """A line a bin, with 95 % intervals, and its target."""
    settings, budgets = results["settings"], results["budgets"]
    several = len(set(results["targets"])) > 1  # where they are relative to the dense cache
    for place, colour in zip(_some(list(range(len(results["bins"])))), COLOURS, strict=False):
        groups = [run["bins"][place][settings["overlap"]][settings["tokens"]] for run in results["runs"]]
        values = [tails(run, results)[place] for run in results["runs"]]
        start, end = results["bins"][place]
        axes.plot(budgets, values, color=colour, marker="o", label=f"{start}-{end}")
        spans = [(group or {}).get(f"{settings['tail']}_interval", (math.nan, math.nan)) for group in groups]
        lows, highs = zip(*spans, strict=True)
        axes.fill_between(budgets, lows, highs, color=colour, alpha=0.15, lw=0)
        if several:
            axes.axhline(results["targets"][place], color=colour, ls="--", lw=1)
    if not several:
        axes.axhline(results["targets"][0], color=INK, ls="--", zorder=3)
    axes.plot([], [], color=INK, ls="--", label="target")
    if settings["bootstrap"]:
        axes.fill_between([], [], color=INK, alpha=0.15, lw=0, label="95 % interval")
    axes.set_title(f"{asked(results)}, by budget")
    axes.set_xlabel("budget, entries")
    axes.set_ylabel("overlap")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _studied(results: Results) -> list[tuple[str, Results, dict[str, Any]]]:
    """Name, schedule and look of the studied targets' lines; targets of the same schedule share one."""
    names: dict[str, list[str]] = {}
    for target, found in results["studied"].items():
        names.setdefault(str(as_schedule(found)), []).append(target)
    looks = [{"color": colour, "ls": dash, "lw": 2.5} for colour, dash in zip(COLOURS, LAYERS, strict=False)]
    return [
        (f"target {', '.join(same)}", results["studied"][same[0]], look)
        for same, look in zip(names.values(), looks, strict=False)
    ]


def _held(axes: Axes, results: Results) -> None:
    """Figure 3: what schedules of several targets hold, each bin's budget measured by itself; ours as it was run."""
    x, by_budget = _middles(results), {run["budget"]: tails(run, results) for run in results["runs"]}
    for label, found, look in _studied(results):
        schedule = as_schedule(found)
        held = [by_budget[schedule.at(start)][i] for i, (start, _) in enumerate(results["bins"])]
        axes.plot(x, held, label=label, **look)
    if "verified" in results:
        held = tails(results["verified"], results)
        axes.plot(x, held, color=INK, lw=1, marker="s", label="this schedule, as run")
    axes.plot(x, results["targets"], color=INK, ls="--", label="this target")
    axes.plot(x, tails(results["floor"], results), color=INK, ls=":", label="dense")
    axes.set_title("What schedules hold")
    axes.set_xlabel("context, tokens")
    axes.set_ylabel(asked(results))


def _schedules(axes: Axes, results: Results) -> None:
    """Figure 3's budgets."""
    end, ours = results["bins"][-1][1], {"color": INK, "lw": 1}
    drawn = [*_studied(results), ("this schedule", results["schedule"], ours)]
    for label, found, look in drawn:
        x, y = [*found["starts"], end], [*found["budgets"], found["budgets"][-1]]
        axes.plot(x, y, drawstyle="steps-post", label=label, **look)
    axes.plot([0, end], [0, end], color=INK, ls=":", lw=1, label="dense")
    axes.set_ylim(0, 1.1 * max(max(found["budgets"]) for _, found, _ in drawn))
    axes.set_title("Budget by context")
    axes.set_xlabel("context, tokens")
    axes.set_ylabel("budget, entries")


def _vetoed(axes: Axes, results: Results) -> None:
    runs, budgets = results["runs"], results["budgets"]
    names = {"rejected_frac": "rejected at xi < 1e-4", "kv_saved_frac": "KV saved"}
    if any(run["kv_read_frac"] < 0.999 - run["kv_saved_frac"] for run in runs):
        names["kv_read_frac"] = "KV read"
    for (key, label), colour, marker in zip(names.items(), COLOURS, MARKERS, strict=False):
        axes.plot(budgets, [100 * run[key] for run in runs], color=colour, marker=marker, label=label)
    axes.set_title("Rollouts and KV at constant budgets")
    axes.set_xlabel("budget, entries")
    axes.set_ylabel("% of rollouts, % of KV")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
