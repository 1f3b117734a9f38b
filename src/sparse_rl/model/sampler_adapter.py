# SPDX-License-Identifier: Apache-2.0
"""A low-rank adapter of the sampler alone: W x becomes W x + (alpha / r) B A x while it is on, and only then.

It is no part of the module: outside of `on` the module has neither its parameters nor its arithmetic, so what is
scored, learnt, saved or exported knows nothing of it. Adapters that are trained as the policy (lora.py) are another
matter: they stay as they are, on or off, beneath this one.

Where there is room, `Merged` has the same in the weights of a second copy of the projections, which costs a forward
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import linear
from torch.nn.utils import skip_init

from sparse_rl.model.lora import ADAPTER
from sparse_rl.runfolder import to_json


class LowRank(nn.Module):
    def __init__(self, part: nn.Linear, r: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        weight, bound = part.weight, part.in_features**-0.5  # as peft draws A
        a = torch.empty(r, part.in_features).uniform_(-bound, bound, generator=generator)
        self.a = nn.Parameter(a.to(weight.device, weight.dtype))
        self.b = nn.Parameter(torch.zeros(part.out_features, r, device=weight.device, dtype=weight.dtype))
        self.scale = alpha / r

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(linear(x, self.a), self.b) * self.scale


class Adapted(nn.Module):
    """A projection with the adapter on it."""

    def __init__(self, base: nn.Module, low_rank: LowRank) -> None:
        super().__init__()
        self.base, self.low_rank = base, low_rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.base(x) + self.low_rank(x)
        return out


class SamplerAdapter(nn.Module):
    """One pair of matrices for every linear layer of a model but its head. Same seed, same adapter."""

    def __init__(self, model: transformers.PreTrainedModel, r: int, alpha: float, seed: int) -> None:
        super().__init__()
        generator, head = torch.Generator().manual_seed(seed), model.get_output_embeddings()
        self.names = [name for name, part in model.named_modules() if type(part) is nn.Linear and part is not head]
        self.r, self.alpha = r, alpha
        self.pairs = nn.ModuleList(LowRank(model.get_submodule(n), r, alpha, generator) for n in self.names)  # type: ignore[arg-type]

    @contextmanager
    def on(self, model: transformers.PreTrainedModel, merged: Sequence[nn.Module] | None = None) -> Iterator[None]:
        """Let the projections of the model have the adapter, or be those of `Merged`, for as long as this lasts."""
        places = [(model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]) for path in self.names]
        bases = [getattr(owner, name) for owner, name in places]
        adapted = merged or [Adapted(base, pair) for base, pair in zip(bases, self.pairs, strict=True)]  # type: ignore[arg-type]
        try:
            for (owner, name), part in zip(places, adapted, strict=True):
                owner._modules[name] = part
            yield
        finally:
            for (owner, name), base in zip(places, bases, strict=True):
                owner._modules[name] = base

    def save(self, folder: Path, base: Path) -> None:
        """Write it in peft's layout, as an adapter of the model in `base`."""
        folder.mkdir()
        weights = {}
        for name, pair in zip(self.names, self.pairs, strict=True):
            for key, parameter in zip("AB", pair.parameters(), strict=True):
                weights[f"base_model.model.{name}.lora_{key}.weight"] = parameter.detach().contiguous()
        save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        settings = {
            "peft_type": "LORA",
            "base_model_name_or_path": str(base.resolve()),
            "r": self.r,
            "lora_alpha": self.alpha,
            "target_modules": self.names,
            "inference_mode": True,
        }
        (folder / ADAPTER).write_text(to_json(settings))


class Merged:
    """A copy of the adapted projections, with the adapter in its weights.

    It lies where it lies, so that decode graphs stay good. Biases are the model's own: no adapter has one.
    """

    def __init__(self, adapter: SamplerAdapter, model: transformers.PreTrainedModel) -> None:
        self.adapter, self.copies = adapter, [_like(model.get_submodule(name)) for name in adapter.names]

    @torch.no_grad()
    def renew(
        self, model: transformers.PreTrainedModel, master_of: Callable[[nn.Parameter], torch.Tensor]
    ) -> list[nn.Linear]:
        """Write W + (alpha / r) B A into it, with the policy's own adapter if it has one, rounded once.

        master_of: a parameter in full and with all its digits, at least fp32, on the parameter's device
        """
        for name, pair, copy in zip(self.adapter.names, self.adapter.pairs, self.copies, strict=True):
            part: Any = model.get_submodule(name)
            base = getattr(part, "base_layer", part)  # of a layer that peft has wrapped
            terms: list[Any] = [(pair.a, pair.b, pair.scale)]
            if base is not part:
                policy = part.active_adapters[0]
                terms.append((part.lora_A[policy].weight, part.lora_B[policy].weight, part.scaling[policy]))
            weight = master_of(base.weight)
            for a, b, scale in terms:
                weight = torch.addmm(weight, master_of(b), master_of(a), alpha=scale)
            copy.weight.copy_(weight)
        return self.copies


def _like(part: Any) -> nn.Linear:
    """A projection with weights of its own."""
    settings = {"device": part.weight.device, "dtype": part.weight.dtype}
    copy: nn.Linear = skip_init(nn.Linear, part.in_features, part.out_features, bias=False, **settings)
    copy.weight.requires_grad_(False)
    copy.bias = part.bias
    return copy


@contextmanager
def frozen(model: transformers.PreTrainedModel) -> Iterator[None]:
    """No gradient goes to the model's own parameters for as long as this lasts."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trained:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
