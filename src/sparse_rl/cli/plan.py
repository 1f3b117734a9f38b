# SPDX-License-Identifier: Apache-2.0
"""`sparse-rl plan`: what a run will hold, whether it fits, and what to change if it does not.

The arithmetic is in plan/memory.py. `train` has its warning, and the plan of its --dry-run, from here.
"""

from __future__ import annotations

import json
import logging
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_rl.cli.parsing import model_dtype
from sparse_rl.cli.train import read, train_parser

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

    from sparse_rl.plan import Device, ModelSize, Plan, RunSize

logger = logging.getLogger(__name__)

IN_FP32 = ("embedded", "smollm2", "tiny")  # unless a dtype is given
PROMPT = 512  # tokens, where nobody says

DESCRIPTION = """What a training run will hold in memory, from its settings alone: nothing is loaded, nothing is run.

It takes every setting of `sparse-rl train`. Without --config, --model and --shape it has those of default.yaml:
{default}
The defaults listed below are for all else. Exit status 0: it fits; 1: it does not, and what would help is listed.

  sparse-rl plan --shape qwen2.5-7b --gpu h200 --kv.policy rkv --sampling.max_tokens 16384 --engine.rows 64
  sparse-rl plan --config qwen2.5-1.5b.yaml --memory 80GB --json
"""


def run(arguments: list[str]) -> None:
    settings, _, parts = read(arguments, train_parser("plan", DESCRIPTION, _add_own))
    from sparse_rl.plan import as_json, choose_device, lines

    device = choose_device(settings.device, gpu=settings.gpu, memory=settings.memory)
    plan = plan_of(settings, parts, device, settings.shape, settings.prompt, settings.ranks, download=True)
    if settings.json:
        print(json.dumps(as_json(plan), indent=2))
    else:
        print("\n".join(lines(plan)))
    if not plan.fits:
        sys.stdout.flush()
        sys.exit(1)


def _add_own(parser: ArgumentParser) -> None:
    parser.add_argument("--shape", type=str | None, default=None, help="a published model's shape, instead of --model")
    parser.add_argument("--gpu", type=str | None, default=None, help="a GPU by name: h200, h100, a100-80, 4090, ...")
    parser.add_argument("--memory", type=str | None, default=None, help="a GPU's memory, in bytes or as in 80GB")
    parser.add_argument("--ranks", type=int, default=1, help="processes the run is sharded over, one GPU each")
    parser.add_argument("--prompt", type=int | None, default=None, help=f"tokens of the longest prompt [{PROMPT}]")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")


def plan_comments(settings: Namespace, parts: dict[str, Any], ranks: int = 1) -> list[str]:
    """The plan on the run's own device as comment lines, or why there is none."""
    try:
        from sparse_rl.plan import lines

        text = lines(_own_plan(settings, parts, ranks), "train")
    except ValueError as error:
        text = [f"no plan: {' '.join(str(error).split())}"]
    return [f"# {line}".rstrip() for line in text]


def warn_of_memory(settings: Namespace, parts: dict[str, Any], ranks: int = 1) -> None:
    """Say before the weights are loaded that the run is not expected to fit its GPU."""
    if not settings.device.startswith("cuda"):
        return
    try:
        from sparse_rl.plan import summary

        plan = _own_plan(settings, parts, ranks)
    except ValueError:
        return  # what cannot be planned may still run
    if not plan.fits:
        logger.warning("this run %s. `sparse-rl plan` with its settings says what would help.", summary(plan))


def _own_plan(settings: Namespace, parts: dict[str, Any], ranks: int) -> Plan:
    from sparse_rl.plan import choose_device

    return plan_of(settings, parts, choose_device(settings.device), ranks=ranks)


def plan_of(
    settings: Namespace,
    parts: dict[str, Any],
    device: Device,
    shape: str | None = None,
    prompt: int | None = None,
    ranks: int = 1,
    *,
    download: bool = False,
) -> Plan:
    """The plan of a run with these settings; ValueError if the model's configuration is not at hand."""
    from sparse_rl.plan import make_plan
    from sparse_rl.train.shard import check_sharded

    if prompt is not None and prompt < 1:
        raise ValueError(f"--prompt is {prompt}; it must be at least 1.")
    if ranks < 1:
        raise ValueError(f"--ranks is {ranks}; it must be at least 1.")
    if ranks > 1:
        check_sharded(parts["optimizer"])
    size = _size(settings.model, shape, settings.dtype, device.cuda, download)
    if prompt is not None and prompt >= size.context:
        raise ValueError(f"--prompt is {prompt}, but the model's context is {size.context}; shorten it.")
    return make_plan(size, _run(size, parts, prompt or min(PROMPT, size.context // 2), ranks), device)


@lru_cache(maxsize=8)
def _size(model: str, shape: str | None, dtype: str | None, cuda: bool, download: bool) -> ModelSize:
    import torch

    from sparse_rl.model.lora import ADAPTER, base_name
    from sparse_rl.model.shapes import SHAPES, shape_config
    from sparse_rl.plan import model_config, model_size

    chosen = model_dtype(dtype)
    if shape is not None:
        return model_size(shape_config(shape), shape, chosen or (torch.bfloat16 if cuda else torch.float32))
    if (Path(model) / ADAPTER).is_file():  # it is merged into its base
        return replace(_size(base_name(Path(model)), None, dtype, cuda, download), name=model)
    try:
        config = model_config(model, download=False)
    except ValueError:
        known = "smollm2-135m" if model == "smollm2" else model
        published = known.rpartition("/")[2].lower().removesuffix("-instruct")
        if published in SHAPES:
            config = shape_config(published)
            chosen = chosen or (torch.float32 if model in IN_FP32 else torch.bfloat16)  # as others are published
        elif download:
            config = model_config(model, download=True)
        else:
            raise
    if chosen is None and model.partition(":")[0] not in IN_FP32:
        chosen = config.dtype if isinstance(config.dtype, torch.dtype) else model_dtype(config.dtype)
    return model_size(config, model, chosen or torch.float32)


def _run(size: ModelSize, parts: dict[str, Any], prompt: int, ranks: int) -> RunSize:
    """What the settings say of memory, as numbers."""
    from sparse_rl.calibrate.search import with_budget
    from sparse_rl.model.lora import check_rank
    from sparse_rl.objective.mismatch import overlap_ids
    from sparse_rl.plan import RunSize
    from sparse_rl.train.control import control_grid

    engine, update, optimizer, lora = (parts[name] for name in ("engine", "update", "optimizer", "lora"))
    kv, control = parts["kv"], parts["control"]
    page_size = engine.page_size or kv.page_size
    pool_pages = engine.pool_pages
    if engine.pool_bytes is not None:
        pool_pages = engine.pool_bytes // kv.page_bytes(size.attention, page_size)
    check_rank(lora.r, size.hidden)
    targets = () if lora.target == ("all-linear",) else lora.target
    completion = max(1, min(parts["sampling"].max_tokens, size.context - prompt))
    grid: tuple[int, ...] = ()
    if control.auto:
        grid = control_grid(control, kv, prompt=prompt, longest=prompt + completion, page_size=page_size)
        kv = with_budget(kv, grid[-1])
    return RunSize(
        kv=kv,
        auto=grid[0] if grid else 0,
        rows=engine.rows,
        requests=parts["config"].prompts_per_step * parts["sampling"].n,
        prompt=prompt,
        completion=completion,
        max_tokens=update.max_tokens,
        page_size=page_size,
        pool_pages=pool_pages,
        prefill_tokens=engine.max_prefill_tokens,
        top_logprobs=overlap_ids(size.vocabulary),
        graphs=engine.graphs,
        activations=update.activations,
        moments="8bit" if optimizer.kind == "adamw_8bit" else "fp32",
        on_host=optimizer.offload,
        reference=parts["loss"].beta > 0,
        lora=size.adapters(lora.r, targets) if lora.r else 0,
        distill=size.adapters(parts["distill"].r),
        merged=parts["distill"].merged,
        ranks=ranks,
    )
