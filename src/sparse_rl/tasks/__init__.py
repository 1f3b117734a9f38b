# SPDX-License-Identifier: Apache-2.0
"""Prompts and the functions that grade completions; one task a file, dataset and reward together."""

from sparse_rl.tasks.base import Graded, Reward, Rewards, Task, TaskConfig
from sparse_rl.tasks.chain import Chain
from sparse_rl.tasks.lookup import Lookup
from sparse_rl.tasks.rewards import GradingConfig
from sparse_rl.tasks.rows import Rows, RowsConfig

TASKS: dict[str, type[TaskConfig]] = {task.name: task for task in (Chain, Lookup, RowsConfig)}

__all__ = [
    "TASKS",
    "Chain",
    "Graded",
    "GradingConfig",
    "Lookup",
    "Reward",
    "Rewards",
    "Rows",
    "RowsConfig",
    "Task",
    "TaskConfig",
]
