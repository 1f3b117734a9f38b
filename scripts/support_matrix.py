# SPDX-License-Identifier: Apache-2.0
"""Run every family on the installed transformers, record the verdicts, and say which have changed.

    python scripts/support_matrix.py            # all, ten minutes on one core
    python scripts/support_matrix.py gpt_oss    # one or several

A verdict is `works` or `refused: REASON`. A family that is loaded and then wrong has none: it keeps the old one here,
and the script ends with an error. `python scripts/docs_tables.py` then writes docs/models.md.
"""

from __future__ import annotations

import sys
import tempfile
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import families
import transformers
from family_checks import record, recorded, verdict


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    cells, before, wrong = families.cells(), recorded(), []
    known = {*cells, *families.outside()}
    record(families.outside(), known)
    for cell in sys.argv[1:] or cells:
        try:
            with tempfile.TemporaryDirectory() as folder:
                now = verdict(families.tiny_model(families.tiny_config(cell)), Path(folder))
        except Exception:
            wrong.append(cell)
            print(f"{cell} is wrong:\n{traceback.format_exc()}", flush=True)
            continue
        record({cell: now}, known)
        if now != before.get(cell):
            print(f"{cell}: {now}\n    (before: {before.get(cell, 'nothing')})", flush=True)
    works = sum(text == "works" for text in recorded().values())
    print(f"transformers {transformers.__version__}: {works} of {len(recorded())} work")
    sys.exit(f"wrong: {', '.join(wrong)}" if wrong else 0)


if __name__ == "__main__":
    main()
