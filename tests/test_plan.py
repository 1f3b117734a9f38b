# SPDX-License-Identifier: Apache-2.0
"""A plan's bytes are those of the real tensors, its pool is the engine's, and its advice makes a run fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from schedules import named

from sparse_rl.kv import GKV, RKV, Full, SnapKV, Streaming
from sparse_rl.model.attention import PackedRows, packed_positions
from sparse_rl.model.dry_run import dry_run
from sparse_rl.model.load import LoadedModel, load
from sparse_rl.model.shapes import shape_config
from sparse_rl.model.tiny import FAMILIES, tiny_model, tiny_tokenizer
from sparse_rl.plan import Device, Run, make_plan, model_config, model_size, remedies, rows_that_fit, summary, together
from sparse_rl.plan.device import GPUS, choose_device, parse_bytes
from sparse_rl.plan.memory import largest
from sparse_rl.plan.records import LEARNING
from sparse_rl.rollout import Engine, EngineConfig, Sampling
from sparse_rl.train import OptimizerConfig
from sparse_rl.train.distill import DistillConfig, Distiller
from sparse_rl.train.master import MasterWeights
from sparse_rl.train.peaks import MemoryPeaks
from sparse_rl.train.processes import Processes

BIG = Device(name="big", memory=10**15)
H200 = choose_device("cpu", gpu="h200")


@pytest.fixture(scope="module")
def qwen():
    return model_size(shape_config("qwen2.5-7b"), "qwen2.5-7b", torch.bfloat16)


def long_run(**changes) -> Run:
    """64 sequences of 16k tokens."""
    settings = {
        "kv": RKV(budget=512, interval=128),
        "rows": 64,
        "requests": 64,
        "prompt": 128,
        "completion": 16384,
        "max_tokens": 8192,
    }
    return Run(**(settings | changes))


def held(plan, name):
    return sum(line.bytes for line in plan.lines if line.name == name)


# Exact against real tensors


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
    distiller = Distiller(loaded, DistillConfig(r=3, merged=True), RKV(), 0, Processes())
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


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_leaves_behind_what_autograd_saves(family):
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
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        model.get_decoder()(
            input_ids=torch.randint(0, 256, (1, tokens)),
            position_ids=packed_positions(boundaries, torch.device("cpu")),
            use_cache=False,
            kv=PackedRows(boundaries),
        )
    shape = size.attention
    joined = tokens * shape.num_layers * shape.num_heads * shape.head_dim * 2  # the sequences' outputs, put together
    assert saved - joined == pytest.approx(tokens * (size.saved_layers + size.saved_outside), rel=0.015)


def test_parameters_of_a_layer_and_around_it(qwen):
    hidden, wide, kv = 3584, 18944, 4 * 128
    layer = 2 * hidden**2 + 2 * hidden * kv + 3 * hidden * wide + (hidden + 2 * kv) + 2 * hidden
    assert qwen.layer == layer and qwen.matrix == hidden * wide
    assert qwen.around == 2 * 152064 * hidden + hidden
    assert qwen.parameters == 28 * layer + qwen.around
    # LoRA adds r x (in + out) to each matrix of a layer.
    assert qwen.adapters(2, ("q_proj", "down_proj")) == 2 * 28 * (2 * hidden + wide + hidden)
    assert qwen.adapters(1) == 28 * (4 * hidden + 2 * (hidden + kv) + 3 * (hidden + wide))
    with pytest.raises(ValueError, match=r"q_poj is no matrix of qwen2.5-7b; it has q_proj"):
        qwen.adapters(4, ("q_poj",))


def test_the_config_of_a_name_is_the_loaded_model_s():
    for name in ("embedded", "tiny:qwen3"):
        model = load(name).model
        size = model_size(model_config(name, download=False), name, torch.float32)
        assert size.parameters == sum(parameter.numel() for parameter in model.parameters())
    with pytest.raises(ValueError, match="no/where"):
        model_config("no/where", download=False)


# Arithmetic by hand


def test_savers_save_what_they_say(qwen):
    count, size = qwen.parameters, qwen
    plain = make_plan(size, long_run(), BIG)
    assert held(plain, "weights") + held(plain, "masters") + held(plain, "gradients") == 10 * count
    assert held(plain, "optimizer moments") == 8 * count
    rounded = make_plan(size, long_run(moments="8bit"), BIG)
    assert held(rounded, "optimizer moments") == 2 * (count + 4 * -(-count // 256))
    away = make_plan(size, long_run(on_host=True), BIG)
    for stage in LEARNING:
        assert plain.held(stage) - away.held(stage) == 12 * count, "masters and moments"
    with_reference = make_plan(size, long_run(reference=True), BIG)
    assert with_reference.held("rollout") - plain.held("rollout") == 2 * count
    adapters = size.adapters(16)
    lora = make_plan(size, long_run(lora=adapters, reference=True), BIG)
    names = ("LoRA adapters", "masters", "gradients", "optimizer moments", "reference model")
    assert [held(lora, name) for name in names] == [2 * adapters, 4 * adapters, 4 * adapters, 8 * adapters, 0]


def test_activations_by_kind(qwen):
    tokens = 16384 + 128  # longer than max_tokens: alone
    keep, recompute, offload = (
        make_plan(qwen, long_run(activations=kind), BIG) for kind in ("keep", "recompute", "offload")
    )
    assert held(keep, "activations") == tokens * (qwen.saved_layers + qwen.saved_outside)
    assert held(recompute, "activations") == tokens * (28 * 3584 * 2 + qwen.saved_outside)
    once_more = held(recompute, "backward of a layer") - held(keep, "backward of a layer")
    assert once_more == tokens * qwen.saved_layer
    assert recompute.held("layers") - offload.held("layers") == tokens * 26 * 3584 * 2  # two layers are in flight
    host = [line for line in offload.lines if line.where == "host"]
    assert [(line.name, line.bytes) for line in host] == [("activations", tokens * 28 * 3584 * 2)]


def test_the_largest_forward(qwen):
    def tokens(**changes):
        return long_run(**changes).forward_tokens

    assert tokens() == 16512
    assert tokens(max_tokens=40000) == 40000
    assert tokens(max_tokens=40000, requests=2) == 2 * 16512, "a forward holds no more than there is"
    assert tokens(max_tokens=40000, requests=4, ranks=2) == 2 * 16512


def test_ranks_share_all_but_the_module(qwen):
    one, four = (make_plan(qwen, long_run(ranks=ranks), BIG) for ranks in (1, 4))
    assert held(four, "weights") == held(one, "weights")
    for name in ("masters", "gradients", "optimizer moments"):
        assert 4 * held(four, name) == pytest.approx(held(one, name), rel=1e-6)
    assert held(four, "gathered parameters") == (qwen.layer + qwen.around) * 6 and not held(one, "gathered parameters")
    assert four.run.rows_used == 16 and four.pages_wanted == 17 * one.pages_a_row


def test_driver_s_share_is_not_the_allocator_s(qwen):
    plan = make_plan(qwen, long_run(), H200)
    outside = sum(line.bytes for line in plan.lines if line.where == "driver")
    assert outside > 0.02 * H200.memory
    assert plan.held("rollout") - plan.held("rollout", driver=False) == outside


def test_on_a_cpu_host_memory_is_the_device_s(qwen):
    host = Device(name="cpu", memory=10**15, cuda=False)
    moved, plain = (make_plan(qwen, long_run(on_host=on), host) for on in (True, False))
    assert moved.held("head") == plain.held("head")
    assert not {"CUDA context", "fragmentation", "graph pool"} & {line.name for line in plain.lines}


# What fits


def test_a_dense_pool_takes_what_is_left_and_says_how_many_rows_that_is(qwen):
    plan = make_plan(qwen, long_run(kv=Full(), activations="recompute", moments="fp32"), H200)
    a_row = -(-(128 + 16384 - 1) // 64) * 64 * qwen.attention.entry_bytes
    assert plan.pages_wanted * plan.page_bytes == 65 * a_row
    resident = 14 * qwen.parameters + held(plan, "rows") + 600_000_000
    free = H200.memory - resident - int(0.1 * H200.memory)
    assert plan.pages == free // plan.page_bytes
    assert not plan.rollout_fits and plan.rows_in_flight == free // a_row - 1
    text = summary(plan)
    assert text.startswith("does not fit: ") and f"needs {65 * a_row / 1e9:.1f} GB" in text
    assert f"{plan.rows_in_flight} rows in flight" in text and "beside weights, masters and optimizer moments" in text


@pytest.mark.parametrize("policy", [Full(), RKV()], ids=lambda policy: policy.name)
@pytest.mark.parametrize("memory", [40e9, 150e9])
def test_rows_that_fit_is_the_most(policy, memory):
    size = model_size(shape_config("qwen2.5-1.5b"), "small", torch.bfloat16)
    device, run = Device(name="some", memory=int(memory)), long_run()
    rows = rows_that_fit(size, run, device, policy)

    def fits(count):
        return make_plan(size, replace(run, kv=policy, rows=count, requests=count), device).rollout_fits

    assert rows > 0 and fits(rows) and not fits(rows + 1)


def test_sparse_rows_are_many_times_the_dense_ones(qwen):
    run = long_run(moments="8bit")
    assert rows_that_fit(qwen, run, H200, RKV()) > 15 * rows_that_fit(qwen, run, H200, Full())


def test_a_pool_of_a_given_size_is_taken_as_it_is(qwen):
    plan = make_plan(qwen, long_run(kv=Full(), pool_pages=1000, activations="recompute", moments="8bit"), H200)
    assert plan.pages == 1000 and plan.fits and plan.rows_in_flight == 1000 // plan.pages_a_row
    least = make_plan(qwen, long_run(kv=Full(), pool_pages=plan.pages_a_row - 1, activations="recompute"), BIG)
    assert not least.fits, "not one sequence has room"


def test_fp32_adam_on_7b_does_not_fit_one_h200_and_a_saver_does(qwen):
    plan = make_plan(qwen, long_run(activations="recompute"), H200)
    assert plan.rollout_fits and not plan.learning_fits
    assert plan.held(plan.learning) > 18 * qwen.parameters  # 137 GB before activations
    chosen = together(plan)
    assert chosen and chosen[-1].plan.fits
    for saver in ({"moments": "8bit"}, {"on_host": True}):
        assert make_plan(qwen, long_run(activations="recompute", **saver), H200).fits


def test_each_remedy_brings_it_down_and_together_they_suffice(qwen):
    generator = torch.Generator().manual_seed(5)
    for _ in range(30):
        draw = torch.rand(5, generator=generator).tolist()
        run = long_run(
            kv=Full() if draw[0] < 0.5 else RKV(),
            rows=int(8 + 300 * draw[1]),
            max_tokens=int(4096 + 60000 * draw[2]),
            activations=["keep", "recompute"][draw[3] < 0.5],
        )
        plan = make_plan(qwen, run, Device(name="some", memory=int(40e9 + 160e9 * draw[4])))
        if plan.fits:
            continue
        for remedy in remedies(plan):
            after = remedy.plan
            down = after.held(after.learning) < plan.held(plan.learning) or after.wanted < plan.wanted
            assert down or after.rows_in_flight > plan.rows_in_flight, remedy.setting
        chosen = together(plan)
        if chosen:
            assert chosen[-1].plan.fits
            settings = [remedy.setting for remedy in chosen]
            assert len({setting.split()[0] for setting in settings}) == len(settings), "no setting twice"


def test_advice_does_not_name_what_is_not_needed(qwen):
    chosen = [remedy.setting for remedy in together(make_plan(qwen, long_run(), H200))]
    assert chosen == ["update.activations offload"], "the KV pool is given back, which is just enough"
    dense = make_plan(qwen, long_run(kv=Full(), moments="8bit", rows=96, requests=96, activations="recompute"), H200)
    settings = [remedy.setting for remedy in remedies(dense)]
    assert any(setting.startswith("kv.policy rkv") for setting in settings)
    assert [remedy.setting.split()[0] for remedy in together(dense)] == ["engine.rows"]


def test_largest():
    for most, limit in ((0, 5), (1, 0), (1000, 137), (10, 10), (10, 99)):
        assert largest(lambda n, limit=limit: n <= limit, most) == min(most, limit)


# Devices


@pytest.mark.parametrize(
    ("text", "count"),
    [("80GB", 80 * 10**9), ("80 gb", 80 * 10**9), ("1.5GiB", 3 * 2**29), ("1000", 1000), ("2e9", 2 * 10**9)],
)
def test_bytes_as_people_write_them(text, count):
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GB", "80 GBs", "-3", "0", "1.2.3GB", "many"])
def test_bytes_nobody_can_read(text):
    with pytest.raises(ValueError, match="--memory is"):
        parse_bytes(text)


def test_devices():
    assert choose_device("cpu", memory="24GB") == Device(name="a GPU of 24.0 GB", memory=24 * 10**9)
    assert all(choose_device("cpu", gpu=name.upper()).memory > 10**10 for name in GPUS)
    assert not choose_device("cpu").cuda
    with pytest.raises(ValueError, match="did you mean h200"):
        choose_device("cpu", gpu="h20")
    with pytest.raises(ValueError, match="leave one out"):
        choose_device("cpu", gpu="h200", memory="1GB")
    with pytest.raises(ValueError, match="--gpu NAME"):
        choose_device("cuda:99")


def test_a_run_s_peaks_are_a_stage_s(monkeypatch):
    readings = iter([7, 5])
    resets = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(readings))
    peaks = MemoryPeaks(torch.device("cuda"))
    for stage in ("rollout", "update"):
        with peaks(stage):
            assert len(resets) == len(peaks.bytes) + 1, "counted from the stage's start"
    assert peaks.bytes == {"memory/rollout_peak_bytes": 7.0, "memory/update_peak_bytes": 5.0}
    on_cpu = MemoryPeaks(torch.device("cpu"))
    with on_cpu("rollout"):
        pass
    assert on_cpu.bytes == {}
