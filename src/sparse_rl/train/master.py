# SPDX-License-Identifier: Apache-2.0
"""fp32 weights and gradients behind a module of lower precision.

At a learning rate of 1e-6 a bf16 parameter does not move, and bf16 sums over many microbatches are off by a percent. So
the optimiser works on fp32 copies, and each microbatch's gradient is added to an fp32 buffer and freed at once.

Masters in the host's memory are `offload.py`'s, sharded ones `shard.py`'s.
"""

from __future__ import annotations

import torch
from torch import nn

HOOKS = "_master_weight_hooks"  # an attribute of the module


class MasterWeights:
    """Owns the fp32 side of a module's trainable parameters; one of fp32 or more is its own master."""

    def __init__(self, module: nn.Module) -> None:
        self.names = [name for name, parameter in module.named_parameters() if parameter.requires_grad]
        self.parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.masters = [self.master_of(parameter) for parameter in self.parameters]
        if not self.parameters:
            raise ValueError("the model has no parameter that requires a gradient; there is nothing to train.")
        self.holders = [self.holder_of(p, master) for p, master in zip(self.parameters, self.masters, strict=True)]
        self.collect(module)

    def collect(self, module: nn.Module) -> None:
        """Let each parameter's gradient move to its holder as soon as it is there."""
        for hook in getattr(module, HOOKS, []):  # of masters that were here before
            hook.remove()
        for parameter, holder in zip(self.parameters, self.holders, strict=True):
            parameter.gradient_holder = None if holder is parameter else holder  # type: ignore[attr-defined]
        hooks = [
            parameter.register_post_accumulate_grad_hook(_move_gradient(holder))
            for parameter, holder in zip(self.parameters, self.holders, strict=True)
            if holder is not parameter
        ]
        setattr(module, HOOKS, hooks)

    def master_of(self, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.dtype.itemsize >= 4:
            return parameter
        return nn.Parameter(parameter.detach().float())

    def holder_of(self, parameter: nn.Parameter, master: nn.Parameter) -> nn.Parameter:
        """What collects the parameter's gradient, as its .grad."""
        return master

    def zero_grad(self) -> None:
        for holder in self.holders:
            holder.grad = None

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Move the masters by their gradients, and the module with them."""
        optimizer.step()
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Round the masters into the module."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)

    def to_sampler(self) -> None:
        """Bring the sampler's module up to date; here it is the learner's own."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All masters by the module's names."""
        return {name: master.detach() for name, master in zip(self.names, self.masters, strict=True)}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        for name, master in zip(self.names, self.masters, strict=True):
            master.copy_(state[name])
        self.publish()


def _move_gradient(holder: nn.Parameter):  # type: ignore[no-untyped-def]
    def add(parameter: torch.Tensor) -> None:
        if parameter.grad is None:  # the head's weight: its gradient went straight to the holder
            return
        if holder.grad is None:
            holder.grad = parameter.grad.float()
        else:
            holder.grad += parameter.grad
        parameter.grad = None

    return add
