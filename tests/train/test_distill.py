# SPDX-License-Identifier: Apache-2.0
"""The sampler's adapter: it learns, the policy does not notice, a resumed run keeps it, an exported model has none."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
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
from sparse_rl.model.sampler_adapter import Merged, SamplerAdapter
from sparse_rl.rollout import Sampling
from sparse_rl.rollout.fusion import find_groups, fused
from sparse_rl.rollout.memory import GuardedEngine
from sparse_rl.train import OptimizerConfig, UpdateConfig
from sparse_rl.train.control import ControlConfig, measure
from sparse_rl.train.distill import DistillConfig, Distiller
from sparse_rl.train.export import export

DISTILL = DistillConfig(r=4, lr=1e-2, kl="topk", kl_weight=1.0, every=1)
MERGED = replace(DISTILL, merged=True)
PARTS = {"eval": EvalConfig(prompts=0), "optimizer": OptimizerConfig(learning_rate=1e-3)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with a merged adapter that was never stopped, and the rollouts of its steps."""
    folder = tmp_path_factory.mktemp("distill") / "run"
    trainer = small_trainer(folder, parts=PARTS | {"distill": MERGED}, steps=3, save_total_limit=None)
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
    ours, theirs = (without_times(path) for path in (folder, tmp_path / "run"))
    learnt = ("loss", "grad_norm", "reward", "mismatch/overlap_mean", "rollout_corr/kl")
    for a, b in zip(ours, theirs, strict=True):
        assert [a.get(key) for key in learnt] == [b.get(key) for key in learnt]
    assert "distill/kl" in ours[-1] and "distill/kl" not in theirs[-1]


def test_a_resumed_run_is_the_run_that_was_never_stopped(whole, tmp_path):
    folder, _, _ = whole
    shutil.copytree(folder, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoint-1", "checkpoint-3"))
    parts = PARTS | {"distill": MERGED}
    small_trainer(tmp_path / "run", parts=parts, steps=3, resume_from_checkpoint=True).train()
    assert without_times(tmp_path / "run") == without_times(folder)
    for part in (".", "distill"):
        assert same(kept(folder / "checkpoint-3" / part), kept(tmp_path / "run" / "checkpoint-3" / part))
    for distill, said in (
        (DistillConfig(r=3), r"rank 4; give --distill\.r 4"),
        (DistillConfig(), r"--distill\.r 4\), or"),
    ):
        given = PARTS | {"distill": distill}
        trainer = small_trainer(tmp_path / "run", parts=given, steps=4, resume_from_checkpoint=True)
        with pytest.raises(ValueError, match=said):
            trainer.train()


def test_what_is_evaluated_is_sampled_without_the_adapter(tmp_path, monkeypatch):
    parts = PARTS | {"distill": DISTILL, "eval": EvalConfig(every=1, prompts=2)}
    trainer = small_trainer(tmp_path / "run", parts=parts, steps=1)
    generate, adapted = GuardedEngine.generate, []

    def watched(engine, *args, **more):
        names = [name for name, _ in trainer.loaded.model.named_parameters() if "low_rank" in name]
        adapted.append((engine is trainer.engine, bool(names)))
        return generate(engine, *args, **more)

    monkeypatch.setattr(GuardedEngine, "generate", watched)
    trainer.train()
    assert adapted == [(False, False)] * 2 + [(True, True)] + [(False, False)] * 2


def test_a_run_may_get_an_adapter_later(tmp_path):
    small_trainer(tmp_path / "run", parts=PARTS, steps=1).train()
    parts = PARTS | {"distill": DISTILL}
    small_trainer(tmp_path / "run", parts=parts, steps=2, resume_from_checkpoint=True).train()
    last = without_times(tmp_path / "run")[-1]
    assert last["distill/overlap_p05"] == last["distill/overlap_p05_without"], "it began with B = 0"
    assert (tmp_path / "run" / "checkpoint-2" / "distill" / "adapter_model.safetensors").is_file()


def disturb(trainer):
    """An adapter, and adapters of the policy if there are any, that change what the model says."""
    masters = zip(*(getattr(trainer.distiller.learner.masters, name) for name in ("names", "masters")), strict=True)
    ours = [master for name, master in masters if name.endswith(".b")]
    for weight in ours + [p for name, p in trainer.loaded.model.named_parameters() if "lora_B" in name]:
        torch.nn.init.normal_(weight, std=0.1, generator=torch.Generator().manual_seed(len(ours)))
    trainer.distiller.learner.masters.publish()


@pytest.mark.parametrize(("dtype", "lora"), [(torch.float64, 0), (torch.float32, 0), (torch.float64, 2)])
@pytest.mark.some(1)
def test_a_merged_copy_samples_what_the_adapter_does(dtype, lora, tmp_path):
    """It is made anew from the weights of the day, at the same place, and the shared weights do not notice."""
    if lora:
        pytest.importorskip("peft")
    ids, found = torch.randint(0, 20, (2, 9)), {}
    for merged in (False, True):
        parts = {"distill": DistillConfig(r=4, merged=merged), "lora": LoraConfig(r=lora) if lora else LoraConfig()}
        trainer = small_trainer(tmp_path / str(merged), loaded=load("embedded", dtype=dtype), parts=PARTS | parts)
        disturb(trainer)
        model, masters = trainer.loaded.model, trainer.learner.masters
        before = {name: value.clone() for name, value in model.state_dict().items()}
        plain, rollouts = model(ids).logits, trainer._roll_out()
        assert same(before, model.state_dict()) and torch.equal(model(ids).logits, plain)
        with trainer.distiller.sampling(masters):
            logits, places = model(ids).logits, [parameter.data_ptr() for parameter in model.parameters()]
        with torch.no_grad():
            for parameter in masters.parameters:
                parameter.mul_(1.25)
        with trainer.distiller.sampling(masters):
            assert places == [parameter.data_ptr() for parameter in model.parameters()]
            found[merged] = (torch.cat([r.sampler_logprobs for r in rollouts]), logits, model(ids).logits)
        assert (logits - plain).abs().max() > 0.1 and (logits - found[merged][2]).abs().max() > 0.1
    exact = 1e-6 if dtype == torch.float64 else 1e-5  # norms round to fp32 in any model: a last digit there may flip
    torch.testing.assert_close(found[True][0], found[False][0], rtol=0, atol=exact)
    torch.testing.assert_close(found[True][1:], found[False][1:], rtol=10 * exact, atol=10 * exact)


def test_a_merged_copy_is_rounded_once(tmp_path):
    """In bf16 most of what a step of the adapter adds to a weight is less than its last digit."""
    loaded = load("embedded", dtype=torch.bfloat16)
    trainer = small_trainer(tmp_path / "run", loaded=loaded, parts=PARTS | {"distill": DistillConfig(r=2, merged=True)})
    for master in (*trainer.learner.masters.masters, *trainer.distiller.learner.masters.masters):
        torch.nn.init.normal_(master, std=0.05)
    name = trainer.distiller.adapter.names[-1]
    at = trainer.learner.masters.names.index(f"{name}.weight")
    a, b = trainer.distiller.learner.masters.masters[-2:]
    with trainer.distiller.sampling(trainer.learner.masters):
        got = loaded.model.get_submodule(name).weight
        assert torch.equal(got, (trainer.learner.masters.masters[at] + 16.0 / 2 * b @ a).bfloat16())
    assert loaded.model.get_submodule(name).weight is trainer.learner.masters.parameters[at]


@pytest.mark.parametrize("bad", [False, True])
def test_the_budget_follows_the_tail_of_the_sampler_with_its_adapter(bad, tmp_path, monkeypatch):
    """With room for every token only the adapter keeps the sampler from the dense model; a bad one needs more."""
    monkeypatch.setattr("sparse_rl.train.control.dense_from", lambda kv, prompt, longest: 64)
    control = ControlConfig(auto=True, bin=100, patience=1, smallest=32, largest=64, budgets=3, multiple=16)
    update = UpdateConfig(skip_zero_rows=False)
    parts = {"kv": RKV(budget=48, interval=4, window=4), "control": control, "distill": DISTILL, "update": update}
    trainer = small_trainer(tmp_path / "run", loaded=load("embedded"), parts=PARTS | parts, prompts_per_step=8)
    if bad:
        disturb(trainer)
    rollouts = trainer._roll_out()
    measured = measure(rollouts, trainer._learn(rollouts, torch.zeros(len(rollouts))), control)
    trainer.controller.observe(measured)
    under = measured[0].share(measured[0].under)
    assert under > 0.2 if bad else under == 0.0
    assert trainer.controller.policy.schedule.at(0) == (64 if bad else 32)


def test_a_measurement_that_runs_out_of_memory_is_done_again_with_half(tmp_path, monkeypatch):
    plain, tried = Distiller._overlaps, []

    def measured(distiller, batch, max_tokens):
        tried.append(max_tokens)
        if len(tried) == 1:
            raise torch.OutOfMemoryError
        return plain(distiller, batch, max_tokens)

    monkeypatch.setattr(Distiller, "_overlaps", measured)
    trainer = small_trainer(tmp_path / "run", parts=PARTS | {"distill": DISTILL})
    rollouts, none = trainer._roll_out(), torch.zeros(8)
    metrics = trainer._distill(rollouts, none, trainer._learn(rollouts, none))
    assert tried == [100, 50] and {"distill/overlap_p05", "distill/loss"} < metrics.keys()


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
@pytest.mark.some(1)
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


def test_the_policy_loss_of_tokens_just_sampled_is_minus_their_advantage(tmp_path):
    config = DistillConfig(r=2, lr=0.0, pg_weight=0.5, kl_weight=0.0, kl="forward")
    trainer = small_trainer(tmp_path / "run", parts=PARTS | {"distill": config})
    rollouts, advantages = trainer._roll_out(), torch.randn(8)
    updated = trainer._learn(rollouts, torch.zeros(8))  # which moves nothing
    lengths = torch.tensor([float(rollout.completion_mask.sum()) for rollout in rollouts])
    for unscored in (0, 3):  # the first rollouts, of which the dense model said nothing, do not count
        dense = [torch.full_like(each, torch.nan) for each in updated.dense_logprobs[:unscored]]
        known = replace(updated, dense_logprobs=(*dense, *updated.dense_logprobs[unscored:]))
        expected = -0.5 * (lengths * advantages)[unscored:].sum() / lengths[unscored:].sum()
        found = trainer._distill(rollouts, advantages, known)
        assert found["distill/loss"] == pytest.approx(float(expected), abs=1e-4)
    truncated = torch.tensor([rollout.finish_reason == "length" for rollout in rollouts])
    assert truncated.any()
    trainer.loss_config = replace(trainer.loss_config, mask_truncated_completions=True)
    expected = -0.5 * (lengths * advantages)[~truncated].sum() / lengths.sum()
    found = trainer._distill(rollouts, advantages, updated)
    assert found["distill/loss"] == pytest.approx(float(expected), abs=1e-4)


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
    merged = Merged(adapter, model)
    for _ in range(2):  # the second finds its weights laid together
        with adapter.on(model, merged.renew(model, torch.Tensor.detach)):
            groups = find_groups(model)
            assert len(groups) == 2 * model.config.num_hidden_layers
            with fused(groups):
                torch.testing.assert_close(model(ids).logits, expected)
            places = {parameter.data_ptr() for parameter in model.parameters()}
        assert len(places - {copy.weight.data_ptr() for copy in merged.copies}) == len(places) - len(merged.copies)
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
