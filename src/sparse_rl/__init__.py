# SPDX-License-Identifier: Apache-2.0
"""Reinforcement learning of language models whose rollouts run on a sparse KV cache."""

__version__ = "0.1.0"
