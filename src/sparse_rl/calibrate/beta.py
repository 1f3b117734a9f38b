# SPDX-License-Identifier: Apache-2.0
"""A scaled Beta distribution over the tokens whose overlap is not perfect, and the tail it gives in closed form.

overlap > 0.999 for a share pi of the tokens, else 0.999 Beta(a, b)
P05 = 0.999 BetaInv(0.05 / (1 - pi); a, b)       with fewer than 5 % imperfect tokens it lies above 0.999

Which tokens those are, and how sure their tail is, is in `statistics.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

PERFECT = 0.999
INSIDE = 1e-6  # values are kept this far from 0 and 1, where a Beta's density may be infinite
KS_POINTS = 20_000  # order statistics the distance is looked for at
LEAST = 20  # imperfect tokens that a fit needs


@dataclass(frozen=True, slots=True, kw_only=True)
class BetaFit:
    """Of one group of tokens."""

    a: float
    b: float
    perfect: float  # pi, the share of tokens with overlap above 0.999
    ks: float  # largest distance between the fitted and the empirical distribution of the others

    def quantile(self, at: float) -> float | None:
        """The overlap that a share `at` of all tokens lies below; None: it is above 0.999."""
        if at >= 1.0 - self.perfect:
            return None
        return PERFECT * float(inverse(np.array([at / (1.0 - self.perfect)]), self.a, self.b)[0])

    @property
    def mean(self) -> float:
        """Of all tokens, the perfect ones counted as 1."""
        return self.perfect + (1.0 - self.perfect) * PERFECT * self.a / (self.a + self.b)


def fit(overlap: np.ndarray) -> BetaFit | None:
    """Maximum likelihood on the fixed support [0, 0.999]; None where too few tokens are imperfect to say anything.

    Values within 1e-6 of an end are moved there, so a or b well below 0.1 comes back too large: a large KS shows it.
    """
    below = overlap[overlap <= PERFECT].astype(np.float64) / PERFECT
    if len(below) < LEAST or np.ptp(below) < INSIDE:
        return None
    below = np.sort(below.clip(INSIDE, 1.0 - INSIDE))
    a, b = _maximise(float(np.log(below).mean()), float(np.log1p(-below).mean()), below)
    return BetaFit(a=a, b=b, perfect=1.0 - len(below) / len(overlap), ks=_distance(below, a, b))


def _maximise(log_x: float, log_rest: float, sample: np.ndarray) -> tuple[float, float]:
    """Newton's method on the likelihood, which is concave; a step is halved until both parameters stay positive."""
    mean, variance = float(sample.mean()), float(sample.var())
    common = max(mean * (1.0 - mean) / max(variance, 1e-12) - 1.0, 1e-2)
    at = torch.tensor([mean * common, (1.0 - mean) * common], dtype=torch.float64)
    wanted = torch.tensor([log_x, log_rest], dtype=torch.float64)
    for _ in range(100):
        gradient = wanted - torch.special.digamma(at) + torch.special.digamma(at.sum())
        curvature = torch.special.polygamma(1, at.sum()) - torch.diag(torch.special.polygamma(1, at))
        step = torch.linalg.solve(curvature, gradient)
        while bool((at - step <= 0).any()):
            step = step / 2
        at = at - step
        if float((step / at).abs().max()) < 1e-10:
            break
    return float(at[0]), float(at[1])


def _distance(ordered: np.ndarray, a: float, b: float) -> float:
    """Kolmogorov and Smirnov's statistic."""
    size = len(ordered)
    places = np.unique(np.linspace(0, size - 1, min(size, KS_POINTS)).round().astype(int))
    fitted = cdf(ordered[places], a, b)
    return float(np.maximum(np.abs((places + 1) / size - fitted), np.abs(places / size - fitted)).max())


def cdf(x: np.ndarray, a: float, b: float) -> np.ndarray:
    """The regularised incomplete Beta function I_x(a, b), by its continued fraction."""
    x = np.asarray(x, dtype=np.float64)
    turned = x > (a + 1.0) / (a + b + 2.0)  # where the fraction converges fast for 1 - x
    near = _fraction(np.where(turned, 0.0, x), a, b)
    far = 1.0 - _fraction(np.where(turned, 1.0 - x, 0.0), b, a)
    return np.where(turned, far, near)


def _fraction(x: np.ndarray, a: float, b: float) -> np.ndarray:
    """I_x(a, b) for x below its turning point, by Lentz's method."""
    tiny = 1e-300
    c, d = np.ones_like(x), 1.0 / (1.0 - (a + b) * x / (a + 1.0))
    total = d.copy()
    for m in range(1, 300):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1.0 + term * d
            d = 1.0 / np.where(np.abs(d) < tiny, tiny, d)
            c = 1.0 + term / c
            c = np.where(np.abs(c) < tiny, tiny, c)
            total = total * c * d
        if np.abs(c * d - 1.0).max(initial=0.0) < 1e-14:
            break
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    with np.errstate(divide="ignore"):
        front = np.exp(scale + a * np.log(x) + b * np.log1p(-x)) / a
    return np.where(x > 0.0, front * total, 0.0)


def inverse(shares: np.ndarray, a: float, b: float) -> np.ndarray:
    """Where the distribution function takes these values, by bisection."""
    low, high = np.zeros_like(shares, dtype=np.float64), np.ones_like(shares, dtype=np.float64)
    for _ in range(60):
        middle = (low + high) / 2
        below = cdf(middle, a, b) < shares
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return (low + high) / 2


def density(x: np.ndarray, a: float, b: float) -> np.ndarray:
    """Of Beta(a, b), inside (0, 1)."""
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b)
    found: np.ndarray = np.exp(scale + (a - 1.0) * np.log(x) + (b - 1.0) * np.log1p(-x))
    return found
