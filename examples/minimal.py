# SPDX-License-Identifier: Apache-2.0
"""Sparse-RL in one file: sample with a compressed KV cache, score with the dense one, correct, learn.

    python examples/minimal.py

Everything that `sparse-rl train` adds is left out: evaluation, checkpoints, logs, skipping of rows without a loss, the
single pass that makes the scoring forward unnecessary, fp32 masters behind a bf16 module.
"""

from __future__ import annotations

import torch

from sparse_rl.kv import RKV
from sparse_rl.model.load import load
from sparse_rl.objective.advantage import advantages
from sparse_rl.objective.correction import PRESETS, correct
from sparse_rl.objective.loss import LossConfig, policy_loss, token_scale
from sparse_rl.rollout import Engine, EngineConfig, Sampling
from sparse_rl.score.head import Head
from sparse_rl.score.pack import flatten, pack
from sparse_rl.score.score import score_microbatch
from sparse_rl.tasks import Chain

PROMPTS, GROUP, STEPS = 16, 8, 5


def main(steps: int = STEPS) -> None:
    loaded, task, loss_config = load("embedded"), Chain(), LossConfig()
    engine = Engine(loaded, RKV(budget=56, interval=8), EngineConfig(rows=PROMPTS * GROUP))
    head = Head(loaded.model)  # log-probs of tokens, a chunk of the vocabulary's logits at a time
    optimizer = torch.optim.AdamW(loaded.model.parameters(), lr=1e-4, weight_decay=0.0)

    for step in range(steps):
        # 1. Roll out on the sparse cache; each rollout carries the log-probs it was sampled with.
        prompts = task.stream(step * PROMPTS, PROMPTS, seed=0)
        rollouts = engine.generate(prompts, Sampling(n=GROUP, max_tokens=task.chain_len + 16, seed=step))

        # 2. Reward, and compare within each prompt's group.
        rewards = task.rewards.grade(rollouts, loaded.tokenizer).rewards
        groups = torch.arange(PROMPTS).repeat_interleave(GROUP)
        advantage = advantages(rewards, groups, "grpo").to(loaded.model.device)

        # 3. What the dense model, at the same weights, says of every sampled token.
        batch = flatten(rollouts, loaded.model.device)
        dense = torch.zeros_like(batch.sampler_logprobs)
        for microbatch in pack(rollouts, max_tokens=8192):
            with torch.no_grad():
                dense[microbatch.tokens.to(dense.device)] = score_microbatch(head, batch, microbatch, 1.0).logprobs

        # 4. xi = pi_dense / pi_sparse: reject rollouts with an impossible token, weigh the tokens of the others.
        corrected = correct(
            dense - batch.sampler_logprobs, batch.mask, batch.rows, batch.num_rows, PRESETS["sparse_rl"]
        )
        scale = token_scale(batch.mask, batch.rows, batch.num_rows, loss_config.aggregation, task.chain_len + 16)

        # 5. One clipped policy-gradient step on the dense model.
        optimizer.zero_grad()
        for microbatch in pack(rollouts, max_tokens=8192):
            tokens = microbatch.tokens.to(dense.device)
            learner = score_microbatch(head, batch, microbatch, 1.0).logprobs  # this time with gradient
            policy_loss(
                learner,
                dense[tokens],
                advantage[batch.rows[tokens]],
                corrected.weight[tokens],
                batch.mask[tokens],
                scale[tokens],
                batch.rows[tokens],
                batch.num_rows,
                loss_config,
            ).loss.backward()
        torch.nn.utils.clip_grad_norm_(loaded.model.parameters(), 1.0)
        optimizer.step()

        saved = sum(rollout.kv.saved_frac for rollout in rollouts) / len(rollouts)
        rejected = 1.0 - corrected.accepted.float().mean()
        print(f"step {step + 1}: reward {rewards.mean():.3f}, rejected {rejected:.0%}, KV saved {saved:.0%}")


if __name__ == "__main__":
    main()
