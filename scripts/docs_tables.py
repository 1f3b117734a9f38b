# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of README and docs/ that say what the code says (metrics, alarms, TRL's names) or what it measured.

    python scripts/docs_tables.py

A page has the place between `<!-- table: WHAT -->` and `<!-- end -->`; WHAT is a key of TABLES and what it takes. Those
of benchmarks are in scripts/benchmark_tables.py.
tests/test_docs.py fails where a page is behind.
"""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path

from sparse_rl.cli.trl_names import NAMES, REFUSED, VALUES
from sparse_rl.metrics import METRICS, REMEDIES
from sparse_rl.report.markdown import table

ROOT = Path(__file__).parents[1]
MEASURED = runpy.run_path(str(ROOT / "scripts" / "benchmark_tables.py"))
PLACE = re.compile(r"(<!-- table: (\w+)((?: \S+)*) -->\n).*?(<!-- end -->)", flags=re.DOTALL)


def metrics(*prefixes: str) -> str:
    """Those whose names begin so."""
    chosen = ((f"`{name}`", text) for name, text in METRICS.items() if name.startswith(prefixes))
    return table(("metric", "what it is"), chosen)


def alarms() -> str:
    return table(
        ("alarm", "when", "what to do"), ((f"`{name}`", METRICS[name], text) for name, text in REMEDIES.items())
    )


def trl_names() -> str:
    rows = []
    for name, key in NAMES.items():
        values = ", ".join(f"`{theirs}` is `{ours}`" for theirs, ours in VALUES.get(name, {}).items())
        rows.append((f"`{name}`", f"`{key}`", values))
    return table(("TRL", "here", "values"), rows)


def trl_refused() -> str:
    return table(("TRL", "instead"), ((f"`{name}`", text) for name, text in REFUSED.items()))


TABLES: dict[str, Callable[..., str]] = {
    **MEASURED["TABLES"],
    **{function.__name__: function for function in (metrics, alarms, trl_names, trl_refused)},
}


def filled(page: str) -> str:
    """The page with its tables as the code has them."""
    return PLACE.sub(lambda place: f"{place[1]}{TABLES[place[2]](*place[3].split())}\n{place[4]}", page)


def main() -> None:
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        page = path.read_text()
        if filled(page) != page:
            path.write_text(filled(page))
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
