# SPDX-License-Identifier: Apache-2.0
"""Adapters: they alone move, sampler and learner share them, a checkpoint holds them, their base is the reference."""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
from pathlib import Path
from shutil import which

import pytest
import torch
from safetensors.torch import load_file
from small_run import kept, small_trainer, without_times

from sparse_rl.evaluate import EvalConfig
from sparse_rl.kv import RKV
from sparse_rl.metrics import read_log
from sparse_rl.model.attention import keep_out_of_compiled_code
from sparse_rl.model.dry_run import dry_run
from sparse_rl.model.load import load
from sparse_rl.model.lora import LoraConfig, adapters_off, add_adapters, merge, save_model
from sparse_rl.model.tiny import FAMILIES, tiny_model, tiny_tokenizer
from sparse_rl.objective.loss import LossConfig
from sparse_rl.rollout import Engine, EngineConfig, Sampling
from sparse_rl.rollout.decoder import COMPILER, TRACING, compiled_parts
from sparse_rl.rollout.fusion import Columns, find_groups, fused
from sparse_rl.train import OptimizerConfig, UpdateConfig, checkpoint

peft = pytest.importorskip("peft")

IDS = torch.randint(0, 200, (2, 12))
OPTIMIZER = OptimizerConfig(learning_rate=1e-2)
PARTS = {"lora": LoraConfig(r=4, alpha=8.0), "optimizer": OPTIMIZER, "eval": EvalConfig(prompts=1)}


def trained(folder, *, dtype=None, parts=None, **config):
    trainer = small_trainer(folder, loaded=load("embedded", dtype=dtype), parts=PARTS | (parts or {}), **config)
    trainer.train()
    return trainer


def disturb(model, std=0.2):
    """Give B something to say."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=std)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A bf16 run with a reference that was never stopped."""
    folder = tmp_path_factory.mktemp("lora") / "run"
    parts = {"loss": LossConfig(beta=0.1)}
    return folder, trained(folder, dtype=torch.bfloat16, parts=parts, steps=2, save_total_limit=None)


# The module


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"gpt_oss", "deepseek_v3"}))  # whose projections are others
@pytest.mark.some(3)
def test_fresh_adapters_change_nothing_and_serve_every_family(family):
    model = tiny_model(family)
    expected, shape = model(IDS).logits.detach(), dry_run(model)
    add_adapters(model, LoraConfig(r=3), seed=1)
    assert torch.equal(model(IDS).logits, expected) and dry_run(model) == shape
    trainable = {name.split(".")[-2] for name, p in model.named_parameters() if p.requires_grad}
    adapted = {name.split(".")[-4] for name, p in model.named_parameters() if ".lora_A." in name}
    assert trainable == {"default"}
    inward = (
        {"qkv_proj", "gate_up_proj"} if family == "phi3" else {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    )
    assert adapted == inward | {"o_proj", "down_proj"}
    disturb(model)
    assert not torch.allclose(model(IDS).logits, expected)
    with adapters_off(model):
        assert torch.equal(model(IDS).logits, expected)


def test_an_adapted_projection_is_w_x_plus_alpha_over_r_b_a_x():
    model = tiny_model(dtype=torch.float64)
    add_adapters(model, LoraConfig(r=3, alpha=6.0, target=("v_proj",)), seed=0)
    disturb(model)
    part = model.model.layers[1].self_attn.v_proj
    w, a, b = part.base_layer.weight, part.lora_A["default"].weight, part.lora_B["default"].weight
    x = torch.randn(5, 128, dtype=torch.float64)
    assert a.shape == (3, 128) and b.shape == (64, 3) and a.dtype == torch.float64
    torch.testing.assert_close(part(x), x @ w.T + 2.0 * (x @ a.T @ b.T))
    assert type(model.model.layers[1].self_attn.q_proj) is torch.nn.Linear


def test_the_seed_decides_the_adapters_and_nothing_else_is_drawn():
    def adapters(seed):
        model = tiny_model()
        state = torch.get_rng_state()
        add_adapters(model, LoraConfig(r=2), seed)
        assert torch.equal(torch.get_rng_state(), state)
        return torch.cat([p.flatten() for p in model.parameters() if p.requires_grad])

    assert torch.equal(adapters(3), adapters(3)) and not torch.equal(adapters(3), adapters(4))


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "norm", "q_prog", "self_attn"])
def test_only_projections_are_adapted(target):
    with pytest.raises(ValueError, match=rf"lora.target has '{target}'; this model's projections are .*, q_proj"):
        add_adapters(tiny_model(), LoraConfig(r=2, target=("q_proj", target)), seed=0)


def test_settings_that_do_not_fit_are_refused(monkeypatch):
    for given, message in (
        ({"r": -1}, "lora.r is -1"),
        ({"r": 2, "alpha": 0.0}, "lora.alpha is 0.0"),
        ({"r": 2, "target": ()}, "lora.target is \\[\\]"),
        ({"r": 2, "target": ("all-linear", "q_proj")}, "all-linear alone"),
        ({"alpha": 1.0}, "lora.alpha is given, but lora.r is 0"),
    ):
        with pytest.raises(ValueError, match=message):
            LoraConfig(**given)
    model = tiny_model()
    with pytest.raises(
        ValueError, match=rf"lora.r is 1000000000, more than the model is wide \({model.config.hidden_size}"
    ):
        add_adapters(model, LoraConfig(r=10**9), seed=0)
    add_adapters(model, LoraConfig(r=1), seed=0)
    with pytest.raises(ValueError, match="has adapters already; load it anew"):
        add_adapters(model, LoraConfig(r=1), seed=0)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"lora.r is 8, which needs peft; pip install 'sparse-rl\[lora\]'"):
        add_adapters(tiny_model(), LoraConfig(r=8), seed=0)
    with pytest.raises(ValueError, match=r"^saved is an adapter, which needs peft; pip install"):
        merge(tiny_model(), Path("saved"))


@pytest.mark.parametrize(("target", "left"), [("all-linear", set()), ("k_proj", {"gate_proj"})])
def test_adapted_projections_are_joined_and_each_adds_its_own(target, left):
    model = tiny_model("qwen2", dtype=torch.float64)
    add_adapters(model, LoraConfig(r=2, target=(target,)), seed=0)
    kept, groups = list(model.parameters()), find_groups(model)
    assert len(groups) == 2 * model.config.num_hidden_layers
    for _ in range(2):  # the same groups serve after an update in place
        disturb(model)
        expected = model(IDS).logits
        with fused(groups):
            assert type(model.model.layers[1].self_attn.k_proj) is Columns
            torch.testing.assert_close(model(IDS).logits, expected)
    assert all(a is b for a, b in zip(kept, model.parameters(), strict=True))
    with adapters_off(model):
        assert {group.names[0] for group in find_groups(model)} == left


def test_what_a_joined_product_could_not_add_is_left_as_it_is():
    """Adapters of more digits than their base, as peft makes them by itself, and one that other projections have."""
    model = tiny_model("qwen2", dtype=torch.bfloat16)
    settings = peft.LoraConfig(target_modules=["q_proj", "k_proj", "v_proj"])
    wrapped = peft.get_peft_model(model, settings)
    assert model.model.layers[0].self_attn.q_proj.lora_A["default"].weight.dtype == torch.float32
    disturb(wrapped)
    expected, groups = wrapped(IDS).logits, find_groups(wrapped)
    assert {group.names[0] for group in groups} == {"gate_proj"}
    with fused(groups):
        torch.testing.assert_close(wrapped(IDS).logits, expected)
    wrapped.add_adapter("other", peft.LoraConfig(target_modules=["o_proj"]))
    wrapped.set_adapter("other")
    assert {group.names[0] for group in find_groups(wrapped)} == {"gate_proj"}


@pytest.mark.slow
@pytest.mark.skipif(not (which("g++") or which("clang++")), reason="torch.compile needs a C++ compiler")
@pytest.mark.timeout(300)
def test_adapted_layers_compile_to_one_code_for_all():
    model = tiny_model("qwen3", num_hidden_layers=6)
    add_adapters(model, LoraConfig(r=2), seed=0)
    disturb(model)
    keep_out_of_compiled_code()
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.no_grad(), torch._dynamo.config.patch(TRACING):
        expected, groups = model(IDS[:, :5], use_cache=False).logits, find_groups(model)
        for part in compiled_parts(model):
            part._compiled_call_impl = torch.compile(part._call_impl, dynamic=True, options=COMPILER)
        with fused(groups):
            got = model(IDS[:, :5], use_cache=False).logits
        first = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        disturb(model)  # an update in place needs no new code
        with fused(groups):
            again = model(IDS[:, :5], use_cache=False).logits
    torch.testing.assert_close(got, expected)
    assert not torch.allclose(again, expected)
    assert first == torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 8


# The run


def test_the_adapters_move_and_the_base_does_not(whole):
    _, trainer = whole
    base = load("embedded", dtype=torch.bfloat16).model.state_dict()
    state = trainer.loaded.model.state_dict()
    frozen = {name.replace(".base_layer", ""): value for name, value in state.items() if ".lora_" not in name}
    assert frozen.keys() == base.keys() and all(torch.equal(frozen[name], base[name]) for name in base)
    moved = [bool(value.any()) for name, value in state.items() if ".lora_B." in name]
    assert len(moved) == 28 and all(moved)
    assert {p.dtype for p in trainer.learner.masters.masters} == {torch.float32}


def test_the_reference_is_the_base_so_kl_is_0_before_the_first_update_and_not_after(whole, tmp_path):
    folder, trainer = whole
    lines = read_log(folder / "metrics.jsonl")
    assert trainer.learner.ref_head.model is trainer.loaded.model, "no second copy"
    assert math.isfinite(lines[2]["kl"]) and lines[2]["kl"] > 0
    parts = {"loss": LossConfig(beta=0.1), "update": UpdateConfig(max_tokens=100)}
    trained(tmp_path / "run", parts=parts, steps=1)
    assert read_log(tmp_path / "run" / "metrics.jsonl")[1]["kl"] == 0.0


def test_a_reference_between_forward_and_backward_leaves_the_gradient_alone():
    def gradients(disturbed):
        model = load("embedded").model
        add_adapters(model, LoraConfig(r=2), seed=0)
        torch.manual_seed(5)
        disturb(model)
        loss = model(IDS % 16).logits.logsumexp(-1).sum()
        if disturbed:
            with adapters_off(model), torch.no_grad():
                model(IDS % 16)
        loss.backward()
        return [p.grad for p in model.parameters() if p.requires_grad]

    for a, b in zip(gradients(False), gradients(True), strict=True):
        assert torch.equal(a, b)


def test_run_json_counts_what_is_trained(whole):
    folder, _ = whole
    record = json.loads((folder / "run.json").read_text())
    sizes = [w.shape for name, w in load("embedded").model.named_parameters() if "proj" in name]
    assert record["trainable_parameters"] == sum(4 * (rows + columns) for rows, columns in sizes)
    assert record["parameters"] == record["trainable_parameters"] + 796544
    assert record["config"]["lora"] == {"r": 4, "alpha": 8.0, "target": ["all-linear"]}


def test_a_stopped_run_resumes_bit_for_bit(whole, tmp_path):
    folder, _ = whole
    shutil.copytree(folder, tmp_path / "run")
    for later in checkpoint.checkpoints(tmp_path / "run")[1:]:
        shutil.rmtree(later)
    parts = {"loss": LossConfig(beta=0.1)}
    trained(tmp_path / "run", dtype=torch.bfloat16, parts=parts, steps=2, save_total_limit=None,
            resume_from_checkpoint=True)  # fmt: skip
    last = [run / "checkpoint-2" for run in (tmp_path / "run", folder)]
    adapters = [load_file(path / "adapter_model.safetensors") for path in last]
    for ours, theirs in (adapters, [kept(path) for path in last]):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert without_times(tmp_path / "run") == without_times(folder)


def test_a_run_of_other_adapters_is_not_taken_up(whole, tmp_path):
    folder, _ = whole
    shutil.copytree(folder, tmp_path / "run")
    for parts in ({"lora": LoraConfig(r=5)}, {"lora": LoraConfig()}):
        with pytest.raises(ValueError, match=r"is of another model .* and its lora settings"):
            trained(tmp_path / "run", parts=parts, steps=2, resume_from_checkpoint=True)


def test_a_run_on_another_base_is_not_taken_up(whole, tmp_path, monkeypatch):
    folder, _ = whole
    shutil.copytree(folder, tmp_path / "run")
    other = load("embedded", dtype=torch.bfloat16)
    with torch.no_grad():
        other.model.model.layers[1].mlp.up_proj.weight.mul_(1.1)
    monkeypatch.setitem(globals(), "load", lambda *_, **__: other)
    with pytest.raises(ValueError, match=r"checkpoint-2 has adapters for other weights than those of .*embedded"):
        trained(tmp_path / "run", parts={"loss": LossConfig(beta=0.1)}, steps=3, resume_from_checkpoint=True)


# The checkpoint


def test_a_checkpoint_holds_the_adapters_alone_and_peft_reads_it(whole):
    folder, trainer = whole
    last = folder / "checkpoint-2"
    names = {path.name for path in last.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json", "tokenizer.json"} <= names
    assert not names & {"model.safetensors", "config.json"}
    adapters, masters = load_file(last / "adapter_model.safetensors"), checkpoint.read_masters(last)
    assert len(adapters) == len(masters) == 56 and all(".lora_" in name for name in [*adapters, *masters])
    base = load("embedded", dtype=torch.bfloat16).model
    with torch.no_grad():
        theirs = peft.PeftModel.from_pretrained(base, last, autocast_adapter_dtype=False)(IDS % 16).logits
        assert torch.equal(theirs, trainer.loaded.model(IDS % 16).logits)


def test_an_adapter_folder_loads_as_a_model_with_the_adapter_merged(whole):
    folder, trainer = whole
    merged = load(str(folder / "checkpoint-2"))
    assert not any(".lora_" in name for name in merged.model.state_dict())
    assert all(parameter.requires_grad for parameter in merged.model.parameters())
    assert merged.model.config.name_or_path == str(folder / "checkpoint-2")
    state, expected = trainer.loaded.model.state_dict(), load("embedded").model.state_dict()
    for name in expected:
        if "proj" in name:
            a, b = (state[name.replace("weight", f"lora_{x}.default.weight")].float() for x in "AB")
            expected[name] = expected[name] + 2.0 * b @ a
    torch.testing.assert_close(merged.model.state_dict(), expected)


def test_adapters_on_adapters_find_their_way_to_the_base(whole, tmp_path):
    """A run that starts from an adapter's checkpoint."""
    folder, _ = whole
    start = load(str(folder / "checkpoint-1"))
    trainer = small_trainer(tmp_path / "run", loaded=start, parts=PARTS, steps=1)
    trainer.train()
    again = load(str(tmp_path / "run" / "checkpoint-1"))
    with torch.no_grad():
        merged, adapted = again.model(IDS % 16).logits, trainer.loaded.model(IDS % 16).logits
        torch.testing.assert_close(merged, adapted, atol=1e-3, rtol=1e-4)
        assert not torch.allclose(load("embedded").model(IDS % 16).logits, adapted, atol=1e-1)


def test_an_adapter_without_its_base_says_so(whole, tmp_path):
    folder, _ = whole

    def with_settings(name, change):
        shutil.copytree(folder / "checkpoint-1", tmp_path / name)
        path = tmp_path / name / "adapter_config.json"
        path.write_text(change(json.loads(path.read_text())))
        return str(tmp_path / name)

    tiny_model(hidden_size=64).save_pretrained(tmp_path / "other")
    tiny_tokenizer().save_pretrained(tmp_path / "other")
    gone = with_settings("gone", lambda s: json.dumps(s | {"base_model_name_or_path": str(tmp_path / "nowhere")}))
    with pytest.raises(
        ValueError, match=r"gone is an adapter of '.*nowhere', which cannot be loaded: .*Bring it there"
    ):
        load(gone)
    for change, message in (
        (lambda s: json.dumps(s | {"base_model_name_or_path": None}), "does not say what it was trained on"),
        (lambda s: json.dumps(s | {"peft_type": "IA3"}), "an adapter of type IA3; only LORA"),
        (lambda s: "{", "adapter_config.json is damaged"),
        (lambda s: json.dumps(s | {"base_model_name_or_path": str(tmp_path / "other")}), "does not fit its base model"),
    ):
        with pytest.raises(ValueError, match=message):
            load(with_settings(str(len(list(tmp_path.iterdir()))), change))


def test_a_quantised_checkpoint_is_refused_with_the_reason(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"is quantised \(bitsandbytes\), but .* plain weights; give the unquantised"):
        load(str(tmp_path))


# The sampler


@pytest.mark.parametrize("policy", [None, RKV(budget=16, interval=8, window=4)], ids=["full", "rkv"])
@pytest.mark.some(1)
def test_the_engine_samples_from_the_adapted_module_what_the_merged_one_says(policy, prompts, tmp_path):
    loaded = load("tiny", dtype=torch.float64)
    add_adapters(loaded.model, LoraConfig(r=4), seed=0)
    disturb(loaded.model, std=0.05)
    save_model(loaded.model, tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    merged = load(str(tmp_path), dtype=torch.float64)
    sampling = Sampling(max_tokens=30, temperature=0.0, stop_ids=())
    given = prompts(5, 20, 33, seed=random.randrange(1000))
    base = Engine(load("tiny", dtype=torch.float64), policy, EngineConfig(rows=4)).generate(given, sampling)
    adapted, plain = (Engine(m, policy, EngineConfig(rows=4)).generate(given, sampling) for m in (loaded, merged))
    for a, b in zip(adapted, plain, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        torch.testing.assert_close(a.sampler_logprobs, b.sampler_logprobs, atol=1e-5, rtol=0)
    assert any(a.token_ids.tolist() != b.token_ids.tolist() for a, b in zip(adapted, base, strict=True))


@pytest.mark.gpu
@pytest.mark.compiled
def test_graphs_of_adapted_layers_follow_the_adapters(prompts, device):
    loaded = load("tiny", device=device)
    add_adapters(loaded.model, LoraConfig(r=4), seed=0)
    sampling = Sampling(max_tokens=30, temperature=0.0, stop_ids=())
    engine = Engine(loaded, RKV(budget=32, interval=16), EngineConfig(rows=8))
    eager = Engine(loaded, RKV(budget=32, interval=16), EngineConfig(rows=8, graphs=False))
    drawn = []
    for _ in range(2):  # the same graphs serve after an update in place
        disturb(loaded.model, std=0.05)
        drawn.append([rollout.token_ids.tolist() for rollout in engine.generate(prompts(5, 40, 17), sampling)])
        expected = [rollout.token_ids.tolist() for rollout in eager.generate(prompts(5, 40, 17), sampling)]
        assert sum(a == b for a, b in zip(drawn[-1], expected, strict=True)) >= 2
        assert (engine.stats.capture_s > 0) == (len(drawn) == 1)
    assert drawn[0] != drawn[1]
