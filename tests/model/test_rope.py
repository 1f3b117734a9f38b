# SPDX-License-Identifier: Apache-2.0
"""How far scaled rotations reach, and one factor for all sequences: transformers' own, for a long one."""

from __future__ import annotations

import copy
import json
import logging

import pytest
import torch
import transformers
from moving_ropes import LONGROPE, MOVING, ORIGINAL, PLAIN, POSITIONS, plain, settings

from sparse_rl.model import rope
from sparse_rl.model.attention import UnsupportedModelError
from sparse_rl.model.dry_run import dry_run, waits_for_device
from sparse_rl.model.load import load, load_reader
from sparse_rl.model.lora import LoraConfig, add_adapters, save_model
from sparse_rl.model.tiny import tiny_config, tiny_model, tiny_tokenizer
from sparse_rl.plan.size import model_size


@pytest.mark.parametrize(
    ("parameters", "positions", "longest", "expected"),
    [
        (PLAIN, 4096, None, 4096),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
            32768,
            None,
            131072,
        ),  # Qwen2.5
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 40960, 9, 131072),  # Qwen3
        ({"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096}, 163840, None, 163840),
        ({"rope_type": "yarn", "factor": 2.0}, 4096, None, 8192),
        ({"rope_type": "linear", "factor": 4.0}, 16384, None, 16384),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 131072, None, 131072),
        ({"rope_type": "dynamic", "factor": 2.0}, 4096, None, 8192),
        ({"rope_type": "dynamic", "factor": 2.0}, 4096, 5000, 5000),
        ({"rope_type": "dynamic", "factor": 2.0}, 4096, 100, 4096),
        ({"rope_type": "dynamic", "factor": 2.0}, 4096, 9999, 8192),
        (LONGROPE, 128, None, 128),
        (LONGROPE, 128, 49, 128),
        (LONGROPE, 128, 48, 48),
        (LONGROPE, 48, None, 48),  # MiniCPM3: its long factor is for nobody
        ({"sliding_attention": PLAIN, "full_attention": {"rope_type": "linear", "factor": 8.0}}, 131072, None, 131072),
        ({"sliding_attention": PLAIN, "full_attention": {"rope_type": "yarn", "factor": 8.0}}, 8192, None, 65536),
        ({"sliding_attention": {"rope_type": "yarn", "factor": 8.0}, "full_attention": PLAIN}, 8192, None, 8192),
    ],
)
def test_the_context_counts_the_scaling_in(parameters, positions, longest, expected):
    config = transformers.LlamaConfig()
    config.rope_parameters, config.max_position_embeddings = parameters, positions
    assert rope.context(config, longest) == expected


@pytest.mark.parametrize("case", MOVING)
def test_a_fixed_rotation_is_that_of_a_long_sequence(case):
    """For every position, and whatever stands beside it; the config and the state dict are transformers' own."""
    family, changed = settings(case)
    model, own = tiny_model(family, **changed), plain(case)
    ids = torch.randint(0, 256, (1, POSITIONS))
    expected = own(ids).logits
    torch.testing.assert_close(model(ids).logits, expected)
    for length in (7, ORIGINAL, ORIGINAL + 1, 100):
        torch.testing.assert_close(model(ids[:, :length]).logits, expected[:, :length])
        if length <= ORIGINAL:
            assert (own(ids[:, :length]).logits - expected[:, :length]).abs().max() > 0.1, "it is another factor"
    rope.fix(model, 30)
    torch.testing.assert_close(model(ids[:, :30]).logits, own(ids[:, :30]).logits)
    assert model.state_dict().keys() == own.state_dict().keys()
    assert model.config.rope_parameters == own.config.rope_parameters


def test_a_dynamic_rotation_is_that_of_the_longest_sequence():
    family, changed = settings("dynamic")
    model, ids = tiny_model(family, **changed), torch.randint(0, 256, (1, 90))
    for longest in (80, 90, 80):  # it may be chosen again; transformers' own would never shrink it
        rope.fix(model, longest)
        torch.testing.assert_close(model(ids[:, :longest]).logits, plain("dynamic")(ids[:, :longest]).logits)


@pytest.mark.parametrize("case", MOVING)
def test_a_dry_run_wants_a_fixed_rotation(case):
    own = plain(case)
    own.set_attn_implementation("sparse_rl")
    with pytest.raises(UnsupportedModelError, match=r"in every forward, by the longest sequence .*rope\.fix\(model\)"):
        dry_run(own)
    assert "looks at the positions" in waits_for_device(own)
    rope.fix(own)
    dry_run(own)
    assert waits_for_device(own) == "", "it may go into a CUDA graph"
    assert rope.fixed_for(copy.deepcopy(own)) == POSITIONS


def test_a_rotation_that_no_factor_fixes_is_refused():
    """PhiMoE scales by another number beyond the original length."""
    given = {**LONGROPE, "short_mscale": 1.2, "long_mscale": 1.2}
    config = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 1}
    model = transformers.PhimoeForCausalLM(transformers.PhimoeConfig(**config, vocab_size=99, rope_parameters=given))
    assert not rope.moves(model), "as published"
    model.config.rope_parameters["long_mscale"] = 1.3
    rope.fix(model)
    with pytest.raises(UnsupportedModelError, match=r"rope type longrope.* even after rope\.fix"):
        dry_run(model)


def test_load_chooses_by_the_longest_sequence(tmp_path):
    tiny_model("phi3", num_hidden_layers=1).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    name, ids = str(tmp_path), torch.randint(0, 256, (1, 20))
    short, long = load(name, longest=64), load(name)
    assert (
        (short.context, long.context)
        == (64, 8192)
        == (load("tiny:phi3", longest=9).context, load(name, longest=65).context)
    )
    assert (short.model(ids).logits - long.model(ids).logits).abs().max() > 0.1
    torch.testing.assert_close(
        transformers.AutoModelForCausalLM.from_pretrained(name)(ids).logits, short.model(ids).logits
    )
    long.fit(60)
    assert long.context == 64 and torch.equal(short.model(ids).logits, long.model(ids).logits)
    assert load_reader(name).context == 8192


def test_a_trained_checkpoint_keeps_its_factor(tmp_path, caplog):
    tiny_model("phi3", num_hidden_layers=1).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    rope.save(64, tmp_path)
    loaded = load(str(tmp_path))
    assert loaded.context == load_reader(str(tmp_path)).context == 64
    with caplog.at_level(logging.WARNING):
        loaded.fit(50)
        assert not caplog.records
        loaded.fit(500)
    assert loaded.context == 64 and "up to 64 tokens" in caplog.text
    assert load(str(tmp_path), longest=500).context == 8192, "whoever asks for it gets it"
    (tmp_path / rope.RECORD).write_text("{")
    with pytest.raises(ValueError, match=r"sparse_rl\.json is damaged"):
        load(str(tmp_path))


def test_a_linear_scaling_is_taken_as_counted_in(tmp_path, caplog):
    tiny_model(num_hidden_layers=1, rope_parameters={**PLAIN, "rope_type": "linear", "factor": 4.0}).save_pretrained(
        tmp_path
    )
    tiny_tokenizer().save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        load(str(tmp_path))
    assert "set it to 32768 in the config" in caplog.text


@pytest.mark.parametrize("case", MOVING)
def test_a_plan_needs_no_positions(case):
    family, changed = settings(case)
    size = model_size(tiny_config(family, **changed), case, torch.float32)
    assert size.context == POSITIONS


def test_what_is_written_down(tmp_path):
    rope.save(rope.fixed_for(tiny_model(num_hidden_layers=1)), tmp_path)
    assert not list(tmp_path.iterdir()), "nothing of most models"
    rope.save(rope.fixed_for(tiny_model("phi3", num_hidden_layers=1)), tmp_path)
    assert json.loads((tmp_path / rope.RECORD).read_text()) == {"longest": 8192}
    assert rope.recorded(tmp_path) == 8192


def test_a_merged_model_rotates_with_all_digits(tmp_path):
    pytest.importorskip("peft")
    tiny_model(num_hidden_layers=1, dtype=torch.bfloat16).save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    base = load(str(tmp_path / "base")).model
    ids = torch.randint(0, 256, (1, 400))
    expected = base(ids).logits
    add_adapters(base, LoraConfig(r=2), seed=1)
    (tmp_path / "adapter").mkdir()
    save_model(base, tmp_path / "adapter")
    merged = load(str(tmp_path / "adapter")).model
    assert merged.model.rotary_emb.inv_freq.dtype == torch.float32
    assert torch.equal(merged(ids).logits, expected), "a fresh adapter adds nothing"


def test_a_model_without_a_name_has_no_record(tmp_path, monkeypatch):
    """What lies in the working folder is another model's."""
    monkeypatch.chdir(tmp_path)
    rope.save(64, tmp_path)
    loaded = load("tiny:phi3")
    loaded.model.config.name_or_path = ""
    loaded.fit(64)
    assert loaded.context == 64
