# SPDX-License-Identifier: Apache-2.0
"""How fast rollouts are: `measure` runs one work and says where the time and the memory went.

Updates are measured by learner.py. What others need on the same work (against.py, trl_step.py) is measured beside them.
"""

from sparse_rl.bench.rollout import measure, measure_rivals
from sparse_rl.bench.work import BenchConfig

__all__ = ["BenchConfig", "measure", "measure_rivals"]
