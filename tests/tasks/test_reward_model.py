# SPDX-License-Identifier: Apache-2.0
"""A reward model gives what transformers gives for each text alone; what is no reward model is refused."""

from __future__ import annotations

import random

import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForSequenceClassification

from sparse_rl.grading import Failed
from sparse_rl.model.tiny import tiny_model, tiny_tokenizer
from sparse_rl.tasks import Rewards
from sparse_rl.tasks.rewards import build_reward

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def write(path, *, labels=1, chat=True, context=64):
    """A random classifier and its tokenizer in a folder."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE if chat else None
    shape = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(
        vocab_size=len(tokenizer), **shape, num_key_value_heads=1, num_labels=labels, max_position_embeddings=context
    )
    LlamaForSequenceClassification(config).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return f"model:path={path}"


def chat(text, role="assistant"):
    return [{"role": role, "content": text}]


@torch.no_grad()
def alone(path, text):
    """The logit of one text, without padding."""
    ids = torch.tensor([list(text.encode())])
    return AutoModelForSequenceClassification.from_pretrained(path, pad_token_id=258)(ids).logits.item()


def test_rewards_are_the_logits_of_each_text_alone(tmp_path):
    reward = build_reward(write(tmp_path))
    draw = random.Random(random.random())
    texts = ["".join(draw.choices("abc ", k=draw.randint(1, 30))) for _ in range(20)]  # more than a batch
    rewards = reward(prompts=["hi "] * 20, completions=texts, answer=None)
    assert rewards == pytest.approx([alone(tmp_path, f"hi {text}") for text in texts], abs=1e-5)
    assert len({round(value, 6) for value in rewards}) > 5
    (as_chat,) = reward(prompts=[chat("hi", "user")], completions=[chat("ho")])
    assert as_chat == pytest.approx(alone(tmp_path, "<user>hi<assistant>ho"), abs=1e-5)
    assert Rewards((reward,)).names == (tmp_path.name,)
    assert not any(parameter.requires_grad for parameter in reward.model.parameters())


def test_a_text_that_is_too_long_is_left_out(tmp_path):
    reward = build_reward(write(tmp_path, context=16))
    first, second, third = reward(prompts=["a" * 8] * 3, completions=["b" * 8, "b" * 9, ""])
    assert isinstance(first, float) and isinstance(third, float)
    assert second == Failed("17 tokens, and the reward model reads 1 to 16")


def test_an_error_does_not_leave_it_on_the_gpu(tmp_path, monkeypatch):
    """With its weights held back on the CPU, the forward on another device raises."""
    reward, moved = build_reward(write(tmp_path) + ",device=cpu"), []
    monkeypatch.setattr(reward, "device", "cuda")
    monkeypatch.setattr(reward.model, "to", moved.append)
    with pytest.raises((RuntimeError, AssertionError)):
        reward(prompts=["a"], completions=["b"])
    assert moved == ["cuda", "cpu"]


def test_what_is_no_reward_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has 2 labels; a reward is one number"):
        build_reward(write(tmp_path / "two", labels=2))
    model = tiny_model()
    model.config.num_labels = 1
    model.save_pretrained(tmp_path / "causal")
    tiny_tokenizer().save_pretrained(tmp_path / "causal")
    with pytest.raises(ValueError, match="has no weights for score"):
        build_reward(f"model:path={tmp_path / 'causal'}")
    with pytest.raises(ValueError, match="cannot be loaded on 'moon'"):
        build_reward(f"{write(tmp_path / 'one')},device=moon")
    plain = build_reward(write(tmp_path / "plain", chat=False))
    with pytest.raises(ValueError, match="has no chat template, but the prompts are chats"):
        plain(prompts=[chat("hi", "user")], completions=[chat("ho")])
