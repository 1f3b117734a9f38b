# SPDX-License-Identifier: Apache-2.0
"""Prompts and the functions that grade completions; one task a file, dataset and reward together."""

from sparse_rl.tasks.base import Graded, Reward, Rewards, Task
from sparse_rl.tasks.chain import Chain
from sparse_rl.tasks.jsonl import JsonlConfig, Rows

TASKS: dict[str, type[Chain] | type[JsonlConfig]] = {task.name: task for task in (Chain, JsonlConfig)}

__all__ = ["TASKS", "Chain", "Graded", "JsonlConfig", "Reward", "Rewards", "Rows", "Task"]
