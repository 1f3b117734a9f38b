# SPDX-License-Identifier: Apache-2.0
"""The module with its fp32 masters, its optimiser and its learning rate.

Losses and gradients are those of `update.py`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from sparse_rl.score.head import Head
from sparse_rl.specs import check_choices
from sparse_rl.train.master import MasterWeights
from sparse_rl.train.offload import HostMasters
from sparse_rl.train.processes import Processes


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its learning rate.

    kind: "adamw", or "adamw_8bit" with moments of a byte each (torchao's)
    offload: keep fp32 weights and moments in the host's memory and take the step there; needs a GPU
    learning_rate: at its highest
    schedule: "constant", "linear" (to 0 at the end) or "cosine" (to 0 at the end)
    warmup: updates over which the learning rate rises from 0
    weight_decay: of matrices; vectors (norms, biases) are not decayed
    beta1: decay of the gradient's running mean
    beta2: decay of its running square
    eps: added to the denominator
    """

    kind: Literal["adamw", "adamw_8bit"] = "adamw"
    offload: bool = False
    learning_rate: float = 1e-6
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = 0
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8

    def __post_init__(self) -> None:
        check_choices(self, "optimizer")
        for field in ("learning_rate", "warmup", "weight_decay", "eps"):
            if not 0 <= getattr(self, field) < math.inf:
                raise ValueError(f"optimizer.{field} is {getattr(self, field)}; it must be 0 or more.")
        for field in ("beta1", "beta2"):
            if not 0 <= getattr(self, field) < 1:
                raise ValueError(f"optimizer.{field} is {getattr(self, field)}; it must lie in [0, 1).")

    def masters(self, module: torch.nn.Module, device: str | None = None) -> MasterWeights:
        """The module's fp32 side, where these settings want it; device: the one a module without weights is for."""
        own = next(module.parameters()).device
        kind = torch.device(device or own).type
        if self.offload and kind != "cuda":
            raise ValueError(
                f"optimizer.offload needs a GPU to take memory from, and the model is on {kind}; leave it out."
            )
        return HostMasters(module) if self.offload and own.type == kind else MasterWeights(module)

    def build(self, masters: MasterWeights) -> torch.optim.Optimizer:
        decayed = [master for master in masters.masters if master.dim() > 1]
        others = [master for master in masters.masters if master.dim() <= 1]
        groups = [{"params": decayed, "weight_decay": self.weight_decay}, {"params": others, "weight_decay": 0.0}]
        settings: dict[str, Any] = {"lr": self.learning_rate, "betas": (self.beta1, self.beta2), "eps": self.eps}
        if self.kind == "adamw_8bit":
            optimizer: torch.optim.Optimizer = _torchao().AdamW8bit(groups, **settings)
            return optimizer
        fused = self.offload or masters.masters[0].is_cuda
        return torch.optim.AdamW(groups, **settings, fused=fused or None)

    def rate(self, update: int, num_updates: int) -> float:
        """The learning rate of an update, counted from 0."""
        if update < self.warmup:
            return self.learning_rate * (update + 1) / self.warmup
        done = min(1.0, (update - self.warmup) / max(1, num_updates - self.warmup))
        factor = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}
        return self.learning_rate * factor[self.schedule]


class Learner:
    """Takes optimiser steps; `rate` gives the learning rate of an update, the optimiser's own if there is none."""

    def __init__(
        self,
        head: Head,
        optimizer: torch.optim.Optimizer,
        masters: MasterWeights,
        *,
        ref_head: Head | None = None,
        rate: Callable[[int], float] | None = None,
        processes: Processes | None = None,
    ) -> None:
        self.head, self.ref_head = head, ref_head
        self.optimizer, self.masters = optimizer, masters
        self.rate, self.processes = rate, processes or Processes()
        self.num_updates = 0

    @property
    def device(self) -> torch.device:
        return self.head.model.device

    def step(self, max_grad_norm: float, *, skip: bool) -> dict[str, float]:
        """Clip, step, publish; the schedule goes on even where nothing moves."""
        if self.rate is not None:
            for group in self.optimizer.param_groups:
                set_rate(group, self.rate(self.num_updates))
        self.num_updates += 1
        metrics = {"learning_rate": float(self.optimizer.param_groups[0]["lr"])}
        if skip:
            self.masters.zero_grad()
            return metrics | {"grad_norm": 0.0, "correction/skipped_updates": 1.0}
        total = torch.nn.utils.clip_grad_norm_(self.masters.holders, max_grad_norm)
        norm = float(total.full_tensor() if hasattr(total, "full_tensor") else total)
        finite = math.isfinite(norm)
        if finite:
            self.masters.step(self.optimizer)
        self.masters.zero_grad()
        return metrics | {"grad_norm": norm, "correction/skipped_updates": float(not finite)}


def set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):  # torchao's compiled step reads it
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _torchao() -> Any:
    try:
        return importlib.import_module("torchao.optim")
    except ImportError as error:
        raise ValueError("adamw_8bit needs torchao; pip install 'sparse-rl[optim]'.") from error
