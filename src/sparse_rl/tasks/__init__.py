# SPDX-License-Identifier: Apache-2.0
"""Prompts and the functions that grade completions; one task a file, dataset and reward together."""

from sparse_rl.tasks.base import Graded, Reward, Rewards, Task, TaskConfig
from sparse_rl.tasks.chain import Chain
from sparse_rl.tasks.jsonl import JsonlConfig, Rows
from sparse_rl.tasks.lookup import Lookup
from sparse_rl.tasks.words import Words

TASKS: dict[str, type[TaskConfig]] = {task.name: task for task in (Chain, JsonlConfig, Lookup, Words)}

__all__ = [
    "TASKS",
    "Chain",
    "Graded",
    "JsonlConfig",
    "Lookup",
    "Reward",
    "Rewards",
    "Rows",
    "Task",
    "TaskConfig",
    "Words",
]
