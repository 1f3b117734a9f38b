# SPDX-License-Identifier: Apache-2.0
"""--help: what it names, and what it does without."""

from __future__ import annotations

import subprocess
import sys

from commands import run


def test_help_names_every_setting_without_a_model():
    code, out, _ = run("generate", "--help")
    assert code == 0
    for setting in ("--kv.policy", "--kv.protect_prompt", "--sampling.top_p", "--engine.pool_bytes", "--compare"):
        assert setting in out
    code, out, _ = run("--help")
    assert code == 0 and "generate" in out


def test_reports_and_help_that_lists_no_component_do_without_torch():
    script = """
import sys
from sparse_rl.cli import main
for command in ([], ["report"], ["export"], ["bench"], ["data"], ["data", "check"], ["env"]):
    try:
        main([*command, "--help"])
    except SystemExit as end:
        assert end.code == 0, command
    assert "torch" not in sys.modules, f"{command} imported torch"
import sparse_rl.report.page
assert "torch" not in sys.modules, "report imported torch"
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_help_of_settings_does_without_what_takes_seconds_to_import():
    """Settings stand beside code that needs torch; the rest, transformers' models say, comes when it is used."""
    script = """
import sys
from sparse_rl.cli import main
for command in ("train", "sft", "eval", "plan", "calibrate", "generate", "inspect"):
    try:
        main([command, "--help"])
    except SystemExit as end:
        assert end.code == 0, command
    for module in ("transformers.modeling_utils", "torch._dynamo", "torch.distributed.tensor", "sympy"):
        assert module not in sys.modules, f"{command} imported {module}"
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_help_names_who_has_a_setting_and_its_default_if_there_is_one():
    _, out, _ = run("train", "--help")
    words = " ".join(out.split())
    assert "size of the table, 2 to 16 [8: chain]" in words
    assert "the same, for evaluation; without it, nothing is evaluated [rows]" in words
    assert "hub:NAME:CONFIG:SPLIT [rows]" in words and '"file.py:function" [rows]' in words
    assert "--print_config" not in out  # --dry-run does that
