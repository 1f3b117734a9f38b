# SPDX-License-Identifier: Apache-2.0
"""A plan's arithmetic, by hand: parameters, what each saver saves, activations, ranks."""

from __future__ import annotations

import pytest
from long_run import BIG, H200, held, long_run

from sparse_rl.plan import Device, make_plan
from sparse_rl.plan.records import LEARNING


def test_parameters_of_a_layer_and_around_it(qwen):
    hidden, wide, kv = 3584, 18944, 4 * 128
    layer = 2 * hidden**2 + 2 * hidden * kv + 3 * hidden * wide + (hidden + 2 * kv) + 2 * hidden
    assert qwen.layer == layer and qwen.matrix == hidden * wide
    assert qwen.around == 2 * 152064 * hidden + hidden
    assert qwen.parameters == 28 * layer + qwen.around
    # LoRA adds r x (in + out) to each matrix of a layer.
    assert qwen.adapters(2, ("q_proj", "down_proj")) == 2 * 28 * (2 * hidden + wide + hidden)
    assert qwen.adapters(1) == 28 * (4 * hidden + 2 * (hidden + kv) + 3 * (hidden + wide))
    assert qwen.adapters(1, ("self_attn.q_proj",)) == qwen.adapters(1, ("q_proj",)), "as peft takes them"
    for targets in (("q_poj",), ("q_proj", "q_poj")):
        with pytest.raises(ValueError, match=r"lora.target has 'q_poj'; this model's projections are q_proj, k_proj"):
            qwen.adapters(4, targets)


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
    assert held(keep, "backward of a layer") == 2 * (tokens * (3 * 18944 + 4 * 3584) + 3584 * 18944), "and a gradient"
    assert held(keep, "head") == 2 * (152064 * (2**28 // 152064) + 2 * tokens * 3584)
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
