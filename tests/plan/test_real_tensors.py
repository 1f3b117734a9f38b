# SPDX-License-Identifier: Apache-2.0
"""A plan's bytes are those of the real tensors, and its pool is the engine's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from long_run import BIG, held, long_run
from schedules import named

from sparse_rl.kv import GKV, RKV, Full, SnapKV, Streaming
from sparse_rl.model.attention import PackedRows, packed_positions
from sparse_rl.model.dry_run import dry_run
from sparse_rl.model.load import LoadedModel, load
from sparse_rl.model.tiny import FAMILIES, tiny_model, tiny_tokenizer
from sparse_rl.plan import make_plan, model_config, model_size
from sparse_rl.rollout import Engine, EngineConfig, Sampling
from sparse_rl.train import OptimizerConfig
from sparse_rl.train.distill import DistillConfig, Distiller
from sparse_rl.train.master import MasterWeights
from sparse_rl.train.processes import Processes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_weights_masters_gradients_and_moments_are_those_of_a_learner(family, dtype):
    model = tiny_model(family, dtype=dtype)
    masters = MasterWeights(model)
    optimizer = OptimizerConfig().build(masters)
    ids = torch.randint(0, 256, (1, 9))
    model(input_ids=ids, use_cache=False).logits.float().logsumexp(-1).sum().backward()
    gradients = sum(master.grad.nbytes for master in masters.masters)
    optimizer.step()
    moments = sum(state[key].nbytes for state in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq"))
    own = {id(parameter) for parameter in model.parameters()}

    plan = make_plan(model_size(model.config, family, dtype), long_run(), BIG)
    assert held(plan, "weights") == sum(parameter.nbytes for parameter in model.parameters())
    assert held(plan, "masters") == sum(master.nbytes for master in masters.masters if id(master) not in own)
    assert held(plan, "gradients") == gradients
    assert held(plan, "optimizer moments") == moments


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        ("llama", Full()),
        ("llama", RKV(budget=20, interval=7, window=4)),
        ("qwen2", SnapKV(budget=33, interval=16, window=8, protect_prompt=True)),
        ("gemma3", Streaming(budget=16, interval=16)),
        ("qwen2", GKV(budget=20, interval=9)),
        ("llama", Streaming(budget=named((0, 30, 300), (8, 16, 90)), interval=9)),
    ],
    ids=["full", "rkv", "snapkv", "streaming", "gkv", "schedule"],
)
@pytest.mark.some(2)
def test_the_pool_and_the_rows_are_the_engine_s(family, policy):
    model = tiny_model(family, dtype=torch.bfloat16)
    loaded = LoadedModel(model=model, tokenizer=tiny_tokenizer(), shape=dry_run(model))
    engine = Engine(loaded, policy, EngineConfig(rows=3, page_size=16))
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (21, 5)]
    engine.generate(prompts, Sampling(n=2, max_tokens=50, top_logprobs=6, stop_ids=()))
    cache, (decoder,) = engine.cache, engine.decoders.values()

    size = model_size(model.config, family, torch.bfloat16)
    run = long_run(
        kv=policy, rows=3, requests=4, prompt=21, completion=50, page_size=16, top_logprobs=6, max_tokens=100
    )
    plan = make_plan(size, run, BIG)
    assert plan.pages == cache.num_pages == engine.stats.num_pages
    assert held(plan, "KV pool") == sum(tensor.nbytes for tensor in cache.pools)
    rest = (*cache.fixed_tensors(), cache.windows, cache.scales)
    assert held(plan, "rows") == sum(tensor.nbytes for tensor in rest) + decoder.rows.num_bytes
    pool = next(line for line in plan.lines if line.name == "KV pool")
    assert ("layers" in pool.stages) == engine.bounded  # the trainer releases the others
    assert size.attention == replace(dry_run(model), device=torch.device("meta"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_sampler_s_adapter_and_its_state_are_the_distiller_s(dtype):
    model = tiny_model("qwen2", dtype=dtype)
    loaded = LoadedModel(model=model, tokenizer=tiny_tokenizer(), shape=dry_run(model))
    distiller = Distiller(loaded, DistillConfig(r=3, merged=True), 0, Processes())
    masters, own = distiller.learner.masters.masters, list(distiller.adapter.parameters())
    for master in masters:
        master.grad = torch.zeros_like(master)
    distiller.learner.optimizer.step()
    state = distiller.learner.optimizer.state.values()
    moments = sum(each[key].nbytes for each in state for key in ("exp_avg", "exp_avg_sq"))
    others = sum(master.nbytes for master in masters if all(master is not parameter for parameter in own))

    size = model_size(model.config, "qwen2", dtype)
    plan = make_plan(size, long_run(distill=size.adapters(3), merged=True), BIG)
    assert held(plan, "merged copy") == sum(copy.weight.nbytes for copy in distiller.merged.copies)
    assert held(plan, "sampler's adapter") == sum(parameter.nbytes for parameter in own) + others + moments
    assert held(plan, "its gradients") == sum(master.grad.nbytes for master in masters)


def test_the_positions_kept_are_those_of_the_rollouts():
    model = tiny_model("llama")
    loaded = LoadedModel(model=model, tokenizer=tiny_tokenizer(), shape=dry_run(model))
    size = model_size(model.config, "llama", torch.float32)
    prompts = [torch.randint(0, 256, (40,)).tolist() for _ in range(2)]
    for policy in (
        RKV(budget=20, interval=7, window=4),  # less than the prompt
        SnapKV(budget=13, interval=8, window=8, protect_prompt=True),
        Streaming(budget=named((0, 50, 70), (8, 16, 30)), interval=5),
        Streaming(budget=named((0, 10, 30, 80), (6, 30, 36, 38)), interval=5),  # steps inside the prompt
    ):
        engine = Engine(loaded, policy, EngineConfig(rows=3, page_size=16))
        rollouts = engine.generate(prompts, Sampling(max_tokens=60, stop_ids=()), record_kept=True)
        real = sum(kept.nbytes for rollout in rollouts for kept in rollout.kept_positions)
        run = long_run(kv=policy, requests=2, prompt=40, completion=60, distill=size.adapters(2))
        assert held(make_plan(size, run, BIG), "positions kept") == real > 0
        of_each = [
            held(make_plan(size, replace(run, kv=replace(policy, budget=budget)), BIG), "positions kept")
            for budget in range(10, 91)
        ]
        moving = replace(run, kv=replace(policy, budget=90), auto=10)
        assert held(make_plan(size, moving, BIG), "positions kept") == pytest.approx(max(of_each), rel=0.1)


@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"gemma2", "gpt_oss"}))  # a GPU's kernel keeps less of these
@pytest.mark.some(4)
def test_a_token_leaves_behind_what_autograd_saves(family, monkeypatch):
    model, tokens = tiny_model(family, dtype=torch.bfloat16), 20  # inside the windows
    size = model_size(model.config, family, torch.bfloat16)
    known = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept, saved = [], 0

    def save(tensor):
        nonlocal saved
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            known.add(storage._cdata)
            kept.append(tensor)
            saved += storage.nbytes()
        return tensor

    boundaries = [0, 8, tokens]
    monkeypatch.setattr("sparse_rl.kernels.attention.PADDED_TO", 1)  # a flash kernel pads nothing
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        model.get_decoder()(
            input_ids=torch.randint(0, 256, (1, tokens)),
            position_ids=packed_positions(boundaries, torch.device("cpu")),
            use_cache=False,
            kv=PackedRows(boundaries),
        )
    shape = size.attention
    joined = tokens * shape.num_layers * shape.num_heads * shape.head_dim * 2  # the sequences' outputs, put together
    counted = 0.065 if family == "phi3" else 0.015  # its values are part of a product that is counted whole
    assert saved - joined == pytest.approx(tokens * (size.saved_layers + size.saved_outside), rel=counted)


def test_the_config_of_a_name_is_the_loaded_model_s():
    for name in ("embedded", "tiny:qwen3"):
        model = load(name).model
        size = model_size(model_config(name, download=False), name, torch.float32)
        assert size.parameters == sum(parameter.numel() for parameter in model.parameters())
    with pytest.raises(ValueError, match="no/where"):
        model_config("no/where", download=False)
