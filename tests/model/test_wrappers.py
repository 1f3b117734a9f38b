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
from sparse_rl.model import lora, wrappers
from sparse_rl.model.load import load, load_reader, stop_ids
from sparse_rl.plan import model_config, model_size
from sparse_rl.train import OptimizerConfig
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
    size = model_size(model_config(str(tmp_path), download=False), "x", torch.float32)
    assert size.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert size.context == load_reader(str(tmp_path)).context == 256
