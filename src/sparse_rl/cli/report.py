# SPDX-License-Identifier: Apache-2.0
"""`sparse-rl report`: run folders in, one HTML page out.

The page is report/page.py's; that of --evidence is report/evidence_page.py's.
"""

from __future__ import annotations

from pathlib import Path

from sparse_rl.cli.parsing import make_parser, parse

DESCRIPTION = """One self-contained HTML page with plots and tables of one or several runs, of `train` or of `sft`.

  sparse-rl report runs/first
  sparse-rl report runs/naive runs/sparse_rl --output comparison.html --png plots

Or the page about the papers' claims, from the raw results of benchmarks/evidence, its plots in a folder beside it:

  sparse-rl report --evidence benchmarks/evidence/results --output docs/evidence.md
"""


def run(arguments: list[str]) -> None:
    parser = make_parser("report", DESCRIPTION)
    parser.add_argument("runs", nargs="*", help="run folders")
    parser.add_argument("--evidence", type=str | None, default=None, help="folder of raw results, instead of runs")
    parser.add_argument("--output", type=str, default="report.html", help="the page to write")
    parser.add_argument("--png", type=str | None, default=None, help="folder that also gets every plot as a PNG")
    settings = parse(parser, arguments)
    if Path(settings.output).is_dir():
        raise ValueError(f"--output {settings.output!r} is a folder; name the page, such as report.html.")
    if settings.evidence is not None:
        _evidence(settings.evidence, Path(settings.output), [*settings.runs, *([settings.png] if settings.png else [])])
    else:
        from sparse_rl.report.page import write_report

        write_report(
            [Path(run) for run in settings.runs], Path(settings.output), Path(settings.png) if settings.png else None
        )
    print(f"wrote {settings.output}")


def _evidence(results: str, output: Path, others: list[str]) -> None:
    if others:
        raise ValueError(f"--evidence makes a page of its own, without runs or --png; leave out {', '.join(others)}.")
    if output.suffix != ".md":
        raise ValueError(f"--output {str(output)!r} of --evidence is Markdown; name it so, such as docs/evidence.md.")
    from sparse_rl.report.evidence_page import write_evidence

    write_evidence(Path(results), output)
