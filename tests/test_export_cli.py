# SPDX-License-Identifier: Apache-2.0
"""`sparse-rl export`: what was trained, in a folder that transformers alone can read."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from commands import assert_one_sentence, run
from small_run import small_trainer
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparse_rl.evaluate import EvalConfig
from sparse_rl.model.load import load
from sparse_rl.model.lora import LoraConfig
from sparse_rl.train import OptimizerConfig
from sparse_rl.train.checkpoint import read_masters

IDS = torch.randint(0, 16, (4, 24))


def trained(folder, dtype, lora=None):
    if lora is not None:
        pytest.importorskip("peft")
    parts = {"optimizer": OptimizerConfig(learning_rate=1e-2), "eval": EvalConfig(prompts=1), "lora": lora}
    trainer = small_trainer(folder, loaded=load("embedded", dtype=dtype), parts=parts, steps=1, save_every=0)
    trainer.train()
    return folder / "checkpoint-1", trainer.loaded.model


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("full") / "run", torch.bfloat16)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("adapter") / "run", torch.bfloat16, LoraConfig(r=4))


def exported(checkpoint, output, *more):
    code, out, _ = run("export", str(checkpoint), str(output), *more)
    assert code == 0 and out == f"{output} holds the model of {checkpoint}\n"
    assert not [path for path in output.parent.iterdir() if path.name.startswith(".")]
    return AutoModelForCausalLM.from_pretrained(output)


def logits(model):
    with torch.no_grad():
        return model(IDS).logits.double()


def test_a_full_checkpoint_is_exported_as_it_was_trained(full, tmp_path):
    checkpoint, model = full
    plain = exported(checkpoint, tmp_path / "out")
    assert plain.dtype == torch.bfloat16
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
                     "tokenizer_config.json"}  # fmt: skip
    expected = model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in plain.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("x1").input_ids == load("embedded").tokenizer("x1").input_ids


def test_more_digits_are_taken_from_the_masters(full, tmp_path):
    checkpoint, _ = full
    plain = exported(checkpoint, tmp_path / "out", "--dtype", "float32")
    masters = read_masters(checkpoint)
    assert plain.dtype == torch.float32
    assert all(torch.equal(parameter, masters[name]) for name, parameter in plain.named_parameters())
    assert any(not torch.equal(value, value.bfloat16().float()) for value in masters.values())


def test_a_merged_adapter_is_the_adapted_model_up_to_rounding(adapter, tmp_path):
    """In fp32 from the masters, and in bf16 no further from it than the adapted bf16 module itself."""
    checkpoint, model = adapter
    masters, exact = read_masters(checkpoint), load("embedded").model
    wide = exported(checkpoint, tmp_path / "wide", "--dtype", "float32")
    base = load("embedded", dtype=torch.bfloat16).model.state_dict()
    for name, weight in exact.state_dict().items():
        weight.copy_(base[name].float())
        if "proj" in name:
            a, b = (masters[name.replace("weight", f"lora_{part}.default.weight")] for part in "AB")
            weight.add_(8.0 * b @ a)
    torch.testing.assert_close(wide.state_dict(), exact.state_dict())
    torch.testing.assert_close(logits(wide), logits(exact), atol=1e-4, rtol=1e-4)
    narrow = exported(checkpoint, tmp_path / "narrow")
    assert narrow.dtype == torch.bfloat16
    for name, weight in exact.state_dict().items():
        assert torch.equal(narrow.state_dict()[name], weight.bfloat16()), "rounded once"
    own, ours = ((logits(m) - logits(exact)).square().mean().sqrt() for m in (model, narrow))
    changed = (logits(load("embedded").model) - logits(exact)).square().mean().sqrt()
    assert ours < 1.5 * own < 0.5 * changed


def test_an_adapter_that_peft_wrote_is_merged_too(adapter, tmp_path):
    checkpoint, _ = adapter
    shutil.copytree(checkpoint, tmp_path / "peft")
    (tmp_path / "peft" / "trainer_state.json").unlink()
    shutil.rmtree(tmp_path / "peft" / "state")
    plain = exported(tmp_path / "peft", tmp_path / "out")
    assert plain.dtype == torch.float32  # the base's own
    assert torch.equal(logits(plain), logits(load(str(checkpoint)).model))


def test_what_is_exported_can_be_trained_and_sampled(adapter, tmp_path):
    exported(adapter[0], tmp_path / "out")
    code, out, _ = run("generate", "a|", "--model", str(tmp_path / "out"), "--sampling.max_tokens", "3")
    assert code == 0 and len(json.loads(out)["token_ids"]) <= 3
    code, out, _ = run("generate", "a|", "--model", str(adapter[0]), "--sampling.max_tokens", "3")
    assert code == 0 and len(json.loads(out)["token_ids"]) <= 3


def test_nothing_is_overwritten_and_nothing_left_half_written(full, tmp_path, monkeypatch):
    checkpoint, _ = full
    for name in ("taken", "out.tmp", "out.old"):  # a user's own
        (tmp_path / name).mkdir()
    assert_one_sentence(run("export", str(checkpoint), str(tmp_path / "taken")), "exists and is not overwritten")

    def full_disk(path):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("sparse_rl.runfolder._to_disk", full_disk)
        result = run("export", str(checkpoint), str(tmp_path / "out"))
    assert_one_sentence((result[0], result[1], result[2].splitlines()[-1]), "out could not be written", "make room")
    assert {path.name for path in tmp_path.iterdir()} == {"taken", "out.tmp", "out.old"}
    exported(checkpoint, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"taken", "out.tmp", "out.old", "out"}


def test_what_is_no_checkpoint_is_refused(full, tmp_path):
    checkpoint, _ = full
    assert_one_sentence(run("export", str(tmp_path / "no"), str(tmp_path / "out")), "is no folder; give a checkpoint")
    assert_one_sentence(run("export", str(tmp_path), str(tmp_path / "out")), "is not a checkpoint of a run")
    whole = run("export", str(checkpoint.parent), str(tmp_path / "out"))
    assert_one_sentence(whole, f"is a run; give one of its checkpoints, {checkpoint} say")
    assert_one_sentence(run("export", str(checkpoint), str(tmp_path / "out"), "--dtype", "int4"), "dtype 'int4'")
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint, damaged)
    (damaged / "model.safetensors").write_bytes(b"")
    assert_one_sentence(run("export", str(damaged), str(tmp_path / "out")), "is damaged: model.safetensors")


def test_help_says_what_happens_to_adapters():
    code, out, _ = run("export", "--help")
    assert code == 0 and "adapters are added to the base model's weights" in out and "--dtype" in out
