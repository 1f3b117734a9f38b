# SPDX-License-Identifier: Apache-2.0
"""One matrix product where a layer does several on the same input: q, k and v; gate and up.

At a few hundred rows a small product takes as long as its launch. The weights of such a group are laid one behind the
other in memory and the module's parameters become views of that, so there is no second copy and nothing to keep in
step: whoever updates the parameters in place updates both. While a decode step is compiled, the first projection of a
group computes the product of all, and each takes its columns. What an adapter adds to a projection, be it the sampler's
or the policy's own, it adds to its columns.

The learner's forward runs the projections one by one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from sparse_rl.model.lora import adapted_by_policy
from sparse_rl.model.sampler_adapter import Adapted

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True, slots=True)
class Group:
    owner: Any  # the module whose children they are
    names: tuple[str, ...]  # in the order of the calls

    @property
    def parts(self) -> list[Any]:
        return [_split(self.owner.get_submodule(name))[0] for name in self.names]

    def join(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weights and biases of all parts, which become views of them; nothing moves that lies so already."""
        parts = self.parts
        bias = None if parts[0].bias is None else _join([part.bias for part in parts])
        return _join([part.weight for part in parts]), bias


class Product:
    value: torch.Tensor | None = None


class PolicyLowRank(nn.Module):
    """What the policy's own adapter adds to a projection that peft has wrapped."""

    def __init__(self, part: Any) -> None:
        super().__init__()
        name = part.active_adapters[0]
        self.a, self.b, self.scale = part.lora_A[name], part.lora_B[name], part.scaling[name]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(self.a(x)) * self.scale
        return out


class Columns(nn.Module):
    """A projection as some columns of its group's product, which the first of the group computes and the last drops."""

    def __init__(self, product: Product, start: int, stop: int, low_rank: nn.Module | None, *, last: bool) -> None:
        super().__init__()
        self.product, self.low_rank = product, low_rank
        self.columns = (start, stop)
        self.last = last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.product.value
        assert value is not None
        if self.last:
            self.product.value = None
        columns = value[..., self.columns[0] : self.columns[1]]
        return columns if self.low_rank is None else columns + self.low_rank(x)


class FirstColumns(Columns):
    def __init__(
        self, product: Product, stop: int, low_rank: nn.Module | None, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> None:
        super().__init__(product, 0, stop, low_rank, last=False)
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.product.value = linear(x, self.get_buffer("weight"), self._buffers["bias"])
        return super().forward(x)


@torch.no_grad()
def find_groups(model: nn.Module) -> list[Group]:
    """Projections that one forward pass calls one after the other on the same input."""
    found = [
        Group(owner, names)
        for owner in model.modules()
        for names in GROUPS
        if _alike([_split(getattr(owner, name, None))[0] for name in names])
    ]
    calls: list[tuple[nn.Module, torch.Tensor]] = []
    parts = {part for group in found for part in group.parts}
    hooks = [part.register_forward_pre_hook(lambda part, inputs: calls.append((part, inputs[0]))) for part in parts]
    try:
        token = torch.zeros((1, 1), dtype=torch.long, device=next(model.parameters()).device)
        model(input_ids=token, attention_mask=torch.ones_like(token), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    order = [part for part, _ in calls]
    return [group for group in found if _called_together(group.parts, order, [x for _, x in calls])]


@contextmanager
def fused(groups: list[Group]) -> Iterator[None]:
    """Let the projections of each group compute one product for as long as this lasts."""
    originals = [(group, {name: group.owner.get_submodule(name) for name in group.names}) for group in groups]
    try:
        for group, parts in originals:
            product, (first, *rest) = Product(), parts
            part, low_rank = _split(parts[first])
            stop = part.out_features
            group.owner._modules[first] = FirstColumns(product, stop, low_rank, *group.join())
            for name in rest:
                part, low_rank = _split(parts[name])
                start, stop = stop, stop + part.out_features
                group.owner._modules[name] = Columns(product, start, stop, low_rank, last=name == rest[-1])
        yield
    finally:
        for group, parts in originals:
            group.owner._modules.update(parts)


def _split(part: Any) -> tuple[Any, nn.Module | None]:
    """The projection itself, and what an adapter adds to it; one with two adapters stays as it is."""
    if isinstance(part, Adapted):
        return part.base, part.low_rank
    return (part.base_layer, PolicyLowRank(part)) if adapted_by_policy(part) else (part, None)


def _alike(parts: list[Any]) -> bool:
    """Whether the parts are plain linear layers of one kind and input, and nobody listens to them."""
    if not all(type(p) is nn.Linear and not (p._forward_hooks or p._forward_pre_hooks) for p in parts):
        return False
    kinds = {(p.in_features, p.weight.dtype, p.weight.device, p.bias is None, p.weight.requires_grad) for p in parts}
    return len(kinds) == 1


def _called_together(parts: list[nn.Module], order: list[nn.Module], inputs: list[torch.Tensor]) -> bool:
    """Whether each part was called once, one after the other, on one and the same tensor."""
    if any(order.count(part) != 1 for part in parts):
        return False
    start = order.index(parts[0])
    stop = start + len(parts)
    return order[start:stop] == parts and all(x is inputs[start] for x in inputs[start:stop])


def _join(parameters: list[nn.Parameter]) -> torch.Tensor:
    first = parameters[0].data
    storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    ends = accumulate((parameter.nbytes for parameter in parameters), initial=first.data_ptr())
    if len(storages) == 1 and all(p.data_ptr() == end for p, end in zip(parameters, ends, strict=False)):
        return first.as_strided((sum(map(len, parameters)), *first.shape[1:]), first.stride())
    whole = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole
