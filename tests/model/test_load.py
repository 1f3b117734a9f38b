# SPDX-License-Identifier: Apache-2.0
"""Models that load, and those that are refused with the reason."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from dataclasses import replace
from functools import partial

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from sparse_rl.kernels.attention import packed_attention
from sparse_rl.model import attention, probe
from sparse_rl.model.attention import NAME, UnsupportedModelError, registered
from sparse_rl.model.dry_run import _Recorder, dry_run
from sparse_rl.model.load import load, load_reader, stop_ids
from sparse_rl.model.tiny import FAMILIES, WINDOW, tiny_model, tiny_tokenizer

SMALL = {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.12,  # else attention hardly counts, and half precision hides which
}

REFUSED = {
    "convolution layers": ("lfm2", {"layer_types": ["conv", "conv", "full_attention", "conv"]}, "layers of type conv"),
    "state-space layers": ("mamba", {}, "layers of type linear_attention"),
    "chunked attention": ("llama4_text", {"num_local_experts": 2}, "chunked_attention"),
    "attention twice a layer": ("diffllama", {}, r"for layers \[0, 0, 1, 1, .* each of its 4 once in order"),
    "its own attention": ("stablelm", {}, "code of its own, not through transformers' AttentionInterface"),
    "a mask of its own": ("doge", {}, "attention mask|got a mask"),
    "an encoder": ("bert", {}, "reads the tokens that follow"),
    "positions of its own": ("roberta", {"is_decoder": True}, "other logits"),
    "layers of two widths": (
        "gemma4_text",
        {"layer_types": ["sliding_attention", "full_attention"] * 2, "vocab_size_per_layer_input": 259},
        "4 heads and 2 of keys, 512 and 512 wide in layer 1, 4 heads and 2 of keys, 16 and 16 wide in layer 0",
    ),
    "both directions": ("gemma3_text", {"use_bidirectional_attention": True}, "both directions"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_models_are_refused(case, dtype):
    model_type, settings, message = REFUSED[case]
    config = AutoConfig.for_model(model_type, **{**SMALL, **settings})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=registered(), dtype=dtype).eval()
    with pytest.raises(UnsupportedModelError, match=message):
        dry_run(model)


half_model = partial(tiny_model, dtype=torch.bfloat16)


def noisy_model():
    """Sharp attention in many layers amplifies rounding: logits of bf16 are 0.2 of their spread off."""
    model = half_model(seed=2, num_hidden_layers=32)
    for name, weight in model.named_parameters():
        if "q_proj" in name or "k_proj" in name:
            weight.data.mul_(3)
    return model


def test_a_model_that_rounding_moves_far_is_not_refused(monkeypatch):
    model = noisy_model()
    assert dry_run(model).dtype == torch.bfloat16 and model.config._attn_implementation == NAME
    monkeypatch.setattr(probe, "_in_float32", lambda given: given)
    with pytest.raises(UnsupportedModelError, match="other logits"):
        dry_run(model)


@pytest.mark.parametrize(
    "fault", [{"scale": 0.05}, {"window": 2}, {"boundaries": [0, 2, 77, 83]}, {"boundaries": [0, 83]}]
)
@pytest.mark.parametrize(
    ("make", "kernels"), [(half_model, "all"), (half_model, "of half precision"), (noisy_model, "all")]
)
@pytest.mark.some(2)
def test_attention_that_is_wrong_is_refused_in_half_precision(make, kernels, fault, monkeypatch):
    def wrong(call, boundaries):
        given = {"boundaries": boundaries}
        given |= fault if kernels == "all" or call.q_BHTD.dtype == torch.bfloat16 else {}
        return packed_attention(boundaries=given.pop("boundaries"), call=replace(call, **given))

    monkeypatch.setattr(attention, "packed_attention", wrong)
    with pytest.raises(UnsupportedModelError, match="other logits.*" + ("" if kernels == "all" else "--dtype float32")):
        dry_run(make())


@pytest.mark.parametrize("make", [half_model, noisy_model])
def test_positions_that_are_wrong_are_refused_in_half_precision(make, monkeypatch):
    logits = probe._logits
    wrong = lambda model, ids, positions, kv: logits(model, ids, positions % 3, kv)  # noqa: E731
    monkeypatch.setattr(probe, "_logits", wrong)
    with pytest.raises(UnsupportedModelError, match="other logits"):
        dry_run(make())


def scale_by_place(queries):
    """Follows the place in the row, not the position."""
    steps = torch.arange(queries.shape[1]) // 32
    return queries * (1 + 0.3 * steps.to(queries.dtype))[:, None]


def scale_alone(queries):
    """Wrong for a token that comes alone, as in decoding."""
    return queries * (1.3 if queries.shape[1] == 1 else 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [scale_by_place, scale_alone])
def test_a_scale_that_does_not_follow_positions_is_refused(scale, dtype):
    model = tiny_model(dtype=dtype)
    model.model.layers[2].self_attn.q_proj.register_forward_hook(lambda module, given, queries: scale(queries))
    with pytest.raises(UnsupportedModelError, match="other logits"):
        dry_run(model)


def test_a_text_that_changes_with_a_far_one_beside_it_is_refused():
    model = tiny_model()
    rotate = model.model.rotary_emb.forward
    model.model.rotary_emb.forward = lambda x, position_ids: rotate(x, position_ids * (1 + (position_ids.max() > 4096)))
    with pytest.raises(UnsupportedModelError, match="other logits"):
        dry_run(model)


def test_a_mixture_with_a_router_near_a_tie_is_not_refused():
    """Of 40 such models this is the one whose tokens go to other experts in bf16."""
    settings = SMALL | {"num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 1}
    torch.manual_seed(36)
    config = AutoConfig.for_model("mixtral", **settings | {"initializer_range": 0.2})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=registered(), dtype=torch.bfloat16).eval()
    assert dry_run(model).dtype == torch.bfloat16


def test_a_mixture_in_float64_is_refused_with_a_remedy():
    config = AutoConfig.for_model("mixtral", **SMALL | {"num_local_experts": 4})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=registered(), dtype=torch.float64).eval()
    with pytest.raises(UnsupportedModelError, match=r"does not run in float64 \(.*\); give --dtype float32"):
        dry_run(model)


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [("llama", {"attention_dropout": 0.1}), ("opt", {"dropout": 0.2, "layerdrop": 0.3, "ffn_dim": 64})],
)
def test_dropout_is_switched_off_and_saved_as_it_was(model_type, settings, tmp_path, caplog):
    config = AutoConfig.for_model(model_type, **SMALL, **settings)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "given")
    tiny_tokenizer().save_pretrained(tmp_path / "given")
    model = load(str(tmp_path / "given")).model
    assert "dropout is switched off" in caplog.text and all(name in caplog.text for name in settings if "drop" in name)
    model.train()
    ids = torch.arange(1, 9)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)
    model.save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert {name: saved[name] for name in settings} == settings


@pytest.mark.parametrize("family", FAMILIES)
def test_shape_of_every_family(family):
    shape = dry_run(tiny_model(family))
    latent = family == "deepseek_v3"
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads) == (4, 4, 4 if latent else 2)
    assert (shape.head_dim, shape.value_dim) == (32, 24 if latent else 32)
    expected = {
        "qwen2": (None, None, WINDOW, WINDOW),
        "mistral": (WINDOW,) * 4,
        **dict.fromkeys(("gemma2", "gemma3", "gpt_oss"), (WINDOW, None, WINDOW, None)),
    }
    assert shape.windows == expected.get(family, (None,) * 4)
    assert shape.entry_bytes == (4 * 4 * ((32 + 24) * 4 + 4) if latent else 4 * 2 * (2 * 32 * 4 + 4))
    by_hand = sum(min(context, w or context) for w in shape.windows for context in (20, 21, 22, 23, 24, 25, 26))
    assert shape.hybrid_entries(range(20, 27)) == by_hand / 4
    for contexts in (range(1, 5), range(3, 3), range(WINDOW - 2, WINDOW + 3), range(90, 95)):
        by_hand = sum(min(context, w or context) for w in shape.windows for context in contexts)
        assert shape.hybrid_entries(contexts) == by_hand / 4


def test_a_saved_model_loads_and_samples_alike(tmp_path):
    model = tiny_model("qwen3", seed=3)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    loaded = load(str(tmp_path))
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits)
    assert loaded.tokenizer("héllo\n").input_ids == list("héllo\n".encode())
    assert loaded.tokenizer.decode(list("héllo\n".encode())) == "héllo\n"
    assert loaded.vocab_size == 259


def test_all_stop_ids_of_the_generation_config():
    model = tiny_model()
    model.generation_config.eos_token_id = [5, 9]
    assert stop_ids(model) == (5, 9)
    model.generation_config.eos_token_id = 7
    assert stop_ids(model) == (7,)
    model.generation_config.eos_token_id = None
    assert stop_ids(model) == ()


def test_tiny_models_are_reproducible_and_leave_the_seed_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, second = tiny_model(seed=1), tiny_model(seed=1)
    assert torch.rand(1) == expected
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(next(first.parameters()), next(tiny_model(seed=2).parameters()))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiny:gpt9", "no tiny model of family 'gpt9'"),
        ("smolm2", r"'smolm2' is unknown \(did you mean 'smollm2'\?\)"),
        ("embeded", r"did you mean 'embedded'\?"),
        ("", "neither a folder nor a hub name"),
        ("./nowhere", "neither a folder nor a hub name"),
        ("no/such/model", "neither a folder nor a hub name"),
        ("no-such-owner/no-such-model", "no such folder here"),
    ],
)
def test_names_that_lead_nowhere(name, message, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=message):
        load(name)


def test_broken_folders_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"no config\.json\. Give one that has\.$"):
        load(str(tmp_path))
    for step, age in ((9, 200), (10, 100)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "config.json").touch()
        os.utime(tmp_path / f"checkpoint-{step}" / "config.json", (time.time() - age,) * 2)
    with pytest.raises(ValueError, match=r"Its last checkpoint has one: .*checkpoint-10$"):
        load(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match="could not be loaded"):
        load(str(tmp_path))
    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 weights, model.norm.weight"):
        load(str(tmp_path))
    weights["model.norm.weight"] = torch.full_like(weights["model.embed_tokens.weight"][0], math.nan)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"has logits that are not finite; check its weights"):
        load(str(tmp_path))
    for path in tmp_path.glob("token*"):
        path.unlink()
    with pytest.raises(ValueError, match=r"has no tokenizer \(tokenizer\.json, .*\); write one into the folder with"):
        load(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    with pytest.raises(ValueError, match="could not be loaded"):
        load(str(tmp_path))


def test_sampling_defaults_of_a_checkpoint_are_ignored_aloud(tmp_path, caplog):
    model = tiny_model()
    model.generation_config.update(do_sample=True, temperature=0.6, top_p=0.95)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        load(str(tmp_path))
    assert "temperature 0.6, top_p 0.95" in caplog.text


def test_layers_that_are_not_what_the_config_says_are_refused():
    model = tiny_model("gemma3")
    model.config.layer_types = ["full_attention"] * 4
    with pytest.raises(UnsupportedModelError, match="cannot tell which"):
        dry_run(model)


def test_layers_of_different_shape_are_refused(monkeypatch):
    model = tiny_model()
    attend = _Recorder.attend

    def uneven(self, layer_idx, call):
        heads = 1 + layer_idx % 2
        return attend(self, layer_idx, replace(call, k_BKTD=call.k_BKTD[:, :heads], v_BKTE=call.v_BKTE[:, :heads]))

    monkeypatch.setattr(_Recorder, "attend", uneven)
    with pytest.raises(
        UnsupportedModelError,
        match=r"4 heads and 2 of keys, 32 and 32 wide in layer 1, 4 heads and 1 of keys, .* must be alike",
    ):
        dry_run(model)


def test_a_dry_run_leaves_the_model_as_it_was(monkeypatch):
    model = tiny_model()
    model.train()
    model.model.embed_tokens.eval()
    dry_run(model)
    assert model.training and not model.model.embed_tokens.training
    forward = model.model.layers[0].forward

    def fail_with_its_own(*args, **kwargs):
        if model.config._attn_implementation == "eager":
            raise RuntimeError("no eager attention")
        return forward(*args, **kwargs)

    monkeypatch.setattr(model.model.layers[0], "forward", fail_with_its_own)
    with pytest.raises(UnsupportedModelError, match="no eager attention"):
        dry_run(model)
    assert model.config._attn_implementation == NAME and model.training


@pytest.mark.parametrize("name", ["tiny", "tiny:qwen3", "embedded", "folder", "adapter"])
def test_what_is_read_without_weights_is_what_is_loaded(tmp_path, name):
    if name in ("folder", "adapter"):
        tiny_model(max_position_embeddings=77).save_pretrained(tmp_path / "folder")
        tiny_tokenizer().save_pretrained(tmp_path / "folder")
        (tmp_path / "adapter").mkdir()
        base = {"peft_type": "LORA", "base_model_name_or_path": str(tmp_path / "folder")}
        (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(base))
    reader = load_reader(str(tmp_path / name) if name in ("folder", "adapter") else name)
    loaded = load(str(tmp_path / "folder") if name in ("folder", "adapter") else name)
    assert reader.context == loaded.context and reader.tokenizer.get_vocab() == loaded.tokenizer.get_vocab()


def test_a_reader_that_cannot_be_had_is_said(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "no/such/model"}')
    with pytest.raises(ValueError, match="is an adapter of 'no/such/model', which cannot be loaded"):
        load_reader(str(tmp_path))
    with pytest.raises(ValueError, match="no tiny model of family 'x'"):
        load_reader("tiny:x")
