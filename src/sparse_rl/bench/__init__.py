# SPDX-License-Identifier: Apache-2.0
"""How fast rollouts are: `measure` runs one work and says where the time and the memory went."""

from sparse_rl.bench.rollout import measure, measure_rivals
from sparse_rl.bench.work import BenchConfig

__all__ = ["BenchConfig", "measure", "measure_rivals"]
