# SPDX-License-Identifier: Apache-2.0
"""A learner whose weights, gradients and optimiser state are sharded over processes with FSDP2.

The loaded module stays whole in every process and is the sampler's: no hooks, fixed addresses, so its CUDA graphs stay
good. The learner is a second module, fp32, of which a process holds its shard alone. A forward gathers one decoder
layer after the other, rounded to the sampler's precision; a backward sums the gradients over processes in fp32. When a
rollout batch has been learnt from, the new weights are gathered into the sampler's module, one parameter at a time.

How the shards lie on disk is in `shard_files.py`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers
from torch import nn

from sparse_rl.score.head import Head, TokenScores
from sparse_rl.train.layers import decoder_layers
from sparse_rl.train.learner import OptimizerConfig
from sparse_rl.train.master import MasterWeights
from sparse_rl.train.processes import Processes


class ShardedWeights(MasterWeights):
    """The shards of a module's trainable parameters, and `head` to score with them."""

    def __init__(self, module: transformers.PreTrainedModel, processes: Processes) -> None:
        self.root: Any = _shard(_Scorer(copy.deepcopy(module)), module.dtype, processes.size)
        self.head = ShardedHead(self.root)
        self.moved = False  # since the sampler's module was written
        shards = {name.removeprefix("model."): shard for name, shard in self.root.named_parameters()}
        self.shards = {parameter: shards[name] for name, parameter in module.named_parameters()}
        super().__init__(module)

    def master_of(self, parameter: nn.Parameter) -> nn.Parameter:
        return self.shards[parameter]

    def collect(self, module: nn.Module) -> None:
        """Nothing to do: FSDP sums the gradients into the shards, and the sampler's module has none."""

    def publish(self) -> None:
        """The next forward gathers them; the sampler waits until its turn."""
        self.moved = True

    @torch.no_grad()
    def to_sampler(self) -> None:
        self.root.reshard()  # a forward without gradient leaves what is outside the layers gathered, and soon stale
        if self.moved:
            for parameter, shard in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(shard.to(parameter.dtype).full_tensor())  # type: ignore[attr-defined]
        self.moved = False


def check_sharded(optimizer: OptimizerConfig) -> None:
    """Refuse what has no sharded form."""
    if optimizer.offload or optimizer.kind != "adamw":
        option = "offload is true" if optimizer.offload else f"kind is {optimizer.kind!r}"
        raise ValueError(f"optimizer.{option}, but under torchrun AdamW's state is sharded over GPUs; leave it out.")


class ShardedHead(Head):
    """The head of the sharded module."""

    def __init__(self, root: _Scorer) -> None:
        self.root, self.model, self.map = root, root.model, root.head.map

    def __call__(
        self,
        inputs: dict[str, Any],
        predicting: torch.Tensor,
        token_ids: torch.Tensor,
        *,
        temperature: float = 1.0,
        at_ids: torch.Tensor | None = None,
        num_top: int = 0,
    ) -> TokenScores:
        logprobs, at, top_ids, top_logprobs = self.root(inputs, predicting, token_ids, temperature, at_ids, num_top)
        return TokenScores(logprobs=logprobs, at_ids=at, top_ids=top_ids, top_logprobs=top_logprobs)


class _Scorer(nn.Module):
    """The model and its head as one module, whose forward is the one FSDP wraps: it returns plain tensors."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        super().__init__()
        self.model, self.head = model, Head(model)

    def forward(
        self,
        inputs: dict[str, Any],
        predicting: torch.Tensor,
        token_ids: torch.Tensor,
        temperature: float,
        at_ids: torch.Tensor | None,
        num_top: int,
    ) -> tuple[torch.Tensor | None, ...]:
        scores = self.head(inputs, predicting, token_ids, temperature=temperature, at_ids=at_ids, num_top=num_top)
        return scores.logprobs, scores.at_ids, scores.top_ids, scores.top_logprobs


def _shard(scorer: _Scorer, dtype: torch.dtype, size: int) -> _Scorer:
    """Shard layer by layer, so that one layer at a time is whole in fp32."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    lower = dtype.itemsize < 4
    precision = MixedPrecisionPolicy(
        param_dtype=dtype if lower else None, reduce_dtype=torch.float32 if lower else None, cast_forward_inputs=False
    )
    mesh = init_device_mesh(scorer.model.device.type, (size,))
    for module in (*decoder_layers(scorer.model), scorer):
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.dtype.itemsize < 4:
                parameter.data = parameter.data.float()
        sharded = fully_shard(module, mesh=mesh, mp_policy=precision)
        sharded.set_gradient_divide_factor(1.0)  # the sum over processes, not the mean
        sharded.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    return scorer
