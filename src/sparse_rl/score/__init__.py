# SPDX-License-Identifier: Apache-2.0
"""Dense log-probs of sampled tokens."""

from sparse_rl.score.score import DenseScores, score

__all__ = ["DenseScores", "score"]
