# SPDX-License-Identifier: Apache-2.0
"""The numbers of an evaluation as tables of text, for the terminal, Markdown and the page.

overview   a model: caches down, benchmarks across
details    a model: every benchmark with its caches below each other, and everything that was measured
groups     a benchmark of a model: levels or subjects down, caches across

The numbers are evaluate/results.py's; plots and samples are in `eval_page.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sparse_rl.report.markdown import table

NONE = "–"
REASONS, REASON = 5, 200  # why graders failed: how many are shown, and characters of each
WIDE = 200  # columns, where nobody has said how many there are
Results = dict[str, Any]
Numbers = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Text:
    """A table of text; the first `labels` columns say what a row is."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    labels: int = 1


def share(found: Numbers | None, sign: str = "") -> str:
    """45.2 ± 1.4, in percent."""
    if found is None or found["mean"] is None:
        return NONE
    shown = f"{100 * found['mean']:{sign}.1f}"
    return shown if found["se"] is None else f"{shown} ± {100 * found['se']:.1f}"


def models(results: Results) -> list[str]:
    return list(dict.fromkeys(cell["model"] for cell in results["cells"]))


def of_model(results: Results, model: str) -> list[Numbers]:
    return [cell for cell in results["cells"] if cell["model"] == model]


def main_metric(cell: Numbers) -> str:
    first: str = next(iter(cell["metrics"]))
    return first


def mean(cells: list[Numbers], name: str) -> float:
    """Over benchmarks."""
    total: float = sum(cell[name] for cell in cells)
    return total / len(cells)


def chooses(cells: list[Numbers]) -> bool:
    """Whether some cache read less than it held, so that what was read is worth a column."""
    return any(cell["kv_read_frac"] < 0.999 * (1.0 - cell["kv_saved_frac"]) for cell in cells)


def overview(results: Results, model: str) -> Text:
    cells = of_model(results, model)
    caches = dict.fromkeys(cell["cache"] for cell in cells)
    headlines = {each["cache"]: each for each in results["headlines"] if each["model"] == model}
    firsts = {cell["benchmark"]: main_metric(cell) for cell in cells}
    rows = []
    for cache in caches:
        own = [cell for cell in cells if cell["cache"] == cache]
        tokens, seconds = sum(c["tokens"] for c in own), sum(c["generate_s"] - c["capture_s"] for c in own)
        by = {cell["benchmark"]: cell["metrics"] for cell in own}
        row = [cache, *(share(by[name][metric]) if name in by else NONE for name, metric in firsts.items())]
        row += [share(headlines.get(cache))] if headlines else []
        row += [
            f"{100 * mean(own, 'kv_saved_frac'):.0f} %",
            *([f"{100 * mean(own, 'kv_read_frac'):.0f} %"] if chooses(cells) else []),
            f"{tokens / sum(c['samples'] for c in own):,.0f}",
        ]
        rows.append([*row, f"{tokens / seconds:,.0f}" if seconds > 0 else NONE])
    head = ["cache", *(f"{name}, {metric}" for name, metric in firsts.items()), *(["average"] if headlines else [])]
    return Text(f"{model}: accuracy in % ± s.e.", [*head, *kv_head(cells), "tokens/answer", "tok/s"], rows)


def kv_head(cells: list[Numbers]) -> list[str]:
    return ["KV saved", *(["KV read"] if chooses(cells) else [])]


def details(results: Results, model: str) -> Text:
    cells = of_model(results, model)
    metrics = list(dict.fromkeys(metric for cell in cells for metric in cell["metrics"]))
    compared = any("difference" in cell for cell in cells)
    rows = []
    for benchmark in dict.fromkeys(cell["benchmark"] for cell in cells):
        for cell in (cell for cell in cells if cell["benchmark"] == benchmark):
            difference = cell.get("difference", {}).get(main_metric(cell))
            rows.append(
                [
                    benchmark,
                    cell["cache"],
                    *(share(cell["metrics"].get(metric)) if metric in cell["metrics"] else "" for metric in metrics),
                    *([share(difference, "+") if difference else ""] if compared else []),
                    f"{100 * cell['kv_saved_frac']:.1f} %",
                    *([f"{100 * cell['kv_read_frac']:.1f} %"] if chooses(cells) else []),
                    f"{cell['peak_entries']:,.0f}",
                    f"{cell['tokens_per_answer']:,.0f}",
                    f"{100 * cell['truncated'] / cell['samples']:.1f} %",
                    str(cell["failed"]),
                    f"{cell['problems']} x {cell['n']}",
                    NONE if cell["tokens_per_s"] is None else f"{cell['tokens_per_s']:,.0f}",
                ]
            )
    head = ["benchmark", "cache", *metrics, *(["against full"] if compared else []), *kv_head(cells), "peak entries"]
    head += ["tokens/answer", "cut off", "grader failed", "samples", "tok/s"]
    return Text(f"{model}: every benchmark", head, rows, labels=2)


def groups(results: Results, model: str) -> list[Text]:
    """Accuracy by level and by subject, wherever a benchmark has several."""
    found = []
    cells = of_model(results, model)
    for benchmark in dict.fromkeys(cell["benchmark"] for cell in cells):
        own = [cell for cell in cells if cell["benchmark"] == benchmark]
        for key in ("level", "subject"):
            of = {cell["cache"]: cell.get(f"by_{key}", {}) for cell in own}
            labels = max(of.values(), key=len)
            if labels:
                rows = [
                    [label, str(labels[label]["count"]), *(share(by.get(label)) for by in of.values())]
                    for label in labels
                ]
                title = f"{model}, {benchmark}: {main_metric(own[0])} by {key}"
                found.append(Text(title, [key, "problems", *of], rows))
    return found


def departures(results: Results) -> list[str]:
    """What is not as the protocol has it, a line a benchmark, alike ones together."""
    lines: dict[str, list[str]] = {}
    for cell in results["cells"]:
        said = ", ".join(cell["departures"])
        names = lines.setdefault(said, [])
        if cell["benchmark"] not in names:
            names.append(cell["benchmark"])
    return [
        f"Departs from protocol {results['protocol']}: {said} ({', '.join(names)})."
        for said, names in lines.items()
        if said
    ]


def provenance(results: Results) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    said = f"{results['hardware']}; {versions}; commit {results['commit'] or 'unknown'}."
    for each in results["resumes"]:
        changed = [f"{key} {each[key]}" for key in ("hardware", "commit") if each.get(key)]
        changed += [f"{name} {version}" for name, version in each.get("versions", {}).items()]
        said += f" Resumed {each['resumed']} with {', '.join(changed)}."
    return f"{said} {_minutes(results['wall_s'])} in all."


def _minutes(seconds: float) -> str:
    """3 min 53 s"""
    return f"{round(seconds) // 60} min {round(seconds) % 60} s" if seconds >= 59.5 else f"{seconds:.1f} s"


def failures(results: Results) -> list[str]:
    """Why graders failed, if any did, the most frequent reasons first."""
    reasons: dict[str, int] = {}
    for cell in results["cells"]:
        for reason, count in cell["failures"].items():
            reasons[reason] = reasons.get(reason, 0) + count
    ordered = sorted(reasons, key=lambda reason: -reasons[reason])
    said = [f"{reasons[reason]} x {reason[:REASON]}" for reason in ordered[:REASONS]]
    said += [f"and {len(ordered) - REASONS} other reasons"] if len(ordered) > REASONS else []
    return [f"Graders failed, and their samples are left out: {', '.join(said)}."] if said else []


def notes(results: Results) -> list[str]:
    return [*filter(None, [results["partial"]]), *results["notes"], *departures(results), *failures(results)]


def print_tables(results: Results) -> None:
    """To standard output; a file or a pipe gets lines as long as they need be."""
    console = Console()
    console = console if console.is_terminal else Console(width=WIDE)
    for model in models(results):
        for text in (overview(results, model), details(results, model)):
            console.print(_rich(text))
    for note in notes(results):
        console.print(note, highlight=False, markup=False, soft_wrap=True)


def markdown(results: Results) -> str:
    """table.md: the tables, what to know of them, and where they come from."""
    parts = [f"# Evaluation, protocol {results['protocol']}{' (partial)' if results['partial'] else ''}"]
    for model in models(results):
        first = overview(results, model)
        parts += [f"## {_plain(first.title)}", _markdown(first), _markdown(details(results, model))]
        folded = groups(results, model)
        if folded:
            inner = "\n\n".join(f"{_plain(text.title)}\n\n{_markdown(text)}" for text in folded)
            parts.append(f"<details><summary>By level and subject</summary>\n\n{inner}\n\n</details>")
    parts += [
        'Accuracy is in percent, ± one standard error over problems; "against full" is the difference to the dense '
        "cache, paired by problem. KV saved is 1 - entries held / entries a dense cache would hold, summed over decode "
        "steps; over several benchmarks it is their mean, tokens per answer and tok/s are those of all samples "
        'together. "Cut off" are answers that ran into the length limit.',
        *(_plain(note) for note in notes(results)),
        f"`{_plain(results['command'])}`  \n{_plain(provenance(results))}",
    ]
    return "\n\n".join(parts) + "\n"


def _markdown(text: Text) -> str:
    align = "l" * text.labels + "r" * (len(text.head) - text.labels)
    return table([_plain(cell) for cell in text.head], ([_plain(cell) for cell in row] for row in text.rows), align)


def _plain(text: str) -> str:
    """Text on one line that begins no tag of Markdown."""
    return " ".join(text.split()).replace("<", "&lt;")


def _rich(text: Text) -> Table:
    shown = Table(title=escape(text.title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for i, name in enumerate(text.head):
        shown.add_column(escape(name), justify="left" if i < text.labels else "right", overflow="fold")
    before = ""
    for row in text.rows:
        first = "" if text.labels > 1 and row[0] == before else row[0]
        before = row[0]
        shown.add_row(*(escape(cell) for cell in (first, *row[1:])))
    return shown
