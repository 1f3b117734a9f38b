# SPDX-License-Identifier: Apache-2.0
"""An independent sparse forward: the dense model, with a mask that hides what the sampler no longer held.

Every query of the completion sees exactly the positions its layer and KV head held at that step. Positions are the
true ones, keys are never moved, there are no pages: whatever the engine gets wrong about those shows up here.
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface, PreTrainedModel

from sparse_rl.types import Rollout


def _replay_attention(module, query, key, value, attention_mask, scaling=None, visible=None, seen=None, **kwargs):
    if seen is not None:
        seen[module.layer_idx] = (query[0], key[0], scaling)
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    logits = (query @ key.transpose(-1, -2)) * scaling
    hidden = ~visible[module.layer_idx].repeat_interleave(group, dim=0)
    weights = logits.masked_fill(hidden[None], float("-inf")).softmax(dim=-1)
    return (weights @ value).transpose(1, 2).contiguous(), None


AttentionInterface.register("replay", _replay_attention)


def visible_positions(
    *,
    prompt_len: int,
    num_tokens: int,
    firings: list[tuple[int, torch.Tensor]],  # (tokens seen when it fired, kept positions (L, K, E))
    windows: tuple[int | None, ...],
    num_kv_heads: int,
) -> torch.Tensor:
    """L K T T: which position (column) each query (row) attends to. The last token is never a query."""
    total = prompt_len + num_tokens - 1
    visible = torch.ones(total, total, dtype=torch.bool).tril()
    visible = visible.repeat(len(windows), num_kv_heads, 1, 1)
    for seen, kept in firings:
        held = torch.zeros(len(windows), num_kv_heads, total, dtype=torch.bool)
        held.scatter_(-1, kept.long(), True)
        held[..., seen:] = True  # what comes later is held until the next firing says otherwise
        visible[:, :, seen:] &= held[:, :, None]
    age = torch.arange(total)[:, None] - torch.arange(total)[None, :]
    for layer_idx, window in enumerate(windows):
        if window is not None:
            visible[layer_idx] &= age < window
    return visible


def firing_times(prompt_len: int, num_tokens: int, target: int, trigger: int) -> list[int]:
    """Tokens seen at each firing, from the rule alone: after a long prefill, then whenever the trigger is reached."""
    times, held = [], prompt_len
    if prompt_len > target:
        times.append(prompt_len)
        held = target
    for seen in range(prompt_len + 1, prompt_len + num_tokens):
        held += 1
        if held >= trigger:
            times.append(seen)
            held = target
    return times


def scheduled_firings(prompt_len: int, num_tokens: int, policy) -> list[tuple[int, int]]:
    """Tokens seen and entries left at each firing, token by token, the budget looked up anew at each of them."""

    def target(context: int) -> int:
        steps = zip(policy.schedule.starts, policy.schedule.budgets, strict=True)
        return [budget for start, budget in steps if start <= context][-1] + policy.protect_prompt * prompt_len

    firings, held = [], prompt_len
    for seen in range(prompt_len, prompt_len + num_tokens):
        if held > target(seen) if seen == prompt_len else held >= target(seen) + policy.interval:
            held = target(seen)
            firings.append((seen, held))
        held += 1
    return firings


@torch.no_grad()
def replay_logprobs(
    model: PreTrainedModel, ids: torch.Tensor, visible: torch.Tensor, seen: dict | None = None
) -> torch.Tensor:
    """Log-softmax of every position's next-token logits, B T V, with the model's attention masked by `visible`.

    `seen` collects, by layer, the queries (H T D), keys (K T D) and scale of the first row.
    """
    model.set_attn_implementation("replay")
    logits = model(
        input_ids=ids[:, : visible.shape[-1]], use_cache=False, visible=visible.to(ids.device), seen=seen
    ).logits
    model.set_attn_implementation("sdpa")
    return torch.log_softmax(logits, dim=-1)


def rollout_visibility(rollout: Rollout, policy, shape) -> torch.Tensor:
    """The same from a rollout that recorded what it kept."""
    prompt_len, num_tokens = len(rollout.prompt.ids), len(rollout.token_ids)
    firings = scheduled_firings(prompt_len, num_tokens, policy)
    assert rollout.kept_positions is not None and rollout.kv.num_compressions == len(firings)
    assert [kept.shape[-1] for kept in rollout.kept_positions] == [count for _, count in firings]
    return visible_positions(
        prompt_len=prompt_len,
        num_tokens=num_tokens,
        firings=[(seen, kept) for (seen, _), kept in zip(firings, rollout.kept_positions, strict=True)],
        windows=shape.windows,
        num_kv_heads=shape.num_kv_heads,
    )
