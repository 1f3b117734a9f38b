# SPDX-License-Identifier: Apache-2.0
"""The Beta fit: its distribution function, known parameters found again, and the tail in closed form."""

from __future__ import annotations

import numpy as np
import pytest

from sparse_rl.calibrate.beta import PERFECT, BetaFit, cdf, density, fit, inverse


def test_distribution_function():
    x = np.linspace(0.0, 1.0, 101)
    np.testing.assert_allclose(cdf(x, 1.0, 0.37), 1.0 - (1.0 - x) ** 0.37, atol=1e-12)
    np.testing.assert_allclose(cdf(x, 2.6, 1.0), x**2.6, atol=1e-12)
    np.testing.assert_allclose(cdf(x, 3.0, 2.0), 4 * x**3 - 3 * x**4, atol=1e-12)
    for a, b in ((0.5, 0.5), (11.3, 0.55), (120.0, 3.0)):
        np.testing.assert_allclose(cdf(x, a, b), 1.0 - cdf(1.0 - x, b, a), atol=1e-12)
        inside = np.linspace(0.3, 0.9, 20001)
        step = (density(inside, a, b)[:-1] + density(inside, a, b)[1:]) / 2 * np.diff(inside)
        assert step.sum() == pytest.approx(np.diff(cdf(inside[[0, -1]], a, b))[0], rel=1e-5)
        shares = np.array([1e-3, 0.05, 0.5, 0.97])
        np.testing.assert_allclose(cdf(inverse(shares, a, b), a, b), shares, rtol=1e-9)


@pytest.mark.parametrize(("a", "b", "perfect"), [(2.209, 0.47, 0.547), (7.88, 0.55, 0.727), (0.6, 4.0, 0.0)])
def test_known_parameters_are_found_again(a, b, perfect, seed):
    draw = np.random.default_rng(seed)
    size = 40_000
    whole = draw.random(size) < perfect
    overlap = np.where(whole, 0.9995, PERFECT * draw.beta(a, b, size))
    found = fit(overlap)
    assert found is not None
    assert (found.a, found.b) == (pytest.approx(a, rel=0.08), pytest.approx(b, rel=0.08))
    assert found.perfect == pytest.approx(perfect, abs=0.02) and found.ks < 0.015
    assert found.quantile(0.05) == pytest.approx(np.quantile(overlap, 0.05), abs=0.02)
    assert found.mean == pytest.approx(overlap.mean(), abs=0.005)


def test_a_wrong_shape_shows_in_the_distance(seed):
    draw = np.random.default_rng(seed)
    two_humps = np.concatenate([draw.normal(0.2, 0.02, 3000), draw.normal(0.6, 0.02, 3000)])
    found = fit(two_humps)
    assert found is not None and found.ks > 0.15


@pytest.mark.parametrize(
    ("a", "b", "perfect", "tail", "mean"),  # Qwen3-1.7B at contexts of 20-22K, budgets of 512, 8192 and 16384
    [(2.209, 0.47, 0.547, 0.541, 0.920), (7.88, 0.55, 0.7270, 0.880, 0.982), (11.32, 0.55, 0.7675, 0.925, 0.989)],
)
def test_published_fits(a, b, perfect, tail, mean):
    published = BetaFit(a=a, b=b, perfect=perfect, ks=0.0)
    assert published.quantile(0.05) == pytest.approx(tail, abs=1e-3)
    assert published.mean == pytest.approx(mean, abs=1e-3)


def test_few_imperfect_tokens(seed):
    assert BetaFit(a=2.0, b=1.0, perfect=0.96, ks=0.0).quantile(0.05) is None
    draw = np.random.default_rng(seed)
    mostly = np.where(draw.random(5000) < 0.97, 1.0, draw.random(5000))
    found = fit(mostly)
    assert found is not None and found.quantile(0.05) is None and found.quantile(0.01) < PERFECT
    assert fit(np.ones(1000)) is None and fit(np.full(1000, 0.5)) is None
