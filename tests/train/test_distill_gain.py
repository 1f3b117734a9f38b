# SPDX-License-Identifier: Apache-2.0
"""At a fixed, far too small budget the adapter lifts the tail of the overlap, at the policy trained beside it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from sparse_rl.evaluate import EvalConfig
from sparse_rl.kv import PagesMean
from sparse_rl.model.load import load
from sparse_rl.objective.correction import PRESETS
from sparse_rl.objective.mismatch import overlap_bounds
from sparse_rl.rollout import EngineConfig, Sampling
from sparse_rl.score import score
from sparse_rl.tasks import Chain
from sparse_rl.train import OptimizerConfig, Trainer, TrainerConfig
from sparse_rl.train.distill import DistillConfig

NUM_BOOTSTRAPS = 500


def overlaps(trainer: Trainer, *, adapter: bool, seed: int) -> list[torch.Tensor]:
    """Of fresh rollouts, token by token: what the sampler drew from and what the dense model says there."""
    sampling = replace(trainer.sampling, n=2, seed=seed)
    with trainer.distiller.on() if adapter else nullcontext():
        rollouts = trainer.engine.generate(trainer.task.held_out(24), sampling)
    dense = score(trainer.loaded.model, rollouts)
    return [overlap_bounds(r.top_logprobs, d.at_top_ids)[0] for r, d in zip(rollouts, dense, strict=True)]


def tail(parts: list[torch.Tensor]) -> float:
    return float(torch.cat(parts).quantile(0.05))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_tail_of_the_overlap_rises(tmp_path):
    trainer = Trainer(
        load("embedded"),
        Chain(),
        config=TrainerConfig(output_dir=str(tmp_path / "run"), steps=12, prompts_per_step=8),
        kv=PagesMean(budget=48, first=1, last=1, dense_layers=1),
        sampling=Sampling(n=4, max_tokens=195),
        engine=EngineConfig(rows=64),
        correction=PRESETS["tis"],
        optimizer=OptimizerConfig(learning_rate=2e-5),
        distill=DistillConfig(r=8, lr=2e-3, pg_weight=0.0, kl_weight=1.0, kl="topk", every=4),
        eval=EvalConfig(prompts=0),
    )
    trainer.train()
    without, given = (overlaps(trainer, adapter=adapter, seed=5) for adapter in (False, True))
    generator = torch.Generator().manual_seed(0)

    def again(parts: list[torch.Tensor]) -> list[torch.Tensor]:
        return [parts[i] for i in torch.randint(len(parts), (len(parts),), generator=generator).tolist()]

    gains = torch.tensor([tail(again(given)) - tail(again(without)) for _ in range(NUM_BOOTSTRAPS)])
    low, high = gains.quantile(0.025), gains.quantile(0.975)
    print(f"P05 of the overlap: {tail(without):.3f} without, {tail(given):.3f} with; 95 % of [{low:.3f}, {high:.3f}]")
    assert tail(given) - tail(without) >= 0.03 and low > 0
