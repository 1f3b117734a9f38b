# SPDX-License-Identifier: Apache-2.0
"""What the engine samples from a compressed cache is the dense model with a mask: see replay.py."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from replay import firing_times, replay_logprobs, rollout_visibility, visible_positions
from slow_policies import cut_margin, keep, rkv_importance, snapkv_importance

from sparse_rl.kv import RKV, SnapKV, Streaming
from sparse_rl.rollout import Engine, EngineConfig, Sampling, runner

POLICIES = [
    Streaming(budget=20, interval=7),
    Streaming(budget=12, interval=5, protect_prompt=True),
    SnapKV(budget=16, interval=8, window=4),
    RKV(budget=24, interval=9, sinks=2),
    RKV(budget=16, interval=8, window=8, order="score"),
    SnapKV(budget=20, interval=3, window=8),  # fires before the remembered queries are all new
]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: f"{p.name}-{p.budget}")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.some(5)
def test_engine_equals_masked_dense_model(policy, family, tiny, reference, prompts):
    """Fails if a position came from the cache length: the cache is a small part of the context at the end."""
    settings = {"dtype": torch.float64}
    loaded, model = tiny(family, **settings), reference(family, **settings)
    engine = Engine(loaded, policy, EngineConfig(rows=3, page_size=16))
    rollouts = engine.generate(prompts(3, 11, 50), Sampling(max_tokens=75, n=2, stop_ids=()), record_kept=True)
    for rollout in rollouts:
        assert rollout.kv.num_compressions >= 5
        ids = torch.tensor([[*rollout.prompt.ids, *rollout.token_ids.tolist()]], device=model.device)
        visible = rollout_visibility(rollout, policy, loaded.shape)
        logprobs = replay_logprobs(model, ids, visible)[0, len(rollout.prompt.ids) - 1 :]
        expected = logprobs.gather(-1, rollout.token_ids.to(ids.device)[:, None])[:, 0].float().cpu()
        torch.testing.assert_close(rollout.sampler_logprobs, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("policy", POLICIES[2:], ids=lambda p: f"{p.name}-{p.budget}")
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.some(3)
def test_the_engines_own_queries_and_keys_decide_what_is_kept(policy, family, tiny, reference, prompts):
    """Every firing, recomputed by the slow policies from the queries and keys of the masked dense model.

    Several samples of each prompt through few rows: a ring that is stale, another sequence's, or of other tokens shows.
    """
    settings = {"dtype": torch.float64}
    loaded, model = tiny(family, **settings), reference(family, **settings)
    engine = Engine(loaded, policy, EngineConfig(rows=3, page_size=16))
    rollouts = engine.generate(prompts(3, 50), Sampling(max_tokens=70, n=2, stop_ids=()), record_kept=True)
    for rollout in rollouts:
        prompt_len, num_tokens = len(rollout.prompt.ids), len(rollout.token_ids)
        ids = torch.tensor([[*rollout.prompt.ids, *rollout.token_ids.tolist()]], device=model.device)
        seen: dict = {}
        replay_logprobs(model, ids, rollout_visibility(rollout, policy, loaded.shape), seen)
        times = firing_times(prompt_len, num_tokens, policy.target(prompt_len, 0), policy.trigger(prompt_len, 0))
        for layer_idx, (queries, keys, scale) in seen.items():
            window = loaded.shape.windows[layer_idx]
            if window is not None and getattr(policy, "order", "position") == "score":
                continue  # dead entries stand between live ones there, and the slow policies know no dead entries
            for head in range(loaded.shape.num_kv_heads):
                group = queries.shape[0] // keys.shape[0]
                own_queries = queries[head * group : (head + 1) * group].cpu().numpy()
                own_keys = keys[head].cpu().numpy()
                held: list[int] = []
                for time, kept in zip(times, rollout.kept_positions, strict=True):
                    start = max(held, default=-1) + 1
                    held += range(start, time)
                    # Entries outside a layer's window go first, whatever they are worth.
                    live = [p for p in held if window is None or time - p < window]
                    last = own_queries[:, time - policy.window : time]
                    got = set(kept[layer_idx, head].tolist())
                    if len(live) > policy.budget:
                        settings = {"window": policy.window, "scale": scale, "kernel": policy.kernel}
                        if isinstance(policy, RKV):
                            settings |= {"lam": policy.lam, "threshold": policy.threshold}
                        find = rkv_importance if isinstance(policy, RKV) else snapkv_importance
                        importance = find(own_keys[live], last, **settings)
                        sinks = frozenset(i for i, p in enumerate(live) if p < policy.sinks)
                        cut = {"n": len(live), "window": policy.window, "budget": policy.budget, "protected": sinks}
                        expected = {live[i] for i in keep(importance, **cut)}
                        lowest, highest = cut_margin(importance, **cut)
                        for p in got ^ expected:
                            value = importance[live.index(p)]
                            assert highest - 1e-9 <= value <= lowest + 1e-9, (layer_idx, head, time, p)
                    else:
                        assert set(live) <= got
                    held = kept[layer_idx, head].tolist()


def test_streaming_keeps_what_its_definition_says(tiny, prompts):
    policy = Streaming(budget=20, interval=7, sinks=3)
    engine = Engine(tiny(), policy, EngineConfig(rows=3, page_size=16))
    (rollout,) = engine.generate(prompts(30), Sampling(max_tokens=60, stop_ids=()), record_kept=True)
    times = firing_times(30, 60, 20, 27)
    assert len(times) == len(rollout.kept_positions) > 5
    for seen, kept in zip(times, rollout.kept_positions, strict=True):
        assert (kept == torch.tensor([0, 1, 2, *range(seen - 17, seen)])).all()


@pytest.mark.parametrize("policy", POLICIES[2:], ids=lambda p: f"{p.name}-{p.budget}")
@pytest.mark.some(2)
def test_kept_positions_hold_the_protected_ones(policy, tiny, prompts):
    engine = Engine(tiny(), policy, EngineConfig(rows=3, page_size=16))
    (rollout,) = engine.generate(prompts(40), Sampling(max_tokens=60, stop_ids=()), record_kept=True)
    times = firing_times(40, 60, policy.target(40, 0), policy.trigger(40, 0))
    for seen, kept in zip(times, rollout.kept_positions, strict=True):
        assert kept.shape[-1] == policy.budget
        ordered = kept.sort(dim=-1).values
        assert (ordered.diff(dim=-1) > 0).all()
        protected = [*range(policy.sinks), *range(seen - policy.window, seen)]
        assert torch.isin(torch.tensor(protected), kept[0, 0]).all()
        assert (kept == ordered).all() == (policy.order == "position" if isinstance(policy, RKV) else True)


def test_heads_and_layers_keep_different_entries(tiny, prompts):
    engine = Engine(tiny(), RKV(budget=16, interval=8), EngineConfig(rows=3, page_size=16))
    (rollout,) = engine.generate(prompts(40), Sampling(max_tokens=60, stop_ids=()), record_kept=True)
    kept = rollout.kept_positions[-1]
    assert (kept[0] != kept[1]).any() and (kept[:, 0] != kept[:, 1]).any()


def enumerate_model(tiny, reference, vocabulary, num_tokens, policy, prompt):
    """Exact q (sparse) and p (dense) of every continuation: log-probs N T V of all V^T sequences N T."""
    settings = {"vocab_size": vocabulary, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    loaded, model = tiny(dtype=torch.float64, **settings), reference(dtype=torch.float64, **settings)
    sequences = torch.cartesian_prod(*[torch.arange(vocabulary)] * num_tokens)
    ids = torch.cat([torch.tensor(prompt).expand(len(sequences), -1), sequences], dim=1).to(model.device)
    times = firing_times(len(prompt), num_tokens, policy.target(len(prompt), 0), policy.trigger(len(prompt), 0))
    assert len(times) >= 2
    kept = []
    for seen in times:
        recent = range(seen - policy.budget + policy.sinks, seen)
        kept.append(torch.tensor([*range(policy.sinks), *recent]).expand(2, 2, -1))
    visible = visible_positions(
        prompt_len=len(prompt),
        num_tokens=num_tokens,
        firings=list(zip(times, kept, strict=True)),
        windows=loaded.shape.windows,
        num_kv_heads=2,
    )
    q = replay_logprobs(model, ids, visible)[:, len(prompt) - 1 :]
    with torch.no_grad():
        p = torch.log_softmax(model(ids[:, :-1]).logits, dim=-1)[:, len(prompt) - 1 :]
    return loaded, sequences, q.cpu(), p.cpu()


def test_importance_ratios_on_a_model_small_enough_to_enumerate(tiny, reference):
    """E[xi] = 1 and E[min(1, xi)] = 1 - TV under the sampler: exactly by enumeration, and by the engine's samples."""
    vocabulary, num_tokens, num_samples = 5, 4, 2000
    policy, prompt = Streaming(budget=4, interval=2, sinks=1), [1, 3, 0, 2, 4, 1, 1]
    loaded, sequences, q, p = enumerate_model(tiny, reference, vocabulary, num_tokens, policy, prompt)
    chosen_q = q.gather(-1, sequences[..., None])[..., 0]
    chosen_p = p.gather(-1, sequences[..., None])[..., 0]
    weight = chosen_q.sum(-1).exp()  # probability of the whole sequence under the sampler
    assert weight.sum() == pytest.approx(1.0, abs=1e-9)
    xi = (chosen_p - chosen_q).exp()
    tv = 0.5 * (p.exp() - q.exp()).abs().sum(-1)
    mean_xi = (weight[:, None] * xi).sum(0)
    mean_min = (weight[:, None] * xi.clamp(max=1.0)).sum(0)
    mean_tv = (weight[:, None] * tv).sum(0)
    torch.testing.assert_close(mean_xi, torch.ones_like(mean_xi), atol=1e-9, rtol=0)
    torch.testing.assert_close(mean_min, 1.0 - mean_tv, atol=1e-9, rtol=0)
    assert mean_tv[1:].min() > 0.01, "nothing to see: the sparse model is the dense one"

    engine = Engine(loaded, policy, EngineConfig(rows=500, page_size=16))
    rollouts = engine.generate([prompt], Sampling(max_tokens=num_tokens, n=num_samples, seed=11, stop_ids=()))
    sampled = torch.stack([r.token_ids for r in rollouts])
    reported = torch.stack([r.sampler_logprobs for r in rollouts]).double()
    row = (sampled * vocabulary ** torch.arange(num_tokens - 1, -1, -1)).sum(-1)
    torch.testing.assert_close(reported, chosen_q[row], atol=1e-6, rtol=0)
    for values, expected in ((xi[row], mean_xi), (xi[row].clamp(max=1.0), mean_min)):
        error = values.std(0) / num_samples**0.5
        assert ((values.mean(0) - expected).abs() <= 4 * error + 1e-9).all()


def test_entries_a_window_layer_can_still_see_are_live(tiny, prompts, monkeypatch):
    """At the first firing after 60 tokens, a layer of window w counts the last w - 1: the next token is its w-th."""
    loaded, seen = tiny("gemma3"), []
    importance = Streaming.importance
    monkeypatch.setattr(Streaming, "importance", lambda self, e: (seen.append(e), importance(self, e))[1])
    engine = Engine(loaded, Streaming(budget=30, interval=8), EngineConfig(rows=2, page_size=16))
    engine.generate(prompts(60, 60), Sampling(max_tokens=2, stop_ids=()))
    positions, live = seen[0].positions_BKS, seen[0].live_BKS
    for layer_idx, window in enumerate(loaded.shape.windows):
        for row in (2 * layer_idx, 2 * layer_idx + 1):
            expected = list(range(60 - window + 1 if window else 0, 60))
            assert positions[row, 0][live[row, 0]].tolist() == expected


@pytest.mark.parametrize(("order", "chunks"), [("position", 1), ("score", 4)])
def test_kernels_that_copy_nothing_compress_all_rows_at_once(order, chunks, tiny, monkeypatch):
    policy = RKV(budget=16, interval=8, order=order)
    monkeypatch.setattr("sparse_rl.kv.compress.use_triton", lambda x: True)
    monkeypatch.setattr("sparse_rl.kv.compress.COPIED_ENTRIES", 2 * 4 * 24)
    cache = SimpleNamespace(k=None, shape=SimpleNamespace(num_layers=4))
    few = SimpleNamespace(policy=policy, cache=cache)
    items = [SimpleNamespace(num_entries=24) for _ in range(8)]
    assert len(runner.Runner._chunks(few, items)) == chunks


def test_many_rows_are_compressed_in_chunks(tiny, prompts, monkeypatch):
    loaded = tiny(dtype=torch.float64)

    def run():
        engine = Engine(loaded, SnapKV(budget=16, interval=9), EngineConfig(rows=5, page_size=16))
        rollouts = engine.generate(prompts(30, 30, 30, 30, 30), Sampling(max_tokens=30, stop_ids=()))
        return [(r.token_ids.tolist(), r.kv) for r in rollouts]

    expected = run()
    monkeypatch.setattr("sparse_rl.kv.compress.COPIED_ENTRIES", 2 * 2 * 30)  # two rows of two layers at a time
    assert run() == expected
