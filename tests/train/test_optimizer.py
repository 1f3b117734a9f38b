# SPDX-License-Identifier: Apache-2.0
"""Ways to keep the optimiser small: moments of a byte, and fp32 weights and moments on the host."""

from __future__ import annotations

import copy
import shutil
import sys
import tempfile
from pathlib import Path
from shutil import which

import pytest
import torch
from small_run import small_model, small_trainer

from sparse_rl.evaluate import EvalConfig
from sparse_rl.train import OptimizerConfig, offload
from sparse_rl.train.learner import Learner
from sparse_rl.train.master import MasterWeights
from sparse_rl.train.offload import HostMasters
from sparse_rl.train.shard_files import read_shards, write_shards


class Eager:
    """torchao's compiled step takes seconds to compile; what it computes can be run as it stands."""

    def __enter__(self):
        torch.compiler.set_stance("force_eager")

    def __exit__(self, *_):
        torch.compiler.set_stance("default")


@pytest.fixture
def eager():
    pytest.importorskip("torchao")
    with Eager():
        yield


class Regression(torch.nn.Module):
    """y = W x; the loss is how far an estimate of W is off, on inputs that depend on the update."""

    def __init__(self, seed=0, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = torch.nn.Linear(64, 96), torch.nn.Linear(96, 64)
        self.register_buffer("truth", torch.randn(64, 64))
        self.to(dtype)

    def loss(self, update):
        x = torch.randn(128, 64, generator=torch.Generator().manual_seed(update)).to(self.truth)
        return (self.second(self.first(x)) - x @ self.truth).float().square().mean()


def learner_of(module, config, masters=None):
    masters = masters or config.masters(module)
    head = type("Head", (), {"model": module})()
    return Learner(head, config.build(masters), masters, rate=lambda update: config.rate(update, 40))


def learn(module, learner, updates, microbatches=2):
    losses = []
    for update in updates:
        for part in range(microbatches):
            loss = module.loss(microbatches * update + part) / microbatches
            loss.backward()
        losses.append(float(loss.detach()) * microbatches)
        metrics = learner.step(50.0, skip=False)
    return losses, metrics


def test_gradients_of_microbatches_are_summed_in_fp32():
    module = torch.nn.Linear(4, 3, bias=False).bfloat16()
    masters, inputs = MasterWeights(module), torch.randn(64, 1, 4).bfloat16()
    for row in inputs:
        module(row).sum().backward()
    assert module.weight.grad is None
    torch.testing.assert_close(masters.masters[0].grad, inputs.float().sum(0).expand(3, 4), rtol=1e-6, atol=1e-5)


def test_8_bit_moments_learn_what_adamw_learns(eager):
    runs = {}
    for kind in ("adamw", "adamw_8bit"):
        module, config = Regression(), OptimizerConfig(kind=kind, learning_rate=1e-2, schedule="linear")
        learner = learner_of(module, config)
        runs[kind], metrics = learn(module, learner, range(40))
        assert metrics["learning_rate"] == pytest.approx(1e-2 / 40)
    state = learner.optimizer.state[module.first.weight]
    assert state["exp_avg"].codes.dtype == torch.uint8
    assert runs["adamw"][-1] < 0.4 * runs["adamw"][0]
    assert runs["adamw_8bit"] != runs["adamw"]
    assert runs["adamw_8bit"][-1] == pytest.approx(runs["adamw"][-1], rel=0.1)


def resumed(module, learner, config):
    """A second learner that takes up the state of the first."""
    twin = copy.deepcopy(module)
    again = learner_of(twin, config)
    with tempfile.TemporaryDirectory() as folder:
        write_shards(Path(folder, "state"), learner)
        assert read_shards(Path(folder, "state"), again) == []
    again.num_updates = learner.num_updates
    return twin, again


def test_8_bit_moments_resume_bit_for_bit(eager):
    config = OptimizerConfig(kind="adamw_8bit", learning_rate=1e-2, weight_decay=0.1)
    module = Regression()
    learner = learner_of(module, config)
    learn(module, learner, range(5))
    twin, again = resumed(module, learner, config)
    assert learn(module, learner, range(5, 10)) == learn(twin, again, range(5, 10))
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), twin.parameters(), strict=True))


@pytest.mark.slow
@pytest.mark.skipif(not (which("g++") or which("clang++")), reason="torch.compile needs a C++ compiler")
def test_the_compiled_step_is_the_one_that_is_tested_here():
    pytest.importorskip("torchao")
    config, losses = OptimizerConfig(kind="adamw_8bit", learning_rate=1e-2), []
    for _ in range(2):
        module = Regression()
        losses.append(learn(module, learner_of(module, config), range(10))[0])
        torch.compiler.set_stance("force_eager")
    torch.compiler.set_stance("default")
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)


def test_an_8_bit_run_resumes_and_keeps_its_kind(eager, tmp_path):
    def trainer(name, kind="adamw_8bit", **config):
        parts = {"optimizer": OptimizerConfig(kind=kind, learning_rate=1e-3), "eval": EvalConfig(prompts=1)}
        return small_trainer(tmp_path / name, parts=parts, **config)

    whole = trainer("whole", steps=2, save_total_limit=None)
    whole.train()
    shutil.rmtree(tmp_path / "whole" / "checkpoint-2")
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    with pytest.raises(ValueError, match=r"optimizer.kind is 'adamw', but checkpoint-1 was written with 'adamw_8bit'"):
        trainer("parts", kind="adamw", steps=2, resume_from_checkpoint=True).train()
    rest = trainer("parts", steps=2, resume_from_checkpoint=True)
    rest.train()
    ours, theirs, before = (t.state_dict() for t in (rest.loaded.model, whole.loaded.model, small_model().model))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert not torch.equal(ours["model.norm.weight"], before["model.norm.weight"])


@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_masters_on_the_host_take_the_steps_of_masters_beside_the_module(kind, dtype, monkeypatch):
    """On a CPU both are the same memory; what travels through the buffers is what the optimiser would have seen."""
    if kind == "adamw_8bit":
        pytest.importorskip("torchao")
    monkeypatch.setattr(offload, "BUFFER", 64 * 96 + 7)  # four travels, so both buffers serve twice
    config = OptimizerConfig(kind=kind, learning_rate=1e-2, schedule="cosine", weight_decay=0.1)
    modules = [Regression(dtype=dtype), Regression(dtype=dtype)]
    learners = [learner_of(modules[0], config), learner_of(modules[1], config, HostMasters(modules[1]))]
    assert len(learners[1].masters.chunks) == 4
    with Eager():
        runs = [learn(module, learner, range(6)) for module, learner in zip(modules, learners, strict=True)]
    assert runs[0] == runs[1]
    for a, b in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(learners[0].masters.masters, learners[1].masters.masters, strict=True):
        assert torch.equal(a, b) and b.dtype == torch.float32 and b.grad is None
    assert all(p.grad is None for p in modules[1].parameters())


def test_masters_on_the_host_resume_bit_for_bit():
    config = OptimizerConfig(learning_rate=1e-2)
    module = Regression(dtype=torch.bfloat16)
    learner = learner_of(module, config, HostMasters(module))
    learn(module, learner, range(3))
    twin = Regression(seed=1, dtype=torch.bfloat16)
    twin.truth = module.truth
    again = learner_of(twin, config, HostMasters(twin))
    again.masters.load_state_dict(copy.deepcopy(learner.masters.state_dict()))
    again.optimizer.load_state_dict(copy.deepcopy(learner.optimizer.state_dict()))
    again.num_updates = 3
    assert learn(module, learner, range(3, 6)) == learn(twin, again, range(3, 6))
    for a, b in zip(learner.masters.masters, again.masters.masters, strict=True):
        assert torch.equal(a, b) and not torch.equal(a, a.bfloat16().float())


def test_a_parameter_without_a_gradient_stays_where_it_is():
    module = Regression()
    masters = HostMasters(module)
    learner = learner_of(module, OptimizerConfig(learning_rate=1e-2), masters)
    before = [p.detach().clone() for p in module.parameters()]
    module.first.weight.square().sum().backward()
    learner.step(1.0, skip=False)
    moved = [not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True)]
    assert moved == [True, False, False, False]


def test_chunks_hold_every_parameter_once_in_order(monkeypatch):
    monkeypatch.setattr(offload, "BUFFER", 10)
    assert offload._chunks([4, 6, 1, 30, 2, 8, 1]) == [[0, 1], [2], [3], [4, 5], [6]]
    sizes = torch.randint(1, 25, (50,)).tolist()
    chunks = offload._chunks(sizes)
    assert [i for chunk in chunks for i in chunk] == list(range(50))
    assert all(len(chunk) == 1 or sum(sizes[i] for i in chunk) <= 10 for chunk in chunks)


def test_what_cannot_be_had_is_refused(monkeypatch):
    with pytest.raises(ValueError, match=r"optimizer.offload needs a GPU .* the model is on cpu; leave it out"):
        OptimizerConfig(offload=True).masters(Regression())
    with pytest.raises(ValueError, match=r"optimizer.kind is 'sgd'"):
        OptimizerConfig(kind="sgd")
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(ValueError, match=r"needs torchao; pip install 'sparse-rl\[optim\]'"):
        OptimizerConfig(kind="adamw_8bit").build(MasterWeights(Regression()))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["adamw", "adamw_8bit"])
def test_on_a_gpu_the_host_takes_the_same_steps(kind, device):
    """Up to how two devices round."""
    if kind == "adamw_8bit":
        pytest.importorskip("torchao")
    modules = [Regression(dtype=torch.bfloat16).to(device) for _ in range(2)]
    for module, offloaded in zip(modules, (False, True), strict=True):
        learner = learner_of(module, OptimizerConfig(kind=kind, learning_rate=1e-2, offload=offloaded))
        assert learner.masters.masters[0].device.type == ("cpu" if offloaded else "cuda")
        losses, _ = learn(module, learner, range(40))
        assert losses[-1] < 0.4 * losses[0]
    for a, b in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        assert float((a - b).abs().mean()) < 2e-3
