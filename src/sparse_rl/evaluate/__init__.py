# SPDX-License-Identifier: Apache-2.0
"""How good a model is: on held-out prompts while it trains, and on benchmarks, with a dense or a sparse cache."""

from sparse_rl.evaluate.benchmarks import evaluate_benchmarks
from sparse_rl.evaluate.evaluate import EvalConfig, digest_of, evaluate, summary
from sparse_rl.evaluate.observer import EvalObserver, Status
from sparse_rl.evaluate.plan import Cell, Evaluation

__all__ = [
    "Cell",
    "EvalConfig",
    "EvalObserver",
    "Evaluation",
    "Status",
    "digest_of",
    "evaluate",
    "evaluate_benchmarks",
    "summary",
]
