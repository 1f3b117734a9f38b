# SPDX-License-Identifier: Apache-2.0
"""From prompts to rollouts: `Engine.generate`."""

from sparse_rl.rollout.engine import Engine, EngineConfig, EngineStats
from sparse_rl.rollout.loop import Progress
from sparse_rl.rollout.sampler import Sampling

__all__ = ["Engine", "EngineConfig", "EngineStats", "Progress", "Sampling"]
