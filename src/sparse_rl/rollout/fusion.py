# SPDX-License-Identifier: Apache-2.0
"""One matrix product where a layer does several on the same input: q, k and v; gate and up.

At a few hundred rows a small product takes as long as its launch. The weights of such a group are laid one behind the
other in memory and the module's parameters become views of that, so there is no second copy and nothing to keep in
step: whoever updates the parameters in place updates both. While a decode step is compiled, each projection computes
the whole product and takes its slice; the compiler sees that the products are one.
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

GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True, slots=True)
class Group:
    owner: Any  # the module whose children they are
    names: tuple[str, ...]
    weight: torch.Tensor  # of all of them, one behind the other
    bias: torch.Tensor | None


class Slice(nn.Module):
    """A projection as some columns of the product with the whole group's weight."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, start: int, stop: int) -> None:
        super().__init__()
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("bias", bias, persistent=False)
        self.start = start
        self.stop = stop

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.get_buffer("weight"), self._buffers["bias"])[..., self.start : self.stop]


def fuse(model: nn.Module) -> list[Group]:
    """Lay the weights of every group of projections together, where they do not lie so; parameters stay the objects
    they were."""
    groups = []
    for owner in model.modules():
        for names in GROUPS:
            parts: list[Any] = [getattr(owner, name, None) for name in names]
            if _alike(parts):
                weight = _join([part.weight for part in parts])
                bias = _join([part.bias for part in parts]) if parts[0].bias is not None else None
                groups.append(Group(owner, names, weight, bias))
    return groups


@contextmanager
def sliced(groups: list[Group]) -> Iterator[None]:
    """Let the projections of each group compute the group's product for as long as this lasts."""
    originals = [(group, {name: group.owner.get_submodule(name) for name in group.names}) for group in groups]
    try:
        for group, parts in originals:
            start = 0
            for name, part in parts.items():
                stop = start + part.out_features
                group.owner._modules[name] = Slice(group.weight, group.bias, start, stop)
                start = stop
        yield
    finally:
        for group, parts in originals:
            group.owner._modules.update(parts)


def _alike(parts: list[Any]) -> bool:
    """Whether the parts are plain linear layers of one kind and input."""
    return (
        all(type(part) is nn.Linear for part in parts)
        and len(
            {(p.in_features, p.weight.dtype, p.weight.device, p.bias is None, p.weight.requires_grad) for p in parts}
        )
        == 1
    )


def _join(parameters: list[nn.Parameter]) -> torch.Tensor:
    """The parameters as one tensor, of which they are views; they move unless they are that already."""
    first = parameters[0].data
    storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    ends = accumulate((parameter.nbytes for parameter in parameters), initial=first.data_ptr())
    if len(storages) == 1 and all(p.data_ptr() == end for p, end in zip(parameters, ends, strict=False)):
        return first.as_strided((sum(map(len, parameters)), *first.shape[1:]), first.stride())
    whole = torch.cat([parameter.data for parameter in parameters])
    for parameter, part in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
        parameter.data = part
    return whole
