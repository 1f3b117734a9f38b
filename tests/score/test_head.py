# SPDX-License-Identifier: Apache-2.0
"""The chunked head gives the module's own log-probs and gradients, and never holds all logits."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from sparse_rl.model.attention import PackedRows, packed_positions, registered
from sparse_rl.model.tiny import FAMILIES, tiny_model
from sparse_rl.score import head as head_module
from sparse_rl.score.head import Head, LogitMap
from sparse_rl.train.master import MasterWeights


def packed(model):
    boundaries = [0, 9, 20]
    ids = torch.randint(0, 259, (1, 20), generator=torch.Generator().manual_seed(0)).to(model.device)
    inputs = {
        "input_ids": ids,
        "position_ids": packed_positions(boundaries, model.device),
        "use_cache": False,
        "kv": PackedRows(boundaries),
    }
    predicting = torch.tensor([3, 4, 5, 6, 7, 12, 15, 18], device=model.device)
    return inputs, predicting, ids[0, predicting + 1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.some(4)
def test_scores_equal_the_modules_own_logits(family, monkeypatch):
    monkeypatch.setitem(head_module.CHUNK_LOGITS, "cpu", 3 * 259)  # chunks of three tokens
    model = tiny_model(family, dtype=torch.float64)
    inputs, predicting, tokens = packed(model)
    expected = torch.log_softmax(model(**inputs).logits[0, predicting] / 0.7, dim=-1)
    expected_gradient = torch.autograd.grad(expected.gather(-1, tokens[:, None]).sum(), list(model.parameters()))
    at_ids = torch.arange(5, device=model.device).expand(8, 5)
    head = Head(model)
    assert head.map == LogitMap()
    scores = head(inputs, predicting, tokens, temperature=0.7, at_ids=at_ids, num_top=4)
    torch.testing.assert_close(scores.logprobs, expected.gather(-1, tokens[:, None])[:, 0])
    torch.testing.assert_close(scores.at_ids, expected[:, :5].float())
    torch.testing.assert_close(scores.top_logprobs, expected.topk(4).values.float())
    assert (scores.top_ids == expected.topk(4).indices).all()
    gradient = torch.autograd.grad(scores.logprobs.sum(), list(model.parameters()))
    for got, wanted in zip(gradient, expected_gradient, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


SMALL = {
    "vocab_size": 259, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "settings", "expected"),
    [
        ("granite", {"logits_scaling": 8.0}, LogitMap(0.125)),
        ("cohere", {"logit_scale": 0.25}, LogitMap(0.25)),
        ("gemma3_text", {"final_logit_softcapping": 3.0, "initializer_range": 0.5}, LogitMap(cap=3.0)),
    ],
)
def test_heads_that_scale_or_cap(model_type, settings, expected, monkeypatch):
    monkeypatch.setitem(head_module.CHUNK_LOGITS, "cpu", 3 * 259)
    config = AutoConfig.for_model(model_type, **SMALL, **settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=registered(), dtype=torch.float64).eval()
    head = Head(model)
    assert head.map is not None and head.map.cap == expected.cap
    assert head.map.scale == pytest.approx(expected.scale, rel=1e-3)
    inputs, predicting, tokens = packed(model)
    logits = model(**inputs).logits[0, predicting]
    assert expected.cap is None or float(logits.detach().abs().max()) > 0.9 * expected.cap, "the cap is felt"
    weights = torch.randn(len(tokens), dtype=torch.float64)
    wanted = torch.log_softmax(logits, dim=-1).gather(-1, tokens[:, None])[:, 0]
    got = head(inputs, predicting, tokens).logprobs
    torch.testing.assert_close(got, wanted)
    parameters = list(model.parameters())
    expected_gradient = torch.autograd.grad((wanted * weights).sum(), parameters)
    gradient = torch.autograd.grad((got * weights).sum(), parameters)
    for a, b in zip(gradient, expected_gradient, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_a_heads_bias_gets_the_gradient_of_all_tokens(monkeypatch):
    monkeypatch.setitem(head_module.CHUNK_LOGITS, "cpu", 3 * 259)
    model = tiny_model(dtype=torch.float64)
    model.lm_head.bias = torch.nn.Parameter(torch.randn(259, dtype=torch.float64))
    inputs, predicting, tokens = packed(model)
    wanted = torch.log_softmax(model(**inputs).logits[0, predicting], dim=-1).gather(-1, tokens[:, None])[:, 0]
    got = Head(model)(inputs, predicting, tokens).logprobs
    torch.testing.assert_close(got, wanted)
    gradients = [torch.autograd.grad(logprobs.sum(), model.lm_head.bias)[0] for logprobs in (got, wanted)]
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-5)


def test_an_unknown_head_is_called_through_the_module():
    model = tiny_model(dtype=torch.float64)
    original = model.forward

    def forward(*args, **kwargs):
        output = original(*args, **kwargs)
        output.logits = output.logits + torch.linspace(0, 5, 259, dtype=torch.float64)
        return output

    model.forward = forward
    head = Head(model)
    assert head.map is None
    inputs, predicting, tokens = packed(model)
    wanted = torch.log_softmax(model(**inputs).logits[0, predicting], dim=-1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(head(inputs, predicting, tokens).logprobs, wanted)


def test_the_backward_pass_keeps_no_logits(monkeypatch):
    monkeypatch.setitem(head_module.CHUNK_LOGITS, "cpu", 2 * 259)
    model = tiny_model()
    inputs, predicting, tokens = packed(model)
    kept = []

    def note(tensor):
        if tensor.dtype == torch.float32 and tensor.shape[-1] == 259:
            kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        Head(model)(inputs, predicting, tokens).logprobs.sum()
    assert kept == []
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        torch.log_softmax(model(**inputs).logits[0, predicting], -1).sum()
    assert kept, "the check sees logits where they are kept"


def test_chunks_add_no_rounding_to_the_heads_gradient(monkeypatch):
    """In bf16: many chunks are as near to the fp64 gradient as one."""
    errors = {}
    exact = None
    for dtype, chunk in ((torch.float64, 1 << 30), (torch.bfloat16, 1 << 30), (torch.bfloat16, 259)):
        monkeypatch.setitem(head_module.CHUNK_LOGITS, "cpu", chunk)
        model = tiny_model(dtype=torch.bfloat16).to(dtype)
        inputs, predicting, tokens = packed(model)
        Head(model)(inputs, predicting, tokens).logprobs.sum().backward()
        gradient = model.get_output_embeddings().weight.grad.double()
        exact = gradient if exact is None else exact
        errors[dtype, chunk] = float((gradient - exact).norm() / exact.norm())
    assert errors[torch.bfloat16, 259] <= 1.05 * errors[torch.bfloat16, 1 << 30]


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # with a head of its own, and with the embedding's
def test_a_masters_gradient_is_not_rounded_on_its_way(family, monkeypatch):
    monkeypatch.setitem(head_module.CHUNK_LOGITS, "cpu", 259)
    model = tiny_model(family, dtype=torch.bfloat16)
    inputs, predicting, tokens = packed(model)
    weight = model.get_output_embeddings().weight
    hidden = model.get_decoder()(**inputs).last_hidden_state[0, predicting].detach()
    masters = MasterWeights(model)
    (master,) = (m for p, m in zip(masters.parameters, masters.masters, strict=True) if p is weight)
    head = Head(model)
    for _ in range(2):  # two microbatches
        head(inputs, predicting, tokens).logprobs.sum().backward()
    logits = torch.cat([torch.nn.functional.linear(row[None], weight) for row in hidden])  # a token a chunk, as above
    probabilities = torch.softmax(logits.float(), dim=-1)
    logits_grad = (torch.nn.functional.one_hot(tokens, 259) - probabilities).bfloat16().double()
    wanted = 2 * logits_grad.T @ hidden.double()
    if weight is model.get_input_embeddings().weight:
        used = set(inputs["input_ids"].flatten().tolist())
        rows = [i for i in range(259) if i not in used]  # the others have the embedding's gradient as well
        assert not torch.equal(master.grad[sorted(used)].double(), wanted[sorted(used)])
    else:
        rows = list(range(259))
    torch.testing.assert_close(master.grad[rows].double(), wanted[rows], atol=1e-6, rtol=1e-5)
    assert weight.grad is None
