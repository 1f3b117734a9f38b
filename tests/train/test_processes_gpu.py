# SPDX-License-Identifier: Apache-2.0
"""One process of torchrun on a GPU: sharded weights, gathered once a step into the module that decode graphs run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sparse_rl.metrics import read_log

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]  # far less where the GPU is its own
SETTINGS = {
    "trainer.steps": 3,
    "trainer.prompts_per_step": 4,
    "trainer.save_every": 0,
    "eval.prompts": 0,
    "device": "cuda",
    "dtype": "bfloat16",
}


def logged(folder, *launcher):
    flags = [f"--{name}={value}" for name, value in (SETTINGS | {"trainer.output_dir": folder}).items()]
    run = subprocess.run(
        [sys.executable, "-m", *launcher, "-m", "sparse_rl", "train", *flags] if launcher
        else [sys.executable, "-m", "sparse_rl", "train", *flags],
        capture_output=True, text=True, timeout=280, env=os.environ | {"TRITON_INTERPRET": "0"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return [line for line in read_log(folder / "metrics.jsonl") if line["step"]]


def test_a_sharded_learner_leaves_the_decode_graphs_good(tmp_path, device):
    """The first step's rollouts are those of a plain process; nothing is captured after it, though weights move."""
    plain = logged(tmp_path / "plain")
    sharded = logged(tmp_path / "sharded", "torch.distributed.run", "--standalone", "--nproc-per-node", "1")
    assert sharded[0]["reward"] == plain[0]["reward"] and sharded[0]["num_tokens"] == plain[0]["num_tokens"]
    assert sharded[0]["loss"] == pytest.approx(plain[0]["loss"], rel=0.05, abs=1e-4)
    for lines in (plain, sharded):
        assert lines[0]["time/capture_s"] > 0 and lines[-1]["time/capture_s"] == 0
        assert any(line["grad_norm"] > 0 for line in lines)
