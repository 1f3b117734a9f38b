# SPDX-License-Identifier: Apache-2.0
"""The plots of docs/evidence.md. One with nothing to draw is left out.

The numbers in them are computed in `evidence.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_rl.evaluate.statistics import Estimate, estimate
from sparse_rl.report.evidence import ARMS, STATISTICS, Evidence, cases, held, kv_read, survival
from sparse_rl.report.evidence_tables import sparse_before
from sparse_rl.report.plots import COLOURS, INK, looks, plot_style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

PALETTE = (INK, *COLOURS[:4], "#7f3c8d", *COLOURS[4:], "#8c6d31")
LOOKS = dict(zip(ARMS, zip(PALETTE, "osD^v<PX*", strict=True), strict=True))  # colour and marker of an arm
TICKS = (0.02, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98)  # of an accuracy
NEAR = 1e-4  # where what is nearer to the dense model stands on a log axis
LABEL = 8  # size of a label at a point
STAGES = {
    "rollout_s": "rollout",
    "update_plain_s": "update",
    "extra": "what correcting adds",
    "score_s": "scoring first (if asked for)",
}


def draw(evidence: Evidence, folder: Path) -> list[str]:
    """Write every plot that has something to show as a PNG; their names."""
    plots: dict[str, Callable[[Figure, Evidence], bool]] = {}
    for bed in evidence.testbeds:
        own = {"arms": _arms, "curves": _curves, "matrix": _matrix}
        own |= {"budget": _budgets, "length": _lengths} if "sweep" in evidence.bed(bed) else {}
        own |= {"tails": _tails} if evidence.bed(bed).get("whole") else {}
        plots |= {f"{name}-{bed}": partial(make, bed=bed) for name, make in own.items()}
    plots |= {"predictors": _predictors, "time": _times}
    drawn = []
    with plot_style():
        from matplotlib.figure import Figure

        for name, make in plots.items():
            figure = Figure(figsize=(9.0, 3.4), layout="constrained")
            if make(figure, evidence):
                folder.mkdir(parents=True, exist_ok=True)
                figure.savefig(folder / f"{name}.png", dpi=130, metadata={"Software": None})
                drawn.append(name)
    return drawn


def _arms(figure: Figure, evidence: Evidence, bed: str) -> bool:
    """Accuracy after training with both caches: a point an arm and budget; the dense arm and the start as lines."""
    budgets, shown = evidence.bed(bed)["budgets"], False
    panels = figure.subplots(1, 2, sharey=True)
    for panel, cache in zip(panels, ("dense", "sparse"), strict=True):
        for i, arm in enumerate(ARMS[1:]):
            colour, marker = LOOKS[arm]
            ends = [evidence.end(bed, arm, budget, cache) for budget in budgets]
            places = [x + (i - 3.5) * 0.1 for x in range(len(budgets))]
            shown |= _points(panel, places, ends, color=colour, marker=marker, ls="", markersize=6, label=arm)
        names = []
        for x, budget in enumerate(budgets):
            names.append(f"budget {budget}{_saved(evidence, bed, budget)}")
            if cache == "dense":
                lines = {"-": evidence.end(bed, "dense", 0), ":": evidence.start(bed)}
            else:
                lines = {
                    "-": evidence.under(bed, "dense", 0, f"rkv:{budget}"),
                    ":": sparse_before(evidence, bed, budget),
                }
            for dash, found in lines.items():
                label = "dense-trained" if dash == "-" else "before training"
                if found.count:
                    panel.plot([x - 0.45, x + 0.45], [found.mean] * 2, color=INK, ls=dash, lw=1.3, label=label)
        panel.set_title(f"Accuracy after training, {cache} cache (± 1 s.e.)")
        panel.set_xticks(range(len(budgets)), names)
        panel.set_xlim(-0.5, len(budgets) - 0.5)
        panel.grid(axis="x", visible=False)
        panel.margins(y=0.1)
    figure.legend(*_legend(panels), loc="outside lower left", ncols=5, columnspacing=1.0, handletextpad=0.3, fontsize=9)
    return shown


def _saved(evidence: Evidence, bed: str, budget: int) -> str:
    """What sparse_rl's rollouts save there, as the second line of a label."""
    saved = evidence.curve(bed, "sparse_rl", budget, "kv_saved", slice(None)).mean
    return "" if math.isnan(saved) else f"\n{saved:.0%} of KV saved"


def _curves(figure: Figure, evidence: Evidence, bed: str) -> bool:
    """Dense accuracy over the steps, mean of the seeds: before, some looks on the way, the end."""
    budgets, start, lows = evidence.bed(bed)["budgets"], evidence.start(bed), [0.2]
    figure.set_size_inches(9.0, 4.4)
    panels = figure.subplots(1, len(budgets), sharey=True, squeeze=False)[0]
    for panel, budget in zip(panels, budgets, strict=True):
        for arm in ARMS:
            runs = [r for r in evidence.runs(bed, arm, budget) if r["results"]["checks"]]
            if not runs or not start.count:
                continue
            on_the_way: dict[int, list[float | None]] = {}  # a run that collapsed may have fewer
            for step, accuracy, _ in (look for run in runs for look in run["results"]["checks"]):
                on_the_way.setdefault(step, []).append(accuracy)
            steps = [0, *sorted(on_the_way), max(len(run["results"]["curves"]["reward"]) for run in runs)]
            colour, marker = LOOKS[arm]
            found = [estimate(on_the_way[step]) for step in steps[1:-1]]
            found = [Estimate(start.mean, 0.0, 1), *found, evidence.end(bed, arm, budget)]
            apart = [step + (ARMS.index(arm) - 4) * steps[-1] / 200 for step in steps]
            if _points(panel, apart, found, color=colour, marker=marker, lw=1.2, label=arm):
                lows += [each.mean - (0.0 if math.isnan(each.se) else each.se) for each in found if each.count]
        panel.set_title(f"Dense accuracy, budget {budget}")
        panel.set_xlabel("step (bars: ± 1 s.e.)")
        panel.set_yscale("logit", nonpositive="clip")  # or all that learn lie on each other
        panel.set_yticks(TICKS, [f"{tick:g}" for tick in TICKS])
        panel.set_yticks([], minor=True)
        panel.set_ylim(max(TICKS[0] / 2, min(lows) * 0.9), (1 + TICKS[-1]) / 2)
    panels[0].set_ylabel("logit scale")
    figure.legend(*_legend(panels), loc="outside lower left", ncols=9, columnspacing=1.0, fontsize=9)
    return len(lows) > 1


def _budgets(figure: Figure, evidence: Evidence, bed: str) -> bool:
    settings = evidence.bed(bed)
    budgets = [b for b in sorted({*settings["sweep"], *settings["budgets"]}) if evidence.runs(bed, "sparse_rl", b)]
    panel, shown = figure.subplots(), False
    for arm in ("naive", "sparse_rl"):
        for cache, dash in (("dense", "-"), ("sparse", "--")):
            ends = [evidence.end(bed, arm, budget, cache) for budget in budgets]
            colour, marker = LOOKS[arm]
            label = f"{arm}, {cache} cache"
            shown |= _points(panel, list(budgets), ends, color=colour, marker=marker, ls=dash, label=label)
    dense = evidence.end(bed, "dense", 0)
    for found, label, dash in ((dense, "dense-trained", "-"), (evidence.start(bed), "before training", ":")):
        if found.count:
            panel.axhline(found.mean, color=INK, lw=1, ls=dash, label=f"{label}, dense cache")
    panel.set_title("Accuracy after training by budget (± 1 s.e.)")
    panel.set_xlabel("KV budget, entries")
    panel.set_xscale("log", base=2)
    panel.set_xticks(budgets, [str(budget) for budget in budgets])
    panel.set_xticks([], minor=True)
    panel.margins(y=0.1)
    if shown:
        figure.legend(loc="outside right upper", handlelength=3.5)
    return shown


def _lengths(figure: Figure, evidence: Evidence, bed: str) -> bool:
    """Share of rollouts that a veto would have ended by a token; dotted, what a constant hazard foretells."""
    settings = evidence.bed(bed)
    panel, shown = figure.subplots(), False
    budgets = sorted({*settings["sweep"], *settings["budgets"]})
    for budget, (colour, _) in zip(budgets, looks(len(budgets)), strict=True):
        found = survival(evidence, bed, budget)
        if found is None or not found.places:
            continue
        shown = True
        steps = [*(place + 1 for place in found.places), found.length]
        panel.step(
            steps, [1 - found.left(step) for step in steps], color=colour, where="post", label=f"budget {budget}"
        )
        ahead = [found.middle + i / 20 * (found.length - found.middle) for i in range(21)] if found.hazard else []
        panel.plot(ahead, [1 - found.law(token) for token in ahead], color=colour, ls=":", lw=1.8)
    panel.set_title("Rollouts with a token xi < 1e-4 so far, before training (dotted: a constant hazard foretells)")
    panel.set_xlabel("tokens")
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(lambda share, _: f"{share:.3%}".rstrip("0%").rstrip(".") + " %")
    if shown:
        figure.legend(loc="outside right upper")
    return shown


def _matrix(figure: Figure, evidence: Evidence, bed: str) -> bool:
    budgets = evidence.bed(bed)["budgets"]
    budgets = budgets[1:] or budgets
    panels, shown = figure.subplots(1, len(budgets), sharey=True, squeeze=False)[0], False
    for panel, budget in zip(panels, budgets, strict=True):
        caches = ["full", *(f"{policy}:{budget}" for policy in ("rkv", "snapkv", "streaming"))]
        for i, (arm, at) in enumerate((("start", 0), ("dense", 0), ("naive", budget), ("sparse_rl", budget))):
            colour, marker = LOOKS.get(arm, ("#999999", "D"))
            found = [evidence.under(bed, arm, at, cache) for cache in caches]
            places = [x + (i - 1.5) * 0.15 for x in range(len(caches))]
            label = "before training" if arm == "start" else f"{arm}-trained"
            shown |= _points(panel, places, found, color=colour, marker=marker, ls="", markersize=6, label=label)
        panel.set_xticks(range(len(caches)), caches)
        panel.set_title(f"Accuracy by cache, trained at {budget} (± 1 s.e.)")
        panel.margins(y=0.1)
    figure.legend(*_legend(panels), loc="outside lower left", ncols=4)
    return shown


def _tails(figure: Figure, evidence: Evidence, bed: str) -> bool:
    """Accuracy with both caches against what a step reads; schedules with their targets beside them."""
    from matplotlib.patheffects import Normal, Stroke

    runs, shown = held(evidence, bed), False
    figure.set_size_inches(9.0, 4.2)
    names = {
        "tis": "constant budget",
        "schedule": "schedule for a P05",
        "auto": "auto",
        "auto_distill": "auto + DistillSparse",
    }
    panels, texts = figure.subplots(1, 2, sharey=True), []
    for panel, cache in zip(panels, ("dense", "sparse"), strict=True):
        for (arm, label), colour, marker in zip(names.items(), COLOURS, "osD^", strict=False):
            own = [(budget, target) for name, budget, target in runs if name == arm]
            reads = [kv_read(evidence, bed, arm, *each).mean for each in own]
            ends = [evidence.end(bed, arm, budget, cache, target=target) for budget, target in own]
            look = {"color": colour, "marker": marker, "ls": "-" if arm == "tis" else "", "label": label}
            there = _points(panel, reads, ends, markersize=6, **look)
            shown |= there and arm != "tis"
            for (budget, target), x, end in zip(own, reads, ends, strict=True):
                text = str(budget) if target is None else f"{target:g}"
                if end.count and arm in ("tis", "schedule"):
                    place = {"xytext": (-12, 7) if arm == "tis" else (3, -13), "textcoords": "offset points"}
                    texts.append(panel.annotate(text, (x, end.mean), color=colour, fontsize=LABEL, **place))
                    texts[-1].set_path_effects([Stroke(linewidth=2.5, foreground="white"), Normal()])
        lines = {"-": evidence.end(bed, "dense", 0), ":": evidence.start(bed)} if cache == "dense" else {}
        for dash, found in lines.items():
            if found.count:
                label = "dense-trained" if dash == "-" else "before training"
                panel.axhline(found.mean, color=INK, ls=dash, lw=1, label=label)
        panel.set_title(f"Accuracy after training, {cache} cache (± 1 s.e.)")
        panel.set_xlabel("KV read, of a dense cache")
        panel.xaxis.set_major_formatter("{x:.0%}")
        panel.margins(y=0.15)
    figure.legend(*_legend(panels), loc="outside lower left", ncols=6, fontsize=9)
    _apart(figure, texts)
    return shown


def _apart(figure: Figure, texts: list[Annotation]) -> None:
    """Move labels further from their points, up or down as they are, until none lies on one before it."""
    figure.draw_without_rendering()  # which puts everything in its place
    for i, text in enumerate(texts):
        for _ in range(len(texts)):
            if not any(text.get_window_extent().overlaps(other.get_window_extent()) for other in texts[:i]):
                break
            x, y = text.xyann
            text.xyann = (x, y + math.copysign(LABEL, y))


def _predictors(figure: Figure, evidence: Evidence) -> bool:
    """On log axes, what is further from the dense model to the right: most overlaps are next to 1."""
    found = cases(evidence, ["naive"])
    figure.set_size_inches(9.0, 5.6)
    panels = figure.subplots(2, 3, sharey=True).flat
    beds = list(dict.fromkeys(case.setting[0] for case in found))
    for panel, (name, (label, sign)) in zip(panels, STATISTICS.items(), strict=True):
        panel.set_xscale("log")
        known = [(case, case.known[name]) for case in found]
        far = [(case, max(v if sign > 0 else 1 - v, NEAR)) for case, v in known if v is not None]
        values = [value for _, value in far] or [1.0]
        panel.set_xlim(min(values) / 1.5, max(values) * 1.5)
        for bed, (colour, _), marker in zip(beds, looks(len(beds)), "osD^v<P"[: len(beds)], strict=True):
            for failed in (True, False):
                own = [(v, case.change) for case, v in far if case.setting[0] == bed and case.failed == failed]
                x, y = zip(*own, strict=True) if own else ((), ())
                look = {"color": colour, "marker": marker, "ls": "", "alpha": 0.7}
                look |= {} if failed else {"markerfacecolor": "none"}
                panel.plot(x, y, label=f"{bed}, {'collapsed' if failed else 'not'}", **look)
        panel.axhline(0, color=INK, ls=":", lw=1)
        panel.set_xlabel(label if sign > 0 else f"1 - {label}")
    figure.suptitle(
        "Change of dense accuracy in naive runs, by what was measured before (filled: a collapse)",
        x=0.01,
        ha="left",
        fontsize=11,
    )
    if beds:
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=4)
    return bool(found)


def _times(figure: Figure, evidence: Evidence) -> bool:
    records = sorted(evidence.part("e"), key=lambda r: (r["settings"]["response"], r["settings"]["budget"]))
    seconds, memory = figure.subplots(1, 2)
    kinds = [(r["settings"]["response"], "sparse" if r["settings"]["budget"] else "dense") for r in records]
    names = [f"{response:,} tokens, {kind}" for response, kind in kinds]
    left = [0.0] * len(records)
    for (stage, label), colour in zip(STAGES.items(), PALETTE[:4], strict=True):
        values = [_stage(r["results"], stage) for r in records]
        seconds.barh(names, values, left=left, color=colour, label=label)
        left = [a + b for a, b in zip(left, values, strict=True)]
    for i, (stage, colour) in enumerate(zip(("update", "rollout", "kv"), PALETTE[4:7], strict=True)):
        peaks = [r["results"][f"{stage}_peak_bytes"] / 1e9 for r in records]
        memory.barh([y + 0.27 * (i - 1) for y in range(len(names))], peaks, color=colour, height=0.25, label=stage)
    memory.set_yticks(range(len(names)), names)
    for panel, title in ((seconds, "Seconds of a step"), (memory, "Peak memory, GB")):
        panel.set_title(title)
        panel.invert_yaxis()
        panel.grid(axis="y", visible=False)
    tight = {"fontsize": 9, "columnspacing": 0.7}
    figure.legend(*seconds.get_legend_handles_labels(), loc="outside lower left", ncols=4, **tight)
    figure.legend(*memory.get_legend_handles_labels(), loc="outside lower right", ncols=3, **tight)
    return bool(records)


def _stage(found: dict[str, float], stage: str) -> float:
    """Seconds; what correcting adds is the corrected update less the plain one."""
    if stage == "extra":
        return found["update_corrected_s"] - found["update_plain_s"]
    return found[stage]


def _points(panel: Axes, places: Sequence[float], found: list[Estimate], **look: Any) -> bool:
    """Those that there are, with their errors; whether there are any."""
    there = [(x, e.mean, 0.0 if math.isnan(e.se) else e.se) for x, e in zip(places, found, strict=True) if e.count]
    if there:
        x, y, error = zip(*there, strict=True)
        panel.errorbar(x, y, error, capsize=2, **look)
    return bool(there)


def _legend(panels: Any) -> tuple[list[Any], list[str]]:
    """Handles and names of what any panel has, each once."""
    named: dict[str, Any] = {}
    for panel in panels:
        handles, labels = panel.get_legend_handles_labels()
        named = dict(zip(labels, handles, strict=True)) | named
    return list(named.values()), list(named)
