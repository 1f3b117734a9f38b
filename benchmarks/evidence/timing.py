# SPDX-License-Identifier: Apache-2.0
"""One step on a published shape, dense or sparse: seconds and peak bytes of its stages, and what correcting costs.

Stages are those of benchmarks/full_step.py: random weights, every completion of full length, drawn rewards. Scoring and
updates are timed on the first `learnt` completions, the fastest of ROUNDS, and told for all of them.
"""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from cells import HERE, Cell

sys.path.insert(0, str(HERE.parent))
from full_step import learn, make_learner, roll_out

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

ROUNDS = 2  # of each timing, in turn with the others
WARM_UP = 768  # tokens of a first rollout, which compiles: beyond the sparse cache's first compression


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
    roll_out(Namespace(**vars(args) | {"response": min(args.response, WARM_UP)}), engine)
    began = clock(place)
    with peaks("rollout"):
        rollouts = roll_out(args, engine)
    rollout_s = clock(place) - began
    assert engine.stats is not None
    stats, saved = engine.stats, kv_saved_frac(rollouts)
    engine.release()
    part, times = rollouts[: args.learnt], len(rollouts) / args.learnt
    learn(args, learner, part, guards, "none")  # compiles
    found: dict[str, Any] = {
        "rollout_s": rollout_s - stats.capture_s,
        "capture_s": stats.capture_s,
        "preemptions": stats.num_preemptions,
        "kv_peak_bytes": stats.peak_bytes,
        "kv_saved": saved,
    }
    dense = score(loaded.model, part, max_tokens=args.max_tokens)
    log_xi = torch.cat([d.dense_logprobs - r.sampler_logprobs for d, r in zip(dense, part, strict=True)]).to(place)
    found["correct_s"] = times * correcting(log_xi, part, place)
    stages: dict[str, Callable[[], Any]] = {
        "score_s": lambda: score(loaded.model, part, max_tokens=args.max_tokens),
        "update_plain_s": lambda: learn(args, learner, part, guards, "none"),
        "update_corrected_s": lambda: learn(args, learner, part, guards, "reweight_only"),
    }
    for name, work in [*stages.items()] * ROUNDS:
        began = clock(place)
        with peaks("update" if name != "score_s" else "score"):
            work()
        seconds = times * (clock(place) - began)
        found[name] = min(seconds, found.get(name, seconds))
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
