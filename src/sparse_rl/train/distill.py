# SPDX-License-Identifier: Apache-2.0
"""DistillSparse: an adapter that only the sampler has, and that learns to say with a sparse cache what the dense model
would say. The policy is trained, scored, saved and exported without it.

    loss = pg_weight * PPO(sparse / sampler) + kl_weight * KL(dense, sparse)

`sparse` is a forward over the rollouts that reads what the sampler read (kv/replay.py), with the policy as it is after
its own updates, frozen; `dense` are the log-probs that the update had, detached, or with `topk` those of another pass.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from sparse_rl.kv import KVPolicy
from sparse_rl.kv.replay import ReplayedRows
from sparse_rl.model.load import LoadedModel
from sparse_rl.model.sampler_adapter import Merged, SamplerAdapter, frozen
from sparse_rl.objective.distill import Divergence, divergence
from sparse_rl.objective.loss import LossConfig, policy_loss, token_scale
from sparse_rl.objective.mismatch import overlap_bounds, weighted_quantiles
from sparse_rl.score.at_ids import logprobs_at
from sparse_rl.score.head import Head
from sparse_rl.score.pack import Completions, Microbatch, flatten, pack
from sparse_rl.specs import check_choices, refuse_unused
from sparse_rl.train.guards import Guards, optimizer_memory
from sparse_rl.train.layers import learner_layers
from sparse_rl.train.learner import Learner, OptimizerConfig
from sparse_rl.train.master import MasterWeights
from sparse_rl.train.processes import Processes
from sparse_rl.train.shares import deal
from sparse_rl.train.update import UpdateConfig, Updated
from sparse_rl.types import Rollout

MEASURED = 8  # rollouts whose overlap is measured with and without the adapter


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillConfig:
    """DistillSparse: an adapter of the sampler alone that pulls it towards the dense model.

    r: rank of the adapter, 0 for none
    alpha: the adapter's output is scaled by alpha / r
    lr: learning rate of its own AdamW
    pg_weight: coefficient of the policy loss of the sparse sampler
    kl_weight: coefficient of the KL between the dense model and the sparse sampler
    kl: "topk" (over the sampler's most likely ids), "forward" (k3 of sampled tokens) or "reverse" (k2 of them)
    every: steps between measurements of the overlap with and without the adapter, 0 for none
    merged: sample from a second copy of the projections with the adapter in its weights: no slower than without it
    """

    r: int = 0
    alpha: float = 16.0
    lr: float = 5e-6
    pg_weight: float = 0.0
    kl_weight: float = 1.0
    kl: Divergence = "topk"
    every: int = 10
    merged: bool = False

    def __post_init__(self) -> None:
        check_choices(self, "distill")
        for field in ("r", "lr", "pg_weight", "kl_weight", "every"):
            if not 0 <= getattr(self, field) < math.inf:
                raise ValueError(f"distill.{field} is {getattr(self, field)}; it must be 0 or more.")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"distill.alpha is {self.alpha}; it must be above 0.")
        if not self.pg_weight and not self.kl_weight:
            raise ValueError(
                "distill.pg_weight and distill.kl_weight are both 0: the adapter would learn nothing; raise kl_weight."
            )
        if not self.r:
            refuse_unused(self, "distill", "distill.r is 0: there is no adapter; set distill.r")


class Distiller:
    """The sampler's adapter and its optimiser."""

    def __init__(self, loaded: LoadedModel, config: DistillConfig, seed: int, processes: Processes) -> None:
        self.model, self.config = loaded.model, config
        self.adapter = SamplerAdapter(loaded.model, config.r, config.alpha, seed)
        masters = MasterWeights(self.adapter)
        optimizer = OptimizerConfig(learning_rate=config.lr).build(masters)
        self.learner = Learner(Head(loaded.model), optimizer, masters, processes=processes)
        self.merged = Merged(self.adapter, loaded.model) if config.merged else None

    def sampling(self, policy: MasterWeights) -> AbstractContextManager[None]:
        """The module as the sampler runs it, for as long as this lasts. All processes call it."""
        if self.merged is None:
            return self.on()
        masters: dict[nn.Parameter, torch.Tensor] = {}
        for of in (policy, self.learner.masters):
            masters |= zip(of.parameters, of.masters, strict=True)

        def master_of(parameter: nn.Parameter) -> torch.Tensor:
            found = masters.get(parameter, parameter)
            whole = found.full_tensor() if hasattr(found, "full_tensor") else found
            return whole.to(parameter.device, torch.promote_types(parameter.dtype, torch.float32))

        return self.adapter.on(self.model, self.merged.renew(self.model, master_of))

    def on(self) -> AbstractContextManager[None]:
        """The module with the adapter, for as long as this lasts."""
        return self.adapter.on(self.model)

    def learn(
        self,
        rollouts: list[Rollout],
        advantages_R: torch.Tensor,
        updated: Updated,
        kv: KVPolicy,
        page_size: int,
        loss: LossConfig,
        update: UpdateConfig,
        *,
        temperature: float,
        max_length: int,
        step: int,
        guards: Guards,
    ) -> dict[str, float]:
        """One step of the adapter on the rollouts that were scored; overlap with and without it, if it is time."""
        device = self.learner.device
        truncated = torch.tensor([rollout.finish_reason == "length" for rollout in rollouts])
        batch = _Batch(
            rollouts=rollouts,
            completions=flatten(rollouts, device),
            dense=torch.cat(updated.dense_logprobs).to(device),
            advantages=advantages_R.masked_fill(truncated & loss.mask_truncated_completions, 0.0).to(device),
            kv=kv,
            page_size=page_size,
            loss=replace(loss, beta=0.0),
            temperature=temperature,
        )
        with frozen(self.model), learner_layers(self.model, update.activations, compiles=False):
            metrics: dict[str, float] = {}
            works = [partial(self._step, batch, update.max_grad_norm, max_length)]
            if self.config.every and step % self.config.every == 0:
                works.insert(0, partial(self._overlaps, batch))
            for work in works:
                metrics |= guards.fit(work, update.max_tokens, rollouts, self.learner, "a step of the adapter")
            return metrics

    def _step(self, batch: _Batch, max_grad_norm: float, max_length: int, max_tokens: int) -> dict[str, float]:
        config, processes, completions = self.config, self.learner.processes, batch.completions
        counted = completions.mask & ~batch.dense.isnan()
        scale = token_scale(counted, completions.rows, completions.num_rows, batch.loss.aggregation, max_length)
        known = torch.unique(completions.rows[counted]).tolist()
        totals = torch.zeros(2, dtype=torch.float64, device=counted.device)  # loss, KL
        self.learner.masters.zero_grad()
        for microbatch in deal(batch.rollouts, max_tokens, known, processes):
            if not microbatch.indices:
                continue
            tokens = microbatch.tokens.to(counted.device)
            dense = batch.dense[tokens, None].nan_to_num()
            if config.kl == "topk":
                with torch.no_grad():
                    dense = self._logprobs(batch, microbatch, sparse=False)
            with self.on():
                sparse = self._logprobs(batch, microbatch, sparse=True)
                kl = torch.where(counted[tokens], divergence(dense, sparse, config.kl), 0.0)
                total = config.kl_weight * (kl * scale[tokens]).sum()
                if config.pg_weight:
                    output = policy_loss(
                        sparse[:, 0],
                        completions.sampler_logprobs[tokens],
                        batch.advantages[completions.rows[tokens]],
                        counted[tokens].float(),
                        counted[tokens],
                        scale[tokens],
                        completions.rows[tokens],
                        completions.num_rows,
                        batch.loss,
                    )
                    total = total + config.pg_weight * output.loss
                total.backward()
            totals += torch.stack([total.detach().double(), kl.detach().double().sum()])
        for holder in self.learner.masters.holders:
            if processes.size > 1:
                holder.grad = torch.zeros_like(holder) if holder.grad is None else holder.grad
                processes.sum(holder.grad)
        total_loss, total_kl = processes.sum(totals).tolist()
        with optimizer_memory():
            moved = self.learner.step(max_grad_norm, skip=not known or not math.isfinite(total_loss))
        return {
            "distill/loss": total_loss,
            "distill/kl": total_kl / max(int(counted.sum()), 1),
            "distill/grad_norm": moved["grad_norm"],
        }

    @torch.no_grad()
    def _overlaps(self, batch: _Batch, max_tokens: int) -> dict[str, float]:
        """Of some rollouts, what sampler and dense model share with the adapter and without it, at the same budget."""
        chosen = list(range(0, len(batch.rollouts), max(1, len(batch.rollouts) // MEASURED)))[:MEASURED]
        found: dict[str, list[torch.Tensor]] = {"": [], "_without": []}
        for microbatch in pack(batch.rollouts, max_tokens, chosen):
            mask = batch.completions.mask[microbatch.tokens.to(batch.dense.device)]
            dense = self._logprobs(batch, microbatch, sparse=False)[:, 1:]
            without = self._logprobs(batch, microbatch, sparse=True)[:, 1:]
            with self.on():
                sparse = self._logprobs(batch, microbatch, sparse=True)[:, 1:]
            for name, logprobs in (("", sparse), ("_without", without)):
                found[name].append(overlap_bounds(logprobs, dense)[0][mask])
        metrics: dict[str, float] = {}
        for name, parts in found.items():
            shared = torch.cat(parts).double()
            (p05,) = weighted_quantiles(shared, torch.ones_like(shared), [0.05])
            metrics |= {f"distill/overlap_mean{name}": float(shared.mean()), f"distill/overlap_p05{name}": p05}
        return metrics

    def _logprobs(self, batch: _Batch, microbatch: Microbatch, *, sparse: bool) -> torch.Tensor:
        """(T, 1 + k): of the sampled tokens, and at the sampler's most likely ids where they are needed."""
        completions, device = batch.completions, batch.dense.device
        tokens = microbatch.tokens.to(device)
        ids = completions.token_ids[tokens, None]
        if completions.top_ids is not None and (self.config.kl == "topk" or not torch.is_grad_enabled()):
            ids = torch.cat([ids, completions.top_ids[tokens]], dim=1)
        inputs = microbatch.inputs(device)
        if sparse:
            members = [batch.rollouts[i] for i in microbatch.indices]
            inputs["kv"] = ReplayedRows(microbatch.boundaries, members, batch.kv.selection, batch.page_size)
        return logprobs_at(self.learner.head, inputs, microbatch.predicting.to(device), ids, batch.temperature)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    rollouts: list[Rollout]
    completions: Completions
    dense: torch.Tensor  # (T,) log-probs, nan where nobody looked
    advantages: torch.Tensor  # (R,)
    kv: KVPolicy  # as it was when they were sampled
    page_size: int
    loss: LossConfig
    temperature: float
