# SPDX-License-Identifier: Apache-2.0
"""Projections laid together: the same parameters, the same numbers, one product."""

from __future__ import annotations

import copy
from shutil import which

import pytest
import torch
from safetensors.torch import save_file

from sparse_rl.model.attention import keep_out_of_compiled_code
from sparse_rl.model.tiny import FAMILIES, tiny_model
from sparse_rl.rollout.decoder import COMPILER, compiled_parts
from sparse_rl.rollout.fusion import _join, find_groups, fused

IDS = torch.arange(24).reshape(2, 12)


def places(model):
    return [parameter.data_ptr() for parameter in model.parameters()]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.some(4)
def test_the_model_computes_what_it_did(family):
    model = tiny_model(family, dtype=torch.float64)
    before, parameters = model(IDS).logits, dict(model.named_parameters())
    groups = find_groups(model)
    joined = {"gpt_oss": 4, "deepseek_v3": 4, "phi3": 0}  # experts and latents are not; phi3's are in the checkpoint
    assert len(groups) == joined.get(family, 2 * model.config.num_hidden_layers)
    with fused(groups):
        torch.testing.assert_close(model(IDS).logits, before)
    assert dict(model.named_parameters()).keys() == parameters.keys()
    assert all(a is b for a, b in zip(parameters.values(), model.parameters(), strict=True)), "the same objects"
    torch.testing.assert_close(model(IDS).logits, before, rtol=0, atol=0)


def test_updates_in_place_reach_the_product_and_gradients_are_unchanged():
    model, twin = tiny_model("qwen2"), tiny_model("qwen2")
    groups = find_groups(model)
    with fused(groups):
        pass
    for trained in (model, twin):
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
        trained(IDS).logits.logsumexp(-1).sum().backward()
        optimizer.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(a, b)
    before = places(model)
    with fused(groups), torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, twin(IDS).logits)
    assert places(model) == before, "what lies together stays where it is"


def test_a_parameter_that_moved_comes_back_to_its_group():
    model = tiny_model("qwen2")
    groups = find_groups(model)
    with fused(groups):
        expected = model(IDS).logits
    before = places(model)
    projection = model.model.layers[1].self_attn.k_proj
    projection.bias.data = projection.bias.data.clone()
    with fused(groups):
        torch.testing.assert_close(model(IDS).logits, expected)
    assert sum(a != b for a, b in zip(before, places(model), strict=True)) == 3, "the biases of one group"


def test_a_fused_model_can_be_saved_and_copied(tmp_path):
    model = tiny_model("llama")
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for group in find_groups(model):
        group.join()
    model.save_pretrained(tmp_path / "folder")
    save_file({name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}, tmp_path / "file")
    again = type(model).from_pretrained(tmp_path / "folder")
    for name, tensor in expected.items():
        assert torch.equal(again.state_dict()[name], tensor)
        assert torch.equal(copy.deepcopy(model).state_dict()[name], tensor)


def test_projections_that_differ_or_are_called_otherwise_are_left_alone():
    model = tiny_model("llama")
    layers = model.model.layers
    layers[0].self_attn.q_proj.requires_grad_(False)
    layers[1].mlp.up_proj = torch.nn.Sequential(layers[1].mlp.up_proj)  # an adapter's wrapper, say
    mlp = layers[2].mlp
    mlp.forward = lambda x: mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x + 0))  # another tensor
    attention = layers[3].self_attn

    def key_first(part, inputs):
        attention.k_proj(inputs[0])

    attention.q_proj.register_forward_pre_hook(key_first)
    found = [(group.owner, group.names[0]) for group in find_groups(model)]
    left = []
    for i, layer in enumerate(layers):
        owners = {"q_proj": layer.self_attn, "gate_proj": layer.mlp}
        left += [(i, name) for name, owner in owners.items() if (owner, name) not in found]
    assert left == [(0, "q_proj"), (1, "gate_proj"), (2, "gate_proj"), (3, "q_proj")]


def test_projections_that_someone_listens_to_are_left_alone():
    model = tiny_model("llama")
    model.model.layers[0].self_attn.v_proj.register_forward_hook(lambda *given: None)
    model.model.layers[1].mlp.gate_proj.register_forward_pre_hook(lambda *given: None)
    assert len(find_groups(model)) == 2 * model.config.num_hidden_layers - 2


def test_a_product_is_not_kept():
    model = tiny_model("llama")
    with fused(find_groups(model)):
        model(IDS)
        assert model.model.layers[0].mlp.up_proj.product.value is None


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
@pytest.mark.some(0)
def test_layers_are_compiled_once_with_one_product_a_group(family):
    """The same few graphs for all layers and any number of rows; q, k, v and o, gate, up and down are four products."""
    products = []

    def backend(graph, inputs):
        products.append(sum("linear" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    model = tiny_model(family)
    expected = model(IDS[:1, :5].repeat(6, 1), use_cache=False).logits
    keep_out_of_compiled_code()
    with fused(find_groups(model)), torch.no_grad():
        for part in compiled_parts(model):
            part._compiled_call_impl = torch.compile(part._call_impl, dynamic=True, backend=backend)
        counts = []
        for rows in (6, 4, 2, 6):
            logits = model(IDS[:1, :5].repeat(rows, 1), use_cache=False).logits
            counts.append(len(products))
    for part in compiled_parts(model):
        part._compiled_call_impl = None
    torch.testing.assert_close(logits, expected)
    assert len(set(counts)) == 1 and counts[0] <= 8, "a few graphs, for all layers and any number of rows"
    assert max(products) == 2 and sum(products) in (4, 5), products


@pytest.mark.skipif(not (which("g++") or which("clang++")), reason="torch.compile needs a C++ compiler")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "where", [pytest.param("gpu", marks=pytest.mark.gpu), pytest.param("cpu", marks=pytest.mark.slow)]
)
def test_compiled_layers_round_where_the_module_does(where, device):
    """In bf16 the compiler, left to itself, keeps more digits than the module: xi would measure that."""
    model = tiny_model("qwen3", dtype=torch.bfloat16, num_hidden_layers=1, device=device)
    ids = torch.randint(0, 256, (6, 1), device=device)
    expected = model(ids, use_cache=False).logits.detach()
    keep_out_of_compiled_code()

    # a C++ compiler takes half a minute for whole layers; most of what rounds is in the MLP
    parts = compiled_parts(model) if where == "gpu" else [compiled_parts(model)[0].mlp]

    def error(options):
        torch._dynamo.reset()
        with torch.no_grad():
            for part in parts:
                part._compiled_call_impl = torch.compile(part._call_impl, dynamic=True, options=options)
            got = model(ids, use_cache=False).logits
        for part in parts:
            part._compiled_call_impl = None
        return float((got - expected).abs().mean())

    assert error(COMPILER) < 0.25 * error({})


def test_what_lies_together_inside_something_larger_is_found_there():
    flat = torch.randn(10, 4)
    parameters = [torch.nn.Parameter(torch.empty(0)) for _ in range(2)]
    parameters[0].data, parameters[1].data = flat[2:5], flat[5:9]
    assert torch.equal(_join(parameters), flat[2:9])
    assert parameters[0].data_ptr() == flat[2].data_ptr()
