# SPDX-License-Identifier: Apache-2.0
"""One or several runs as one HTML page that needs nothing but itself.

What comes from a run is text until it is escaped: `Html` marks what already is markup, and everything else that reaches
a tag goes through `html.escape`.
"""

from __future__ import annotations

import html
import math
import os
from collections.abc import Iterable
from pathlib import Path

from sparse_rl.metrics import definition
from sparse_rl.report.plots import MARKERS, PLOTS, Plot, drawn, looks, png, svg
from sparse_rl.report.runs import Record, Run, differing, load_runs

LAST = 10  # steps that the summary's reward is a mean over
MANY_REJECTED = 0.15  # from here on the page says so
REJECTED, COMPLETIONS = 5, 4  # of each run, at most
NONE = "–"

CSS = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; --warn: #e69f0033; --bad: #d55e0055; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 82rem; margin: 0 auto; padding: 1rem; }
h1 { margin: 0; } h2 { margin: 2rem 0 .5rem; } p { max-width: 60rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line); }
th { white-space: nowrap; } td { min-width: 3rem; max-width: 32rem; overflow-wrap: anywhere; }
.summary td { white-space: nowrap; }
.note { background: var(--warn); padding: .5rem .8rem; border-radius: .4rem; }
.legend { position: sticky; top: 0; background: Canvas; padding: .4rem 0; display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(23rem, 100%), 1fr)); gap: 1rem; }
svg { width: 100%; height: auto; } details { margin: .5rem 0; } summary { cursor: pointer; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--soft); padding: .6rem; margin: .3rem 0 1rem; font-size: .85rem; }
mark { background: var(--bad); color: inherit; border-radius: .2rem; padding: 0 .15rem; } small { opacity: .75; }
"""


class Html(str):
    """Text that is markup already."""


def write_report(folders: list[Path], output: Path, png_folder: Path | None = None) -> None:
    """Write the page, and a PNG of each of its plots where a folder for them is given."""
    runs = load_runs(folders)
    plots = [plot for plot in PLOTS if drawn(plot, runs)]
