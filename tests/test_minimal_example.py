# SPDX-License-Identifier: Apache-2.0
"""`examples/minimal.py`, the method in one file, takes a step."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from sparse_rl.tasks import Chain


def test_the_minimal_example_takes_a_step(monkeypatch, capsys):
    path = Path(__file__).parents[1] / "examples" / "minimal.py"
    spec = importlib.util.spec_from_file_location("minimal", path)
    minimal = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(minimal)
    monkeypatch.setattr(minimal, "PROMPTS", 2)
    monkeypatch.setattr(minimal, "GROUP", 2)
    monkeypatch.setattr(minimal, "Chain", lambda: Chain(letters=2, steps=3))
    minimal.main(steps=1)
    assert "step 1: reward" in capsys.readouterr().out
