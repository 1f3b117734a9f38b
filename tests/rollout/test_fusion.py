# SPDX-License-Identifier: Apache-2.0
"""Projections laid together: the same parameters, the same numbers, one product."""

from __future__ import annotations

import copy

import pytest
import torch
from safetensors.torch import save_file

from sparse_rl.model.tiny import FAMILIES, tiny_model
from sparse_rl.rollout.fusion import fuse, sliced

IDS = torch.arange(24).reshape(2, 12)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_computes_what_it_did(family):
    model = tiny_model(family, dtype=torch.float64)
    before, parameters = model(IDS).logits, dict(model.named_parameters())
    groups = fuse(model)
    assert len(groups) == 2 * model.config.num_hidden_layers
    assert all(a is b for a, b in zip(parameters.values(), model.parameters(), strict=True)), "the same objects"
    torch.testing.assert_close(model(IDS).logits, before, rtol=0, atol=0)
    with sliced(groups):
        torch.testing.assert_close(model(IDS).logits, before)
    assert dict(model.named_parameters()).keys() == parameters.keys()


def test_updates_in_place_reach_the_product_and_gradients_are_unchanged():
    model, twin = tiny_model("qwen2"), tiny_model("qwen2")
    groups = fuse(model)
    for trained in (model, twin):
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
        trained(IDS).logits.logsumexp(-1).sum().backward()
        optimizer.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)
    with sliced(groups), torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, twin(IDS).logits)


def test_what_lies_together_stays_where_it_is_and_what_moved_comes_back():
    model = tiny_model("qwen2")
    fuse(model)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    expected = model(IDS).logits
    fuse(model)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    projection = model.model.layers[1].self_attn.k_proj
    projection.bias.data = projection.bias.data.clone()
    groups = fuse(model)
    with sliced(groups):
        torch.testing.assert_close(model(IDS).logits, expected)
    moved = sum(a != parameter.data_ptr() for a, parameter in zip(places, model.parameters(), strict=True))
    assert moved == 3, "the biases of one group"


def test_a_fused_model_can_be_saved_and_copied(tmp_path):
    model = tiny_model("llama")
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fuse(model)
    model.save_pretrained(tmp_path / "folder")
    save_file({name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}, tmp_path / "file")
    again = type(model).from_pretrained(tmp_path / "folder")
    for name, tensor in expected.items():
        assert torch.equal(again.state_dict()[name], tensor)
        assert torch.equal(copy.deepcopy(model).state_dict()[name], tensor)


def test_projections_that_differ_are_left_alone():
    model = tiny_model("llama")
    layers = model.model.layers
    layers[0].self_attn.q_proj.requires_grad_(False)
    layers[1].mlp.up_proj = torch.nn.Sequential(layers[1].mlp.up_proj)  # an adapter's wrapper, say
    groups = fuse(model)
    assert {(i, names) for i, layer in enumerate(layers) for names in ("q_proj", "gate_proj")
            if not any(g.owner in (layer.self_attn, layer.mlp) and names in g.names for g in groups)} == {
        (0, "q_proj"), (1, "gate_proj"),
    }  # fmt: skip


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_layers_are_compiled_once_for_all_of_them_and_any_number_of_rows(family):
    from sparse_rl.model.attention import keep_out_of_compiled_code
    from sparse_rl.rollout.decoder import compiled_parts

    products = []

    def backend(graph, inputs):
        products.append(sum("linear" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    model = tiny_model(family)
    keep_out_of_compiled_code()
    with sliced(fuse(model)), torch.no_grad():
        for part in compiled_parts(model):
            part._compiled_call_impl = torch.compile(part._call_impl, dynamic=True, backend=backend)
        counts = []
        for rows in (6, 4, 2):
            model(IDS[:1, :5].repeat(rows, 1), use_cache=False)
            counts.append(len(products))
    for part in compiled_parts(model):
        part._compiled_call_impl = None
    assert counts[0] == counts[1] == counts[2] < 2 * model.config.num_hidden_layers + 2
