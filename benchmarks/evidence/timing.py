# SPDX-License-Identifier: Apache-2.0
"""One step on a published shape, dense or sparse: seconds and peak bytes of its stages, and what correcting costs.

Stages are those of benchmarks/full_step.py: random weights, every completion of full length, drawn rewards.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from cells import HERE, Cell

sys.path.insert(0, str(HERE.parent))
from full_step import GROUP, learn, make_learner, roll_out

from sparse_rl.kv import RKV, Full
from sparse_rl.model.shapes import random_model
from sparse_rl.objective.correction import PRESETS, correct
from sparse_rl.objective.mismatch import diagnose
from sparse_rl.rollout import EngineConfig
from sparse_rl.rollout.memory import GuardedEngine
from sparse_rl.score import score
from sparse_rl.train.guards import Guards
from sparse_rl.train.peaks import MemoryPeaks
from sparse_rl.types import Rollout, kv_saved_frac


def step(cell: Cell, device: str, models: Path) -> dict[str, Any]:
    """Rollout, a scoring pass of its own, and updates without and with correction."""
    torch.manual_seed(0)
    given, place = cell.settings, torch.device(device)
    args = Namespace(**given, lora=0, optimizer="adamw", offload=False)
    kv = RKV(budget=args.budget, interval=args.interval) if args.budget else Full()
    loaded = random_model(args.shape, place, torch.bfloat16 if place.type == "cuda" else torch.float32)
    guards, peaks = Guards(), MemoryPeaks(place)
    learner = make_learner(args, loaded)
    engine = GuardedEngine(loaded, kv, EngineConfig(rows=args.sequences), guards, "rollout")
    guards.give_pool = engine.release
    began = clock(place)
    with peaks("rollout"):
        rollouts = roll_out(args, engine)
    rollout_s = clock(place) - began
    assert engine.stats is not None
    stats, saved = engine.stats, kv_saved_frac(rollouts)
    engine.release()
    learn(args, learner, rollouts[:GROUP], guards, "none")  # compiles
    found: dict[str, Any] = {
        "rollout_s": rollout_s - stats.capture_s,
        "capture_s": stats.capture_s,
        "preemptions": stats.num_preemptions,
        "kv_peak_bytes": stats.peak_bytes,
        "kv_saved": saved,
    }
    began = clock(place)
    dense = score(loaded.model, rollouts, max_tokens=args.max_tokens)
    found["score_s"] = clock(place) - began
    log_xi = torch.cat([d.dense_logprobs - r.sampler_logprobs for d, r in zip(dense, rollouts, strict=True)]).to(place)
    found["correct_s"] = correcting(log_xi, rollouts, place)
    for name, preset in (("plain", "none"), ("corrected", "reweight_only")) * 2:  # twice, in turn: the faster counts
        began = clock(place)
        with peaks("update"):
            learn(args, learner, rollouts, guards, preset)
        seconds = clock(place) - began
        found[f"update_{name}_s"] = min(seconds, found.get(f"update_{name}_s", seconds))
    bytes_ = {stage: int(peaks.bytes.get(f"memory/{stage}_peak_bytes", 0)) for stage in ("rollout", "update")}
    found |= {f"{stage}_peak_bytes": most for stage, most in bytes_.items()}
    found["halved"] = guards.state()
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in found.items()}


def correcting(log_xi: torch.Tensor, rollouts: list[Rollout], place: torch.device) -> float:
    """Seconds of the correction and its diagnostics, the log-probs being there."""
    lengths = torch.tensor([len(rollout.token_ids) for rollout in rollouts])
    rows = torch.arange(len(rollouts)).repeat_interleave(lengths).to(place)
    mask, seconds = torch.ones_like(rows, dtype=torch.bool), []
    for _ in range(4):  # the first is slower
        began = clock(place)
        correct(log_xi, mask, rows, len(rollouts), PRESETS["sparse_rl"])
        diagnose(log_xi, mask, rows, torch.ones(len(rollouts), device=place))
        seconds.append(clock(place) - began)
    return min(seconds)


def clock(place: torch.device) -> float:
    """Seconds, once the device has done what it was given."""
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    return time.perf_counter()
