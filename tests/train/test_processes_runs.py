# SPDX-License-Identifier: Apache-2.0
"""A run of several processes is the run of one; they end together, with a word, and resume in any number."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import small_run
import torch
from several import results_of, several
from small_run import TASK, small_trainer, without_times
from torch.distributed.checkpoint import filesystem

from sparse_rl.evaluate import EvalConfig
from sparse_rl.metrics import read_log
from sparse_rl.model.load import load
from sparse_rl.model.lora import LoraConfig
from sparse_rl.objective.loss import LossConfig
from sparse_rl.tasks import Rewards
from sparse_rl.train import OptimizerConfig, UpdateConfig, checkpoint
from sparse_rl.train.distill import DistillConfig
from sparse_rl.train.processes import Processes


def run(processes, folder, parts=None, task=TASK, dtype=torch.float64, **config):
    """A small run; what each process sampled, step by step."""
    loaded, sampled = small_run.small_model(dtype), []
    trainer = small_trainer(folder, loaded=loaded, task=task, parts=parts, processes=processes, **config)
    learn = trainer._learn
    trainer._learn = lambda rollouts, advantages: sampled.append(rollouts) or learn(rollouts, advantages)
    trainer.train()
    return [[rollout.token_ids.tolist() for rollout in rollouts] for rollouts in sampled], loaded.model.state_dict()


def logged(folder):
    """What a run logged, but for what each process has for itself."""
    return without_times(folder, ("kv/peak_bytes", "rollout/preemptions"))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.some(1)
def test_a_run_of_several_processes_is_the_run_of_one(tmp_path, size):
    """With remax and a third process that has no prompt to sample; every metric, evaluations included."""
    config = {"steps": 4 - size, "advantage": "remax" if size == 3 else "grpo", "save_every": 0}
    expected, weights = run(Processes(), tmp_path / "one", **config)
    for sampled, model in results_of(size, run_with, tmp_path / "several", config):
        assert sampled == expected and len(sampled) == 4 - size
        assert all(torch.allclose(model[name], weights[name], atol=1e-6) for name in weights)
    for got, line in zip(logged(tmp_path / "several"), logged(tmp_path / "one"), strict=True):
        assert got.keys() == line.keys()
        for name, value in line.items():
            assert got[name] == (None if value is None else pytest.approx(value, abs=1e-6, rel=1e-6)), name
    for name in ("completions.jsonl", "rejected.jsonl"):
        assert len(read_log(tmp_path / "several" / name)) == len(read_log(tmp_path / "one" / name))


def run_with(processes, folder, config):
    return run(processes, folder, **config)


@pytest.mark.slow
def test_adapters_are_sharded_and_saved_as_one_process_does(tmp_path):
    pytest.importorskip("peft")
    loss, optimizer = LossConfig(beta=0.1), OptimizerConfig(learning_rate=1e-2)
    parts = {"lora": LoraConfig(r=4), "loss": loss, "optimizer": optimizer, "eval": EvalConfig(prompts=0)}
    config = {"parts": parts, "steps": 2, "dtype": torch.float32}
    results_of(2, run_with, tmp_path / "two", config)
    run(Processes(), tmp_path / "one", **config)
    ours, theirs = (checkpoint.read_masters(tmp_path / name / "checkpoint-2") for name in ("two", "one"))
    assert ours.keys() == theirs.keys() and all("lora" in name for name in ours)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, atol=1e-3, rtol=0)
    lines = [logged(tmp_path / name)[1] for name in ("two", "one")]
    assert lines[0]["loss"] == pytest.approx(lines[1]["loss"], abs=1e-6)
    assert (tmp_path / "two" / "checkpoint-2" / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_a_merged_sampler_s_adapter_is_made_from_the_shards(tmp_path):
    """The second step samples with what the first has learnt, of the policy and of the adapter."""
    parts = {"distill": DistillConfig(r=4, lr=1e-2, merged=True), "eval": EvalConfig(prompts=0)}
    config = {"parts": parts, "steps": 2}
    expected, weights = run(Processes(), tmp_path / "one", **config)
    for sampled, model in results_of(2, run_with, tmp_path / "two", config):
        assert sampled == expected
        assert all(torch.allclose(model[name], weights[name], atol=1e-6) for name in weights)
    lines = [logged(tmp_path / name)[2] for name in ("two", "one")]
    assert lines[0]["distill/loss"] == pytest.approx(lines[1]["distill/loss"], rel=1e-4)


def test_what_has_no_sharded_form_is_refused(tmp_path):
    parts = {"optimizer": OptimizerConfig(kind="adamw_8bit")}
    ((code, said),) = several(1, run_with, tmp_path / "run", {"parts": parts})
    assert code == 1 and said.startswith("ValueError: optimizer.kind is 'adamw_8bit', but under torchrun")


def test_a_run_goes_on_with_another_number_of_processes(tmp_path):
    """Two processes, then one, then two; as one all along."""
    config = {"parts": {"optimizer": OptimizerConfig(learning_rate=1e-3), "eval": EvalConfig(prompts=0)}}
    run(Processes(), tmp_path / "one", steps=3, **config)
    two, config["resume_from_checkpoint"] = tmp_path / "two", True
    results_of(2, run_with, two, {"steps": 1, **config, "resume_from_checkpoint": False})
    run(Processes(), two, steps=2, **config)
    results_of(2, run_with, two, {"steps": 3, **config})
    steps = [[line["step"], line.get("loss", 0.0), line["num_tokens"]] for line in logged(two)]
    alone = [[line["step"], line.get("loss", 0.0), line["num_tokens"]] for line in logged(tmp_path / "one")]
    assert steps == [pytest.approx(line, abs=1e-6) for line in alone]
    ours, theirs = (small_run.kept(folder / "checkpoint-3") for folder in (two, tmp_path / "one"))
    assert ours.keys() == theirs.keys() and any(name.endswith("exp_avg_sq") for name in ours)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, atol=1e-6, rtol=0)
    exported = load(str(two / "checkpoint-3")).model.state_dict()
    assert all(torch.equal(exported[name.partition(".")[2]], ours[name]) for name in ours if name[0] == "m")


SHORT = {"steps": 2, "parts": {"eval": EvalConfig(prompts=0)}}


def killed(processes, folder, point):
    if processes.rank == 1:
        small_run.watch(point, on_call=lambda count: small_run.kill(count, 3))
    return run(processes, folder, **SHORT)


@pytest.mark.parametrize("point", [pytest.param("rollout", marks=pytest.mark.slow), "update"])
def test_a_killed_process_stops_the_others_with_a_word_and_the_run_resumes(tmp_path, point):
    folder = tmp_path / "run"
    (code, said), (other, _) = several(2, killed, folder, point)
    assert (code, other) == (1, -signal.SIGKILL)
    assert said == (
        "Lost: another of the 2 processes has ended (its connection is closed); "
        f"start {folder} again with --trainer.resume_from_checkpoint true."
    )
    assert not list(folder.glob("*.tmp"))
    results_of(2, run_with, folder, {**SHORT, "resume_from_checkpoint": True})
    run(Processes(), tmp_path / "one", **SHORT)
    got, expected = (logged(tmp_path / name)[-1] for name in ("run", "one"))
    assert got["loss"] == pytest.approx(expected["loss"], abs=1e-6) and got["step"] == 2


def terminated(processes, folder):
    """The first process gets SIGTERM where Python cannot hear it."""
    signal.signal(signal.SIGTERM, lambda *_: None)
    first, _ = processes.gather(os.getpid())
    if processes.rank == 1:
        time.sleep(0.2)
        os.kill(first, signal.SIGTERM)
        time.sleep(0.6)
    with processes.watched(folder):
        processes.gather(None)


def test_a_process_told_to_stop_says_so_even_where_it_waits(monkeypatch, capfd):
    monkeypatch.setattr("sparse_rl.train.processes.GRACE_S", 0.1)
    results_of(2, terminated, "runs/some")
    assert capfd.readouterr().err == (
        "sparse-rl: process 0 cannot stop 0.1 s after SIGTERM; if another of the 2 processes has ended, "
        "start runs/some again with --trainer.resume_from_checkpoint true.\n"
    )


SMALL = {"steps": 2, "parts": {"eval": EvalConfig(prompts=0), "update": UpdateConfig(max_tokens=30)}}


def stopped(processes, folder, point, at):
    """Process 1 gets SIGTERM at some call; how often each made it is written into the folder."""
    here = processes.rank == 1
    calls = small_run.watch(point, on_call=lambda count: here and count == at and os.kill(os.getpid(), signal.SIGTERM))
    try:
        return run(processes, folder, **SMALL, save_every=0)
    finally:
        (folder / f"calls-{processes.rank}").write_text(str(len(calls)))


# Of 15 decode steps and 4 forwards in each of the two steps.
@pytest.mark.parametrize(("point", "at", "calls"), [("rollout", 20, (30, 20)), ("update", 5, (5, 5))])
@pytest.mark.some(0)
def test_a_signal_to_one_process_saves_the_run_and_ends_all(tmp_path, point, at, calls):
    """In the second step's rollout, which the other one ends, and in its update, where all stop between forwards."""
    results = several(2, stopped, tmp_path / "run", point, at)
    assert results == [(1, "Stopped: 143")] * 2
    assert tuple(int((tmp_path / "run" / f"calls-{rank}").read_text()) for rank in (0, 1)) == calls
    (saved,) = checkpoint.checkpoints(tmp_path / "run")
    assert saved.name == "checkpoint-1"
    results_of(2, run_with, tmp_path / "run", {**SMALL, "resume_from_checkpoint": True})
    run(Processes(), tmp_path / "one", **SMALL)
    got, expected = (logged(tmp_path / name)[-1] for name in ("run", "one"))
    assert got["loss"] == pytest.approx(expected["loss"], abs=1e-6) and got["step"] == 2


def broken_in_second(processes, folder):
    graded = []

    def reward(completions, **_):
        graded.append(len(completions))
        if processes.rank == 1 and len(graded) == 2:
            raise KeyError("answer")
        return [float(i) for i in range(len(completions))]

    class Broken(small_run.Small):
        rewards = Rewards((reward,))

    return run(processes, folder, task=Broken(), parts={"eval": EvalConfig(prompts=0)}, save_every=0)


def test_one_process_that_fails_speaks_for_all(tmp_path):
    results = several(2, broken_in_second, tmp_path / "run")
    assert results == [(1, "Dismissed: 2"), (1, results[1][1])]
    assert results[1][1].startswith("ValueError: reward function 'reward' raised KeyError: 'answer' (")
    assert [path.name for path in checkpoint.checkpoints(tmp_path / "run")] == [
        "checkpoint-1"
    ]  # what was learnt is kept
    again = several(2, run_with, tmp_path / "run", {})  # the folder is taken: the first process says so
    assert "has a run in it" in again[0][1] and again[1] == (1, "Dismissed: 2")


def full_disk_in_second(processes, folder):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    if processes.rank == 1:
        filesystem._write_item = full
    return run(processes, folder, **SHORT)


def test_a_full_disk_of_one_process_stops_all(tmp_path):
    results = several(2, full_disk_in_second, tmp_path / "run")
    assert "checkpoint-1 could not be written ([Errno 28] No space left on device); make room" in results[0][1]
    assert results[1] == (1, "Dismissed: 2")
    assert [path.name for path in (tmp_path / "run").glob("checkpoint*")] == []


def test_a_checkpoint_before_the_first_update_resumes(tmp_path):
    """Nothing was learnt, so the optimiser has no state."""
    parts = {"eval": EvalConfig(prompts=0)}

    class Flat(small_run.Small):
        rewards = Rewards((lambda completions, **_: [1.0] * len(completions),))

    small_trainer(tmp_path / "run", task=Flat(), parts=parts, steps=1).train()
    assert not any(name.startswith("optimizer.") for name in small_run.kept(tmp_path / "run" / "checkpoint-1"))
    trainer = small_trainer(tmp_path / "run", task=Flat(), parts=parts, steps=2, resume_from_checkpoint=True)
    trainer.train()
    assert trainer.step == 2 and [p.name for p in checkpoint.checkpoints(tmp_path / "run")][-1] == "checkpoint-2"


def start(folder, *more):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "sparse_rl", "train"]
    small = ["--eval.prompts", "8", "--trainer.prompts_per_step", "4", "--sampling.max_tokens", "48"]
    return subprocess.Popen(
        [*command, "--trainer.output_dir", str(folder), "--trainer.save_every", "1", *small, *more],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def rank_of(pid):
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return next((int(line[5:]) for line in variables if line.startswith(b"RANK=")), None)


@pytest.mark.slow
@pytest.mark.timeout(900)  # far less where the processor is its own
@pytest.mark.parametrize("rank", [0, 1])
def test_torchrun_runs_the_command_and_a_killed_process_is_explained(tmp_path, rank):
    run = start(tmp_path / "run", "--trainer.steps", "1000")
    deadline = time.time() + 240
    while not checkpoint.checkpoints(tmp_path / "run") and run.poll() is None and time.time() < deadline:
        time.sleep(0.2)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
    os.kill(next(int(child) for child in children if rank_of(child) == rank), signal.SIGKILL)
    _, said = run.communicate(timeout=120)
    assert run.returncode != 0 and said.count("sparse-rl: error: ") == 1
    assert f"start {tmp_path / 'run'} again with --trainer.resume_from_checkpoint true" in said
    step = checkpoint.step_of(checkpoint.checkpoints(tmp_path / "run")[-1])
    more = ["--trainer.resume_from_checkpoint", "true", "--trainer.steps", str(step + 1)]
    again = start(tmp_path / "run", *more)
    out, said = again.communicate(timeout=240)
    assert again.returncode == 0 and out.count("the model is in") == 1, said
    assert (
        said.count("parameters, float32 on cpu, KV rkv") == 1
        and read_log(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == step + 1
    )
    refused = start(tmp_path / "run", "--trainer.steps", "2")
    _, said = refused.communicate(timeout=240)
    assert refused.returncode != 0 and said.count("has a run in it") == 1
