# SPDX-License-Identifier: Apache-2.0
"""scripts/pretrain_chain.py: the model that it trains can be sampled from, as it does to know when to stop."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[1] / "scripts"
MEASURED = """
from pretrain_chain import accuracy, build
from sparse_rl.tasks.chain import Chain
print(accuracy(build(64, "sdpa"), Chain(letters=4, steps=1), 64, count=2))
"""


@pytest.mark.slow
def test_a_model_that_is_being_trained_is_measured():
    """In a process of its own, where nothing else has imported what the script needs."""
    done = subprocess.run([sys.executable, "-c", MEASURED], cwd=SCRIPTS, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert 0 <= float(done.stdout) <= 1
