# SPDX-License-Identifier: Apache-2.0
"""Schedules made up for tests, known by name as the published ones are."""

from __future__ import annotations

from hypothesis import strategies as st

from sparse_rl.kv.schedule import Schedule, published


def named(starts: tuple[int, ...], budgets: tuple[int, ...]) -> str:
    """A `budget` that stands for these steps."""
    name = f"test/{'-'.join(map(str, starts))}/{'-'.join(map(str, budgets))}"
    published()[name] = Schedule(starts, budgets)
    return name


@st.composite
def names(draw: st.DrawFn, *, longest: int, least: int, most: int) -> str:
    """Up to six steps below `longest` tokens, budgets from `least` to `most`."""
    later = draw(st.lists(st.integers(1, longest), max_size=5, unique=True))
    budgets = draw(st.lists(st.integers(least, most), min_size=len(later) + 1, max_size=len(later) + 1))
    return named((0, *sorted(later)), tuple(sorted(budgets)))
