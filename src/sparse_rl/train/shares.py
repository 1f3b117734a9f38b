# SPDX-License-Identifier: Apache-2.0
"""The work of a step in shares, one a process: completions to grade, microbatches to learn from.

How processes talk is in `processes.py`, how weights are sharded in `shard.py`.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import transformers

from sparse_rl.rollout import Engine
from sparse_rl.rollout.engine import EngineStats
from sparse_rl.score.pack import Microbatch, pack
from sparse_rl.tasks import Graded, Rewards
from sparse_rl.train.processes import Processes
from sparse_rl.types import Rollout

SLACK = (1.0, 1.05, 1.1, 1.2, 1.4)  # over an even share of the tokens, tried in turn


def rollout_stats(engine: Engine, processes: Processes) -> EngineStats:
    """Of the last call in all processes: the largest peak, since each has its own pool, and all preemptions."""
    known = [stats for stats in processes.gather(engine.stats) if stats is not None]
    return replace(
        known[0],
        peak_bytes=max(stats.peak_bytes for stats in known),
        num_preemptions=sum(stats.num_preemptions for stats in known),
        capture_s=max(stats.capture_s for stats in known),
    )


def grade(
    rewards: Rewards,
    rollouts: list[Rollout],
    n: int,
    tokenizer: transformers.PreTrainedTokenizerBase,
    processes: Processes,
) -> Graded:
    """The rewards of all rollouts, `n` a prompt: each process grades its share of whole groups."""
    mine = processes.share(len(rollouts) // n)
    own = rollouts[mine.start * n : mine.stop * n]
    result = processes.together(lambda: rewards.grade(own, tokenizer) if own else None)
    parts = [part for part in processes.gather(result) if part is not None]
    names, starts = parts[0].by_function, [0]
    for part in parts:
        starts.append(starts[-1] + len(part.rewards))
    return Graded(
        rewards=torch.cat([part.rewards for part in parts]),
        by_function={name: torch.cat([part.by_function[name] for part in parts]) for name in names},
        failures={
            name: {
                start + i: why
                for start, part in zip(starts, parts, strict=False)
                for i, why in part.failures.get(name, {}).items()
            }
            for name in names
        },
    )


def deal(rollouts: list[Rollout], max_tokens: int, chosen: list[int], processes: Processes) -> list[Microbatch]:
    """This process's microbatches of the chosen rollouts: as many as every other's, so that their collectives meet.

    The processes go through them in step, so those of about the same size meet; a blank one, without rollouts, is for
    a process that has no work left.
    """
    if processes.size == 1:
        return pack(rollouts, max_tokens, chosen)
    packed = sorted(_pack_evenly(rollouts, max_tokens, chosen, processes.size), key=lambda m: -len(m.ids))
    mine, rounds = packed[processes.rank :: processes.size], -(-len(packed) // processes.size)
    return mine + [_blank(rollouts[0])] * (rounds - len(mine))


def _pack_evenly(rollouts: list[Rollout], max_tokens: int, chosen: list[int], size: int) -> list[Microbatch]:
    """As few rounds as `max_tokens` allows, with work for all processes in each, where the lengths allow it."""
    packed = pack(rollouts, max_tokens, chosen)
    wanted = -(-len(packed) // size) * size
    share = sum(len(microbatch.ids) for microbatch in packed) / max(wanted, 1)
    for slack in SLACK:
        even = pack(rollouts, min(max_tokens, int(slack * share)), chosen)
        if len(even) <= wanted:
            return even
    return packed


def _blank(rollout: Rollout) -> Microbatch:
    """The smallest forward there is; nobody reads its scores."""
    return Microbatch(
        indices=(),
        ids=torch.tensor([rollout.prompt.ids[-1], int(rollout.token_ids[0])]),
        boundaries=[0, 2],
        predicting=torch.tensor([0]),
        tokens=torch.tensor([0]),
    )
