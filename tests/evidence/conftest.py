# SPDX-License-Identifier: Apache-2.0
"""The scripts of benchmarks/evidence as modules."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "evidence"


@pytest.fixture
def evidence(monkeypatch):
    """The scripts' modules, found as they find each other."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import cells
    import pool

    yield cells, pool
    for name in [name for name, module in sys.modules.items() if str(FOLDER) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]
