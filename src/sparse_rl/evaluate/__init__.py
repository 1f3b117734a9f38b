# SPDX-License-Identifier: Apache-2.0
"""How good a model is on held-out prompts, with a dense or a sparse cache."""

from sparse_rl.evaluate.evaluate import EvalConfig, evaluate, summary

__all__ = ["EvalConfig", "evaluate", "summary"]
