# SPDX-License-Identifier: Apache-2.0
"""The README's Python runs as it stands, and so does its shell for one's own data."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sparse_rl.metrics import read_log

README = Path(__file__).parents[1] / "README.md"
SHELL = re.findall(r"```bash\n(.*?)```", README.read_text(), flags=re.DOTALL)
SNIPPETS = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippet_runs(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(SNIPPETS[number], f"README.md, snippet {number}", "exec"), {"__name__": "readme"})


def test_there_are_snippets():
    assert len(SNIPPETS) == 2


def test_one_s_own_data_and_reward_train(tmp_path):
    """Exactly the README's lines, in a shell of their own, on a CPU."""
    (script,) = SHELL
    assert len(script.splitlines()) < 10
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    environment |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        ["bash", "-e"], input=script, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "mine.jsonl: 2 rows, layout trl, longest prompt 12 tokens." in done.stderr
    steps = [line for line in read_log(tmp_path / "runs" / "mine" / "metrics.jsonl") if line["step"]]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all(line["rewards/right_digits/mean"] > 0 and line["kv/saved_frac"] > 0 for line in steps)
    assert (tmp_path / "runs" / "mine" / "checkpoint-3" / "model.safetensors").exists()
