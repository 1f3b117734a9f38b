# SPDX-License-Identifier: Apache-2.0
"""The learner on a GPU: gradients as exact as bf16 allows, and no [tokens x vocabulary] in memory."""

from __future__ import annotations

import pytest
import torch

from sparse_rl.bench.learner import LearnerBenchConfig, make_rollouts
from sparse_rl.kernels.attention import AttentionCall, packed_attention_flash, packed_attention_ref
from sparse_rl.model.shapes import random_model, random_module
from sparse_rl.objective.correction import PRESETS
from sparse_rl.objective.loss import LossConfig
from sparse_rl.score.head import Head
from sparse_rl.score.pack import flatten, pack
from sparse_rl.score.score import score_microbatch
from sparse_rl.train.layers import learner_layers
from sparse_rl.train.learner import Learner, OptimizerConfig
from sparse_rl.train.master import MasterWeights
from sparse_rl.train.update import UpdateConfig, update

pytestmark = pytest.mark.gpu
SHAPES = ["smollm2-135m", "qwen2.5-1.5b"]


@pytest.mark.parametrize(("heads", "width"), [((4, 4), 64), ((12, 2), 128), ((8, 1), 128), ((4, 2), 256)])
@pytest.mark.parametrize("window", [None, 37])
def test_flash_gradients_are_those_of_the_reference(heads, width, window, device):
    boundaries = [0, 5, 300, 301, 713]
    exact = [torch.randn(1, n, 713, width, device=device, dtype=torch.float64) for n in (heads[0], heads[1], heads[1])]
    direction = torch.randn(1, heads[0], 713, width, device=device, dtype=torch.float64)

    def run(function, dtype):
        inputs = [x.to(torch.bfloat16).to(dtype).requires_grad_() for x in exact]
        out = function(AttentionCall(*inputs, scale=width**-0.5, window=window), boundaries)
        return [out, *torch.autograd.grad((out * direction.to(torch.bfloat16).to(dtype)).sum(), inputs)]

    wanted = run(packed_attention_ref, torch.float64)
    errors = {f: run(f, torch.bfloat16) for f in (packed_attention_flash, packed_attention_ref)}
    for i, right in enumerate(wanted):
        flash, plain = (float((e[i].double() - right).norm() / right.norm()) for e in errors.values())
        assert flash < max(2 * plain, 1e-2), f"output {i}: {flash:.4f} against {plain:.4f} of plain torch in bf16"


def gradients(model, rollouts, *, compiles, activations="keep"):
    completions = flatten(rollouts, model.device)
    (microbatch,) = pack(rollouts, 1 << 20)
    with learner_layers(model, activations, compiles=compiles):
        scores = score_microbatch(Head(model), completions, microbatch, 1.0)
        weights = torch.linspace(-1, 1, len(scores.logprobs), device=model.device)
        scores.logprobs.mul(weights).mean().backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return found


@pytest.mark.timeout(400)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_an_fp32_models_to_bf16_rounding(shape, device):
    """No further from fp32 than plain autograd on transformers' own attention in bf16 is."""
    config = LearnerBenchConfig(shape=shape, device=device, sequences=8, prompt=16, output=200, median=80)
    loaded = random_model(config.shape, device, torch.bfloat16)
    rollouts = make_rollouts(config, loaded)
    (microbatch,) = pack(rollouts, 1 << 20)

    def plain(dtype):
        model = random_module(config.shape, device, torch.bfloat16, 0, attn_implementation="sdpa").to(dtype)
        terms = []
        weights = torch.linspace(-1, 1, len(microbatch.tokens), device=device).to(dtype)
        first = torch.tensor([0, *(len(r.token_ids) for r in rollouts)]).cumsum(0)
        for i, rollout in enumerate(rollouts):  # one by one: nothing of ours is in it
            ids = torch.tensor([*rollout.prompt.ids, *rollout.token_ids.tolist()], device=device)[None]
            start = len(rollout.prompt.ids) - 1
            logprobs = torch.log_softmax(model(ids, use_cache=False).logits[0, start:-1].float(), -1)
            chosen = logprobs.gather(1, rollout.token_ids.to(device)[:, None])[:, 0]
            terms.append((chosen * weights[first[i] : first[i + 1]]).sum())
        (torch.stack(terms).sum() / len(weights)).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    wanted, theirs = plain(torch.float32), plain(torch.bfloat16)

    def error(found):
        total = sum((found[name].double() - wanted[name]).square().sum() for name in wanted)
        return float((total / sum(g.double().square().sum() for g in wanted.values())).sqrt())

    bound = 1.2 * error(theirs)
    for settings in ({"compiles": False}, {"compiles": True}, {"compiles": True, "activations": "recompute"}):
        ours = error(gradients(loaded.model, rollouts, **settings))
        assert ours < bound, f"{settings}: {ours:.4f}, the bound is {bound:.4f}"


@pytest.mark.parametrize("shape", SHAPES)
def test_no_tensor_holds_all_logits(shape, device):
    """From the allocator's trace: nothing as large as [tokens x vocabulary], be it in fp32 or in bf16."""
    config = LearnerBenchConfig(shape=shape, device=device, sequences=16, prompt=16, output=1024, spread="equal")
    loaded = random_model(config.shape, device, torch.bfloat16)
    rollouts = make_rollouts(config, loaded)
    masters = MasterWeights(loaded.model)
    learner = Learner(Head(loaded.model), OptimizerConfig().build(masters), masters)
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")
    try:
        updated = update(
            learner,
            rollouts,
            torch.tensor([1.0, -1.0]).repeat(8),
            [0] * 16,
            PRESETS["sparse_rl"],
            LossConfig(),
            UpdateConfig(max_tokens=1 << 20, activations="recompute", compile=False),
            temperature=1.0,
            max_length=1024,
            generator=torch.Generator().manual_seed(0),
        )
        trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    assert updated.metrics["grad_norm"] > 0
    largest = max(event["size"] for event in trace if event["action"] == "alloc")
    tokens, vocabulary = 16 * 1024, loaded.vocab_size
    assert 0 < largest < tokens * vocabulary * 2, f"{largest:,} bytes were allocated at once"
