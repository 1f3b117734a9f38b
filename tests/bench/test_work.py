# SPDX-License-Identifier: Apache-2.0
"""Requests, windows, rooflines and kernel names: arithmetic, against numbers worked out by hand."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import sparse_rl
from sparse_rl.bench.meter import Meter
from sparse_rl.bench.profile import Kernel, category, split
from sparse_rl.bench.roofline import Roofline, device_limits
from sparse_rl.bench.work import (
    BenchConfig,
    Window,
    dense_peak_entries,
    full_window,
    make_prompts,
    output_lengths,
    profile_window,
    steps_to_fill,
)
from sparse_rl.calibrate.cost import Machine, Model
from sparse_rl.kv import RKV, Full
from sparse_rl.model.shapes import SHAPES, random_model, shape_config
from sparse_rl.rollout import Progress

RKV_512 = RKV(budget=512, interval=128)
PARAMETERS = {  # as published
    "smollm2-135m": 134_515_008,
    "llama-3.2-1b": 1_235_814_400,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
}


def module(name):
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(shape_config(name), dtype=torch.bfloat16)


@pytest.mark.parametrize("name", PARAMETERS)
def test_shapes_have_the_published_number_of_parameters(name):
    assert sum(parameter.numel() for parameter in module(name).parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", SHAPES)
def test_no_shape_ends_a_text_or_runs_out_of_positions(name):
    config = shape_config(name)
    assert config.eos_token_id is None and config.max_position_embeddings >= 40960


def test_random_weights_follow_the_seed(device):
    def weights(seed):
        return random_model("tiny", device, torch.float32, seed).model.state_dict()

    first, again, other = weights(3), weights(3), weights(4)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


# The table of tokens a second by rows, 512 + 64 entries: 4.19 TB/s, 780 TFLOP/s.
@pytest.mark.parametrize(
    ("name", "rows", "expected"),
    [
        ("qwen2.5-1.5b", 256, 124_309),
        ("qwen2.5-1.5b", 64, 64_107),
        ("qwen2.5-7b", 256, 38_230),
        ("qwen2.5-7b", 16, 4_567),
        ("qwen3-1.7b", 128, 44_789),
        ("qwen3-4b", 1024, 32_542),
    ],
)
def test_roofline(name, rows, expected):
    bandwidth, flops = device_limits("NVIDIA H200", torch.bfloat16)
    roofline = Roofline(
        model=Model.of(module(name), name, 2),
        machine=Machine(name="h200", bandwidth=bandwidth, flops=flops),
        rows=rows,
        entries=576.0,
    )
    assert roofline.tokens_per_s == pytest.approx(expected, rel=1e-3)
    assert f"B {rows}" in str(roofline) and "c 576" in str(roofline)


def test_a_device_that_is_not_known_has_no_limits():
    assert device_limits("Some GPU", torch.bfloat16) == (None, None)
    bandwidth, flops = device_limits("NVIDIA H200", torch.float32)
    assert bandwidth == pytest.approx(4.19e12) and flops is None
    bandwidth, flops = device_limits("NVIDIA H100 80GB HBM3", torch.bfloat16)
    assert bandwidth == pytest.approx(2.92e12, rel=0.01) and flops == pytest.approx(780e12)


def test_standard_work_is_two_requests_a_row():
    config = BenchConfig(rows=6, prompt=5, output=9, n=3)
    prompts = make_prompts(config, 1000)
    assert len(prompts) == 4 and output_lengths(prompts) == [9] * 4
    assert len({prompt.ids for prompt in prompts}) == 4 and {len(prompt.ids) for prompt in prompts} == {5}


def test_lognormal_lengths():
    config = BenchConfig(rows=1000, prompt=1, output=2000, work="lognormal", seed=7)
    lengths = torch.tensor(output_lengths(make_prompts(config, 10))).double()
    assert len(lengths) == 4000 and lengths.min() >= 1 and lengths.max() == 2000
    assert lengths.median() == pytest.approx(1000, rel=0.05)
    log = lengths.log().sort().values  # a normal's quartiles lie 0.6745 sigma from its median
    assert float(log[3000] - log[1000]) / (2 * 0.6745) == pytest.approx(0.6, rel=0.07)


def test_windows_hold_whole_intervals_of_full_caches():
    def window(policy, **settings):
        config = BenchConfig(**{"rows": 4, "output": 4096, **settings})
        return full_window(config, policy, make_prompts(config, 10))

    assert steps_to_fill(RKV_512, 128) == 512 and steps_to_fill(RKV_512, 2000) == 128
    whole = window(RKV_512)
    assert whole.start == 512 and whole.steps % 128 == 0 and 3712 - 512 < whole.steps + 512 <= 0.95 * 4096
    cut = window(RKV_512, output=16384, max_steps=1000)
    assert (cut.start, cut.steps) == (512, 384)
    dense = window(Full(), prompt=12288, max_steps=100)
    assert (dense.start, dense.steps) == (25, 75)
    assert window(RKV(budget=4096), output=200).start == 47  # never compressed
    with pytest.raises(ValueError, match=r"--max-steps is 600, but caches are full after 512 .* at least 640"):
        window(RKV_512, max_steps=600)


def test_what_is_profiled_is_the_work_itself():
    def window(policy, **settings):
        config = BenchConfig(**{"rows": 64, "output": 4096, **settings})
        prompts = make_prompts(config, 10)
        return profile_window(config, policy, prompts), full_window(config, policy, prompts)

    assert window(RKV_512)[0] == Window(start=512, steps=256)
    assert window(RKV_512, output=768)[0] is None and window(RKV_512, output=769)[0] is not None
    assert window(Full())[0] == Window(start=8, steps=32)
    profiled, measured = window(RKV_512, work="lognormal")
    assert profiled == Window(start=measured.start, steps=256) and measured.start > 1500, "outputs have ended by then"
    assert window(RKV_512, work="lognormal", output=256)[0] is None


def test_dense_peak():
    def peak(lengths, **settings):
        config = BenchConfig(**settings)
        prompts = make_prompts(config, 10)
        assert len(prompts) == len(lengths)
        return dense_peak_entries(
            config, [replace(prompt, max_tokens=n) for prompt, n in zip(prompts, lengths, strict=True)]
        )

    assert peak([8] * 6, rows=3, prompt=5, output=8) == 3 * (5 + 7)
    assert peak([8] * 2, rows=3, prompt=5, output=8, n=3) == 5 + 3 * 7
    # Rows of lengths 9 and 3; the third starts at step 2 and is at 5 + 4 when the first ends at 5 + 8.
    assert peak([9, 3, 5, 1], rows=2, prompt=5, output=9) == 5 + 6 + 5 + 4


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_decode_attention", "attention"),
        ("_write_entries", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, cutlass::bfloat16_t>>", "attention"),
        ("_attention_importance", "compaction"),
        ("_sum_cosines", "compaction"),
        ("_select_and_compact", "compaction"),
        ("_sample", "sampling"),
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN", "linear"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64", "linear"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int>", "linear"),
        ("triton_poi_fused_mul_silu_0", "pointwise"),
        ("void at::native::vectorized_elementwise_kernel<4>", "pointwise"),
        ("Memcpy DtoH (Device -> Pinned)", "pointwise"),
    ],
)
def test_kernels_have_their_category(name, expected):
    assert category(name) == expected


def test_each_kernel_of_ours_has_a_category():
    jitted = re.compile(r"^@triton\.jit.*\n(?:@.*\n|    .*\n|\).*\n)*def (\w+)", re.MULTILINE)
    kinds = {
        **dict.fromkeys(("decode", "write", "attention"), "attention"),
        "compact": "compaction",
        "importance": "compaction",
        "sampling": "sampling",
    }
    kinds |= {"keys": "compaction", "landmarks": "selection", "logprob": "pointwise"}  # the last is the learner's
    for path in (Path(sparse_rl.__file__).parent / "kernels").glob("*_triton.py"):
        text = path.read_text()
        for name in jitted.findall(text):
            if f"{name}[" in text:  # launched; the others are parts of kernels
                assert category(name) == kinds[path.stem.removesuffix("_triton")], f"{path.name}: {name}"


def test_split_goes_by_name_and_by_annotation():
    kernels = [
        Kernel("_decode_attention", 0, 2_000),
        Kernel("_decode_attention", 10_000, 3_000),
        Kernel("gemm", 20_000, 5_000),
        Kernel("elementwise", 31_000, 7_000),  # inside the compaction
        Kernel("elementwise", 40_000, 11_000),  # begins as it ends
    ]
    seconds = split(kernels, [(30_000, 40_000)])
    assert {name: round(1e9 * value) for name, value in seconds.items()} == {
        "attention": 5_000,
        "linear": 5_000,
        "sampling": 0,
        "selection": 0,
        "compaction": 7_000,
        "pointwise": 11_000,
    }


def progress(**given):
    names = {field.name: 0 for field in fields(Progress)}
    return Progress(**{**names, **given})


def test_the_meter_keeps_the_peak_and_waits_for_full_rows():
    cpu = torch.device("cpu")
    meter = Meter(Window(start=99, steps=1), 4, cpu)
    for pages in (9, 2):
        meter.step(progress(pages_used=pages))
    assert meter.peak_pages == 9
    for exact, opened in ((True, False), (False, True)):
        meter = Meter(Window(start=0, steps=1), 20, cpu, exact=exact)
        meter.step(progress(num_rows=19))
        assert (meter.first is not None) == opened


def test_half_precision_limits_are_known():
    assert device_limits("NVIDIA H200", torch.float16) == device_limits("NVIDIA H200", torch.bfloat16)
