# SPDX-License-Identifier: Apache-2.0
"""A run fixes the rotation for its longest sequence; what comes of the run keeps that."""

from __future__ import annotations

import json

import pytest
import transformers
from commands import run

from sparse_rl.model import rope
from sparse_rl.model.load import load
from sparse_rl.model.tiny import tiny_config

ROW = '{"prompt": "a=b1;b=a2;a|", "answer": "3"}\n'
REWARD = "def mine(completions, **_):\n    return [len(text) % 7 for text in completions]\n"
GIVEN = (
    "--model tiny:phi3 --task.train_file rows.jsonl --task.rewards reward.py:mine --kv.policy full --sampling.n 2 "
    "--trainer.prompts_per_step 1 --trainer.steps 1"
)
RESUME = "--trainer.resume_from_checkpoint true --trainer.steps 2"


def train(*arguments):
    code, _, err = run("train", *(word for text in arguments for word in text.split()))
    assert code == 0, err


def last_line(folder):
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text(ROW)
    (tmp_path / "reward.py").write_text(REWARD)
    return tmp_path


def test_a_run_and_what_comes_of_it_keep_the_factor(here, caplog):
    train(GIVEN, "--sampling.max_tokens 16 --trainer.output_dir short")
    assert json.loads((here / "short" / "run.json").read_text())["config"]["longest"] == 64
    checkpoint = here / "short" / "checkpoint-1"
    assert rope.recorded(checkpoint) == 64 and load(str(checkpoint)).context == 64
    own = transformers.AutoConfig.from_pretrained(checkpoint)
    assert own.rope_parameters == tiny_config("phi3").rope_parameters and own.max_position_embeddings == 8192

    train(RESUME, "--sampling.max_tokens 60 --trainer.output_dir short")
    assert "sequences may have 72 tokens, but the run was started for 64" in caplog.text
    assert rope.recorded(here / "short" / "checkpoint-2") == 64
    assert last_line(here / "short")["completions/max_length"] <= 64 - 12

    assert run("export", "short/checkpoint-2", "out")[0] == 0
    exported = load("out")
    assert exported.context == 64
    assert transformers.AutoConfig.from_pretrained("out").rope_parameters == own.rope_parameters

    train(GIVEN.replace("tiny:phi3", "short/checkpoint-2"), "--sampling.max_tokens 60 --trainer.output_dir long")
    assert rope.recorded(here / "long" / "checkpoint-1") == 8192, "longer sequences need the long factor"
    line = last_line(here / "long")
    assert line["mismatch/xi_p01"] == pytest.approx(1, abs=1e-4) == line["mismatch/xi_p99"]

    train(GIVEN.replace("tiny:phi3", "long/checkpoint-1"), "--sampling.max_tokens 8 --trainer.output_dir again")
    assert rope.recorded(here / "again" / "checkpoint-1") == 8192, "what was trained with the long factor keeps it"


def test_an_adapter_keeps_it_too(here):
    train(GIVEN, "--lora.r 2 --sampling.max_tokens 16 --trainer.output_dir adapted")
    checkpoint = here / "adapted" / "checkpoint-1"
    assert rope.recorded(checkpoint) == 64
    assert load(str(checkpoint)).context == 64 and load("tiny:phi3").context == 8192


def test_a_run_does_not_go_on_with_another_factor(monkeypatch):
    train(GIVEN, "--sampling.max_tokens 16 --trainer.output_dir short")
    monkeypatch.setattr("sparse_rl.train.folder.fit_rotation", lambda *given: None)
    code, _, err = run("train", *RESUME.split(), "--trainer.output_dir", "short")
    assert code != 0 and "fixed for 64 tokens, and the model's is fixed for 8192; load the model with longest=64" in err
