# SPDX-License-Identifier: Apache-2.0
"""What a run leaves behind for people: its settings, numbers about rollouts, completions, why some were rejected."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

import sparse_rl
from sparse_rl.model.load import LoadedModel
from sparse_rl.tasks import Graded
from sparse_rl.train.update import Updated
from sparse_rl.types import Rollout

NGRAM = 8  # repetition is counted in runs of this many tokens
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
    full = sum(rollout.kv.full for rollout in rollouts)
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
        "kv/saved_frac": 1.0 - sum(sum(rollout.kv.held) for rollout in rollouts) / full if full else 0.0,
        "kv/peak_frac": sum(rollout.kv.peak for rollout in rollouts) / dense_peak if dense_peak else 1.0,
    }


def repetition(token_ids: torch.Tensor) -> float:
    """Share of the n-grams that occurred earlier."""
    count = len(token_ids) - NGRAM + 1
    if count <= 1:
        return 0.0
    return 1.0 - len(torch.unique(token_ids.unfold(0, NGRAM, 1), dim=0)) / count


def completion_records(
    rollouts: list[Rollout],
    graded: Graded,
    advantages_R: torch.Tensor,
    updated: Updated,
    tokenizer: PreTrainedTokenizerBase,
    count: int,
) -> list[dict[str, Any]]:
    """The first completions of the batch, spread over its groups."""
    chosen = range(0, len(rollouts), max(1, len(rollouts) // count))[:count] if count else []
    records = []
    for i in chosen:
        log_xi = updated.dense_logprobs[i] - rollouts[i].sampler_logprobs
        lowest = float(log_xi.min())
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
    rollouts: list[Rollout], updated: Updated, tokenizer: PreTrainedTokenizerBase, count: int
) -> list[dict[str, Any]]:
    """The rejected completions with the token the dense model finds least likely, both log-probs and its context."""
    lowest = {}
    for i in (~updated.accepted).nonzero()[:, 0].tolist():
        log_xi = updated.dense_logprobs[i] - rollouts[i].sampler_logprobs
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


def start_record(run: Path, settings: dict[str, Any], loaded: LoadedModel) -> None:
    """run.json: the settings and the machine of the last start, and when the run was first started."""
    path = run / "run.json"
    started = datetime.now(UTC).isoformat(timespec="seconds")
    if path.exists():
        started = json.loads(path.read_text())["started"]
    device = loaded.model.device
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    record = {
        "command": " ".join(["sparse-rl", *sys.argv[1:]]) if sys.argv[0].endswith("sparse-rl") else " ".join(sys.argv),
        "config": settings,
        "versions": {
            "sparse_rl": sparse_rl.__version__,
            "commit": _commit(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "hardware": f"{hardware}, {torch.get_num_threads()} threads",
        "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
        "started": started,
    }
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(temporary, path)


def _commit() -> str | None:
    """The package's commit, if it runs from a repository."""
    package = Path(sparse_rl.__file__).parent
    command = ["git", "-C", str(package), "rev-parse", "--short", "HEAD"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None


def differences(before: dict[str, Any], after: dict[str, Any], prefix: str = "") -> list[str]:
    """Settings that are not the same, as "kv.budget 64 is now 48"; where a run lies and how it was resumed is none."""
    found = []
    for key in before.keys() | after.keys():
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += differences(old, new, f"{prefix}{key}.")
        elif key not in ("resume_from_checkpoint", "output_dir") and (list(old) if isinstance(old, tuple) else old) != (
            list(new) if isinstance(new, tuple) else new
        ):
            found.append(f"{prefix}{key} {old} is now {new}")
    return sorted(found)


def task_settings(task: Any) -> dict[str, Any]:
    """A task's settings if it has any, else its kind."""
    if hasattr(task, "__dataclass_fields__"):
        return {"name": task.name, **asdict(task)}
    settings: dict[str, Any] = getattr(task, "settings", {"name": type(task).__name__})
    return settings


def _number(value: torch.Tensor) -> float | None:
    return None if bool(value.isnan()) else float(value)
