# SPDX-License-Identifier: Apache-2.0
"""fp32 weights and the optimiser's state in the host's memory; on the GPU stay the module and the gradient.

The step runs on the host, some parameters at a time: their gradients come over, the optimiser moves their masters, and
the rounded weights go back through the same pinned buffer. There are two buffers, so that the next gradients travel
while the host computes. torchao's CPUOffloadOptimizer does not serve: it takes the gradient over during the backward
pass, before it could be clipped, and leaves the host's fp32 weights out of its state.
"""

from __future__ import annotations

from itertools import cycle

import torch
from torch import nn

from sparse_rl.train.master import MasterWeights

BUFFER = 1 << 26  # elements that travel together; a larger parameter goes alone


class HostMasters(MasterWeights):
    """Masters that lie on the host."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.chunks = _chunks([master.numel() for master in self.masters])
        size = max(sum(self.masters[i].numel() for i in chunk) for chunk in self.chunks)
        device = self.parameters[0].device
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        pinned = self.stream is not None
        self.buffers = [torch.empty(size, dtype=self.masters[0].dtype, pin_memory=pinned) for _ in range(2)]

    def master_of(self, parameter: nn.Parameter) -> nn.Parameter:
        wide = torch.promote_types(parameter.dtype, torch.float32)
        return nn.Parameter(parameter.detach().to("cpu", copy=True).to(wide))

    def holder_of(self, parameter: nn.Parameter, master: nn.Parameter) -> nn.Parameter:
        if parameter.dtype == master.dtype:
            return parameter
        one = torch.zeros((), dtype=master.dtype, device=parameter.device)
        return nn.Parameter(one.expand(parameter.shape))  # takes no memory but its gradient's

    @torch.no_grad()
    def step(self, optimizer: torch.optim.Optimizer) -> None:
        arriving = None
        for chunk, buffer in zip(self.chunks, cycle(self.buffers), strict=False):
            fetched = self._fetch(chunk, buffer)
            if arriving is not None:
                self._move(*arriving, optimizer)
            arriving = fetched
        if arriving is not None:
            self._move(*arriving, optimizer)
        if self.stream is not None:
            self.stream.synchronize()  # nobody reads the buffers or the masters any more

    def _fetch(self, chunk: list[int], buffer: torch.Tensor) -> tuple[dict[int, torch.Tensor], torch.cuda.Event | None]:
        """The gradients of some parameters, in the buffer as soon as the event has happened."""
        chunk = [i for i in chunk if self.holders[i].grad is not None]
        places = buffer[: sum(self.masters[i].numel() for i in chunk)].split([self.masters[i].numel() for i in chunk])
        gradients = {i: place.view(self.masters[i].shape) for i, place in zip(chunk, places, strict=True)}
        for i, place in gradients.items():
            gradient = self.holders[i].grad
            assert gradient is not None
            place.copy_(gradient, non_blocking=True)
            self.holders[i].grad = None
        return gradients, None if self.stream is None else self.stream.record_event()

    def _move(
        self,
        gradients: dict[int, torch.Tensor],
        arrived: torch.cuda.Event | None,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        """The optimiser's step on these masters alone; their gradients make room for the rounded weights."""
        if arrived is not None:
            arrived.synchronize()
        for i, gradient in gradients.items():
            self.masters[i].grad = gradient
        optimizer.step()
        for i, gradient in gradients.items():
            master, parameter = self.masters[i], self.parameters[i]
            master.grad = None
            rounded = gradient.view(-1).view(parameter.dtype)[: parameter.numel()].view(parameter.shape)
            parameter.copy_(rounded.copy_(master), non_blocking=True)


def _chunks(sizes: list[int]) -> list[list[int]]:
    """Indices in order, in groups of at most BUFFER elements or one index."""
    chunks: list[list[int]] = []
    room = 0
    for i, size in enumerate(sizes):
        if size > room:
            chunks.append([])
            room = max(BUFFER, size)
        chunks[-1].append(i)
        room -= size
    return chunks
