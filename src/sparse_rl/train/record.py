# SPDX-License-Identifier: Apache-2.0
"""What a step leaves behind for people: numbers about rollouts, completions, and why some were rejected.

Nothing hangs on it; what raises an alarm is in `alarms.py`.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from sparse_rl.kv import EvictPolicy
from sparse_rl.rollout.engine import EngineStats
from sparse_rl.tasks import Graded
from sparse_rl.train.update import Updated
from sparse_rl.types import Rollout, kv_read_frac, kv_saved_frac

logger = logging.getLogger(__name__)

NGRAM = 8  # repetition is counted in runs of this many tokens
MULTIPLIERS = torch.randint(1 << 62, (NGRAM,), generator=torch.Generator().manual_seed(0)) | 1  # of a run's hash
SLOW_S = 60.0  # of grading, after which it is told of
BEFORE, AFTER = 48, 8  # tokens of context around an offending one


def rollout_metrics(rollouts: list[Rollout], graded: Graded, groups: list[int]) -> dict[str, float]:
    """Rewards, lengths, repetition and KV of a rollout batch."""
    lengths = torch.tensor([len(rollout.token_ids) for rollout in rollouts], dtype=torch.float64)
    cut = torch.tensor([rollout.finish_reason == "length" for rollout in rollouts])
    rewards, group_of = graded.rewards, torch.tensor(groups)
    spreads = []
    for group in range(max(groups) + 1):
        known = rewards[(group_of == group) & ~rewards.isnan()]
        spreads.append(len(known) == 0 or bool((known == known[0]).all()))
    dense_peak = sum(len(rollout.prompt.ids) + len(rollout.token_ids) - 1 for rollout in rollouts)
    return {
        **graded.metrics(),
        "frac_reward_zero_std": sum(spreads) / len(spreads),
        "completions/mean_length": float(lengths.mean()),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": float(cut.double().mean()),
        "completions/mean_terminated_length": float(lengths[~cut].mean()) if not cut.all() else 0.0,
        "completions/repetition": sum(repetition(rollout.token_ids) for rollout in rollouts) / len(rollouts),
        "completions/ungraded_frac": float(rewards.isnan().double().mean()),
        "kv/saved_frac": kv_saved_frac(rollouts),
        "kv/read_frac": kv_read_frac(rollouts),
        "kv/peak_frac": sum(rollout.kv.peak for rollout in rollouts) / dense_peak if dense_peak else 1.0,
    }


def engine_metrics(rollouts: list[Rollout], stats: EngineStats, rows: int, seconds: float) -> dict[str, float]:
    """How the engine sampled them."""
    return {
        "rollout/tokens_per_s": sum(len(rollout.token_ids) for rollout in rollouts) / seconds,
        "rollout/rows": rows,
        "rollout/preemptions": stats.num_preemptions,
        "kv/peak_bytes": stats.peak_bytes,
        "time/capture_s": stats.capture_s,
    }


def warn(rollouts: list[Rollout], graded: Graded, evicts: EvictPolicy | None, naive: bool, warned: set[str]) -> None:
    """What the user would want to change, each once; alarms.py has what may come and go.

    evicts: the policy, if it drops entries and its budget is the user's
    """
    if naive and "naive" not in warned:
        warned.add("naive")
        logger.warning(
            "the cache is sparse and correction.preset none corrects nothing: the sampler is learnt, and the dense "
            "policy often lost; set correction.preset to sparse_rl, or kv.policy to full."
        )
    found = {name: list(why.values()) for name, why in graded.failures.items() if why}
    failed = [f"{name} {len(reasons)} times, the first: {reasons[0]}" for name, reasons in found.items()]
    if bool(graded.rewards.isnan().all()) and "ungraded" not in warned:
        warned |= {"ungraded", "failed"}
        why = f"graders failed ({'; '.join(failed)})" if failed else "every reward function declined"
        logger.warning("none of the step's %d completions has a reward, so nothing was learnt: %s.", len(rollouts), why)
    elif failed and "failed" not in warned:
        warned.add("failed")
        logger.warning(
            "some completions could not be graded and are left out (%s); rewards/NAME/failed counts them.",
            "; ".join(failed),
        )
    if evicts and not any(rollout.kv.num_compressions for rollout in rollouts) and "budget" not in warned:
        warned.add("budget")
        longest = max(rollouts, key=lambda rollout: len(rollout.prompt.ids) + len(rollout.token_ids))
        prompt, held = len(longest.prompt.ids), len(longest.prompt.ids) + len(longest.token_ids) - 1  # never the last
        due = evicts.trigger(prompt, held)
        logger.warning(
            "no cache was ever cut: the longest sequence holds %d entries, and is cut when it holds %d (%d + "
            "kv.interval %d); a smaller %s would save memory.",
            held,
            due,
            due - evicts.interval,
            evicts.interval,
            "kv.budget" if 2 * evicts.interval < held else "kv.interval (and kv.budget)",
        )


@contextmanager
def told_if_slow(rewards: tuple[str, ...], warned: set[str]) -> Iterator[None]:
    """Say once that grading takes long, while it does: a function that hangs says nothing itself."""

    def tell() -> None:
        warned.add("slow")
        logger.warning(
            "grading (%s) has taken %g s so far; a reward function of your own has no time limit, and may hang. Ctrl-C "
            "stops the run there.",
            ", ".join(rewards),
            SLOW_S,
        )

    timer = threading.Timer(SLOW_S, tell)
    timer.daemon = True
    if "slow" not in warned:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def repetition(token_ids: torch.Tensor) -> float:
    """Share of the n-grams that occurred earlier."""
    count = len(token_ids) - NGRAM + 1
    if count <= 1:
        return 0.0
    hashes = (token_ids.long().unfold(0, NGRAM, 1) * MULTIPLIERS.to(token_ids.device)).sum(dim=1)  # modulo 2^64
    return 1.0 - len(torch.unique(hashes)) / count


def completion_records(
    rollouts: list[Rollout],
    graded: Graded,
    advantages_R: torch.Tensor,
    updated: Updated,
    tokenizer: transformers.PreTrainedTokenizerBase,
    count: int,
) -> list[dict[str, Any]]:
    """The first completions of the batch, spread over its groups."""
    chosen = range(0, len(rollouts), max(1, len(rollouts) // count))[:count] if count else []
    records = []
    for i in chosen:
        lowest = float(_log_xi(rollouts[i], updated.dense_logprobs[i]).min())
        records.append(
            {
                "prompt": rollouts[i].prompt.text,
                "completion": tokenizer.decode(rollouts[i].token_ids),
                "reward": float(graded.rewards[i]),
                "rewards": {name: _number(values[i]) for name, values in graded.by_function.items()},
                "advantage": float(advantages_R[i]),
                "accepted": bool(updated.accepted[i]),
                "finish_reason": rollouts[i].finish_reason,
                "lowest_log_xi": None if math.isnan(lowest) else lowest,
            }
        )
    return records


def rejected_records(
    rollouts: list[Rollout], updated: Updated, tokenizer: transformers.PreTrainedTokenizerBase, count: int
) -> list[dict[str, Any]]:
    """The rejected completions with the token the dense model finds least likely, both log-probs and its context."""
    lowest = {}
    for i in (~updated.accepted).nonzero()[:, 0].tolist():
        log_xi = _log_xi(rollouts[i], updated.dense_logprobs[i])
        place = int(log_xi.argmin())
        lowest[i] = (float(log_xi[place]), place)
    records = []
    for i in sorted(lowest, key=lambda i: lowest[i])[:count]:
        (value, place), rollout = lowest[i], rollouts[i]
        sequence = [*rollout.prompt.ids, *rollout.token_ids.tolist()]
        at = len(rollout.prompt.ids) + place
        records.append(
            {
                "prompt": rollout.prompt.text,
                "token": tokenizer.decode([sequence[at]]),
                "token_id": sequence[at],
                "index": place,
                "sampler_logprob": float(rollout.sampler_logprobs[place]),
                "dense_logprob": float(updated.dense_logprobs[i][place]),
                "log_xi": value,
                "before": tokenizer.decode(sequence[max(0, at - BEFORE) : at]),
                "after": tokenizer.decode(sequence[at + 1 : at + 1 + AFTER]),
                "entries_held": rollout.kv.held[place - 1] if place else len(rollout.prompt.ids),
                "entries_dense": at,
            }
        )
    return records


def _log_xi(rollout: Rollout, dense_logprobs: torch.Tensor) -> torch.Tensor:
    """(T,); never the lowest where the sampler did not choose the token."""
    return torch.where(rollout.completion_mask, dense_logprobs - rollout.sampler_logprobs, math.inf)


def _number(value: torch.Tensor) -> float | None:
    return None if bool(value.isnan()) else float(value)
