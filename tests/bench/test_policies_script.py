# SPDX-License-Identifier: Apache-2.0
"""benchmarks/policies.py: what it measures again."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "policies.py"


def test_only_what_was_measured_with_the_same_settings_is_left_out(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("policies_script", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    measured, path = [], tmp_path / "speed.json"

    def speed(args, policy, loaded):
        measured.append((policy.name, policy.budget, args.rows))
        return {"tokens_per_s": 1.0, "step_ms": 1.0, "kv_peak_bytes": 1, "kv_dense_bytes": 1, "capture_s": 0.0}

    monkeypatch.setattr(script, "speed", speed)

    def ran(policies: str, rows: int) -> list[tuple]:
        measured.clear()
        chosen = f"--budgets 64 --policies {policies} --rows {rows} --result {path}"
        monkeypatch.setattr(sys, "argv", f"policies.py speed --device cpu --shape tiny {chosen}".split())
        script.main()
        return list(measured)

    assert ran("knorm", 4) == [("knorm", 64, 4)]
    assert ran("knorm gkv", 4) == [("gkv", 64, 4)], "one was measured"
    assert ran("knorm", 8) == [("knorm", 64, 8)], "with other rows it was not"
    rows = {record["label"]: record["settings"]["rows"] for record in json.loads(path.read_text())}
    assert rows == {"knorm 64": 8, "gkv 64": 4}
