# SPDX-License-Identifier: Apache-2.0
"""The sampler's adapter: it learns, the policy does not notice, a resumed run keeps it, an exported model has none."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_run import TASK, kept, small_trainer, without_times

from sparse_rl.evaluate import EvalConfig
from sparse_rl.kv import RKV, Full, PagesMean
from sparse_rl.model.load import load
from sparse_rl.model.lora import LoraConfig
from sparse_rl.model.sampler_adapter import SamplerAdapter
from sparse_rl.rollout import Sampling
from sparse_rl.rollout.fusion import find_groups, fused
from sparse_rl.train import OptimizerConfig
from sparse_rl.train.distill import DistillConfig
from sparse_rl.train.export import export

DISTILL = DistillConfig(r=4, lr=1e-2, kl="topk", kl_weight=1.0, every=1)
PARTS = {"eval": EvalConfig(prompts=0), "optimizer": OptimizerConfig(learning_rate=1e-3)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with an adapter that was never stopped, and the rollouts of its steps."""
    folder = tmp_path_factory.mktemp("distill") / "run"
    trainer = small_trainer(folder, parts=PARTS | {"distill": DISTILL}, steps=3, save_total_limit=None)
    sampled, roll_out = [], trainer._roll_out
    trainer._roll_out = lambda: sampled.append(roll_out()) or sampled[-1]
    trainer.train()
    return folder, sampled, trainer


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_the_policy_learns_as_if_there_were_no_adapter(whole, tmp_path):
    folder, sampled, trainer = whole
    plain = small_trainer(tmp_path / "run", parts=PARTS, steps=3)
    rollouts = iter(sampled)

    def replayed():
        with plain.run.timer("rollout"):
            return next(rollouts)

    plain._roll_out = replayed
    plain.engine.stats, plain.engine.config = trainer.engine.stats, trainer.engine.config
    plain.train()
    assert same(kept(folder / "checkpoint-3"), kept(tmp_path / "run" / "checkpoint-3"))
    weights = [load_file(path / "checkpoint-3" / "model.safetensors") for path in (folder, tmp_path / "run")]
    assert same(*weights)
    assert all(bool(pair.b.any()) for pair in trainer.distiller.adapter.pairs), "the adapter moved"
    ours, theirs = (without_times(path / "metrics.jsonl") for path in (folder, tmp_path / "run"))
    learnt = ("loss", "grad_norm", "reward", "mismatch/overlap_mean", "rollout_corr/kl")
    for a, b in zip(ours, theirs, strict=True):
        assert [a.get(key) for key in learnt] == [b.get(key) for key in learnt]
    assert "distill/kl" in ours[-1] and "distill/kl" not in theirs[-1]


def test_a_resumed_run_is_the_run_that_was_never_stopped(whole, tmp_path):
    folder, _, _ = whole
    shutil.copytree(folder, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoint-1", "checkpoint-3"))
    parts = PARTS | {"distill": DISTILL}
    small_trainer(tmp_path / "run", parts=parts, steps=3, resume_from_checkpoint=True).train()
    assert without_times(tmp_path / "run" / "metrics.jsonl") == without_times(folder / "metrics.jsonl")
    for part in (".", "distill"):
        assert same(kept(folder / "checkpoint-3" / part), kept(tmp_path / "run" / "checkpoint-3" / part))
    other = PARTS | {"distill": DistillConfig(r=3)}
    trainer = small_trainer(tmp_path / "run", parts=other, steps=4, resume_from_checkpoint=True)
    with pytest.raises(ValueError, match=r"no sampler's adapter of this shape; give the distill\.r of its run"):
        trainer.train()


def test_an_exported_model_has_no_trace_of_it(whole, tmp_path):
    folder, _, _ = whole
    export(folder / "checkpoint-3", tmp_path / "model")
    assert not [path for path in (tmp_path / "model").rglob("*") if "adapter" in path.name or "distill" in path.name]
    exported = load_file(tmp_path / "model" / "model.safetensors")
    assert not [name for name in exported if "lora" in name or "low_rank" in name]
    assert same(exported, load_file(folder / "checkpoint-3" / "model.safetensors"))
    assert "distill" not in (tmp_path / "model" / "config.json").read_text()


def test_its_folder_is_an_adapter_that_loads_for_sparse_inference(whole):
    pytest.importorskip("peft")
    folder, _, trainer = whole
    ids = torch.randint(0, 20, (2, 12))
    merged = load(str(folder / "checkpoint-3" / "distill")).model(ids).logits
    with trainer.distiller.on():
        torch.testing.assert_close(merged, trainer.loaded.model(ids).logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(merged, trainer.loaded.model(ids).logits, atol=1e-2)
    settings = json.loads((folder / "checkpoint-3" / "distill" / "adapter_config.json").read_text())
    assert settings["r"] == 4 and Path(settings["base_model_name_or_path"]) == folder / "checkpoint-3"


@pytest.mark.parametrize(
    ("kl", "kv"),
    [
        ("forward", RKV(budget=12, interval=8, window=4)),
        ("reverse", RKV(budget=12, interval=8, window=4)),
        ("topk", PagesMean(budget=32, last=1, dense_layers=0)),
    ],
    ids=["forward", "reverse", "topk"],
)
def test_steps_on_the_same_rollouts_bring_sampler_and_dense_model_together(kl, kv, tmp_path):
    """The first of them finds the sampler's own log-probs: the policy has not moved."""
    config = DistillConfig(r=8, lr=3e-3, kl=kl, kl_weight=1.0, pg_weight=0.0, every=8)
    parts = {"kv": kv, "distill": config, "sampling": Sampling(n=2, max_tokens=32, temperature=1.5)}
    trainer = small_trainer(tmp_path / "run", parts=PARTS | parts)
    rollouts = trainer._roll_out()
    before = {name: value.clone() for name, value in trainer.loaded.model.state_dict().items()}
    updated = trainer._learn(rollouts, torch.zeros(len(rollouts)))
    distil = partial(trainer._distill, rollouts, torch.zeros(len(rollouts)), updated)
    found = []
    for step in range(9):
        trainer.run.step = step
        found.append(distil())
    assert found[0]["distill/overlap_p05"] == found[0]["distill/overlap_p05_without"]
    assert found[-1]["distill/kl"] < 0.9 * found[0]["distill/kl"]
    gained = found[8]["distill/overlap_mean"] - found[8]["distill/overlap_mean_without"]
    assert gained > 0.002 or kl != "topk", "the others look at the sampled tokens alone"
    assert found[8]["distill/overlap_mean_without"] == found[0]["distill/overlap_mean"]
    assert same(before, trainer.loaded.model.state_dict()), "the policy stands still"
    assert all(parameter.grad is None for parameter in trainer.loaded.model.parameters())


def test_adapters_of_the_policy_are_another_matter(tmp_path):
    pytest.importorskip("peft")
    parts = PARTS | {"lora": LoraConfig(r=2, alpha=4.0)}
    for name, more in (("with", {"distill": DISTILL}), ("without", {})):
        small_trainer(tmp_path / name, parts=parts | more, steps=1).train()
    ours, theirs = (tmp_path / name / "checkpoint-1" for name in ("with", "without"))
    assert same(kept(ours), kept(theirs)) and (ours / "distill" / "adapter_model.safetensors").is_file()
    assert same(load_file(ours / "adapter_model.safetensors"), load_file(theirs / "adapter_model.safetensors"))


def test_projections_laid_together_have_the_adapter_too():
    model, ids = load("embedded", dtype=torch.float64).model, torch.randint(0, 20, (2, 9))
    adapter, plain = SamplerAdapter(model, 3, 6.0, seed=2), model(ids).logits
    for pair in adapter.pairs:
        torch.nn.init.normal_(pair.b, std=0.1)
    with adapter.on(model):
        expected = model(ids).logits
        groups = find_groups(model)
        assert len(groups) == 2 * model.config.num_hidden_layers
        with fused(groups):
            torch.testing.assert_close(model(ids).logits, expected)
        torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=0)
    assert (expected - plain).abs().max() > 0.1
    torch.testing.assert_close(model(ids).logits, plain)
    assert not [name for name, _ in model.named_parameters() if "low_rank" in name]


def test_settings_that_do_not_fit_are_refused(tmp_path):
    for given, message in (
        ({"r": -1}, "distill.r is -1"),
        ({"r": 2, "alpha": 0.0}, "distill.alpha is 0.0"),
        ({"r": 2, "kl": "k1"}, "distill.kl is 'k1'"),
        ({"r": 2, "kl_weight": 0.0, "pg_weight": 0.0}, "would learn nothing"),
        ({"lr": 1.0}, "distill.lr is given, but distill.r is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            DistillConfig(**given)
    with pytest.raises(ValueError, match="full is the dense model already"):
        small_trainer(tmp_path / "run", task=TASK, parts={"kv": Full(), "distill": DISTILL})
