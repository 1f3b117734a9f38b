# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of README and docs/ that say what the code says (metrics, alarms, TRL's names) or what it measured.

Those of models say what tests/model/verdicts.json does, which scripts/support_matrix.py writes.

    python scripts/docs_tables.py

A page has the place between `<!-- table: WHAT -->` and `<!-- end -->`; WHAT is a key of TABLES and what it takes. Those
of benchmarks are in scripts/benchmark_tables.py.
tests/test_docs.py fails where a page is behind.
"""

from __future__ import annotations

import json
import re
import runpy
import sys
import textwrap
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from sparse_rl.cli.trl_names import NAMES, REFUSED, VALUES
from sparse_rl.metrics import METRICS, REMEDIES
from sparse_rl.report.markdown import table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
VERDICTS = json.loads((ROOT / "tests" / "model" / "verdicts.json").read_text())
NEWEST = max(VERDICTS, key=lambda version: [int(part) for part in version.split(".")])
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


def models_by_mechanism() -> str:
    import families

    verdicts = ((cell, what, VERDICTS[NEWEST].get(cell, "")) for cell, what in families.MECHANISMS.items())
    return table(
        ("mechanism", "for example", "verdict"),
        ((what, f"`{cell}`", verdict.partition(":")[0]) for cell, what, verdict in verdicts),
    )


def models_that_work() -> str:
    (cells,) = _grouped(lambda verdict: verdict == "works").values()
    return textwrap.fill(cells, 130, break_on_hyphens=False, break_long_words=False)


def models_refused() -> str:
    groups = _grouped(lambda verdict: verdict.startswith("refused"))
    return table(("why", "types"), sorted(groups.items()))


def models_left_out() -> str:
    groups = _grouped(lambda verdict: verdict.startswith("left out"))
    return table(("what they are", "types"), sorted(groups.items()))


def models_of_other_releases() -> str:
    """Types whose verdict is another there."""
    rows = []
    for version, verdicts in VERDICTS.items():
        if version != NEWEST:
            unknown = [cell for cell, verdict in verdicts.items() if verdict is None]
            rows.append((version, "unknown there", _listed(unknown)))
            rows += ((version, _why(verdict), f"`{cell}`") for cell, verdict in verdicts.items() if verdict)
    return table(("transformers", "verdict", "types"), rows)


def _grouped(chosen: Callable[[str], bool]) -> dict[str, str]:
    """Cells by the reason of their verdict."""
    groups = defaultdict(list)
    for cell, verdict in VERDICTS[NEWEST].items():
        if chosen(verdict):
            groups[_why(verdict)].append(cell)
    return {why: _listed(cells) for why, cells in groups.items()}


def _why(verdict: str) -> str:
    """Without the model's own name, so that those of one reason stand together."""
    kind, _, reason = verdict.partition(": ")
    return re.sub(r"^(model '\w+'|\w+) (?=[a-z])", "", reason) if kind == "refused" else reason or kind


def _listed(cells: list[str]) -> str:
    return ", ".join(f"`{cell}`" for cell in sorted(cells))


MODELS = (models_by_mechanism, models_that_work, models_refused, models_left_out, models_of_other_releases)
TABLES: dict[str, Callable[..., str]] = {
    **MEASURED["TABLES"],
    **{function.__name__: function for function in (metrics, alarms, trl_names, trl_refused, *MODELS)},
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
