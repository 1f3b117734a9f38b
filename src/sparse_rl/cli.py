# SPDX-License-Identifier: Apache-2.0
"""The command `sparse-rl`: one subcommand is one function. Heavy imports wait until the subcommand is known."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from jsonargparse import ArgumentParser, Namespace

    from sparse_rl.model.load import LoadedModel
    from sparse_rl.types import Prompt, Rollout

USAGE = """usage: sparse-rl COMMAND ...

Reinforcement learning of language models whose rollouts run on a sparse KV cache.

commands:
  generate   sample from a model whose KV cache is compressed while it decodes

`sparse-rl COMMAND --help` lists the settings of a command.
"""

GENERATE = """Sample from a model whose KV cache is compressed while it decodes; one JSON line a sample.

Prompts come from the arguments, from --prompts FILE (a text file with one prompt a line, or JSONL with a key "prompt"
that is a string or a list of chat messages), or from standard input.

  sparse-rl generate "Once upon a time" --kv.policy rkv --kv.budget 64 --kv.interval 16
  sparse-rl generate --prompts prompts.jsonl --model Qwen/Qwen2.5-1.5B --kv.policy snapkv --output samples.jsonl
  sparse-rl generate "Once upon a time" --kv.policy streaming --kv.budget 32 --compare
"""


def main(arguments: list[str] | None = None) -> None:
    """Run the command and leave with its exit code: 0, 2 for what the user can mend, 1 otherwise."""
    arguments = sys.argv[1:] if arguments is None else arguments
    commands = {"generate": generate}
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, end="")
        sys.exit(0 if arguments else 2)
    if arguments[0] == "--version":
        from sparse_rl import __version__

        print(f"sparse-rl {__version__}")
        sys.exit(0)
    if arguments[0] not in commands:
        fail(f"unknown command {arguments[0]!r}; the commands are {', '.join(commands)}.")
    try:
        commands[arguments[0]](arguments[1:])
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # the reader had enough; leave without a word, and without Python's own at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}; check the path." if error.filename else str(error))
    except ValueError as error:
        fail(" ".join(str(error).split()))
    except FloatingPointError as error:
        fail(str(error), code=1)
    except MemoryError:
        fail("out of memory; ask for fewer engine.rows, samples or pages.")
    except KeyboardInterrupt:
        fail("interrupted; what had finished was written.", code=130)


def fail(message: str, code: int = 2) -> None:
    print(f"sparse-rl: error: {message}", file=sys.stderr)
    sys.exit(code)


def generate(arguments: list[str]) -> None:
    settings = _parse(_generate_parser(), arguments)
    from sparse_rl.config import build_kv, build_section
    from sparse_rl.model.load import load
    from sparse_rl.report.progress import ProgressLine
    from sparse_rl.rollout import Engine, EngineConfig, Sampling

    policy = build_kv(settings.kv)
    _check_command(settings)
    sampling = build_section(Sampling, "sampling", settings.sampling)
    config = build_section(EngineConfig, "engine", settings.engine)
    rows = list(_read_prompts(settings))
    output = _open_output(settings.output)
    try:
        loaded = load(settings.model, dtype=_dtype(settings.dtype), device=settings.device)
        prompts = [_prompt(row, i, loaded) for i, row in enumerate(rows)]
        if settings.compare:
            _compare(loaded, policy, sampling, config, prompts, output)
        else:

            def write(rollout: Rollout) -> None:
                print(json.dumps(_record(rollout, loaded), allow_nan=False), file=output or sys.stdout, flush=True)

            with ProgressLine() as line:
                Engine(loaded, policy, config).generate(prompts, sampling, on_step=line.show, on_rollout=write)
    except BaseException:
        if output is not None and Path(settings.output).is_file() and output.tell() == 0:
            Path(settings.output).unlink()  # nothing was written: leave no empty file behind
        raise
    finally:
        if output is not None:
            output.close()


def _generate_parser() -> ArgumentParser:
    from jsonargparse import ArgumentParser, DefaultHelpFormatter

    from sparse_rl.config import add_kv_section, add_section
    from sparse_rl.rollout import EngineConfig, Sampling

    class Formatter(DefaultHelpFormatter):
        def _fill_text(self, text: str, width: int, indent: str) -> str:
            return text  # keep the examples' lines

    parser = ArgumentParser(
        prog="sparse-rl generate",
        description=GENERATE,
        formatter_class=Formatter,
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("prompt", nargs="*", default=[], help="prompts")
    parser.add_argument("--config", action="config", help="YAML file with any of these settings")
    parser.add_argument("--prompts", type=str | None, default=None, help="text or JSONL file of prompts; - is stdin")
    parser.add_argument(
        "--model", type=str, default="tiny", help="tiny, tiny:FAMILY (random weights), a folder, or a hub name"
    )
    parser.add_argument("--dtype", type=str | None, default=None, help="float32, bfloat16, float16 or float64")
    parser.add_argument("--device", type=str, default="cpu", help="cpu, cuda, cuda:1, ...")
    parser.add_argument("--output", type=str | None, default=None, help="JSONL file to write instead of stdout")
    parser.add_argument("--compare", action="store_true", help="show dense and sparse side by side")
    add_kv_section(parser)
    add_section(parser, "sampling", Sampling)
    add_section(parser, "engine", EngineConfig)
    return parser


def _parse(parser: ArgumentParser, arguments: list[str]) -> Namespace:
    from argparse import ArgumentError

    from sparse_rl.config import suggest

    try:
        return parser.parse_args(arguments)
    except ArgumentError as error:
        raise ValueError(suggest(str(error), parser)) from error


def _check_command(settings: Namespace) -> None:
    """What a config file can get wrong about the command's own settings."""
    import yaml

    for key in ("model", "device", "kv"):
        if settings[key] is None:
            raise ValueError(f"{key} is null; give it a value or leave it out.")
    if not isinstance(settings.compare, bool):
        raise ValueError(f"compare is {settings.compare!r}; it must be true or false.")
    for path in settings.config or []:
        if "prompt" in (yaml.safe_load(Path(str(path)).read_text()) or {}):
            raise ValueError(f'{path} has a key "prompt"; name a file of prompts with "prompts" instead.')
    if settings.output is None and sys.stdout is None:
        raise ValueError("standard output is closed; name a file with --output.")


def _read_prompts(settings: Namespace) -> list[Any]:
    """Strings or lists of chat messages, from the arguments, a file or standard input."""
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
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} is not text in UTF-8 (byte {error.start}); convert it.") from error
    # Lines end at a newline only: other separators may stand inside a prompt.
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise ValueError(f"{name} has no prompts; write one a line.")
    if not (name.endswith(".jsonl") or lines[0][1].lstrip().startswith("{")):
        return [line for _, line in lines]
    rows = []
    for number, line in lines:
        try:
            row = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"line {number} of {name} is not JSON ({error}); mend or remove it.") from error
        if not isinstance(row, dict) or not isinstance(row.get("prompt"), str | list):
            raise ValueError(f'line {number} of {name} has no "prompt" that is a string or a list of messages.')
        rows.append(row["prompt"])
    return rows


def _prompt(row: Any, index: int, loaded: LoadedModel) -> Prompt:
    from sparse_rl.types import Prompt

    chat = not isinstance(row, str)
    if chat and loaded.tokenizer.chat_template is None:
        raise ValueError("a prompt is a list of messages, but the model has no chat template; give it as a string.")
    try:
        text = row
        if chat:
            text = str(loaded.tokenizer.apply_chat_template(row, tokenize=False, add_generation_prompt=True))
        ids = loaded.tokenizer(text, add_special_tokens=not chat).input_ids
    except Exception as error:  # a template's own complaint, or text that is not Unicode
        what = "the model's chat template refuses" if chat else "the tokenizer cannot read"
        raise ValueError(f"prompt {index}: {what} it ({type(error).__name__}: {error}); mend it.") from error
    return Prompt(ids=tuple(ids), text=text, columns={"index": index})


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
            "peak_entries": rollout.kv.peak,
            "peak_bytes": rollout.kv.peak_bytes,
            "num_compressions": rollout.kv.num_compressions,
            "held": list(rollout.kv.held),
        },
        **more,
    }


def _compare(loaded: LoadedModel, policy: Any, sampling: Any, config: Any, prompts: list[Prompt], output: Any) -> None:
    """Sample dense and sparse with the same random numbers; score the sparse tokens with the dense model."""
    from dataclasses import replace

    from rich.console import Console

    from sparse_rl.kv import EvictPolicy, Full
    from sparse_rl.objective.mismatch import overlap_bounds, overlap_ids
    from sparse_rl.report.compare import side_by_side, summary
    from sparse_rl.report.progress import ProgressLine
    from sparse_rl.rollout import Engine
    from sparse_rl.score import score

    if not isinstance(policy, EvictPolicy):
        raise ValueError(
            f"--compare sets a policy against the dense cache, and {policy.name!r} is dense; choose another."
        )
    if sampling.top_p < 1.0 or sampling.top_k is not None:
        raise ValueError("--compare needs the whole distribution; leave out sampling.top_p and sampling.top_k.")
    if sampling.top_logprobs:
        raise ValueError("--compare asks for the log-probs it needs; leave out sampling.top_logprobs.")
    sampling = replace(sampling, top_logprobs=overlap_ids(loaded.vocab_size))
    exact = sampling.top_logprobs == loaded.vocab_size
    with ProgressLine() as line:
        dense = Engine(loaded, Full(), config).generate(prompts, sampling, on_step=line.show)
        sparse = Engine(loaded, policy, config).generate(prompts, sampling, on_step=line.show)
    console = Console()
    scores = score(loaded.model, sparse, temperature=sampling.temperature)
    for dense_rollout, rollout, dense_scores in zip(dense, sparse, scores, strict=True):
        lower, upper = overlap_bounds(_given(rollout.top_logprobs), _given(dense_scores.at_top_ids))
        console.print(side_by_side(loaded.tokenizer, dense_rollout, rollout, lower, exact=exact))
        console.print(summary(dense_rollout, rollout, lower), highlight=False, soft_wrap=True)
        if output is not None:
            more = {"dense_logprobs": dense_scores.dense_logprobs.tolist(), "overlap": lower.tolist()}
            more |= {} if exact else {"overlap_upper": upper.tolist()}
            print(json.dumps(_record(replace(rollout, top_ids=None, top_logprobs=None), loaded, **more)), file=output)


def _dtype(name: str | None) -> torch.dtype | None:
    import torch

    known = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
    known["float64"] = torch.float64
    if name is not None and name not in known:
        raise ValueError(f"dtype {name!r} is unknown; choose one of {', '.join(known)}.")
    return known[name] if name else None


def _given(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor
