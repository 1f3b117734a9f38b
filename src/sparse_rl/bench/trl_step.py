# SPDX-License-Identifier: Apache-2.0
"""The learner's step by TRL: its own `GRPOTrainer.train` on given prompts and completions, only generation replaced.

The clock runs from the moment the completions are there until the optimizer has stepped and the gradients are
dropped: padding, rewards, advantages, every micro-batch forward and backward, clipping, AdamW.

Our own step on such lengths is timed in learner.py.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import statistics
import tempfile
import time
from typing import Any

import torch
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback

from sparse_rl.bench.meter import synchronize
from sparse_rl.model.shapes import random_module
from sparse_rl.model.tiny import tiny_tokenizer
from sparse_rl.specs import first_line

Rows = list[tuple[int, ...]]
FIXED = {  # the same step as ours, and nothing else in its time
    "beta": 0.0,
    "use_vllm": False,
    "optim": "adamw_torch_fused",
    "max_grad_norm": 1.0,
    "shuffle_dataset": False,
    "report_to": "none",
    "logging_strategy": "no",
    "save_strategy": "no",
    "disable_tqdm": True,
}


class _Clock(TrainerCallback):
    """Seconds of each step from its completions to its end."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.began = 0.0
        self.seconds: list[float] = []

    def start(self) -> None:
        synchronize(self.device)
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        synchronize(self.device)
        self.seconds.append(time.perf_counter() - self.began)


def time_trl(
    shape: str,
    device: str,
    dtype: torch.dtype,
    prompts: Rows,
    completions: Rows,
    *,
    group: int,
    microbatch: int,
    recompute: bool,
    steps: int,
    seed: int,
) -> dict[str, Any]:
    """The median of `steps` after one to warm up; a prompt for each completion, those of a group side by side."""
    if len(completions) % microbatch:
        raise RuntimeError(f"TRL cuts equal micro-batches, and {microbatch} does not divide {len(completions)} rows.")
    if dtype not in (torch.bfloat16, torch.float32):
        raise RuntimeError(f"TRL is measured in bfloat16 or float32, not in {dtype}.")
    try:
        trl, datasets = importlib.import_module("trl"), importlib.import_module("datasets")
        _ = trl.GRPOTrainer  # trl imports what it needs only when asked for it
    except (ImportError, RuntimeError) as error:
        raise RuntimeError(f"trl cannot be imported: {first_line(error)}") from error
    asked = {
        "per_device_train_batch_size": microbatch,
        "gradient_accumulation_steps": len(completions) // microbatch,
        "num_generations": group,
        "max_steps": 1 + steps,
        "max_completion_length": max(map(len, completions)),
        "bf16": dtype == torch.bfloat16,
        "gradient_checkpointing": recompute,
        "use_cpu": torch.device(device).type == "cpu",
        "seed": seed,
    }
    attention = "flash_attention_2" if importlib.util.find_spec("flash_attn") else "sdpa"
    model = random_module(shape, device, dtype, seed, attn_implementation=attention)
    clock = _Clock()
    with tempfile.TemporaryDirectory() as folder:
        try:
            config = trl.GRPOConfig(output_dir=folder, **FIXED, **asked)
            trainer = _trainer(trl, datasets, model, config, prompts, completions, clock)
        except ValueError as error:
            raise RuntimeError(f"TRL refuses this work: {first_line(error)}") from error
        clock.device = trainer.args.device
        on_gpu = clock.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(clock.device)
        trainer.train()
    peak = torch.cuda.max_memory_allocated(clock.device) if on_gpu else None
    note = _note(trainer, attention, trl.__version__)
    del trainer, model
    gc.collect()  # a trainer and its model point at each other
    if on_gpu:
        torch.cuda.empty_cache()
    seconds = statistics.median(clock.seconds[1:])
    tokens = sum(map(len, prompts)) + sum(map(len, completions))
    longest = max(map(len, prompts)) + max(map(len, completions))
    return {
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "padded_tokens": longest * len(completions),
        "peak_bytes": peak,
        "note": note,
    }


def _trainer(
    trl: Any,
    datasets: Any,
    model: PreTrainedModel,
    config: Any,
    prompts: Rows,
    completions: Rows,
    clock: _Clock,
) -> Any:
    class Trainer(trl.GRPOTrainer):  # type: ignore[misc]
        def _send_telemetry(self) -> None:
            """Nothing leaves this machine."""

        def _generate(self, prompts: list[Any]) -> Any:
            generated = super()._generate(prompts)
            clock.start()
            return generated

    def rollout(*_: Any) -> dict[str, Any]:
        # Without vLLM, TRL's own generation brings no log-probs along either.
        return {
            "prompt_ids": [list(ids) for ids in prompts],
            "completion_ids": [list(ids) for ids in completions],
            "logprobs": None,
        }

    def alternate(completions: list[str], **_: Any) -> list[float]:
        return [float(row % config.num_generations % 2) for row in range(len(completions))]

    trainer = Trainer(
        model=model,
        args=config,
        reward_funcs=alternate,
        train_dataset=datasets.Dataset.from_dict({"prompt": [""] * (len(prompts) // config.num_generations)}),
        processing_class=tiny_tokenizer(),  # pads, and stands in for one
        callbacks=[clock],
    )
    trainer.rollout_func = rollout  # as an argument it would warn that it is experimental
    trainer.remove_callback(PrinterCallback)
    return trainer


def _note(trainer: Any, attention: str, version: str) -> str:
    """What was run, read from the trainer after it ran."""
    weight = next(trainer.model.parameters())
    moments = {tensor.dtype for state in trainer.optimizer.state.values() for tensor in state.values() if tensor.dim()}
    names = ", ".join(sorted(_name(dtype) for dtype in moments))
    autocast = "under bf16 autocast" if trainer.args.bf16 else "without autocast"
    checkpointing = "with" if trainer.args.gradient_checkpointing else "without"
    old = any("old_per_token_logps" in batch for batch in trainer._buffered_inputs)
    return (
        f"TRL {version}, {attention}, {checkpointing} gradient checkpointing, {autocast}; its weights are its only "
        f"masters ({_name(weight.dtype)}), AdamW's moments {names}; loss {trainer.loss_type} on log-probs of the fused "
        f"head, {'with a' if old else 'no'} pass for old log-probs; rows padded to the longest of the step"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
