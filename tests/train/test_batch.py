# SPDX-License-Identifier: Apache-2.0
"""What a batch knows of its tokens, and what it makes of those that it does not know."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch

from sparse_rl.objective.correction import PRESETS
from sparse_rl.objective.loss import LossConfig
from sparse_rl.score.pack import Completions
from sparse_rl.train.batch import Batch


def test_a_score_that_is_nan_is_anomalous_and_one_that_is_missing_is_not():
    """Three rollouts of two tokens: scored, scored as nan, and not scored."""
    rows = torch.tensor([0, 0, 1, 1, 2, 2])
    completions = Completions(
        num_rows=3,
        token_ids=torch.zeros(6, dtype=torch.int64),
        rows=rows,
        mask=torch.ones(6, dtype=torch.bool),
        sampler_logprobs=torch.full((6,), -1.0),
        top_ids=None,
        top_logprobs=None,
    )
    made = [SimpleNamespace(finish_reason="stop")] * 3
    batch = Batch(made, completions, torch.ones(3), LossConfig())
    looked = SimpleNamespace(logprobs=torch.tensor([-1.0, -0.5, -1.0, math.nan]), at_ids=None)
    batch.observe(SimpleNamespace(indices=[0, 1], tokens=torch.arange(4)), looked)
    for chosen in (batch, batch.part([1, 2])):
        accepted = chosen.correct(chosen.tokens, PRESETS["sparse_rl"]).accepted.tolist()
        assert accepted == [True, False, True][-len(accepted) :]
    corrected = batch.correct(batch.tokens, PRESETS["sparse_rl"])
    assert corrected.kept.tolist() == [True, True, False, False, False, False]
    assert corrected.weight.isfinite().all()
