# SPDX-License-Identifier: Apache-2.0
"""Random numbers that depend on their key alone; tokens that follow the distribution whose log-prob is reported."""

from __future__ import annotations

import pytest
import torch

from sparse_rl.kernels.sampling import GOLDEN, WORD, mix, request_key, sample_ref, token_key, truncate_ref, uniform_ref


def keys(count: int, seed: int = 0) -> torch.Tensor:
    return torch.tensor([token_key(request_key(seed, request), 0) for request in range(count)])


def test_uniform_equals_splitmix64_on_integers():
    key = token_key(request_key(7, 3), 5)
    expected = [(mix((key + column * GOLDEN) & WORD) >> 32) for column in range(1, 9)]
    got = uniform_ref(torch.tensor([key]), 8)[0].double() * 2.0**32 - 0.5
    assert got.tolist() == pytest.approx(expected, rel=1e-6)


def test_mix_matches_published_splitmix64():
    """The first outputs of SplitMix64 seeded with 1234567, as published with the generator."""
    state, outputs = 1234567, []
    for _ in range(3):
        state = (state + GOLDEN) & WORD
        outputs.append(mix(state))
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_uniforms_are_uniform_and_independent():
    u = uniform_ref(keys(400), 1000).double()
    assert u.min() > 0.0 and u.max() <= 1.0
    assert abs(u.mean() - 0.5) < 4 / (12 * u.numel()) ** 0.5
    counts = torch.histc(u, bins=64, min=0.0, max=1.0)
    chi2 = ((counts - u.numel() / 64) ** 2 / (u.numel() / 64)).sum()
    assert chi2 < 63 + 5 * (2 * 63) ** 0.5
    for a, b in ((u[:-1], u[1:]), (u[:, :-1], u[:, 1:])):  # neighbouring requests, neighbouring tokens
        correlation = torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1]
        assert abs(correlation) < 5 / a.numel() ** 0.5


def test_a_uniform_that_would_round_to_one_does_not_break_the_draw():
    """A key whose 59th uniform is the largest there is: the all but certain token 58 is drawn all the same."""
    key = torch.tensor([673480262790411271])
    assert uniform_ref(key, 259)[0, 58] == 1.0 - 2.0**-24
    logits = torch.zeros(1, 259)
    logits[0, 58] = 50.0
    for top_k in (None, 1):
        tokens, logprobs, _, _ = sample_ref(logits, key, temperature=1.0, top_k=top_k)
        assert tokens.tolist() == [58] and logprobs.item() == pytest.approx(0.0, abs=1e-6)


def test_keys_do_not_collide():
    seen = {token_key(request_key(seed, request), i) for seed in range(5) for request in range(40) for i in range(50)}
    assert len(seen) == 5 * 40 * 50


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_reported_logprobs(temperature):
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -3.0])
    count = 40_000
    tokens, logprobs, ids, top = sample_ref(logits.repeat(count, 1), keys(count), temperature=temperature, num_top=5)
    expected = torch.softmax(logits / temperature, -1)
    torch.testing.assert_close(logprobs, expected.log()[tokens])
    torch.testing.assert_close(top[0], expected.log().sort(descending=True).values)
    assert ids[0].tolist() == [0, 1, 2, 3, 4]
    frequency = torch.bincount(tokens, minlength=5) / count
    assert ((frequency - expected).abs() < 4.5 * (expected * (1 - expected) / count).sqrt()).all()


def test_a_row_does_not_depend_on_its_batch():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 50, generator=generator)
    together = sample_ref(logits, keys(6), temperature=1.0)
    for row in range(6):
        alone = sample_ref(logits[row : row + 1], keys(6)[row : row + 1], temperature=1.0)
        assert (alone[0], alone[1]) == (together[0][row], together[1][row])


def test_greedy_reports_the_logprob_at_temperature_one():
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    tokens, logprobs, _, _ = sample_ref(logits, keys(1), temperature=0.0)
    assert tokens.tolist() == [1]
    assert logprobs.item() == pytest.approx(torch.log_softmax(logits, -1)[0, 1].item())


def test_truncation_by_hand():
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    logits = probabilities.log().repeat(2000, 1)
    # top_p 0.6: the best has mass 0.5 < 0.6, the second reaches 0.75; two tokens stay, renormalised.
    tokens, logprobs, _, _ = sample_ref(logits, keys(2000), temperature=1.0, top_p=0.6)
    assert set(tokens.tolist()) == {0, 1}
    torch.testing.assert_close(logprobs, torch.tensor([2 / 3, 1 / 3]).log()[tokens])
    tokens, logprobs, _, _ = sample_ref(logits, keys(2000), temperature=1.0, top_k=3)
    assert set(tokens.tolist()) == {0, 1, 2}
    torch.testing.assert_close(logprobs, (probabilities[:3] / 0.9).log()[tokens])
    # top_k first: {.5, .25, .15} renormalised to {.556, .278, .167}; 0.9 then needs all three, 0.8 only two.
    tokens, _, _, _ = sample_ref(logits, keys(2000), temperature=1.0, top_k=3, top_p=0.8)
    assert set(tokens.tolist()) == {0, 1}
    tokens, _, _, _ = sample_ref(logits, keys(2000), temperature=1.0, top_p=1e-9)
    assert set(tokens.tolist()) == {0}


def test_half_precision_logits_are_scored_in_fp32():
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    tokens, logprobs, _, _ = sample_ref(logits, keys(3), temperature=1.0)
    assert logprobs.dtype == torch.float32
    expected = torch.log_softmax(logits.double(), -1).gather(-1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=0)


def test_the_smallest_uniform_is_not_zero():
    before_zero = (1 << 64) - GOLDEN  # the key whose first state is 0, which mixes to 0
    assert mix(0) == 0
    assert uniform_ref(torch.tensor([before_zero]), 1).item() == 2.0**-33


def test_top_p_stops_where_the_mass_is_reached_exactly():
    kept = truncate_ref(torch.tensor([[0.5, 0.25, 0.25]]).log(), None, 0.5).isfinite()
    assert kept.tolist() == [[True, False, False]]
