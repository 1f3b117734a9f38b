# SPDX-License-Identifier: Apache-2.0
"""From rollouts with rewards, or from completions to imitate, to updated weights."""

from sparse_rl.train.config import TrainerConfig
from sparse_rl.train.control import ControlConfig
from sparse_rl.train.learner import Learner, OptimizerConfig
from sparse_rl.train.observer import Observer
from sparse_rl.train.processes import Stopped
from sparse_rl.train.sft import SFTConfig, SFTTrainer
from sparse_rl.train.trainer import Trainer
from sparse_rl.train.update import UpdateConfig

__all__ = [
    "ControlConfig",
    "Learner",
    "Observer",
    "OptimizerConfig",
    "SFTConfig",
    "SFTTrainer",
    "Stopped",
    "Trainer",
    "TrainerConfig",
    "UpdateConfig",
]
