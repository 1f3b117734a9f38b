# SPDX-License-Identifier: Apache-2.0
"""Several processes do what one does: the same rollouts, losses and weights; and they end, and resume, together."""

from __future__ import annotations

import copy
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import small_run
import torch
from several import results_of, several
from small_run import TASK, small_trainer
from torch.distributed.checkpoint import filesystem

from sparse_rl.evaluate import EvalConfig
from sparse_rl.kv import RKV
from sparse_rl.metrics import TIMES, read_log
from sparse_rl.model.dry_run import dry_run
from sparse_rl.model.load import LoadedModel, load
from sparse_rl.model.tiny import tiny_model, tiny_tokenizer
from sparse_rl.objective.correction import PRESETS
from sparse_rl.objective.loss import LossConfig
from sparse_rl.rollout import Engine, EngineConfig, Sampling
from sparse_rl.score.head import Head
from sparse_rl.score.pack import flatten, pack
from sparse_rl.score.score import score_microbatch
from sparse_rl.tasks import Rewards
from sparse_rl.train import Learner, OptimizerConfig, UpdateConfig, checkpoint
from sparse_rl.train.master import MasterWeights
from sparse_rl.train.processes import Processes
from sparse_rl.train.shard import ShardedWeights
from sparse_rl.train.shares import deal
from sparse_rl.train.update import update

GROUP, MAX_LENGTH = 2, 16
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}


def recorded(seed, family="llama", count=4, **settings):
    """Sparse rollouts of uneven lengths, from prompts drawn anew."""
    model = tiny_model(family, dtype=torch.float64, **SMALL, **settings)
    loaded = LoadedModel(model=model, tokenizer=tiny_tokenizer(), shape=dry_run(model))
    draw = random.Random(seed)
    prompts = [[draw.randrange(256) for _ in range(draw.randint(2, 30))] for _ in range(count)]
    engine = Engine(loaded, RKV(budget=8, interval=4, window=4), EngineConfig(rows=16, page_size=16))
    stop_ids = tuple(range(0, 250, 20))
    return engine.generate(prompts, Sampling(n=GROUP, max_tokens=MAX_LENGTH, top_logprobs=40, stop_ids=stop_ids))


def advantages_of(rollouts, seed, working=None):
    values = torch.randn(len(rollouts), generator=torch.Generator().manual_seed(seed))
    values[torch.arange(len(rollouts)) % 3 == 1] = 0.0
    if working is not None:
        values = torch.where(torch.isin(torch.arange(len(rollouts)), torch.tensor(working)), values.abs() + 0.1, 0.0)
    return values


BATCHES = [  # which rollouts have an advantage, correction, loss, update
    (None, "sparse_rl", {}, {}),
    ([5], "tis", {}, {}),  # one process without work
    ([0, 3, 6], "sparse_rl", {"aggregation": "token_mean"}, {"skip_zero_rows": False}),
    (None, "sparse_rl_release", {"beta": 0.1}, {}),  # a statistic of the whole batch, and a reference
    (None, "icepop", {"surrogate": "gspo"}, {"updates_per_rollout": 2}),
]


def learn(processes, rollouts_of, family="llama", dtype=torch.float64, max_tokens=1, **settings):
    """Metrics of each batch; the learner's weights and the sampler's after all of them."""
    model = tiny_model(family, dtype=dtype, **SMALL, **settings)
    reference = Head(copy.deepcopy(model).requires_grad_(False))
    masters = ShardedWeights(model, processes) if processes.grouped else MasterWeights(model)
    head = masters.head if processes.grouped else Head(model)
    optimizer = torch.optim.AdamW(masters.masters, lr=1e-3)
    learner = Learner(head, optimizer, masters, ref_head=reference, processes=processes)
    metrics = []
    for i, (rollouts, batch) in enumerate(zip(rollouts_of, BATCHES, strict=False)):
        working, preset, loss, config = batch
        result = update(
            learner, rollouts, advantages_of(rollouts, i, working), [k // GROUP for k in range(len(rollouts))],
            PRESETS[preset], LossConfig(**loss), UpdateConfig(max_tokens=max_tokens, **config),
            temperature=1.0, max_length=MAX_LENGTH, generator=torch.Generator().manual_seed(i),
        )  # fmt: skip
        dense = torch.cat(result.dense_logprobs)
        metrics.append(result.metrics | {"seen": int((~dense.isnan()).sum()), "dense": float(dense.nansum())})
    full = [m.full_tensor() if processes.grouped else m for m in masters.masters]
    return metrics, [weight.detach().clone() for weight in full], [p.detach().clone() for p in model.parameters()]


def assert_same_metrics(got, expected, loss=1e-9, tolerance=1e-6):
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=loss)
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, abs=tolerance, rel=tolerance, nan_ok=True), name


def test_two_processes_learn_what_one_does_from_five_batches():
    rollouts = [recorded(random.randrange(1 << 30)) for _ in BATCHES]
    before = [p.detach() for p in tiny_model(dtype=torch.float64, **SMALL).parameters()]
    metrics, weights, _ = learn(Processes(), rollouts)
    assert sum(line["correction/skipped_updates"] for line in metrics) == 0 and metrics[3]["kl"] > 0
    for size in (1, 2):
        for got_metrics, got_weights, sampler in results_of(size, learn, rollouts):
            assert_same_metrics(got_metrics, metrics)
            for got, expected, sampled, old in zip(got_weights, weights, sampler, before, strict=True):
                torch.testing.assert_close(got, expected, atol=1e-8, rtol=0)
                assert torch.equal(got, sampled) and (got - old).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen2", {"tie_word_embeddings": False}),
        ("gemma3", {"final_logit_softcapping": 20.0, "layer_types": ["sliding_attention", "full_attention"]}),
    ],
)
def test_other_heads_and_packed_rows(family, settings):
    """An embedding that is not tied, a head that is called through the module; three processes."""
    rollouts = [recorded(random.randrange(1 << 30), family, **settings)]
    metrics, weights, _ = learn(Processes(), rollouts, family, max_tokens=90, **settings)
    for got_metrics, got_weights, _ in results_of(3, run_settings, rollouts, family, settings):
        assert_same_metrics(got_metrics, metrics, loss=1e-6, tolerance=1e-5)
        for got, expected in zip(got_weights, weights, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)


def run_settings(processes, rollouts, family, settings):
    return learn(processes, rollouts, family, max_tokens=90, **settings)


def test_a_bf16_model_has_fp32_shards_and_a_bf16_sampler():
    rollouts = [recorded(3)]
    found = results_of(2, learn_bf16, rollouts)
    metrics, weights, _ = learn(Processes(), rollouts, dtype=torch.bfloat16)
    for got_metrics, got_weights, sampler in found:
        assert got_metrics[0]["loss"] == pytest.approx(metrics[0]["loss"], rel=0.02, abs=1e-4)
        assert got_metrics[0]["grad_norm"] == pytest.approx(metrics[0]["grad_norm"], rel=0.02)
        for got, expected, sampled in zip(got_weights, weights, sampler, strict=True):
            assert (got.dtype, sampled.dtype) == (torch.float32, torch.bfloat16)
            assert torch.equal(got.bfloat16(), sampled)
            assert (got - expected).abs().mean() < 1e-4
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in found[0][1])


def learn_bf16(processes, rollouts):
    return learn(processes, rollouts, dtype=torch.bfloat16)


def scores_after_loading(processes, rollouts):
    """Of the sharded learner and of the sampler's module, once other weights were put into both."""
    model = tiny_model(**SMALL)
    masters = ShardedWeights(model, processes)
    completions, (microbatch,) = flatten(rollouts, model.device), pack(rollouts, 10_000)
    with torch.no_grad():
        before = score_microbatch(masters.head, completions, microbatch, 1.0).logprobs
        masters.load_state_dict({name: 1.5 * master for name, master in masters.state_dict().items()})
        masters.to_sampler()
        heads = (masters.head, Head(model))
        return before, *(score_microbatch(head, completions, microbatch, 1.0).logprobs for head in heads)


def test_loaded_weights_reach_the_learner_and_the_sampler():
    for before, learner, sampler in results_of(2, scores_after_loading, recorded(5)):
        torch.testing.assert_close(learner, sampler, atol=1e-5, rtol=1e-5)
        assert (before - learner).abs().max() > 0.1


def run(processes, folder, parts=None, task=TASK, dtype=torch.float64, **config):
    """A small run; what each process sampled, step by step."""
    loaded, sampled = load("embedded", dtype=dtype), []
    trainer = small_trainer(folder, loaded=loaded, task=task, parts=parts, processes=processes, **config)
    learn = trainer._learn
    trainer._learn = lambda rollouts, advantages: sampled.append(rollouts) or learn(rollouts, advantages)
    trainer.train()
    return [[rollout.token_ids.tolist() for rollout in rollouts] for rollouts in sampled], loaded.model.state_dict()


def without_times(folder, tolerated=("kv/peak_bytes", "rollout/preemptions")):
    """What a run logged, but for times and for what each process has for itself."""
    lines = read_log(folder / "metrics.jsonl")
    return [{k: v for k, v in line.items() if not k.startswith((*TIMES, *tolerated))} for line in lines]


@pytest.mark.parametrize("size", [2, 3])
def test_a_run_of_several_processes_is_the_run_of_one(tmp_path, size):
    """With remax and a third process that has no prompt to sample; every metric, evaluations included."""
    config = {"steps": 4 - size, "advantage": "remax" if size == 3 else "grpo", "save_every": 0}
    expected, weights = run(Processes(), tmp_path / "one", **config)
    for sampled, model in results_of(size, run_with, tmp_path / "several", config):
        assert sampled == expected and len(sampled) == 4 - size
        assert all(torch.allclose(model[name], weights[name], atol=1e-6) for name in weights)
    for got, line in zip(without_times(tmp_path / "several"), without_times(tmp_path / "one"), strict=True):
        assert got.keys() == line.keys()
        for name, value in line.items():
            assert got[name] == (None if value is None else pytest.approx(value, abs=1e-6, rel=1e-6)), name
    for name in ("completions.jsonl", "rejected.jsonl"):
        assert len(read_log(tmp_path / "several" / name)) == len(read_log(tmp_path / "one" / name))


def run_with(processes, folder, config):
    return run(processes, folder, **config)


def test_a_run_goes_on_with_another_number_of_processes(tmp_path):
    """Two processes, then one, then two; as one all along."""
    config = {"parts": {"optimizer": OptimizerConfig(learning_rate=1e-3), "eval": EvalConfig(prompts=0)}}
    run(Processes(), tmp_path / "one", steps=3, **config)
    two, config["resume_from_checkpoint"] = tmp_path / "two", True
    results_of(2, run_with, two, {"steps": 1, **config, "resume_from_checkpoint": False})
    run(Processes(), two, steps=2, **config)
    results_of(2, run_with, two, {"steps": 3, **config})
    steps = [[line["step"], line.get("loss", 0.0), line["num_tokens"]] for line in without_times(two)]
    alone = [[line["step"], line.get("loss", 0.0), line["num_tokens"]] for line in without_times(tmp_path / "one")]
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
    got, expected = (without_times(tmp_path / name)[-1] for name in ("run", "one"))
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


def stopped(processes, folder):
    if processes.rank == 1:
        small_run.watch("update", on_call=lambda count: count == 2 and os.kill(os.getpid(), signal.SIGTERM))
    return run(processes, folder, **{**SHORT, "save_every": 0})


def test_a_signal_to_one_process_saves_the_run_and_ends_all(tmp_path):
    results = several(2, stopped, tmp_path / "run")
    assert results == [(1, "Stopped: 143")] * 2
    (saved,) = checkpoint.checkpoints(tmp_path / "run")
    assert saved.name == "checkpoint-1"
    results_of(2, run_with, tmp_path / "run", {**SHORT, "resume_from_checkpoint": True})
    run(Processes(), tmp_path / "one", **SHORT)
    got, expected = (without_times(tmp_path / name)[-1] for name in ("run", "one"))
    assert got["loss"] == pytest.approx(expected["loss"], abs=1e-6) and got["step"] == 2


def broken_in_second(processes, folder):
    def reward(completions, **_):
        if processes.rank == 1:
            raise KeyError("answer")
        return [0.0] * len(completions)

    class Broken(small_run.Small):
        rewards = Rewards((reward,))

    return run(processes, folder, task=Broken(), parts={"eval": EvalConfig(prompts=0)})


def test_one_process_that_fails_speaks_for_all(tmp_path):
    results = several(2, broken_in_second, tmp_path / "run")
    assert results == [(1, "Stopped: 2"), (1, results[1][1])]
    assert results[1][1].startswith("ValueError: reward function 'reward' raised KeyError: 'answer'; mend it")
    again = several(2, run_with, tmp_path / "run", {})  # the folder is taken: the first process says so
    assert "has a run in it" in again[0][1] and again[1] == (1, "Stopped: 2")


def full_disk_in_second(processes, folder):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    if processes.rank == 1:
        filesystem._write_item = full
    return run(processes, folder, **SHORT)


def test_a_full_disk_of_one_process_stops_all(tmp_path):
    results = several(2, full_disk_in_second, tmp_path / "run")
    assert "checkpoint-1 could not be written ([Errno 28] No space left on device); make room" in results[0][1]
    assert results[1] == (1, "Stopped: 2")
    assert [path.name for path in (tmp_path / "run").glob("checkpoint*")] == []


@pytest.mark.parametrize("size", [2, 3, 5])
def test_microbatches_are_dealt_once_evenly_and_within_the_limit(size):
    rollouts = recorded(random.randrange(1 << 30), count=6)
    lengths = [len(rollout.prompt.ids) + len(rollout.token_ids) for rollout in rollouts]
    for max_tokens in (1, max(lengths), 150, 100_000):
        chosen = sorted(random.sample(range(len(rollouts)), random.randint(0, len(rollouts))))
        dealt = [deal(rollouts, max_tokens, chosen, Processes(rank, size)) for rank in range(size)]
        assert len({len(mine) for mine in dealt}) == 1
        assert sorted(i for mine in dealt for m in mine for i in m.indices) == chosen
        for microbatch in (m for mine in dealt for m in mine):
            assert len(microbatch.ids) <= max(max_tokens, max(lengths)) or len(microbatch.indices) == 1
            assert len(microbatch.predicting) == len(microbatch.tokens) > 0
        if max_tokens == 100_000 and len(chosen) >= 3 * size:  # all fit in one forward: everybody gets a part
            assert all(len(mine) == 1 and mine[0].indices for mine in dealt)


def test_shares_cover_everything_in_order():
    for count, size in ((0, 3), (2, 3), (7, 3), (9, 3), (5, 1)):
        shares = [list(range(count))[Processes(rank, size).share(count)] for rank in range(size)]
        assert [i for share in shares for i in share] == list(range(count))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1 and len(shares[0]) == math.ceil(count / size)


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
    assert again.returncode == 0 and not out, said
    assert (
        said.count("parameters, KV rkv") == 1 and read_log(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == step + 1
    )
    refused = start(tmp_path / "run", "--trainer.steps", "2")
    _, said = refused.communicate(timeout=240)
    assert refused.returncode != 0 and said.count("has a run in it") == 1
