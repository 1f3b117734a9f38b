# SPDX-License-Identifier: Apache-2.0
"""The engine on a GPU: graphs that equal eager steps, memory that comes and goes, a pool that stays whole."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch
from plain_torch import run_the_references
from schedules import named

from sparse_rl.bench.floor import module_logprobs
from sparse_rl.kv import GKV, H2O, RKV, TOVA, Full, KeyDiff, Knorm, PagesMean, Random, SnapKV, Streaming
from sparse_rl.model.dry_run import dry_run
from sparse_rl.model.load import LoadedModel
from sparse_rl.model.shapes import random_model
from sparse_rl.model.tiny import tiny_model, tiny_tokenizer
from sparse_rl.rollout import Engine, EngineConfig, Sampling
from sparse_rl.score import score
from sparse_rl.types import Prompt

pytestmark = pytest.mark.gpu

POLICIES = [
    Full(),
    Streaming(budget=16, interval=9),
    SnapKV(budget=32, interval=16),
    RKV(budget=32, interval=16),
    PagesMean(budget=64, dense_layers=1),
    RKV(budget=112, interval=16, select="quest", select_budget=64),
]
LENGTHS = (3, 25, 17, 8, 40, 130)


def tokens(rollouts):
    return [rollout.token_ids.tolist() for rollout in rollouts]


def same_up_to_rounding(got, expected, atol):
    """Equal tokens and close log-probs, up to where a close call went the other way, which few rows may have."""
    parted = 0
    for a, b in zip(got, expected, strict=True):
        count = min(len(a.token_ids), len(b.token_ids))
        differs = (a.token_ids[:count] != b.token_ids[:count]).nonzero()[:, 0].tolist()
        same = differs[0] if differs else count
        parted += bool(differs)
        torch.testing.assert_close(a.sampler_logprobs[:same], b.sampler_logprobs[:same], atol=atol, rtol=0)
    assert parted <= len(got) // 4, f"{parted} of {len(got)} rows drew other tokens"


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_graphs_draw_what_eager_steps_draw(family, policy, tiny, prompts):
    """At every batch size on the way down; padded batches may round otherwise than those that are not."""
    loaded = tiny(family, layers=4)
    sampling = Sampling(max_tokens=90, n=3, seed=4, top_logprobs=4)
    runs = [
        Engine(loaded, policy, EngineConfig(rows=12, page_size=16, graphs=graphs)).generate(prompts(*LENGTHS), sampling)
        for graphs in (True, False)
    ]
    same_up_to_rounding(*runs, atol=1e-4)


@pytest.mark.compiled
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_compiled_layers_agree_with_their_modules(family, tiny, prompts):
    loaded = tiny(family, layers=4)
    sampling = Sampling(max_tokens=60, n=3, seed=4, stop_ids=())
    policy = RKV(budget=32, interval=16)
    compiled = Engine(loaded, policy, EngineConfig(rows=12)).generate(prompts(*LENGTHS), sampling)
    plain = Engine(loaded, policy, EngineConfig(rows=12, graphs=False)).generate(prompts(*LENGTHS), sampling)
    same_up_to_rounding(compiled, plain, atol=1e-4)


@pytest.mark.parametrize(
    "policy",
    [
        *POLICIES,
        *(policy(budget=32, interval=16) for policy in (Knorm, KeyDiff, TOVA, H2O, GKV, Random)),
        RKV(budget=named((0, 40, 90), (16, 32, 48)), interval=16),
    ],
    ids=lambda p: p.name,
)
def test_triton_draws_what_the_reference_kernels_draw(policy, tiny, prompts, monkeypatch):
    loaded = tiny("qwen3", layers=4)
    sampling = Sampling(max_tokens=70, n=3, seed=9, stop_ids=())
    triton = Engine(loaded, policy, EngineConfig(rows=8, page_size=16)).generate(prompts(*LENGTHS), sampling)
    run_the_references(monkeypatch)
    reference = Engine(loaded, policy, EngineConfig(rows=8, page_size=16)).generate(prompts(*LENGTHS), sampling)
    same_up_to_rounding(triton, reference, atol=1e-4)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_rows_influence_each_other_through_rounding_alone(policy, tiny, prompts):
    loaded = tiny(layers=4)
    sampling = Sampling(max_tokens=60, n=4, seed=5, stop_ids=())
    many = Engine(loaded, policy, EngineConfig(rows=24, page_size=16)).generate(prompts(*LENGTHS), sampling)
    few = Engine(loaded, policy, EngineConfig(rows=2, page_size=16)).generate(prompts(*LENGTHS), sampling)
    same_up_to_rounding(many, few, atol=1e-4)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("shape", "prompt_len", "rows"), [("qwen2.5-1.5b", 64, 16), ("qwen3-1.7b", 64, 16), ("qwen2.5-1.5b", 2000, 8)]
)
def test_dense_decoding_is_as_close_to_the_dense_forward_as_the_modules_own(shape, prompt_len, rows, device):
    """|log xi| of the engine against that of the module decoding with its own cache, token by token, same tokens.

    Long contexts in few rows are split among programs.
    """
    from sparse_rl.kernels.decode_triton import num_sms, splits_of

    loaded = random_model(shape, device, torch.bfloat16, seed=0)
    if prompt_len > 1000:
        programs = rows * loaded.model.config.num_key_value_heads
        assert splits_of(programs, prompt_len, num_sms(loaded.model.device)) >= 4
    prompts = torch.randint(0, 30_000, (4, prompt_len)).tolist()
    rollouts = Engine(loaded, Full(), EngineConfig(rows=rows)).generate(
        prompts, Sampling(max_tokens=128, n=8, stop_ids=())
    )
    dense = torch.stack([scores.dense_logprobs for scores in score(loaded.model, rollouts)])
    ours = (dense - torch.stack([rollout.sampler_logprobs for rollout in rollouts])).abs().flatten()
    theirs = (dense - module_logprobs(loaded.model, rollouts, slice(0, 128))).abs().flatten()
    print(
        f"mean |log xi|: engine {ours.mean():.2e}, module {theirs.mean():.2e}; max {ours.max():.2e}, {theirs.max():.2e}"
    )
    # No larger, within the error of two means over 4,096 tokens, itself a few hundredths of them.
    error = (ours.var() / len(ours) + theirs.var() / len(theirs)).sqrt()
    assert 3 * error < 0.15 * theirs.mean()
    assert ours.mean() <= theirs.mean() + 3 * error


@pytest.mark.parametrize(
    ("policy", "count", "pages"),
    [(RKV(budget=16, interval=8), 10_000, None), (Full(), 2_000, 1000)],
    ids=["rkv", "full"],
)
def test_thousands_of_requests_of_random_lengths_leave_the_pool_whole(policy, count, pages, tiny):
    """Two of each prompt, so that dense rows share its pages and evicting ones its prefill."""
    generator = torch.Generator().manual_seed(int(torch.randint(1 << 40, ())))
    lengths = torch.randint(1, 40, (count, 2), generator=generator).tolist()
    engine = Engine(tiny(layers=4), policy, EngineConfig(rows=512, page_size=16, pool_pages=pages))
    requests = [Prompt(ids=(1,) * a, max_tokens=b) for a, b in lengths]
    rollouts = engine.generate(requests, Sampling(max_tokens=64, n=2))  # which checks the pool at its end
    most = [b for _, b in lengths for _ in range(2)]
    assert all(1 <= len(r.token_ids) <= b for r, b in zip(rollouts, most, strict=True))
    assert count <= engine.stats.num_prefills < 1.1 * count, "samples of a prompt share its prefill"
    assert (engine.stats.num_preemptions > 0) == (pages is not None)


@pytest.fixture(scope="module")
def small(device):
    """A real shape in bf16, with random weights."""
    return random_model("smollm2-135m", device, torch.bfloat16, seed=0)


def scale(model, rollouts, step):
    """Change every weight by a 32nd, which bf16 does not round back; after ten steps they are about what they were."""
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.mul_(1.0 + 2.0**-5 * (-1) ** (i + step))


def train(model, rollouts, step):
    """A backward pass and an optimizer's step, whose memory is taken here and given back."""
    ids = torch.tensor([[*r.prompt.ids, *r.token_ids.tolist()] for r in rollouts[:4]], device=model.device)
    logits = model(ids, use_cache=False).logits[:, :-1].flatten(0, 1).float()
    torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten()).backward()
    torch.optim.AdamW(model.parameters(), lr=1e-3).step()
    model.zero_grad()


def values(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


@torch.no_grad()
def assign(model, weights):
    for parameter, weight in zip(model.parameters(), weights, strict=True):
        parameter.copy_(weight)


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("policy", "learn"), [(Full(), train), (RKV(budget=128, interval=64), scale)], ids=["full", "rkv"]
)
def test_releasing_the_pool_between_rollouts_changes_nothing(policy, learn, small):
    """Ten times rollout, release, learn, resume; the pool lies elsewhere afterwards, the graphs stay."""
    prompt = torch.randint(0, 30_000, (64,)).tolist()
    sampling = Sampling(max_tokens=400, n=64, seed=5, stop_ids=())
    weights = [values(small.model)]  # before each step; a backward pass may round otherwise the second time

    def rounds(release):
        assign(small.model, weights[0])
        engine = Engine(small, policy, EngineConfig(rows=32))
        engine.generate([prompt], sampling)  # compiles and captures
        drawn, seconds, captured, places, held = [], 0.0, 0.0, set(), []
        for step in range(10):
            began = time.perf_counter()
            rollouts = engine.generate([prompt], sampling)
            seconds += time.perf_counter() - began
            captured += engine.stats.capture_s
            places.add(engine.cache.k.data_ptr())
            drawn.append(tokens(rollouts))
            if release:
                before = torch.cuda.memory_allocated()
                keys, others = engine.cache.k.nbytes, engine.cache.v.nbytes + engine.cache.positions.nbytes
                pool = keys + others
                engine.release()
                assert torch.cuda.memory_allocated() <= before - pool, "memory that is released is freed"
                held.append(torch.empty(keys, dtype=torch.uint8, device="cuda"))  # so that the pool must lie elsewhere
            learn(small.model, rollouts, step)
            if release:
                assign(small.model, weights[step + 1])
                engine.resume()
            else:
                weights.append(values(small.model))
        return drawn, captured / seconds, places

    kept, _, _ = rounds(release=False)
    released, capture_frac, places = rounds(release=True)
    assign(small.model, weights[0])
    for old, new in pairwise(weights):
        changed = sum(int((a != b).sum()) for a, b in zip(old, new, strict=True))
        assert changed > 0.5 * sum(a.numel() for a in old), "nothing was learned, so the test shows nothing"
    assert all(before != after for before, after in pairwise(kept)), "the same seed draws otherwise from other weights"
    assert len(places) > 1, "the pool never moved, so the test shows nothing"
    assert capture_frac <= 0.02
    assert kept == released


@pytest.mark.compiled
def test_moved_parameters_are_noticed(prompts):
    model = tiny_model("llama", device="cuda")
    loaded = LoadedModel(model=model, tokenizer=tiny_tokenizer(), shape=dry_run(model))
    engine = Engine(loaded, Full(), EngineConfig(rows=4))
    sampling = Sampling(max_tokens=20, n=2, stop_ids=())
    engine.generate(prompts(5, 9), sampling)
    (decoder,) = engine.decoders.values()
    graphs = dict(decoder.graphs)
    engine.generate(prompts(5, 9), sampling)
    assert decoder.graphs == graphs and engine.stats.capture_s == 0.0
    weight = model.model.layers[1].mlp.up_proj.weight
    other = torch.randn_like(weight) * weight.std()
    weight.data = other  # elsewhere, and of other values
    moved = engine.generate(prompts(5, 9), sampling)
    assert engine.stats.capture_s > 0
    fresh = Engine(loaded, Full(), EngineConfig(rows=4)).generate(prompts(5, 9), sampling)
    assert tokens(moved) == tokens(fresh)


@pytest.mark.parametrize(
    "policy",
    [
        *(policy(budget=32, interval=16) for policy in (RKV, TOVA, H2O, GKV, Random)),
        RKV(budget=32, interval=16, order="score"),
        RKV(budget=named((0, 40, 90), (16, 32, 48)), interval=16),
    ],
    ids=lambda p: p.name,
)
def test_decoding_does_not_wait_for_the_device(policy, tiny, prompts, monkeypatch):
    """Nothing synchronises but what looks at the tokens: torch raises where it would."""
    from sparse_rl.rollout.runner import Runner

    engine = Engine(tiny(layers=4), policy, EngineConfig(rows=8))
    engine.generate(prompts(*LENGTHS), Sampling(max_tokens=200, stop_ids=()))  # captures

    def strictly(function):
        def call(*args, **kwargs):
            torch.cuda.set_sync_debug_mode("error")
            try:
                return function(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return call

    for name in ("prefill", "compress_prompts", "start", "decode", "compress", "fetch"):
        monkeypatch.setattr(Runner, name, strictly(getattr(Runner, name)))
    others = prompts(*(length - 2 for length in LENGTHS))  # of which nothing is on the device yet
    engine.generate(others, Sampling(max_tokens=200, stop_ids=()))


def test_a_model_that_cannot_be_captured_decodes_eagerly(tiny, prompts, monkeypatch, caplog):
    loaded = tiny(layers=4)
    policy = Full()
    expected = Engine(loaded, policy, EngineConfig(rows=4)).generate(prompts(5, 9), Sampling(max_tokens=20, n=2))
    forward = loaded.model.forward

    def synchronising(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits.sum().item()
        return out

    monkeypatch.setattr(loaded.model, "forward", synchronising)
    engine = Engine(loaded, policy, EngineConfig(rows=4))
    got = engine.generate(prompts(5, 9), Sampling(max_tokens=20, n=2))
    assert "cannot be captured" in caplog.text and not next(iter(engine.decoders.values())).graphs
    same_up_to_rounding(got, expected, atol=1e-4)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    monkeypatch.undo()  # and others can be
    again = Engine(loaded, policy, EngineConfig(rows=4))
    same_up_to_rounding(again.generate(prompts(5, 9), Sampling(max_tokens=20, n=2)), expected, atol=1e-4)
    assert next(iter(again.decoders.values())).graphs
    torch.randn(3, device="cuda")
