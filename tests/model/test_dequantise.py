# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints: their weights are what a computation by hand makes of the blocks, or they are refused."""

from __future__ import annotations

import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from small_run import small_trainer
from tiny_wrappers import TEXT, other_weights, save_wrapper

from sparse_rl.evaluate import EvalConfig
from sparse_rl.model import wrappers
from sparse_rl.model.load import load, load_reader
from sparse_rl.model.tiny import tiny_tokenizer
from sparse_rl.plan import model_config, model_size
from sparse_rl.train.export import export

BLOCK = (32, 24)  # cuts the last block of a row of 64 and of a column of 16 or 80 short
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(BLOCK)}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 80}
LATENT = {
    "q_lora_rank": 40, "kv_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "head_dim": None, "num_key_value_heads": 4,
}  # fmt: skip


def save(folder, model_type, **settings):
    config = transformers.AutoConfig.for_model(model_type, **TEXT | settings)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)


def to_fp8(folder, plain, block=BLOCK, settings=FP8):
    """Quantise the linear layers in a folder; `plain` becomes the same with weights that are dequantised by hand."""
    pytest.importorskip("accelerate")
    weights, dequantised = load_file(folder / "model.safetensors"), {}
    for name, weight in list(weights.items()):
        dequantised[name] = weight
        if not re.search(r"(proj|w1|w2|w3|_with_mqa)\.weight$", name) or "vis" in name:
            continue
        scales = weight.abs().max().float() / 448
        if block is not None:
            scales = scales * (
                1 + torch.rand([-(-size // step) for size, step in zip(weight.shape, block, strict=True)])
            )
        each = scales.expand(weight.shape) if block is None else spread(scales, block, weight.shape)
        weights[name] = (weight.float() / each).to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = scales
        dequantised[name] = (weights[name].float() * each).to(torch.bfloat16)
    assert len(weights) > len(dequantised)
    write(folder, weights, settings)
    write(plain, dequantised, None, folder)


def spread(scales, block, shape):
    """One scale for each weight: blocks begin at the first row and column, and the last ones may be cut short."""
    return scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: shape[0], : shape[1]]


def write(folder, weights, quantised, like=None):
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads(((like or folder) / "config.json").read_text()) | {"quantization_config": quantised}
    (folder / "config.json").write_text(json.dumps({key: given for key, given in config.items() if given is not None}))
    tiny_tokenizer().save_pretrained(folder)


def assert_same_weights(ours, theirs):
    ours, theirs = ours.state_dict(), theirs.state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("qwen3", {}),
        ("minimax_m2", {"intermediate_size": 80, **EXPERTS, "rotary_dim": 8}),
        ("deepseek_v3", {**EXPERTS, **LATENT}),
        ("qwen3_moe", {**EXPERTS, "num_experts": 4}),
    ],
)
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_fp8_is_dequantised_block_by_block(tmp_path, model_type, settings, dtype):
    save(tmp_path / "fp8", model_type, **settings)
    to_fp8(tmp_path / "fp8", tmp_path / "plain")
    model = load(str(tmp_path / "fp8"), dtype=dtype).model
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype="auto")
    if dtype is None:
        assert_same_weights(model, expected)
        model.save_pretrained(tmp_path / "again")
        again = load_file(tmp_path / "again/model.safetensors")
        assert again.keys() == load_file(tmp_path / "plain/model.safetensors").keys()
        assert "quantization_config" not in (tmp_path / "again/config.json").read_text()
    else:
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in model.parameters()), "rounded once"
        assert_same_weights(model.to(torch.bfloat16), expected.to(torch.bfloat16))
    size = model_size(model_config(str(tmp_path / "fp8"), download=False), "x", torch.bfloat16)
    assert size.parameters == sum(parameter.numel() for parameter in model.parameters())


def test_one_scale_a_matrix(tmp_path):
    save(tmp_path / "fp8", "qwen3")
    to_fp8(tmp_path / "fp8", tmp_path / "plain", None, FP8 | {"weight_block_size": None, "activation_scheme": "static"})
    expected = load(str(tmp_path / "plain")).model
    assert_same_weights(load(str(tmp_path / "fp8")).model, expected)


def test_what_a_wrapper_says_of_its_text_alone_is_heard(tmp_path):
    save_wrapper("qwen2_vl", tmp_path / "fp8", torch.bfloat16)
    to_fp8(tmp_path / "fp8", tmp_path / "plain", settings=None)
    config = json.loads((tmp_path / "fp8/config.json").read_text())
    config["text_config"]["quantization_config"] = FP8
    (tmp_path / "fp8/config.json").write_text(json.dumps(config))
    assert_same_weights(*(load(str(tmp_path / name)).model for name in ("fp8", "plain")))


@pytest.mark.slow
def test_a_run_on_a_quantised_model_trains_plain_weights(tmp_path):
    save(tmp_path / "fp8", "qwen3")
    to_fp8(tmp_path / "fp8", tmp_path / "plain")
    runs = {}
    for name in ("fp8", "plain"):
        loaded = load(str(tmp_path / name))
        assert load_reader(str(tmp_path / name)).context == loaded.context
        trainer = small_trainer(tmp_path / f"run-{name}", loaded=loaded, parts={"eval": EvalConfig(prompts=1)}, steps=1)
        trainer.train()
        export(tmp_path / f"run-{name}/checkpoint-1", tmp_path / f"out-{name}")
        runs[name] = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"out-{name}", dtype="auto")
    assert runs["fp8"].dtype == torch.bfloat16
    assert_same_weights(runs["fp8"], runs["plain"])


def test_a_quantised_wrapper_is_exported_in_plain_weights(tmp_path):
    save_wrapper("mistral3", tmp_path / "fp8", torch.bfloat16)
    to_fp8(tmp_path / "fp8", tmp_path / "plain")
    models = [load(str(tmp_path / name)).model for name in ("fp8", "plain")]
    assert_same_weights(*models)
    wrappers.save(models[0], tmp_path / "out")
    tiny_tokenizer().save_pretrained(tmp_path / "out")
    kind = transformers.AutoModelForImageTextToText
    exported, plain = (kind.from_pretrained(tmp_path / name, dtype="auto") for name in ("out", "plain"))
    assert "quantization_config" not in (tmp_path / "out/config.json").read_text()
    ours, theirs = other_weights(exported), other_weights(plain)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert_same_weights(load(str(tmp_path / "out")).model, models[0])


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_mxfp4_experts_are_dequantised(tmp_path, dtype):
    save(tmp_path / "fp4", "gpt_oss", **EXPERTS, intermediate_size=96)
    weights, by_hand = load_file(tmp_path / "fp4/model.safetensors"), {}
    for name, weight in list(weights.items()):
        if re.search(r"experts\.(gate_up|down)_proj$", name):
            experts, inputs, outputs = weight.shape
            codes = torch.randint(0, 16, (experts, outputs, inputs // 32, 32), dtype=torch.uint8)
            scales = torch.randint(120, 130, codes.shape[:3], dtype=torch.uint8)
            del weights[name]
            weights[f"{name}_blocks"] = codes[..., 0::2] | codes[..., 1::2] << 4
            weights[f"{name}_scales"] = scales
            values = E2M1[codes.long()] * 2.0 ** (scales.float() - 127)[..., None]
            by_hand[name] = values.flatten(2).transpose(1, 2)
    assert len(by_hand) == 4
    write(tmp_path / "fp4", weights, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    model = load(str(tmp_path / "fp4"), dtype=dtype).model
    assert {parameter.dtype for parameter in model.parameters()} == {dtype or torch.bfloat16}
    state = model.state_dict()
    assert all(torch.equal(state[name].float(), values) for name, values in by_hand.items())
    model.save_pretrained(tmp_path / "again")
    again = load_file(tmp_path / "again/model.safetensors")
    assert all(torch.equal(again[name].float(), values) for name, values in by_hand.items())


@pytest.mark.parametrize("method", ["gptq", "compressed-tensors", "of tomorrow"])
def test_other_methods_are_refused_by_all_that_reads_them(tmp_path, method):
    save(tmp_path, "qwen3")
    write(tmp_path, load_file(tmp_path / "model.safetensors"), {"quant_method": method})
    for ask in (load, load_reader, lambda name: model_config(name, download=False)):
        with pytest.raises(
            ValueError, match=rf"is quantised \({method}\), but .* or one in fp8 or mxfp4, which is deq"
        ):
            ask(str(tmp_path))


def test_scales_without_a_weight_are_no_plain_model(tmp_path):
    save(tmp_path / "fp8", "qwen3")
    to_fp8(tmp_path / "fp8", tmp_path / "plain")
    weights = load_file(tmp_path / "fp8/model.safetensors")
    weights["model.layers.0.mlp.side_proj.weight_scale_inv"] = torch.ones(2, 2)
    write(tmp_path / "fp8", weights, FP8)
    with pytest.raises(ValueError, match=r"has 1 weights, .*side_proj.* does not use"):
        load(str(tmp_path / "fp8"))
