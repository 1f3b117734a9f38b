# SPDX-License-Identifier: Apache-2.0
"""A step's gradient equals the formula written out, however it is packed, scored, skipped or accumulated."""

from __future__ import annotations

import logging
import math
from dataclasses import replace
from functools import partial

import pytest
import torch

from sparse_rl.kv import RKV
from sparse_rl.model.dry_run import dry_run
from sparse_rl.model.load import LoadedModel
from sparse_rl.model.tiny import tiny_model, tiny_tokenizer
from sparse_rl.objective.correction import PRESETS, Correction
from sparse_rl.objective.loss import LossConfig
from sparse_rl.rollout import Engine, EngineConfig, Sampling
from sparse_rl.score import score
from sparse_rl.score.head import Head
from sparse_rl.train.learner import Learner
from sparse_rl.train.master import MasterWeights
from sparse_rl.train.update import UpdateConfig, _sampling_se, update

MAX_LENGTH, NUM_GROUPS, GROUP = 24, 4, 4
shallow = partial(tiny_model, num_hidden_layers=2)


@pytest.fixture(scope="module")
def rollouts():
    """Sparse rollouts whose xi differ, some far from 1."""
    model = shallow(dtype=torch.float64)
    loaded = LoadedModel(model=model, tokenizer=tiny_tokenizer(), shape=dry_run(model))
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 256, (n,), generator=generator).tolist() for n in (9, 4, 17, 12)]
    engine = Engine(loaded, RKV(budget=10, interval=4, window=4), EngineConfig(rows=16, page_size=16))
    return engine.generate(prompts, Sampling(n=GROUP, max_tokens=MAX_LENGTH, top_logprobs=259, stop_ids=(7, 8, 9, 10)))


ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, -0.5, 0, 0, 0, 0, 2.0, 0.0, -1.0, -1.0, 0, 0, 0, 0], dtype=torch.float64)


def groups_of(rollouts):
    return [i // GROUP for i in range(len(rollouts))]


def gradient(rollouts, correction, loss=None, *, advantages=ADVANTAGES, seed=1, **settings):
    """What plain gradient steps of size 1 move, and the metrics."""
    model = shallow(dtype=torch.float64)
    masters = MasterWeights(model)
    before = [p.detach().clone() for p in masters.masters]
    learner = Learner(Head(model), torch.optim.SGD(masters.masters, lr=1.0), masters)
    result = update(
        learner,
        rollouts,
        advantages,
        groups_of(rollouts),
        correction,
        loss or LossConfig(),
        UpdateConfig(**{"max_grad_norm": 1e9, "max_tokens": 100, **settings}),
        temperature=1.0,
        max_length=MAX_LENGTH,
        generator=torch.Generator().manual_seed(seed),
    )
    return [b - p.detach() for b, p in zip(before, masters.masters, strict=True)], result.metrics


def close(first, second, tolerance=1e-8):
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=1e-6)


@pytest.mark.parametrize("preset", ["none", "sparse_rl", "sparse_rl_release", "tis", "icepop"])
@pytest.mark.some(3)
def test_gradient_equals_the_formula_one_rollout_at_a_time(rollouts, preset):
    """No packing, no flat tensors: sequence means of weight * A * rho, as in the objective's definition."""
    model = shallow(dtype=torch.float64)
    losses, weights = [], []
    for rollout in rollouts:
        ids = torch.tensor([[*rollout.prompt.ids, *rollout.token_ids.tolist()]])
        logprobs = torch.log_softmax(model(ids[:, :-1], use_cache=False).logits[0], -1)[len(rollout.prompt.ids) - 1 :]
        chosen = logprobs.gather(-1, rollout.token_ids[:, None])[:, 0]
        xi = (chosen.detach() - rollout.sampler_logprobs.double()).exp()
        veto = preset.startswith("sparse_rl") and bool((xi < 1e-4).any())
        weight = {"none": torch.ones_like(xi), "tis": xi.clamp(max=2.0)}.get(preset, xi)
        if preset == "icepop":
            weight = torch.where((xi >= 0.5) & (xi <= 5.0), xi, 0.0)
        kept = torch.ones_like(xi, dtype=torch.bool)
        if preset == "sparse_rl_release":
            weight = xi.clamp(max=1.5)
            kept = (xi >= 0.5) & (xi <= 1.5)
        weights.append(weight)
        losses.append((chosen - chosen.detach(), weight, torch.zeros_like(kept) if veto else kept))
    normaliser = torch.cat(weights).mean() if preset == "sparse_rl_release" else 1.0
    total = 0.0
    for advantage, (log_rho, weight, kept) in zip(ADVANTAGES, losses, strict=True):
        length = kept.sum().clamp(min=1) if preset == "sparse_rl_release" else len(kept)
        total = total - (advantage * log_rho.exp() * weight / normaliser * kept).sum() / length / len(rollouts)
    expected = torch.autograd.grad(total, [p for p in model.parameters() if p.requires_grad])
    got, _ = gradient(rollouts, PRESETS[preset], LossConfig(aggregation="sequence_mean"))
    close(got, expected, tolerance=1e-6)
    assert max(g.abs().max() for g in got) > 1e-3


@pytest.mark.parametrize("preset", ["sparse_rl", "sparse_rl_release", "hazard"])
def test_tokens_that_somebody_fed_are_read_and_not_learnt(rollouts, preset):
    """A rollout whose later tokens were fed is learnt as one that ends before them; nobody has their log-probs."""
    cut, fed = [], []
    for i, rollout in enumerate(rollouts):
        first = 3 + i % 3
        chosen = torch.arange(len(rollout.token_ids)) < first
        unknown = torch.where(chosen, rollout.sampler_logprobs, math.nan)
        fed.append(replace(rollout, completion_mask=chosen, sampler_logprobs=unknown))
        names = ("token_ids", "sampler_logprobs", "completion_mask", "top_ids", "top_logprobs")
        cut.append(replace(rollout, **{name: getattr(rollout, name)[:first] for name in names}))
    expected, metrics = gradient(cut, PRESETS[preset])
    got, again = gradient(fed, PRESETS[preset])
    close(got, expected, tolerance=1e-6)
    assert max(g.abs().max() for g in got) > 1e-3
    assert {name for name, value in metrics.items() if again[name] != pytest.approx(value, abs=1e-6)} == set()


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "fixed_length"])
@pytest.mark.parametrize("preset", ["sparse_rl", "sparse_rl_release"])
def test_packing_does_not_matter(rollouts, preset, aggregation):
    loss = LossConfig(aggregation=aggregation)
    together, metrics = gradient(rollouts, PRESETS[preset], loss, max_tokens=100_000)
    alone, again = gradient(rollouts, PRESETS[preset], loss, max_tokens=1)
    close(together, alone)
    assert metrics["loss"] == pytest.approx(again["loss"], abs=1e-6)


@pytest.mark.parametrize("preset", ["none", "sparse_rl", "tis", "geometric"])
def test_single_pass_equals_scoring_first(rollouts, preset):
    single, metrics = gradient(rollouts, PRESETS[preset], skip_zero_rows=False)
    scored, again = gradient(rollouts, PRESETS[preset], skip_zero_rows=False, score_first=True)
    close(single, scored, tolerance=1e-6)
    assert metrics.keys() == again.keys()
    for name, value in metrics.items():
        assert again[name] == pytest.approx(value, abs=1e-5), name


def test_xi_of_the_training_forward_is_that_of_a_separate_scoring_pass(rollouts):
    model = shallow(dtype=torch.float64)
    masters = MasterWeights(model)
    learner = Learner(Head(model), torch.optim.SGD(masters.masters, lr=0.0), masters)
    result = update(
        learner, rollouts, ADVANTAGES, groups_of(rollouts), Correction(veto=0.3), LossConfig(),
        UpdateConfig(max_tokens=100, skip_zero_rows=False), temperature=1.0, max_length=MAX_LENGTH,
        generator=torch.Generator(),
    )  # fmt: skip
    scores = score(model, rollouts)
    for rollout, got, expected, accepted in zip(rollouts, result.dense_logprobs, scores, result.accepted, strict=True):
        torch.testing.assert_close(got, expected.dense_logprobs, atol=1e-5, rtol=0)
        assert accepted == bool((got - rollout.sampler_logprobs >= math.log(0.3)).all())
    assert result.accepted.any() and not result.accepted.all()


def test_skipping_rows_changes_no_gradient_and_estimates_the_diagnostics(rollouts):
    many = list(rollouts) * 8
    advantages = torch.zeros(len(many), dtype=torch.float64)
    advantages[:16] = ADVANTAGES
    full, everything = gradient(many, PRESETS["sparse_rl"], advantages=advantages, skip_zero_rows=False)
    skipped, sampled = gradient(many, PRESETS["sparse_rl"], advantages=advantages, skip_zero_rows=True)
    close(full, skipped)
    assert everything["mismatch/coverage"] == 1.0
    idle = int((advantages == 0).sum())
    expected = (len(many) - idle + max(8, -(-idle // 10))) / len(many)
    assert sampled["mismatch/coverage"] == pytest.approx(expected)
    assert sampled["clip_ratio/region_mean"] == everything["clip_ratio/region_mean"]


def test_a_sample_of_idle_rows_estimates_the_rejection_rate_within_its_stated_error(rollouts):
    """Over many samples: unbiased, and spread no wider than the standard error that is logged."""
    many = list(rollouts) * 8
    advantages = torch.zeros(len(many), dtype=torch.float64)
    advantages[:16] = ADVANTAGES
    scores = score(shallow(dtype=torch.float64), rollouts)
    lowest = [float((s.dense_logprobs - r.sampler_logprobs).min()) for s, r in zip(scores, rollouts, strict=True)]
    half = Correction(veto=math.exp(sorted(lowest)[8] - 1e-6))  # rejects eight of the sixteen
    _, everything = gradient(many, half, advantages=advantages, skip_zero_rows=False)
    assert everything["correction/rejection_rate"] == 0.5
    runs = [gradient(many, half, advantages=advantages, seed=seed)[1] for seed in range(24)]
    stated = runs[0]["mismatch/sampling_se"]
    assert everything["mismatch/sampling_se"] == 0.0 and 0.0 < stated < 0.2
    for name in ("rollout_corr/kl", "mismatch/overlap_mean", "mismatch/catastrophic_frac", "correction/rejection_rate"):
        errors = torch.tensor([run[name] - everything[name] for run in runs], dtype=torch.float64)
        assert abs(errors.mean()) <= 4 * errors.std() / len(runs) ** 0.5, name
    assert 0 < errors.std() <= 1.4 * stated and errors.abs().max() <= 4 * stated


def test_a_share_estimated_from_a_sample_without_replacement_by_hand():
    """Half of four rows rejected, two drawn: 0, 1/2 and 1 come with chances 1/6, 4/6 and 1/6."""
    assert _sampling_se(4, 2) == pytest.approx(math.sqrt(2 / 6 * 0.25))
    assert _sampling_se(4, 4) == 0.0 == _sampling_se(0, 0)


def test_gradients_are_clipped_to_the_norm(rollouts):
    free, metrics = gradient(rollouts, PRESETS["none"])
    clipped, again = gradient(rollouts, PRESETS["none"], max_grad_norm=metrics["grad_norm"] / 4)
    close(clipped, [value / 4 for value in free], tolerance=1e-6)
    assert again["grad_norm"] == pytest.approx(metrics["grad_norm"])


@pytest.mark.parametrize("correction", [PRESETS["sparse_rl"], Correction(veto=0.3, denominator="surviving")])
def test_the_kl_is_a_mean_over_the_tokens_it_is_computed_on(rollouts, correction):
    """Against the formula, one rollout at a time."""
    model, other = shallow(dtype=torch.float64), shallow(dtype=torch.float64, seed=1)
    values = []
    for rollout, dense, ref in zip(rollouts, score(model, rollouts), score(other, rollouts), strict=True):
        log_xi = dense.dense_logprobs - rollout.sampler_logprobs
        if correction.denominator == "fixed" or bool((log_xi >= math.log(0.3)).all()):
            difference = (ref.dense_logprobs - dense.dense_logprobs).double()
            values.append(difference.exp() - difference - 1)
    masters = MasterWeights(model)
    learner = Learner(Head(model), torch.optim.SGD(masters.masters, lr=0.0), masters, ref_head=Head(other))
    result = update(
        learner, rollouts, ADVANTAGES, groups_of(rollouts), correction, LossConfig(beta=0.1), UpdateConfig(),
        temperature=1.0, max_length=MAX_LENGTH, generator=torch.Generator(),
    )  # fmt: skip
    assert result.metrics["kl"] == pytest.approx(float(torch.cat(values).mean()), rel=1e-4)


def test_a_second_learner_on_the_same_module_takes_over(rollouts):
    model = shallow(dtype=torch.bfloat16)
    old = MasterWeights(model)
    new = MasterWeights(model)
    model(torch.tensor([[1, 2, 3]])).logits.float().sum().backward()
    assert all(master.grad is None for master in old.masters)
    assert all(master.grad is not None for master in new.masters)


def test_frozen_parameters_stay_frozen(rollouts):
    model = shallow()
    model.get_input_embeddings().weight.requires_grad_(False)
    assert not any("embed" in name for name in MasterWeights(model).names)
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="nothing to train"):
        MasterWeights(model)


def test_a_batchs_gradient_is_the_mean_of_its_groups(rollouts):
    """Of one gradient, each group's share is the gradient of the group alone."""
    whole, _ = gradient(rollouts, PRESETS["sparse_rl"], LossConfig(aggregation="sequence_mean"))
    parts = []
    for group in range(NUM_GROUPS):
        members = [rollouts[i] for i in range(GROUP * group, GROUP * (group + 1))]
        advantages = ADVANTAGES[GROUP * group : GROUP * (group + 1)]
        parts.append(
            gradient(members, PRESETS["sparse_rl"], LossConfig(aggregation="sequence_mean"), advantages=advantages)[0]
        )
    close(whole, [sum(p[i] for p in parts) / NUM_GROUPS for i in range(len(whole))])


@pytest.mark.parametrize(("updates", "iterations"), [(4, 1), (1, 3), (2, 2)])
def test_later_updates_keep_the_old_log_probs_of_the_rollout(rollouts, updates, iterations):
    """Every update's pi_old is the dense model at the weights the rollout was sampled with."""
    settings = {"updates_per_rollout": updates, "num_iterations": iterations, "skip_zero_rows": False}
    model = shallow(dtype=torch.float64)
    masters = MasterWeights(model)
    learner = Learner(Head(model), torch.optim.SGD(masters.masters, lr=1e-3), masters)
    result = update(
        learner, rollouts, ADVANTAGES, groups_of(rollouts), PRESETS["sparse_rl"], LossConfig(),
        UpdateConfig(**settings), temperature=1.0, max_length=MAX_LENGTH, generator=torch.Generator(),
    )  # fmt: skip
    assert learner.num_updates == updates * iterations
    fresh = score(shallow(dtype=torch.float64), rollouts)
    for got, expected in zip(result.dense_logprobs, fresh, strict=True):
        torch.testing.assert_close(got, expected.dense_logprobs, atol=1e-5, rtol=0)


def test_two_iterations_move_along_the_second_ones_own_ratio(rollouts):
    """By hand: step 1 at rho = 1, step 2 with rho from the moved weights and pi_old from the first."""
    model = shallow(dtype=torch.float64)
    parameters = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in parameters]
    old = None
    for _ in range(2):
        logprobs = []
        for rollout in rollouts:
            ids = torch.tensor([[*rollout.prompt.ids, *rollout.token_ids.tolist()]])
            every = torch.log_softmax(model(ids[:, :-1], use_cache=False).logits[0], -1)[len(rollout.prompt.ids) - 1 :]
            logprobs.append(every.gather(-1, rollout.token_ids[:, None])[:, 0])
        old = [row.detach() for row in logprobs] if old is None else old
        loss = 0.0
        for advantage, new, first in zip(ADVANTAGES, logprobs, old, strict=True):
            rho = (new - first).exp()
            loss = loss - torch.minimum(rho * advantage, rho.clamp(0.8, 1.2) * advantage).mean() / len(rollouts)
        for parameter, step in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.data -= step
    moved, metrics = gradient(rollouts, PRESETS["none"], LossConfig(aggregation="sequence_mean"), num_iterations=2)
    close(moved, [b - p.detach() for b, p in zip(before, parameters, strict=True)], tolerance=1e-6)
    # The clip decides where rho has left [0.8, 1.2] on the side the advantage pushes to; nothing is clipped in step 1.
    clipped = [
        ((new - first).exp() > 1.2 if advantage > 0 else (new - first).exp() < 0.8) & (advantage != 0)
        for advantage, new, first in zip(ADVANTAGES, logprobs, old, strict=True)
    ]
    assert metrics["clip_ratio/region_mean"] == pytest.approx(float(torch.cat(clipped).double().mean()) / 2, rel=1e-6)
    assert metrics["clip_ratio/region_mean"] > 0


def test_more_updates_than_groups_are_refused(rollouts):
    with pytest.raises(ValueError, match="updates_per_rollout is 5, but a rollout batch has 4 groups"):
        gradient(rollouts, PRESETS["none"], updates_per_rollout=5)


def test_nothing_is_skipped_with_a_kl_term(rollouts):
    model = shallow(dtype=torch.float64, seed=1)
    masters = MasterWeights(learner_model := shallow(dtype=torch.float64))
    metrics = update(
        Learner(Head(learner_model), torch.optim.SGD(masters.masters, lr=0.0), masters, ref_head=Head(model)),
        rollouts,
        torch.zeros(len(rollouts), dtype=torch.float64),
        groups_of(rollouts),
        PRESETS["sparse_rl"],
        LossConfig(beta=0.1),
        UpdateConfig(),
        temperature=1.0,
        max_length=MAX_LENGTH,
        generator=torch.Generator(),
    ).metrics
    assert (
        metrics["correction/skipped_updates"] == 0.0
        and metrics["train/working_frac"] == 1.0
        and metrics["kl"] > 0
        and metrics["grad_norm"] > 0
    )


def test_truncated_completions_can_be_left_out(rollouts):
    truncated = [r.finish_reason == "length" for r in rollouts]
    assert any(truncated) and not all(truncated)
    masked, metrics = gradient(
        rollouts, PRESETS["none"], LossConfig(mask_truncated_completions=True, aggregation="token_mean")
    )
    kept = [r for r, cut in zip(rollouts, truncated, strict=True) if not cut]
    left = ADVANTAGES[~torch.tensor(truncated)]
    only, _ = gradient(kept, PRESETS["none"], advantages=left)
    close(masked, only)
    assert metrics["train/working_frac"] == int((left != 0).sum()) / len(rollouts), "their forward is left out too"


@pytest.mark.parametrize("updates", [1, 2])
def test_an_all_rejected_batch_moves_nothing_and_says_so(rollouts, caplog, updates):
    rollouts = [replace(rollout, sampler_logprobs=rollout.sampler_logprobs + 20.0) for rollout in rollouts]
    with caplog.at_level(logging.WARNING):
        moved, metrics = gradient(rollouts, Correction(veto=1e-4), updates_per_rollout=updates)
    assert all(not g.any() for g in moved)
    assert metrics["correction/skipped_updates"] == updates and metrics["correction/rejection_rate"] == 1.0
    assert "rejected" in caplog.text


def test_a_batch_with_every_token_masked_moves_nothing(rollouts):
    moved, metrics = gradient(rollouts, Correction(lower=1e6, upper=1e7, action="mask"))
    assert all(not g.any() for g in moved) and metrics["correction/skipped_updates"] == 1.0


def test_a_surviving_denominator_does_not_depend_on_skipping(rollouts):
    many, advantages = list(rollouts) * 4, torch.zeros(64, dtype=torch.float64)
    advantages[:4] = ADVANTAGES[:4]
    correction = Correction(veto=1e-4, denominator="surviving")
    one, _ = gradient(many, correction, advantages=advantages, skip_zero_rows=True)
    two, _ = gradient(many, correction, advantages=advantages, skip_zero_rows=False)
    close(one, two)


def test_a_gradient_that_is_not_finite_moves_nothing(rollouts):
    moved, metrics = gradient(rollouts, PRESETS["none"], advantages=ADVANTAGES * float("inf"))
    assert all(not g.any() for g in moved) and metrics["correction/skipped_updates"] == 1.0


@pytest.mark.parametrize("with_master", [True, False])
def test_bf16_weights_move_at_a_tiny_learning_rate_only_with_a_master(rollouts, with_master):
    model = shallow(dtype=torch.bfloat16)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    masters = MasterWeights(model)
    if not with_master:
        for parameter in masters.parameters:
            parameter._post_accumulate_grad_hooks.clear()
        masters.masters = masters.parameters
    learner = Learner(Head(model), torch.optim.AdamW(masters.masters, lr=1e-6, weight_decay=0.0), masters)
    for _ in range(10):
        update(
            learner, rollouts, ADVANTAGES.float(), groups_of(rollouts), PRESETS["tis"], LossConfig(),
            UpdateConfig(max_tokens=200), temperature=1.0, max_length=MAX_LENGTH, generator=torch.Generator(),
        )  # fmt: skip
    moved = sum(int((p != before[name]).sum()) for name, p in model.named_parameters())
    total = sum(p.numel() for p in model.parameters())
    assert (moved > 0.01 * total) == with_master, f"{moved} of {total} moved"
    assert all(p.grad is None for p in model.parameters()) or not with_master
