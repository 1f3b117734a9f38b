# SPDX-License-Identifier: Apache-2.0
"""Layers that keep, recompute or offload what the backward pass needs give the same gradients."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from sparse_rl.model.attention import PackedRows, packed_positions
from sparse_rl.model.tiny import tiny_model
from sparse_rl.score.head import Head
from sparse_rl.train import layers
from sparse_rl.train.layers import decoder_layers, learner_layers
from sparse_rl.train.update import UpdateConfig


def gradients(model, device, activations, *, compiles=False):
    """Of some log-probs, and the bytes that were kept for them."""
    boundaries = [0, 13, 20]
    ids = torch.randint(0, 259, (1, 20), generator=torch.Generator().manual_seed(0)).to(device)
    inputs = {"input_ids": ids, "position_ids": packed_positions(boundaries, model.device), "use_cache": False}
    predicting = torch.tensor([3, 8, 11, 14, 18], device=device)
    kept: dict[int, int] = {}

    def note(tensor):
        kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    head = Head(model)
    with learner_layers(model, activations, compiles=compiles):
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            scores = head(inputs | {"kv": PackedRows(boundaries)}, predicting, ids[0, predicting + 1])
        result = torch.autograd.grad(scores.logprobs.sum(), [p for p in model.parameters() if p.requires_grad])
    return result, sum(kept.values())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_recomputed_gradients_are_the_same(family, device):
    model = tiny_model(family, dtype=torch.float64, device=device)
    expected, all_kept = gradients(model, device, "keep")
    got, kept = gradients(model, device, "recompute")
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)
    assert kept < 0.7 * all_kept
    assert all("forward" not in layer.__dict__ for layer in decoder_layers(model)), "the model is as it was"


def test_offloaded_inputs_of_layers_go_to_the_host_and_come_back(monkeypatch):
    """What a layer is recomputed from is packed away, and what is recomputed is not."""
    packed, model = [], tiny_model(dtype=torch.float64, num_hidden_layers=3)

    def to_host(pin_memory):
        assert pin_memory
        return torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x.shape) or x.clone(), lambda x: x)

    monkeypatch.setattr(layers, "save_on_cpu", to_host)
    expected, _ = gradients(model, "cpu", "keep")
    got, _ = gradients(model, "cpu", "offload")
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert packed.count((1, 20, model.config.hidden_size)) == 3


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
def test_compiled_layers_learn_the_same(activations, device):
    model = tiny_model("qwen2", device=device)
    expected, _ = gradients(model, device, "keep")
    got, _ = gradients(model, device, activations, compiles=True)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-3)


def test_unknown_activations_are_refused():
    with pytest.raises(ValueError, match=r"update.activations is 'some'; choose one of keep, recompute, offload"):
        UpdateConfig(activations="some")


def test_an_error_leaves_the_model_as_it_was():
    model = tiny_model()
    with pytest.raises(RuntimeError), learner_layers(model, "recompute", compiles=False):
        raise RuntimeError
    assert all("forward" not in layer.__dict__ for layer in decoder_layers(model))


def test_layers_that_cannot_be_compiled_run_as_they_are(monkeypatch, caplog):
    from torch._dynamo.exc import TorchDynamoException

    def refuse(forward):
        def run(*args, **kwargs):
            raise TorchDynamoException("no compiler")

        return run

    monkeypatch.setattr(layers, "_compiled", refuse)
    monkeypatch.setattr(layers, "UNCOMPILED", set())
    model = tiny_model("qwen2", dtype=torch.float64)
    expected, _ = gradients(model, "cpu", "keep")
    got, _ = gradients(model, "cpu", "keep", compiles=True)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert caplog.text.count("cannot be compiled (no compiler)") == 1


@pytest.mark.some(0)
def test_adapted_layers_share_their_code_with_the_first(monkeypatch):
    """Its input is a frozen embedding's, which needs no gradient; and floats do not become inputs."""
    pytest.importorskip("peft")
    from sparse_rl.model.lora import LoraConfig, add_adapters

    given, before = [], []

    def traced(graph, example):
        given.extend(x for x in example if isinstance(x, torch.Tensor))
        return graph.forward

    compiled = lru_cache(lambda forward: torch.compile(forward, dynamic=True, backend=traced))
    monkeypatch.setattr(layers, "_compiled", compiled)
    model = tiny_model("llama", num_hidden_layers=2)
    add_adapters(model, LoraConfig(r=3, target=("v_proj", "up_proj")), seed=0)
    expected, _ = gradients(model, "cpu", "keep")
    torch._dynamo.reset()
    decoder_layers(model)[1].register_forward_pre_hook(lambda *_: before.append(len(given)))
    got, _ = gradients(model, "cpu", "recompute", compiles=True)
    assert before[-1] == len(given) > 0 and all(x.ndim for x in given)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)
