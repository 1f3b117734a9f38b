# SPDX-License-Identifier: Apache-2.0
"""Slow, loop-by-loop float64 reference for the R-KV and SnapKV eviction policies.

Everything is for one sequence, one layer and one KV head. ``keys`` is (n, d) in physical order and
``queries`` is (g, window, d): the last ``window`` queries of the g query heads sharing the KV head.
The last ``window`` entries are never candidates, so an importance array has n - window entries.
"""

import math
from collections.abc import Set

import numpy as np


def _dot(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.dot(a.astype(np.float64), b.astype(np.float64)))


def _softmax(values: list[float]) -> list[float]:
    if not values:
        return []
    top = max(values)
    exps = [math.exp(v - top) for v in values]
    total = sum(exps)
    return [e / total for e in exps]


def attention_importance(
    keys: np.ndarray, queries: np.ndarray, *, window: int, scale: float, kernel: int = 7
) -> np.ndarray:
    """Pooled mean attention of the last ``window`` queries on each candidate; shape (n - window,)."""
    if queries.shape[1] != window:
        raise ValueError(f"expected {window} queries per head, got {queries.shape[1]}")
    if kernel % 2 != 1:
        raise ValueError(f"kernel must be odd, got {kernel}")
    groups = queries.shape[0]
    candidates = max(keys.shape[0] - window, 0)

    att: list[list[float]] = []
    for i in range(window):
        row = []
        for j in range(candidates):
            row.append(max(_dot(queries[g, i], keys[j]) * scale for g in range(groups)))
        att.append(_softmax(row))  # over the candidates only: the window keys take no mass

    mean = [sum(att[i][j] for i in range(window)) / window for j in range(candidates)]

    pad = kernel // 2
    pooled = np.zeros(candidates, dtype=np.float64)
    for j in range(candidates):
        first, last = max(0, j - pad), min(candidates - 1, j + pad)  # the pad never wins
        pooled[j] = max(mean[first : last + 1])
    return pooled


def redundancy(keys: np.ndarray, *, threshold: float = 0.5) -> np.ndarray:
    """Softmax of the mean cosine similarity per key, over all n keys; shape (n,)."""
    n = keys.shape[0]
    unit = []
    for i in range(n):
        norm = math.sqrt(_dot(keys[i], keys[i])) + 1e-8
        unit.append(np.array([float(x) / norm for x in keys[i]], dtype=np.float64))

    sim = [[0.0 if i == j else _dot(unit[i], unit[j]) for j in range(n)] for i in range(n)]

    for i in range(n):
        last_match = 0  # a row without a match clears column 0
        for j in range(n):
            if sim[i][j] > threshold:
                last_match = j
        sim[i][last_match] = 0.0

    mean = [sum(sim[i][j] for i in range(n)) / n for j in range(n)]
    return np.array(_softmax(mean), dtype=np.float64)


def rkv_importance(
    keys: np.ndarray,
    queries: np.ndarray,
    *,
    window: int,
    scale: float,
    kernel: int = 7,
    lam: float = 0.1,
    threshold: float = 0.5,
) -> np.ndarray:
    """R-KV: lam * importance - (1 - lam) * redundancy, for the n - window candidates."""
    imp = attention_importance(keys, queries, window=window, scale=scale, kernel=kernel)
    red = redundancy(keys, threshold=threshold)  # n entries; the window's are left unread below
    importance = np.zeros(len(imp), dtype=np.float64)
    for j in range(len(imp)):
        importance[j] = lam * imp[j] - (1.0 - lam) * red[j]
    return importance


def snapkv_importance(
    keys: np.ndarray, queries: np.ndarray, *, window: int, scale: float, kernel: int = 7
) -> np.ndarray:
    """SnapKV, decode variant: the importance alone."""
    return attention_importance(keys, queries, window=window, scale=scale, kernel=kernel)


def keep(importance: np.ndarray, *, n: int, window: int, budget: int, protected: Set[int] = frozenset()) -> list[int]:
    """Ascending indices kept: the window, ``protected``, then the most important (ties: later index)."""
    if len(importance) != max(n - window, 0):
        raise ValueError(f"expected {max(n - window, 0)} numbers, got {len(importance)}")
    for j in protected:
        if not 0 <= j < n:
            raise ValueError(f"protected index {j} is outside 0..{n - 1}")
    if n <= budget:
        return list(range(n))
    kept = set(protected) | set(range(max(n - window, 0), n))
    if budget < len(kept):
        raise ValueError(f"budget {budget} is below the {len(kept)} protected entries")
    free = [j for j in range(n) if j not in kept]
    free.sort(key=lambda j: (float(importance[j]), j), reverse=True)
    kept.update(free[: budget - len(kept)])
    return sorted(kept)


def cut_margin(
    importance: np.ndarray, *, n: int, window: int, budget: int, protected: Set[int] = frozenset()
) -> tuple[float, float]:
    """(lowest kept unprotected importance, highest dropped one); +inf / -inf where there is none."""
    kept = set(keep(importance, n=n, window=window, budget=budget, protected=protected))
    lowest_kept, highest_dropped = math.inf, -math.inf
    for j in range(len(importance)):
        if j not in kept:
            highest_dropped = max(highest_dropped, float(importance[j]))
        elif j not in protected:
            lowest_kept = min(lowest_kept, float(importance[j]))
    return lowest_kept, highest_dropped


def page_importance(queries: np.ndarray, keys: np.ndarray, landmarks: int) -> float:
    """What a page of ``keys`` (n, d) is worth to the ``queries`` (g, d) of a group: the mean over its heads.

    With one landmark the product with the mean key, with two the bound from the least and greatest of every channel.
    """
    total = 0.0
    for query in queries:
        for d in range(keys.shape[1]):
            column = [float(key[d]) for key in keys]
            if landmarks == 1:
                total += float(query[d]) * (math.fsum(column) / len(column))
            else:
                total += max(float(query[d]) * min(column), float(query[d]) * max(column))
    return total / len(queries)


def chosen_pages(importance: list[float], count: int, first: int, last: int) -> list[int]:
    """Places of the pages read: the reserved ones, then the best of the others one by one, the earlier of equals."""
    chosen = {n for n in range(len(importance)) if n < first or n >= len(importance) - last}
    while len(chosen) < min(count, len(importance)):
        best = None
        for n, value in enumerate(importance):
            if n not in chosen and (best is None or value > importance[best]):
                best = n
        chosen.add(best)
    return sorted(chosen)
