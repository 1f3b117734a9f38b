# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in FP8 or MXFP4 are read as plain weights; other quantised checkpoints are refused.

Sampler and learner share one module, whose decode graphs, joined projections and updates in place need plain weights.
transformers dequantises block by block while it reads. Two of its habits are changed here: it takes a block's size from
the number of scales, which is wrong where the last block is cut short, and it would quantise again on save.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from sparse_rl.model.attention import UnsupportedModelError

METHODS = ("fp8", "mxfp4")  # that transformers can turn into plain weights on any device
PLAIN = torch.bfloat16  # without another dtype; it holds every value of MXFP4


def ask_for_plain_weights(config: Any, name: str) -> bool:
    """Whether the checkpoint is quantised; its config then asks for dequantised weights, or it is refused."""
    places = [place for place in (config, config.get_text_config()) if getattr(place, "quantization_config", None)]
    if not places:
        return False
    given = places[0].quantization_config
    settings = given if isinstance(given, dict) else given.to_dict()
    method = settings.get("quant_method", "unknown method")
    if method not in METHODS:
        raise UnsupportedModelError(
            f"model {name!r} is quantised ({method}), but sampler and learner share one module of plain weights; give "
            f"the unquantised model, with --lora.r 16 if memory is short, or one in {' or '.join(METHODS)}, which is "
            "dequantised at load."
        )
    forget(config)
    config.quantization_config = {**settings, "dequantize": True}
    config.dtype = getattr(config, "dtype", None) or PLAIN  # else that of the first tensor, which may be FP8
    return True


def forget(config: Any) -> None:
    """Make it the config of plain weights."""
    for place in (config, config.get_text_config()):
        if hasattr(place, "quantization_config"):
            del place.quantization_config


def finish(model: transformers.PreTrainedModel, dtype: torch.dtype | None) -> None:
    """Make a dequantised model one that never was quantised: of one dtype, and saved as it is."""
    forget(model.config)
    model._weight_conversions = None  # type: ignore[assignment]  # the library's default, without its quantisers
    for parameter in model.parameters():
        if dtype is not None and parameter.dtype == PLAIN:  # others are held in fp32 on purpose
            parameter.data = parameter.data.to(dtype)


@contextmanager
def cut_blocks(config: Any) -> Iterator[None]:
    """Read FP8 blocks that a matrix's edge cuts short, as DeepSeek-V3 has (576 rows in blocks of 128)."""
    if not getattr(config, "quantization_config", None):
        yield
        return
    operation = importlib.import_module("transformers.integrations.finegrained_fp8").Fp8Dequantize
    dequantise = operation._dequantize_one

    def of_whole_blocks(self: Any, weight: torch.Tensor, scales: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        block = self.hf_quantizer.quantization_config.weight_block_size
        if block is None or scales.ndim < 2 or weight.dtype == torch.int8:  # int8 holds two values of FP4
            return dequantise(self, weight, scales, *args, **kwargs)
        shape, grid = weight.shape[-2:], scales.shape[-2:]
        if list(grid) != [-(-size // step) for size, step in zip(shape, block, strict=True)]:
            return dequantise(self, weight, scales, *args, **kwargs)
        whole = weight.new_zeros((*weight.shape[:-2], grid[0] * block[0], grid[1] * block[1]))
        whole[..., : shape[0], : shape[1]] = weight
        return dequantise(self, whole, scales, *args, **kwargs)[..., : shape[0], : shape[1]].contiguous()

    operation._dequantize_one = of_whole_blocks
    try:
        yield
    finally:
        operation._dequantize_one = dequantise
