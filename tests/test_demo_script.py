# SPDX-License-Identifier: Apache-2.0
"""scripts/demo.py: a demo that was stopped goes on with what is there."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def test_a_stopped_demo_resumes_arms_that_were_begun_and_starts_the_others(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("demo", Path(__file__).parents[1] / "scripts" / "demo.py")
    demo = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(demo)
    called = []
    monkeypatch.setattr(demo, "sparse_rl", called.append)
    monkeypatch.setattr(demo, "live_table", lambda runs, problems: "")
    monkeypatch.setattr(demo, "RECORDED", tmp_path / "nothing")
    monkeypatch.setattr(sys, "argv", ["demo.py", "--runs", str(tmp_path)])
    (tmp_path / "naive").mkdir()
    (tmp_path / "naive" / "run.json").write_text("{}")  # stopped before its first checkpoint
    demo.main()
    naive, sparse_rl, report = called
    assert "--trainer.resume_from_checkpoint=True" in naive
    assert "--trainer.resume_from_checkpoint=False" in sparse_rl
    assert report[0] == "report" and report[-1] == f"--output={tmp_path / 'report.html'}"
