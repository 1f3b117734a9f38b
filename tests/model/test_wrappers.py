# SPDX-License-Identifier: Apache-2.0
"""Text models of multimodal wrappers: loaded, trained, and exported as the wrapper again."""

from __future__ import annotations

import json
import logging
import shutil

import pytest
import torch
import transformers
from commands import assert_one_sentence, run
from safetensors.torch import load_file, save_file
from small_run import small_trainer
from tiny_wrappers import WRAPPERS, other_weights, save_wrapper, text_weights

from sparse_rl.evaluate import EvalConfig
from sparse_rl.kv import Full
from sparse_rl.model import lora, wrappers
from sparse_rl.model.load import load, load_reader, stop_ids
from sparse_rl.plan import model_config, model_size
from sparse_rl.rollout import Engine, EngineConfig, Sampling
from sparse_rl.train import OptimizerConfig
from sparse_rl.train.distill import DistillConfig
from sparse_rl.train.export import export

QUICK = ("gemma3", "qwen2_5_vl")  # a text model of the library's, and one that gets its head from us
ALL = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in WRAPPERS]


def read(folder, **settings):
    """The wrapper in a folder as transformers alone reads it, with every key accounted for."""
    wrapper, report = transformers.AutoModelForImageTextToText.from_pretrained(
        folder, output_loading_info=True, **settings
    )
    assert not any(report.values()), report
    return wrapper.eval()


def same(ours, theirs):
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@torch.no_grad()
def logits(model, ids):
    model.set_attn_implementation("eager")
    return model.eval()(input_ids=ids).logits


def trained(folder, source, steps=2, **parts):
    """The last checkpoint of a short run, and its model."""
    parts = {"optimizer": OptimizerConfig(learning_rate=1e-2), "eval": EvalConfig(prompts=1), **parts}
    trainer = small_trainer(folder, loaded=load(str(source)), parts=parts, steps=steps, save_every=0)
    trainer.train()
    return folder / f"checkpoint-{steps}", trainer.loaded.model


@pytest.mark.parametrize("name", ALL)
def test_a_wrapper_is_trained_and_exported_as_itself(tmp_path, name):
    wrapper = save_wrapper(name, tmp_path / "source")
    loaded = load(str(tmp_path / "source"))
    assert same(loaded.model.state_dict(), text_weights(wrapper))
    ids = torch.randint(0, 256, (2, 100))
    assert torch.equal(logits(loaded.model, ids), logits(wrapper, ids)), "nothing about text is the wrapper's"
    assert stop_ids(loaded.model) == (258, 10)
    checkpoint, model = trained(tmp_path / "run", tmp_path / "source")
    assert same(load(str(checkpoint)).model.state_dict(), model.state_dict())
    export(checkpoint, tmp_path / "out")
    exported = read(tmp_path / "out")
    assert type(exported) is type(wrapper)
    assert same(text_weights(exported), model.state_dict()) and not same(text_weights(exported), text_weights(wrapper))
    assert same(other_weights(exported), other_weights(wrapper))
    assert (
        load_file(tmp_path / "out/model.safetensors").keys() == load_file(tmp_path / "source/model.safetensors").keys()
    )
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        path.name for path in (tmp_path / "source").iterdir()
    }
    assert same(load(str(tmp_path / "out")).model.state_dict(), model.state_dict())


@pytest.mark.parametrize("name", ALL)
def test_what_is_planned_is_what_is_loaded(tmp_path, name):
    save_wrapper(name, tmp_path)
    model = load(str(tmp_path)).model
    size = model_size(model_config(str(tmp_path), download=False), "x", torch.bfloat16)
    assert size.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert size.context == load_reader(str(tmp_path)).context == 256


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """A wrapper, its folder, and a checkpoint of a run on it."""
    folder = tmp_path_factory.mktemp("qwen")
    wrapper = save_wrapper("qwen2_5_vl", folder / "source", torch.bfloat16)
    checkpoint, model = trained(folder / "run", folder / "source", steps=1)
    return wrapper, folder / "source", checkpoint, model


def copied(folder, source):
    shutil.copytree(source, folder)
    return load_file(folder / "model.safetensors")


def rewrite(folder, weights):
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def test_adapters_have_the_names_of_the_wrappers_modules(tmp_path):
    """peft puts them on the wrapper's text alone, though the vision tower has projections of the same names."""
    peft = pytest.importorskip("peft")
    wrapper = save_wrapper("gemma3", tmp_path / "source")
    assert any("vision" in name and name.endswith("q_proj") for name, _ in wrapper.named_modules())
    checkpoint, model = trained(tmp_path / "run", tmp_path / "source", steps=1, lora=lora.LoraConfig(r=4))
    names = load_file(checkpoint / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in names)
    adapted = peft.PeftModel.from_pretrained(wrapper, checkpoint, autocast_adapter_dtype=False)
    assert not any("vision" in name and "lora" in name for name, _ in adapted.named_modules())
    ids = torch.randint(0, 256, (1, 30))
    ours = logits(model, ids)
    assert (ours - logits(load(str(tmp_path / "source")).model, ids)).abs().max() > 1e-2
    torch.testing.assert_close(logits(adapted.model, ids), ours)
    torch.testing.assert_close(logits(load(str(checkpoint)).model, ids), ours)
    export(checkpoint, tmp_path / "out")
    exported = read(tmp_path / "out")
    torch.testing.assert_close(logits(exported, ids), ours)
    assert same(other_weights(exported), other_weights(read(tmp_path / "source")))


def test_an_adapter_that_peft_put_on_the_wrapper_is_merged_if_it_is_of_text_alone(tmp_path, qwen):
    peft = pytest.importorskip("peft")
    _, source, _, _ = qwen
    for name, targets in (("text", ["q_proj", "down_proj"]), ("all", ["q_proj", "qkv"])):
        settings = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        wrapper = read(source, dtype=torch.float32)
        if name == "text":
            settings.target_modules = r".*language_model.*\.(q_proj|down_proj)"
        adapted = peft.get_peft_model(wrapper, settings)
        adapted.save_pretrained(tmp_path / name)
        edit(tmp_path / name / "adapter_config.json", base_model_name_or_path=str(source))
        if name == "text":
            ids = torch.randint(0, 256, (1, 30))
            ours = load(str(tmp_path / name), dtype=torch.float32).model
            torch.testing.assert_close(logits(ours, ids), logits(adapted.model, ids), atol=1e-4, rtol=1e-4)
    with pytest.raises(
        ValueError, match=r"does not fit its base model: it adapts 1 modules .*model\.visual\.blocks\.0"
    ):
        load(str(tmp_path / "all"))


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_a_wrapper_that_is_gone_is_said_and_its_text_model_exported_alone(tmp_path, caplog, qwen):
    _, source, checkpoint, model = qwen
    source.rename(tmp_path / "moved")
    try:
        with caplog.at_level(logging.WARNING):
            export(checkpoint, tmp_path / "out")
    finally:
        (tmp_path / "moved").rename(source)
    assert f"{source}, which has the tensors that were not trained, is gone" in caplog.text
    assert same(load(str(tmp_path / "out")).model.state_dict(), model.state_dict())
    assert "wrapped_in" not in (tmp_path / "out/config.json").read_text()


def test_another_model_in_the_place_of_the_wrapper_is_refused(tmp_path, qwen):
    _, _, checkpoint, _ = qwen
    save_wrapper("qwen2_5_vl", tmp_path / "source", hidden_size=96)
    found = load(str(checkpoint)).model
    found.config.wrapped_in["name"] = str(tmp_path / "source")
    with pytest.raises(ValueError, match=r"source is not the model that was trained: .* does not fit"):
        wrappers.save(found, tmp_path / "out")


def test_missing_and_unused_text_weights_are_listed(tmp_path, qwen):
    _, source, _, _ = qwen
    weights = copied(tmp_path / "a", source)
    names = {name.rpartition("layers.")[2]: name for name in weights if "language" in name or "model.layers" in name}
    for place in ("0.self_attn.q_proj.weight", "1.mlp.up_proj.weight"):
        del weights[names[place]]
    rewrite(tmp_path / "a", weights)
    with pytest.raises(
        ValueError, match=r"lacks 2 weights, .*0\.self_attn\.q_proj\.weight, .*1\.mlp\.up_proj\.weight;"
    ):
        load(str(tmp_path / "a"))
    weights = copied(tmp_path / "b", source)
    extra = names["1.mlp.up_proj.weight"].replace("up_proj", "side_proj")
    rewrite(tmp_path / "b", weights | {extra: torch.ones(3)})
    with pytest.raises(ValueError, match=r"has 1 weights, .*1\.mlp\.side_proj\.weight that .* does not use"):
        load(str(tmp_path / "b"))


def test_what_stands_beside_the_text_may_have_more_and_goes_along(tmp_path, qwen):
    """Such as buffers of another version; dtypes of their own stay too, and a tied head that is stored is renewed."""
    wrapper, source, checkpoint, model = qwen
    weights = copied(tmp_path / "source", source)
    vision = next(name for name in weights if "visual" in name)
    head, embedding = "lm_head.weight", next(name for name in weights if "embed_tokens" in name)
    more = {f"{vision}_old": torch.ones(3), vision: weights[vision].double(), head: weights[embedding].clone()}
    rewrite(tmp_path / "source", weights | more)
    assert same(load(str(tmp_path / "source")).model.state_dict(), text_weights(wrapper))
    found = load(str(checkpoint)).model
    found.config.wrapped_in["name"] = str(tmp_path / "source")
    wrappers.save(found, tmp_path / "out")
    stored = load_file(tmp_path / "out/model.safetensors")
    assert torch.equal(stored[f"{vision}_old"], torch.ones(3)) and torch.equal(stored[vision], more[vision])
    assert head not in stored and torch.equal(stored[embedding], model.model.embed_tokens.weight)


def test_shards_of_a_wrapper_and_other_dtypes(tmp_path, qwen):
    wrapper, _, checkpoint, _ = qwen
    wrapper.save_pretrained(tmp_path / "source", max_shard_size="100KB")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 2
    found = load(str(checkpoint), dtype=torch.float32).model
    found.config.wrapped_in["name"] = str(tmp_path / "source")
    wrappers.save(found, tmp_path / "out")
    exported = read(tmp_path / "out", dtype="auto")
    assert exported.dtype == torch.float32, "what the config says"
    assert same(text_weights(exported), found.state_dict())
    stored = load_file(tmp_path / "out/model.safetensors")
    assert {t.dtype for name, t in stored.items() if "visual" in name} == {torch.bfloat16}


@pytest.mark.parametrize("name", ALL)
def test_names_that_newer_files_have_are_kept(tmp_path, name):
    wrapper = save_wrapper(name, tmp_path / "source")
    wrapper.save_pretrained(tmp_path / "source", save_original_format=False)
    model = load(str(tmp_path / "source")).model
    assert same(model.state_dict(), text_weights(wrapper))
    wrappers.save(model, tmp_path / "out")
    ours, theirs = (load_file(tmp_path / folder / "model.safetensors") for folder in ("out", "source"))
    assert same(ours, theirs)


def test_a_config_that_holds_the_texts_settings_itself(tmp_path, qwen):
    """As published Qwen2.5-VL checkpoints have it."""
    wrapper, source, _, _ = qwen
    weights, config = copied(tmp_path / "flat", source), json.loads((source / "config.json").read_text())
    text = config.pop("text_config")
    for key in ("model_type", "rope_parameters", "layer_types", "architectures"):
        text.pop(key, None)
    edited = text | config | {"rope_theta": 10000.0, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    (tmp_path / "flat/config.json").write_text(json.dumps(edited))
    ids = torch.randint(0, 256, (1, 60))
    found = load(str(tmp_path / "flat")).model
    assert torch.equal(logits(found, ids), logits(wrapper, ids))
    wrappers.save(found, tmp_path / "out")
    assert same(load_file(tmp_path / "out/model.safetensors"), weights)
    assert torch.equal(logits(read(tmp_path / "out", dtype="auto"), ids), logits(wrapper, ids))


def test_a_wrapper_from_the_hubs_cache(tmp_path, monkeypatch, qwen):
    _, source, _, model = qwen
    commit, repo = "0" * 40, tmp_path / "hub/models--owner--wrapper"
    shutil.copytree(source, repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("transformers.utils.hub.HF_HUB_CACHE", str(tmp_path / "hub"), raising=False)
    found = load("owner/wrapper").model
    assert found.config.wrapped_in == {"name": "owner/wrapper", "text": "model.language_model"}
    found.load_state_dict(model.state_dict())
    wrappers.save(found, tmp_path / "out")
    exported = read(tmp_path / "out", dtype="auto")
    assert same(text_weights(exported), model.state_dict()) and same(
        other_weights(exported), other_weights(read(source))
    )


def test_text_that_the_wrapper_reads_in_another_way_is_refused(qwen, monkeypatch):
    _, source, _, _ = qwen
    kind = transformers.Qwen2_5_VLForConditionalGeneration
    forward = kind.forward

    def capped(self, *args, **kwargs):
        outputs = forward(self, *args, **kwargs)
        outputs.logits = outputs.logits.tanh()
        return outputs

    monkeypatch.setattr(kind, "forward", capped)
    with pytest.raises(ValueError, match="gives text other logits than Qwen2_5_VLTextForCausalLM"):
        load(str(source))


def test_a_head_of_ours_generates_like_the_wrapper(tmp_path):
    """With transformers' own generate, in batches with padding too."""
    wrapper = save_wrapper("qwen2_5_vl", tmp_path)
    model = load(str(tmp_path)).model
    ids = torch.randint(0, 256, (3, 12))
    seen = torch.arange(12)[None] >= torch.tensor([[0], [4], [9]])
    texts = []
    for module in (wrapper, model):
        module.set_attn_implementation("eager")
        texts.append(module.generate(ids, attention_mask=seen.long(), max_new_tokens=30, do_sample=False))
    assert torch.equal(*texts) and texts[0].shape[1] > 13
    sampled = Engine(load(str(tmp_path)), Full(), EngineConfig(rows=2)).generate(
        [[int(i) for i in row[keep]] for row, keep in zip(ids, seen, strict=True)],
        Sampling(max_tokens=30, temperature=0),
    )
    for text, rollout in zip(texts[1], sampled, strict=True):
        length = len(rollout.token_ids)
        assert rollout.token_ids.tolist() == text[12 : 12 + length].tolist()


@pytest.mark.slow
def test_a_wrappers_run_resumes_and_may_have_a_samplers_adapter(tmp_path, qwen):
    _, source, _, _ = qwen
    parts = {"eval": EvalConfig(prompts=1), "distill": DistillConfig(r=2)}
    small_trainer(tmp_path / "whole", loaded=load(str(source)), parts=parts, steps=2).train()
    shutil.copytree(tmp_path / "whole", tmp_path / "twice")
    shutil.rmtree(tmp_path / "twice/checkpoint-2")
    again = load(str(source))
    small_trainer(tmp_path / "twice", loaded=again, parts=parts, steps=2, resume_from_checkpoint=True).train()
    assert same(load(str(tmp_path / "whole/checkpoint-2")).model.state_dict(), again.model.state_dict())


def test_commands_take_wrappers_and_their_checkpoints(tmp_path, qwen):
    _, source, checkpoint, _ = qwen
    for name in (source, checkpoint):
        code, out, _ = run("generate", "a|", "--model", str(name), "--sampling.max_tokens", "3")
        assert code == 0 and len(json.loads(out)["token_ids"]) <= 3
    code, out, err = run("export", str(checkpoint), str(tmp_path / "out"))
    assert code == 0, err
    assert_one_sentence(run("export", str(checkpoint), str(tmp_path / "out")), "exists and is not overwritten")
