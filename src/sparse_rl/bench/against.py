# SPDX-License-Identifier: Apache-2.0
"""The same work by others, one after the other: transformers' `generate` in fixed batches, vLLM where it is installed.

The engine's own dense cache is in rollout.py, TRL's step in trl_step.py.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from sparse_rl.bench.floor import fused
from sparse_rl.bench.meter import synchronize
from sparse_rl.bench.work import BenchConfig, output_lengths
from sparse_rl.model.shapes import random_module, shape_config
from sparse_rl.specs import first_line
from sparse_rl.types import Prompt

Timed = dict[str, Any]


def measure_each(
    times: dict[str, Callable[[], Timed]], rivals: list[str], ours: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """What each rival makes of the same work, and how many times faster we were; or why there is no figure.

    ours: tokens a second
    """
    found: dict[str, Any] = {}
    for name in rivals:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        say(f"the same work by {name}")
        try:
            timed = times[name]()
        except Exception as error:  # whatever a rival does, our own figure stands
            found[name] = {"error": first_line(error)}
        else:
            found[name] = {**timed, "ratio": ours / timed["tokens_per_s"]}
    return found


@torch.no_grad()
def time_generate(config: BenchConfig, dtype: torch.dtype, prompts: list[Prompt]) -> Timed:
    """Batches of `rows`, each until its longest output is done; only wanted tokens count.

    Batches of the standard work are all alike, so one is run.
    """
    device = torch.device(config.device or "cpu")
    model = random_module(config.shape, device, dtype, config.seed, attn_implementation="eager")
    model.set_attn_implementation(fused(model))
    each = [prompt for prompt in prompts for _ in range(config.n)]
    batches = [each[i : i + config.rows] for i in range(0, len(each), config.rows)]
    if config.work == "standard":
        batches = batches[:1]
    generate: Any = model.generate
    tokens, seconds = 0, 0.0
    for number, batch in enumerate([batches[0], *batches]):  # the first time, a few tokens to warm up
        lengths = [min(length, config.generate_tokens if number else 2) for length in output_lengths(batch)]
        ids = torch.tensor([prompt.ids for prompt in batch], device=device)
        synchronize(device)
        began = time.perf_counter()
        sampled = generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max(lengths),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            eos_token_id=None,
            pad_token_id=0,
        )
        synchronize(device)
        assert sampled.shape[1] == config.prompt + max(lengths), "generate stopped early"
        if number:
            tokens, seconds = tokens + sum(lengths), seconds + time.perf_counter() - began
    count = "one batch" if len(batches) == 1 else f"{len(batches)} batches"
    note = f"{count} of {config.rows}, outputs of at most {min(config.output, config.generate_tokens)} tokens"
    return {"tokens_per_s": tokens / seconds, "tokens": tokens, "seconds": seconds, "note": note}


def time_vllm(config: BenchConfig, dtype: torch.dtype, prompts: list[Prompt]) -> Timed:
    """All requests at once, at most `rows` in flight, prompts in its prefix cache before the clock starts."""
    if importlib.util.find_spec("vllm") is None:
        raise RuntimeError("vLLM is not installed")
    if torch.device(config.device or "cpu").type != "cuda":
        raise RuntimeError("vLLM is measured on a GPU")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # a process of its own would be timed with its pipe
    vllm = importlib.import_module("vllm")
    free, total = torch.cuda.mem_get_info(torch.device(config.device or "cuda"))
    lengths = [min(length, config.max_steps or length) for length in output_lengths(prompts)]
    with tempfile.TemporaryDirectory() as folder:
        shape = shape_config(config.shape)
        shape.architectures = [f"{type(shape).__name__.removesuffix('Config')}ForCausalLM"]
        shape.save_pretrained(folder)
        llm = vllm.LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=str(dtype).removeprefix("torch."),
            enforce_eager=False,
            enable_prefix_caching=True,
            max_model_len=config.prompt + config.output,
            max_num_seqs=config.rows,
            gpu_memory_utilization=round(0.95 * free / total, 3),
            seed=config.seed,
        )
    requests = [{"prompt_token_ids": list(prompt.ids)} for prompt in prompts]

    def sample(lengths: list[int]) -> int:
        settings = [
            vllm.SamplingParams(
                n=config.n, max_tokens=length, temperature=1.0, ignore_eos=True, logprobs=0, detokenize=False
            )
            for length in lengths
        ]
        outputs = llm.generate(requests, settings, use_tqdm=False)
        return sum(len(sampled.token_ids) for output in outputs for sampled in output.outputs)

    sample([4] * len(lengths))
    began = time.perf_counter()
    tokens = sample(lengths)
    seconds = time.perf_counter() - began
    assert tokens == sum(lengths) * config.n, "vLLM returned other lengths than asked for"
    note = f"outputs of at most {max(lengths)} tokens, prompts in the prefix cache"
    return {"tokens_per_s": tokens / seconds, "tokens": tokens, "seconds": seconds, "note": note}
