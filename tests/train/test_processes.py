# SPDX-License-Identifier: Apache-2.0
"""Several processes learn what one does: the same losses and weights, however the work is dealt."""

from __future__ import annotations

import copy
import math
import random
from types import SimpleNamespace

import pytest
import torch
from several import results_of

from sparse_rl.kv import RKV
from sparse_rl.model.dry_run import dry_run
from sparse_rl.model.load import LoadedModel
from sparse_rl.model.tiny import tiny_model, tiny_tokenizer
from sparse_rl.objective.correction import PRESETS
from sparse_rl.objective.loss import LossConfig
from sparse_rl.rollout import Engine, EngineConfig, Sampling
from sparse_rl.score.head import Head
from sparse_rl.score.pack import flatten, pack
from sparse_rl.score.score import score_microbatch
from sparse_rl.tasks import Graded
from sparse_rl.train import Learner, UpdateConfig
from sparse_rl.train.master import MasterWeights
from sparse_rl.train.processes import Processes
from sparse_rl.train.shard import ShardedWeights
from sparse_rl.train.shares import deal, grade
from sparse_rl.train.update import update

GROUP, MAX_LENGTH = 2, 16
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}


def recorded(seed, family="llama", count=4, **settings):
    """Sparse rollouts of uneven lengths, from prompts drawn anew."""
    model = tiny_model(family, dtype=torch.float64, **SMALL, **settings)
    loaded = LoadedModel(model=model, tokenizer=tiny_tokenizer(), shape=dry_run(model))
    draw = random.Random(seed)
    prompts = [[draw.randrange(256) for _ in range(draw.randint(2, 30))] for _ in range(count)]
    engine = Engine(loaded, RKV(budget=8, interval=4, window=4), EngineConfig(rows=16, page_size=16))
    stop_ids = tuple(range(0, 250, 20))
    return engine.generate(prompts, Sampling(n=GROUP, max_tokens=MAX_LENGTH, top_logprobs=40, stop_ids=stop_ids))


def advantages_of(rollouts, seed, working=None):
    values = torch.randn(len(rollouts), generator=torch.Generator().manual_seed(seed))
    values[torch.arange(len(rollouts)) % 3 == 1] = 0.0
    if working is not None:
        values = torch.where(torch.isin(torch.arange(len(rollouts)), torch.tensor(working)), values.abs() + 0.1, 0.0)
    return values


BATCHES = [  # which rollouts have an advantage, correction, loss, update
    (None, "sparse_rl", {}, {"activations": "recompute"}),
    ([5], "tis", {}, {}),  # one process without work
    ([0, 3, 6], "sparse_rl", {"aggregation": "token_mean"}, {"skip_zero_rows": False}),
    (None, "sparse_rl_release", {"beta": 0.1}, {}),  # a statistic of the whole batch, and a reference
    (None, "icepop", {"surrogate": "gspo"}, {"updates_per_rollout": 2}),
]


def learn(processes, rollouts_of, family="llama", dtype=torch.float64, max_tokens=90, **settings):
    """Metrics of each batch; the learner's weights and the sampler's after all of them."""
    model = tiny_model(family, dtype=dtype, **SMALL, **settings)
    reference = Head(copy.deepcopy(model).requires_grad_(False))
    masters = ShardedWeights(model, processes) if processes.grouped else MasterWeights(model)
    head = masters.head if processes.grouped else Head(model)
    # eps well above the rounding of a gradient, which Adam would otherwise blow up to a whole step
    optimizer = torch.optim.AdamW(masters.masters, lr=1e-3, eps=1e-2)
    learner = Learner(head, optimizer, masters, ref_head=reference, processes=processes)
    metrics = []
    for i, (rollouts, batch) in enumerate(zip(rollouts_of, BATCHES, strict=False)):
        working, preset, loss, config = batch
        result = update(
            learner, rollouts, advantages_of(rollouts, i, working), [k // GROUP for k in range(len(rollouts))],
            PRESETS[preset], LossConfig(**loss), UpdateConfig(max_tokens=max_tokens, **config),
            temperature=1.0, max_length=MAX_LENGTH, generator=torch.Generator().manual_seed(i),
        )  # fmt: skip
        dense = torch.cat(result.dense_logprobs)
        metrics.append(result.metrics | {"seen": int((~dense.isnan()).sum()), "dense": float(dense.nansum())})
    full = [m.full_tensor() if processes.grouped else m for m in masters.masters]
    return metrics, [weight.detach().clone() for weight in full], [p.detach().clone() for p in model.parameters()]


def assert_same_metrics(got, expected):
    assert len(got) == len(expected)
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-9)
        for name, value in theirs.items():
            assert ours[name] == pytest.approx(value, abs=1e-6, rel=1e-6, nan_ok=True), name


def test_two_processes_learn_what_one_does_from_five_batches():
    rollouts = [recorded(random.randrange(1 << 30)) for _ in BATCHES]
    before = [p.detach() for p in tiny_model(dtype=torch.float64, **SMALL).parameters()]
    metrics, weights, _ = learn(Processes(), rollouts)
    assert sum(line["correction/skipped_updates"] for line in metrics) == 0 and metrics[3]["kl"] > 0
    for size in (1, 2):
        for got_metrics, got_weights, sampler in results_of(size, learn, rollouts):
            assert_same_metrics(got_metrics, metrics)
            for got, expected, sampled, old in zip(got_weights, weights, sampler, before, strict=True):
                torch.testing.assert_close(got, expected, atol=1e-8, rtol=0)
                assert torch.equal(got, sampled) and (got - old).abs().max() > 1e-4


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen2", {"tie_word_embeddings": False}),
        ("gemma3", {"final_logit_softcapping": 20.0, "layer_types": ["sliding_attention", "full_attention"]}),
    ],
)
@pytest.mark.some(1)
def test_other_heads_and_packed_rows(family, settings):
    """An embedding that is not tied, a head that is called through the module; three processes."""
    rollouts = [recorded(random.randrange(1 << 30), family, **settings)]
    metrics, weights, _ = learn(Processes(), rollouts, family, max_tokens=90, **settings)
    for got_metrics, got_weights, _ in results_of(3, run_settings, rollouts, family, settings):
        assert_same_metrics(got_metrics, metrics)
        for got, expected in zip(got_weights, weights, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-8, rtol=0)


def run_settings(processes, rollouts, family, settings):
    return learn(processes, rollouts, family, max_tokens=90, **settings)


def test_a_bf16_model_has_fp32_shards_and_a_bf16_sampler():
    rollouts = [recorded(3)]
    found = results_of(2, learn_bf16, rollouts)
    metrics, weights, _ = learn(Processes(), rollouts, dtype=torch.bfloat16)
    for got_metrics, got_weights, sampler in found:
        assert got_metrics[0]["loss"] == pytest.approx(metrics[0]["loss"], rel=0.02, abs=1e-4)
        assert got_metrics[0]["grad_norm"] == pytest.approx(metrics[0]["grad_norm"], rel=0.02)
        for got, expected, sampled in zip(got_weights, weights, sampler, strict=True):
            assert (got.dtype, sampled.dtype) == (torch.float32, torch.bfloat16)
            assert torch.equal(got.bfloat16(), sampled)
            assert (got - expected).abs().mean() < 1e-4
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in found[0][1])


def learn_bf16(processes, rollouts):
    return learn(processes, rollouts, dtype=torch.bfloat16)


def scores_after_loading(processes, rollouts):
    """Of the sharded learner and of the sampler's module, once other weights were put into both."""
    model = tiny_model(**SMALL)
    masters = ShardedWeights(model, processes)
    completions, (microbatch,) = flatten(rollouts, model.device), pack(rollouts, 10_000)
    with torch.no_grad():
        before = score_microbatch(masters.head, completions, microbatch, 1.0).logprobs
        masters.load_state_dict({name: 1.5 * master for name, master in masters.state_dict().items()})
        masters.to_sampler()
        heads = (masters.head, Head(model))
        return before, *(score_microbatch(head, completions, microbatch, 1.0).logprobs for head in heads)


def test_loaded_weights_reach_the_learner_and_the_sampler():
    for before, learner, sampler in results_of(2, scores_after_loading, recorded(5)):
        torch.testing.assert_close(learner, sampler, atol=1e-5, rtol=1e-5)
        assert (before - learner).abs().max() > 0.1


@pytest.mark.parametrize("size", [2, 3, 5])
def test_microbatches_are_dealt_once_evenly_and_within_the_limit(size):
    rollouts = recorded(random.randrange(1 << 30), count=6)
    lengths = [len(rollout.prompt.ids) + len(rollout.token_ids) for rollout in rollouts]
    for max_tokens in (1, max(lengths), 150, 100_000):
        chosen = sorted(random.sample(range(len(rollouts)), random.randint(0, len(rollouts))))
        dealt = [deal(rollouts, max_tokens, chosen, Processes(rank, size)) for rank in range(size)]
        assert len({len(mine) for mine in dealt}) == 1
        assert sorted(i for mine in dealt for m in mine for i in m.indices) == chosen
        for microbatch in (m for mine in dealt for m in mine):
            assert len(microbatch.ids) <= max(max_tokens, max(lengths)) or len(microbatch.indices) == 1
            assert len(microbatch.predicting) == len(microbatch.tokens) > 0
        if max_tokens == 100_000 and len(chosen) >= 3 * size:  # all fit in one forward: everybody gets a part
            assert all(len(mine) == 1 and mine[0].indices for mine in dealt)


def test_shares_cover_everything_in_order():
    for count, size in ((0, 3), (2, 3), (7, 3), (9, 3), (5, 1)):
        shares = [list(range(count))[Processes(rank, size).share(count)] for rank in range(size)]
        assert [i for share in shares for i in share] == list(range(count))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1 and len(shares[0]) == math.ceil(count / size)


def test_a_failure_keeps_its_completion_where_several_processes_grade():
    """The second of three processes has no prompt."""

    def part(rewards, why):
        return Graded(rewards=torch.tensor(rewards), by_function={"f": torch.tensor(rewards)}, failures={"f": why})

    mine, other = part([1.0, 0.0], {1: "late"}), part([0.5, 2.0], {0: "wrong"})
    first = SimpleNamespace(
        share=lambda count: slice(0, 1), together=lambda work: work(), gather=lambda own: [own, None, other]
    )
    graded = grade(SimpleNamespace(grade=lambda own, _: mine), [None] * 4, 2, None, first)
    assert graded.rewards.tolist() == graded.by_function["f"].tolist() == [1.0, 0.0, 0.5, 2.0]
    assert graded.failures == {"f": {1: "late", 2: "wrong"}} and graded.num_failed == 2


def test_each_process_has_a_device_of_its_own():
    alone, grouped = Processes(), Processes(1, 2, local_rank=10**6, grouped=True)
    assert (alone.device("cuda:1"), grouped.device("cpu")) == ("cuda:1", "cpu")
    with pytest.raises(ValueError, match="device is cuda:1, but torchrun gives each process a GPU of its own"):
        grouped.device("cuda:1")
    with pytest.raises(ValueError, match="of this machine has no GPU"):
        grouped.device("cuda")
