# SPDX-License-Identifier: Apache-2.0
"""`sparse-rl generate`: prompts in, one JSON line a sample out.

Sampled by rollout/engine.py. Nothing is graded: that is `eval.py`'s.
"""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_rl.cli.parsing import add_model, make_parser, model_dtype, parse, quiet_bars, refuse_null
from sparse_rl.cli.recipes import add_config, given_configs, with_configs

if TYPE_CHECKING:
    import torch
    from jsonargparse import ArgumentParser, Namespace

    from sparse_rl.model.load import LoadedModel
    from sparse_rl.report.progress import ProgressLine
    from sparse_rl.tasks.files import Row
    from sparse_rl.types import Prompt, Rollout

DESCRIPTION = """Sample from a model whose KV cache is compressed while it decodes; one JSON line a sample.

Prompts come from the arguments, from --prompts FILE (a text file with one prompt a line, or JSONL with a key "prompt"
that is a string or a list of chat messages), or from standard input. All of them share the sampling settings.

  sparse-rl generate "Once upon a time" --kv.policy rkv --kv.budget 32 --kv.interval 8 --compare
  sparse-rl generate "c=a7;a=b2;b=c0;a|" --model embedded --kv.policy rkv --kv.budget 64 --kv.interval 16
  sparse-rl generate --prompts prompts.jsonl --model Qwen/Qwen2.5-1.5B --kv.policy snapkv --output samples.jsonl
  sparse-rl generate "c=a7;a=b2;b=c0;a|" --model embedded --kv.policy streaming --kv.budget 24 --kv.interval 8 --compare
"""


def run(arguments: list[str]) -> None:
    parser, (configs, others) = _parser(), given_configs(arguments, "generate")
    if any("prompt" in config for config in configs):
        raise ValueError('a --config has a key "prompt"; name a file of prompts with "prompts" instead.')
    settings = parse(parser, with_configs(configs, others))
    from sparse_rl.config import build_kv, build_section
    from sparse_rl.model.load import load
    from sparse_rl.report.progress import ProgressLine
    from sparse_rl.rollout import Engine, EngineConfig, Sampling

    policy = build_kv(settings.kv)
    _check_command(settings)
    sampling = build_section(Sampling, "sampling", settings.sampling)
    if settings.compare:
        _check_compared(policy, sampling)
    config = build_section(EngineConfig, "engine", settings.engine)
    rows = _read_prompts(settings)
    output = _open_output(settings.output)
    try:
        quiet_bars()
        loaded = load(settings.model, dtype=model_dtype(settings.dtype), device=settings.device)
        prompts = [_prompt(row, i, loaded) for i, row in enumerate(rows)]
        loaded.fit(max(len(prompt.ids) for prompt in prompts) + sampling.max_tokens)
        if settings.compare:
            _compare(loaded, policy, sampling, config, prompts, output)
        else:

            def write(rollout: Rollout) -> None:
                print(json.dumps(_record(rollout, loaded), allow_nan=False), file=output or sys.stdout, flush=True)

            with ProgressLine() as line:
                engine = Engine(loaded, policy, config)
                _say_if_uncut(line, policy, engine.generate(prompts, sampling, on_step=line.show, on_rollout=write))
    except BaseException:
        if output is not None and Path(settings.output).is_file() and output.tell() == 0:
            Path(settings.output).unlink()  # nothing was written: leave no empty file behind
        raise
    finally:
        if output is not None:
            output.close()


def _parser() -> ArgumentParser:
    from sparse_rl.config import add_kv_section, add_section
    from sparse_rl.rollout import EngineConfig, Sampling

    parser = make_parser("generate", DESCRIPTION)
    parser.add_argument("prompt", nargs="*", default=[], help="prompts")
    add_config(parser)
    parser.add_argument("--prompts", type=str | None, default=None, help="text or JSONL file of prompts; - is stdin")
    add_model(parser, default="smollm2")
    parser.add_argument("--output", type=str | None, default=None, help="JSONL file to write instead of stdout")
    parser.add_argument("--compare", action="store_true", help="show dense and sparse side by side")
    add_kv_section(parser)
    add_section(parser, "sampling", Sampling)
    add_section(parser, "engine", EngineConfig)
    return parser


def _check_command(settings: Namespace) -> None:
    """What a config file can get wrong about the command's own settings."""
    refuse_null(settings, "model", "device", "kv")
    if not isinstance(settings.compare, bool):
        raise ValueError(f"compare is {settings.compare!r}; it must be true or false.")
    if settings.output is None and sys.stdout is None:
        raise ValueError("standard output is closed; name a file with --output.")


def _read_prompts(settings: Namespace) -> list[Any]:
    """Strings or lists of chat messages, from the arguments, a file or standard input."""
    from sparse_rl.tasks.files import parse_lines, read_text

    if settings.prompt:
        if settings.prompts:
            raise ValueError("prompts were given both as arguments and with --prompts; use one.")
        return list(settings.prompt)
    if settings.prompts in (None, "-"):
        if sys.stdin is None or sys.stdin.isatty():
            raise ValueError("no prompt; give one as an argument, with --prompts FILE, or on standard input.")
        name, content = "standard input", sys.stdin.buffer.read()
    else:
        name, content = settings.prompts, Path(settings.prompts).read_bytes()
    text = read_text(content, name)
    # Lines end at a newline only: other separators may stand inside a prompt.
    lines = [line.rstrip("\r") for line in text.split("\n") if line.strip()]
    if not lines:
        raise ValueError(f"{name} has no prompts; write one a line.")
    if not (name.endswith(".jsonl") or re.match(r'\s*\{\s*("|$)', lines[0])):
        return lines
    return [_prompt_of(row) for row in parse_lines(text, name)]


def _prompt_of(row: Row) -> str | list[Any]:
    """A row's prompt; settings of its own, which nothing would read, are refused."""
    from sparse_rl.rollout import Sampling
    from sparse_rl.tasks.layouts import LAYOUTS

    own = next((key for key in row.columns if key in {field.name for field in fields(Sampling)}), None)
    if own is not None:
        raise ValueError(
            f"{row.where} has its own {own}, but all prompts of a call share their settings; remove it, give "
            f"--sampling.{own}, and make a call for each value."
        )
    return LAYOUTS["trl"].split(row)[0]


def _prompt(row: Any, index: int, loaded: LoadedModel) -> Prompt:
    from sparse_rl.tasks.prompts import make_prompt

    return make_prompt({"prompt": row, "index": index}, f"prompt {index}", loaded.tokenizer)


def _open_output(path: str | None) -> Any:
    if path is None:
        return None
    if not path or Path(path).is_file() or Path(path).is_dir():
        raise ValueError(f"--output {path!r} exists and is not overwritten; choose another name or remove it.")
    return open(path, "w")


def _record(rollout: Rollout, loaded: LoadedModel, **more: Any) -> dict[str, Any]:
    """A rollout as one JSON object."""
    top_logprobs = None
    if rollout.top_logprobs is not None:  # a token that truncation left out has no log-prob
        top_logprobs = [[v if v > -math.inf else None for v in row] for row in rollout.top_logprobs.tolist()]
    return {
        "index": rollout.prompt.columns["index"],
        "prompt": rollout.prompt.text,
        "sample": rollout.sample,
        "completion": loaded.tokenizer.decode(rollout.token_ids),
        "finish_reason": rollout.finish_reason,
        "token_ids": rollout.token_ids.tolist(),
        "sampler_logprobs": rollout.sampler_logprobs.tolist(),
        **({} if rollout.top_ids is None else {"top_ids": rollout.top_ids.tolist()}),
        **({} if top_logprobs is None else {"top_logprobs": top_logprobs}),
        "kv": {
            "saved_frac": rollout.kv.saved_frac,
            "hybrid_saved_frac": rollout.kv.hybrid_saved_frac,
            "read_frac": rollout.kv.read_frac,
            "peak_entries": rollout.kv.peak,
            "peak_bytes": rollout.kv.peak_bytes,
            "num_compressions": rollout.kv.num_compressions,
            "held": list(rollout.kv.held),
        },
        **more,
    }


def _check_compared(policy: Any, sampling: Any) -> None:
    from sparse_rl.kv import Full

    if isinstance(policy, Full):
        raise ValueError(
            f"--compare sets a policy against the dense cache, and {policy.name!r} is dense; choose another."
        )
    if sampling.top_p < 1.0 or sampling.top_k is not None:
        raise ValueError("--compare needs the whole distribution; leave out sampling.top_p and sampling.top_k.")
    if sampling.top_logprobs:
        raise ValueError("--compare asks for the log-probs it needs; leave out sampling.top_logprobs.")


def _compare(loaded: LoadedModel, policy: Any, sampling: Any, config: Any, prompts: list[Prompt], output: Any) -> None:
    """Sample dense and sparse with the same random numbers; score the sparse tokens with the dense model."""
    from dataclasses import replace

    from rich.console import Console

    from sparse_rl.kv import Full
    from sparse_rl.objective.mismatch import overlap_bounds, overlap_ids
    from sparse_rl.report.compare import side_by_side, summary
    from sparse_rl.report.progress import ProgressLine
    from sparse_rl.rollout import Engine
    from sparse_rl.score import score

    sampling = replace(sampling, top_logprobs=overlap_ids(loaded.vocab_size))
    exact = sampling.top_logprobs == loaded.vocab_size
    with ProgressLine() as line:
        dense = Engine(loaded, Full(), config).generate(prompts, sampling, on_step=line.show)
        sparse = Engine(loaded, policy, config).generate(prompts, sampling, on_step=line.show)
        _say_if_uncut(line, policy, sparse)
    console = Console()
    scores = score(loaded.model, sparse, temperature=sampling.temperature)
    for dense_rollout, rollout, dense_scores in zip(dense, sparse, scores, strict=True):
        lower, upper = overlap_bounds(_given(rollout.top_logprobs), _given(dense_scores.at_top_ids))
        console.print(side_by_side(loaded.tokenizer, dense_rollout, rollout, lower, exact=exact))
        console.print(
            summary(dense_rollout, rollout, lower, lower if exact else upper), highlight=False, soft_wrap=True
        )
        if output is not None:
            more = {"dense_logprobs": dense_scores.dense_logprobs.tolist(), "overlap": lower.tolist()}
            more |= {} if exact else {"overlap_upper": upper.tolist()}
            print(json.dumps(_record(replace(rollout, top_ids=None, top_logprobs=None), loaded, **more)), file=output)


def _say_if_uncut(line: ProgressLine, policy: Any, rollouts: list[Rollout]) -> None:
    from sparse_rl.kv import EvictPolicy

    if isinstance(policy, EvictPolicy) and not any(rollout.kv.num_compressions for rollout in rollouts):
        line.say(
            f"no cache was cut: none grew to kv.budget + kv.interval, {policy.budget} + {policy.interval} entries; "
            "lower one of them, or sample more tokens."
        )


def _given(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor
