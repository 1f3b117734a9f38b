# SPDX-License-Identifier: Apache-2.0
"""Learner speed: whole updates on rollouts of stated lengths, every one of them with something to learn.

An update is what training does: forward with the overlap diagnostics, correction, loss, backward, clipping, optimiser
step. What is compiled once is run before the clock starts.

MFU = (6 N + 6 h V + 6 L h l) x tokens / (seconds x F)

N parameters outside the embedding and the head, h hidden size, V vocabulary, L layers, l mean length weighted by
tokens, tokens real ones (prompts included, nothing is padded), F operations a second of the device.

Nothing is sampled: tokens are random, with the dense model's own log-probs. Rollouts are measured in rollout.py.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from sparse_rl.bench.against import Timed, measure_each
from sparse_rl.bench.meter import synchronize
from sparse_rl.bench.roofline import device_limits
from sparse_rl.bench.work import split_rivals
from sparse_rl.model.load import LoadedModel
from sparse_rl.model.shapes import random_model, shape_config
from sparse_rl.objective.correction import PRESETS
from sparse_rl.objective.loss import LossConfig
from sparse_rl.objective.mismatch import overlap_ids
from sparse_rl.runfolder import hardware
from sparse_rl.score import score
from sparse_rl.score.head import Head
from sparse_rl.specs import check_choices, renamed
from sparse_rl.train.learner import Learner, OptimizerConfig
from sparse_rl.train.update import UpdateConfig, update
from sparse_rl.types import KVStats, Prompt, Rollout

FORMULA = "(6 N + 6 h V + 6 L h l) x tokens / (seconds x F)"
GROUP = 8  # completions of a prompt
RIVALS = ("trl",)


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerBenchConfig:
    """One batch of rollouts, learnt from again and again.

    shape: model shape by name, its weights random
    device: cpu, cuda, cuda:1, ...; without it a GPU where there is one
    dtype: float32, bfloat16 or float16; without it bfloat16 on a GPU, float32 on a CPU
    sequences: rollouts of an update
    prompt: tokens of a prompt
    output: tokens of a completion, of the longest if they differ
    spread: "lognormal" (completions of many lengths) or "equal"
    median: of the lengths, where they differ
    sigma: of the lengths' logarithms, where they differ
    steps: updates timed; their median counts
    against: others to take the same step, separated by commas: trl
    rival_rows: sequences of a microbatch of theirs
    flops: operations a second of the device's matrix units in this dtype, for MFU
    seed: of weights, tokens and lengths
    """

    shape: str = "tiny"
    device: str | None = None
    dtype: str | None = None
    sequences: int = 64
    prompt: int = 128
    output: int = 4096
    spread: Literal["lognormal", "equal"] = "lognormal"
    median: int = 700
    sigma: float = 1.0
    steps: int = 3
    against: str = ""
    rival_rows: int = 1
    flops: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        with renamed("bench", "--"):
            check_choices(self, "bench")
        for field in ("sequences", "prompt", "output", "median", "steps", "rival_rows", "flops"):
            given = getattr(self, field)
            if given is not None and given < 1:
                raise ValueError(f"--{field.replace('_', '-')} is {given}; it must be at least 1.")
        if not 0 <= self.sigma < math.inf:
            raise ValueError(f"--sigma is {self.sigma}; it must be 0 or more.")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"--seed is {self.seed}; it must be at least 0 and below 2^63.")
        if self.sequences % GROUP:
            raise ValueError(f"--sequences is {self.sequences}; it must be a multiple of {GROUP}, a prompt's samples.")
        _ = self.rivals  # or one is unknown

    @property
    def rivals(self) -> list[str]:
        return split_rivals(self.against, RIVALS)


def measure_learner(
    config: LearnerBenchConfig,
    update_config: UpdateConfig,
    optimizer: OptimizerConfig,
    dtype: torch.dtype,
    *,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Seconds, tokens a second, MFU and peak bytes of an update."""
    device = torch.device(config.device or "cpu")
    say(f"making a random {config.shape} on {device}")
    loaded = random_model(config.shape, device, dtype, config.seed)
    rollouts = make_rollouts(config, loaded)
    masters = optimizer.masters(loaded.model)
    learner = Learner(Head(loaded.model), optimizer.build(masters), masters)
    advantages = torch.tensor([1.0, -1.0]).repeat(config.sequences // 2)
    groups = [i // GROUP for i in range(config.sequences)]
    seconds = []
    for step in range(config.steps + 1):
        say("warming up" if step == 0 else f"update {step} of {config.steps}")
        if device.type == "cuda" and step == 1:
            torch.cuda.reset_peak_memory_stats(device)
        synchronize(device)
        began = time.perf_counter()
        updated = update(
            learner,
            rollouts,
            advantages,
            groups,
            PRESETS["sparse_rl"],
            LossConfig(),
            update_config,
            temperature=1.0,
            max_length=config.output,
            generator=torch.Generator().manual_seed(step),
        )
        synchronize(device)
        seconds.append(time.perf_counter() - began)
        if updated.metrics["correction/skipped_updates"]:
            raise RuntimeError(f"update {step} was skipped: grad norm {updated.metrics['grad_norm']}")
    middle = statistics.median(seconds[1:])
    lengths = [len(rollout.prompt.ids) + len(rollout.token_ids) for rollout in rollouts]
    flops = config.flops or device_limits(hardware(device), dtype)[1]
    work = operations(loaded, lengths)
    return {
        "tokens_per_s": sum(lengths) / middle,
        "tokens": sum(lengths),
        "seconds": middle,
        "all_seconds": seconds[1:],
        "warmup_s": seconds[0],
        "mfu": work / (middle * flops) if flops else None,
        "formula": FORMULA,
        "flops": flops,
        "operations": work,
        "mean_length": sum(lengths) / len(lengths),
        "weighted_length": sum(length * length for length in lengths) / sum(lengths),
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    }


def operations(loaded: LoadedModel, lengths: list[int]) -> float:
    """What the formula counts above its line, F apart."""
    model = loaded.model
    hidden, layers = model.config.hidden_size, model.config.num_hidden_layers
    body = sum(p.numel() for p in model.parameters()) - sum(
        p.numel()
        for p in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}  # one, if they are tied
    )
    weighted = sum(length * length for length in lengths) / sum(lengths)
    per_token = 6 * body + 6 * hidden * loaded.vocab_size + 6 * layers * hidden * weighted
    return float(per_token * sum(lengths))


def make_rollouts(config: LearnerBenchConfig, loaded: LoadedModel) -> list[Rollout]:
    """Random tokens with the log-probs the dense model gives them, so that nothing is rejected."""
    rollouts = draw_rollouts(config, loaded.vocab_size)
    scores = score(loaded.model, rollouts, max_tokens=16384)
    return [replace(rollout, sampler_logprobs=s.dense_logprobs) for rollout, s in zip(rollouts, scores, strict=True)]


def draw_rollouts(config: LearnerBenchConfig, vocabulary: int) -> list[Rollout]:
    """Random tokens in completions of the stated lengths; nobody has given them log-probs yet."""
    generator = torch.Generator().manual_seed(config.seed)
    lengths = [config.output] * config.sequences
    if config.spread == "lognormal":
        spread = (config.sigma * torch.randn(config.sequences, generator=generator)).exp()
        lengths = (config.median * spread).round().clamp(1, config.output).int().tolist()
    num_top = overlap_ids(vocabulary)
    nothing = KVStats(held=(), full=0, hybrid=0.0, peak=0, peak_bytes=0, num_compressions=0)
    rollouts = []
    for i, length in enumerate(lengths):
        if i % GROUP == 0:
            prompt = Prompt(ids=tuple(torch.randint(0, vocabulary, (config.prompt,), generator=generator).tolist()))
        top = torch.rand(length, vocabulary if vocabulary <= num_top else 4 * num_top, generator=generator)
        rollouts.append(
            Rollout(
                prompt=prompt,
                sample=i % GROUP,
                token_ids=torch.randint(0, vocabulary, (length,), generator=generator),
                sampler_logprobs=torch.zeros(length),
                completion_mask=torch.ones(length, dtype=torch.bool),
                finish_reason="stop",
                kv=nothing,
                top_ids=top.topk(num_top, dim=-1).indices,
                top_logprobs=torch.full((length, num_top), -math.log(vocabulary)),
            )
        )
    return rollouts


def measure_learner_rivals(
    config: LearnerBenchConfig, update_config: UpdateConfig, dtype: torch.dtype, ours: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """The same step by others."""
    from sparse_rl.bench.trl_step import time_trl

    rollouts = draw_rollouts(config, shape_config(config.shape).vocab_size)

    def trl() -> Timed:
        return time_trl(
            config.shape,
            config.device or "cpu",
            dtype,
            [rollout.prompt.ids for rollout in rollouts],
            [tuple(rollout.token_ids.tolist()) for rollout in rollouts],
            group=GROUP,
            microbatch=config.rival_rows,
            recompute=update_config.activations != "keep",
            steps=config.steps,
            seed=config.seed,
        )

    return measure_each({"trl": trl}, config.rivals, ours, say)
