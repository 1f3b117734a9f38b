# SPDX-License-Identifier: Apache-2.0
"""Adapters leave out what chooses among experts, unless it is named."""

from __future__ import annotations

import logging

import families
import pytest
import torch

from sparse_rl.model.lora import LoraConfig, add_adapters, merge, save_model
from sparse_rl.model.tiny import tiny_model

ROUTERS = {
    "afmoe": {"mlp.router.gate"},
    "hunyuan_v1_moe": {"mlp.gate.wg"},
    "jetmoe": {"mlp.router.layer", "self_attention.experts.router.layer"},
    "mixtral": {"mlp.gate"},
    "qwen2_moe": {"mlp.shared_expert_gate"},
}


def adapted(model):
    """Names of what has adapters in the last layer."""
    suffix = ".lora_A.default.weight"
    names = {name.removesuffix(suffix) for name, _ in model.named_parameters() if name.endswith(suffix)}
    return {name.split(".", 3)[3] for name in names if name.startswith("model.layers.1.")}


@pytest.mark.parametrize("family", ROUTERS)
def test_routers_have_no_adapters_by_default(family, caplog, tmp_path):
    """All else has, and what was saved is merged into another copy of the base."""
    config = families.tiny_config(family)
    model = families.tiny_model(config)
    with caplog.at_level(logging.INFO):
        add_adapters(model, LoraConfig(r=2), seed=0)
    assert not adapted(model) & ROUTERS[family] and "leaves out the routers" in caplog.text
    attention = {"self_attention.kv_proj"} if family == "jetmoe" else {f"self_attn.{x}_proj" for x in "qkvo"}
    assert attention <= adapted(model)
    assert ("mlp.experts" in adapted(model)) == (family in ("afmoe", "hunyuan_v1_moe", "mixtral"))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    save_model(model, tmp_path)
    merged, ids = families.tiny_model(config), torch.arange(1, 20)[None]
    with torch.no_grad():
        before = merged(ids).logits
        merge(merged, tmp_path)
        torch.testing.assert_close(merged(ids).logits, model(ids).logits, atol=1e-3, rtol=0)
        assert (before - model(ids).logits).abs().max() > 0.1


def test_a_router_that_is_named_has_adapters_and_is_told(caplog):
    model = families.tiny_model(families.tiny_config("afmoe"))
    add_adapters(model, LoraConfig(r=2, target=("q_proj", "gate")), seed=0)
    assert adapted(model) == {"self_attn.q_proj", "mlp.router.gate"}
    assert "adapts 1 routers of experts too, such as model.layers.1.mlp.router.gate" in caplog.text


def test_a_model_without_experts_is_adapted_whole(caplog):
    model = tiny_model(num_hidden_layers=2)
    with caplog.at_level(logging.INFO):
        add_adapters(model, LoraConfig(r=2), seed=0)
    assert {"mlp.gate_proj", "self_attn.q_proj"} <= adapted(model) and "routers" not in caplog.text
