# SPDX-License-Identifier: Apache-2.0
"""`sparse-rl calibrate`: the cheapest budget by context length for a model; `calibrate cost` has a file of its own.

What is run, and the schedule that comes of it, is calibrate/calibrate.py's; the page is report/calibration_page.py's.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonargparse import Namespace

from sparse_rl.cli.parsing import (
    add_engine,
    add_fields,
    add_model,
    build_engine,
    make_parser,
    model_dtype,
    parse,
    quiet_bars,
    show_warnings,
)
from sparse_rl.cli.recipes import add_config, given_configs, with_configs

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

    from sparse_rl.calibrate import CalibrationConfig
    from sparse_rl.kv import KVPolicy
    from sparse_rl.model.load import LoadedModel, Reader
    from sparse_rl.rollout import EngineConfig, Sampling
    from sparse_rl.types import Prompt

DESCRIPTION = """Find the budget a model needs: the cheapest KV cache, by context length, that stays near the dense one.

The dense cache and each budget of a grid answer the prompts; one dense pass over every answer says how much of the
next-token distributions overlap, sum_v min(p_dense, p_sparse), at every token. Sparrow found training stable as long as
the worst tokens overlap enough: the 5th percentile at 0.86 or more on its scale. Per bin of context length the cheapest
budget that reaches the target goes into the schedule, which is then run as it is. Small models spread their probability
over more ids than that scale counts, and their dense cache is itself below 0.86, which is said at once: give
--relative, with which the target is a share of the dense cache's own tail, 0.915 unless --target says another. OUTPUT
gets

  schedule.json   for --kv.budget of train and generate, and for --kv rkv:OUTPUT/schedule.json of eval
  report.html     curves, fits, hazards, the schedule; report.png has the curves alone
  results.json    every number of it
  runs/           what was measured, a file a budget

A calibration that was killed goes on with the same command and --resume: finished budgets are not done again. With
another --target, --relative, --tail, --tokens, --overlap or --bin, --resume finds another schedule from the same runs.

Prompts are those of a task (--task.name and its settings, as in train), of --benchmarks, or of a file (--prompts;
JSONL, JSON, CSV or parquet with a prompt or a problem in every row). Let them be like those of training, and as long.

  sparse-rl calibrate --num-prompts 48 --n 1 --max-tokens 195 --kv rkv:interval=8 --page 8 --lowest 16 --bin 60 \\
      --min-tokens 600 --sure --output cal
  sparse-rl calibrate --model smollm2 --benchmarks gsm8k --kv snapkv:interval=16 --max-tokens 1024 --bin 250 \\
      --relative --sure --device cuda --dtype bfloat16 --output calibrations/smollm2
  sparse-rl calibrate --model Qwen/Qwen3-1.7B --benchmarks aime24 aime25 --n 8 --max-tokens 37888 --sure --dry-run
  sparse-rl calibrate cost --help       what a schedule saves: predicted for any shape and GPU, measured on this one
"""


def run(arguments: list[str]) -> None:
    if arguments[:1] == ["cost"]:
        from sparse_rl.cli import calibrate_cost

        calibrate_cost.run(arguments[1:])
        return
    parser, (configs, others) = _parser(), given_configs(arguments, "calibrate")
    settings = parse(parser, with_configs(configs, others))
    from sparse_rl import specs
    from sparse_rl.calibrate import Calibration, calibrate
    from sparse_rl.evaluate.plan import parse_cache
    from sparse_rl.model.load import load, load_reader, weights_digest
    from sparse_rl.report.calibration_live import CalibrationLive
    from sparse_rl.report.calibration_page import summary_lines, write_calibration

    show_warnings()
    policy, config = parse_cache(settings.kv), _config(settings)
    if "budget" in specs.parse(settings.kv, "budget")[1]:
        raise ValueError(
            f"--kv {settings.kv!r} has a budget, but that is what is looked for; leave it out, or name the budgets to "
            "try with --budgets."
        )
    _check_source(settings, parser)
    sampling, engine = _sampling(settings), build_engine(settings)
    if settings.dry_run:
        _dry_run(settings, policy, config, sampling, engine, load_reader(settings.model))
        return
    if not settings.output:
        raise ValueError("--output is missing; name a folder for the runs, the schedule and the report.")
    quiet_bars()
    loaded = load(settings.model, dtype=model_dtype(settings.dtype), device=settings.device)
    prompts = _prompts(settings, loaded)
    loaded.fit(max(len(prompt.ids) for prompt in prompts) + sampling.max_tokens)
    calibration = Calibration(
        loaded=loaded, policy=policy, prompts=prompts, sampling=sampling, engine=engine, config=config
    )
    folder, named = Path(settings.output), {"model": settings.model, "model_digest": weights_digest(loaded.model)}
    with CalibrationLive() as live, specs.renamed("sampling", "--"), specs.renamed("kv", ""):
        results = calibrate(calibration, folder, named=named, resume=settings.resume, observer=live)
    write_calibration(results, folder)
    print("\n".join(summary_lines(results)))
    written = (folder / name for name in ("schedule.json", "report.html", "report.png", "results.json"))
    print(", ".join(str(path) for path in written if path.exists()))  # no picture without matplotlib
    print("\n".join(_to_train(settings, config, results)))


def _parser() -> ArgumentParser:
    from sparse_rl.calibrate import CalibrationConfig
    from sparse_rl.config import add_task_section

    parser = make_parser("calibrate", DESCRIPTION)
    add_config(parser)
    add_model(parser, default="embedded")
    parser.add_argument(
        "--kv",
        type=str,
        default="rkv",
        help="the policy: rkv, snapkv:interval=16, ...; its budget is what is looked for",
    )
    parser.add_argument("--prompts", type=str | None, default=None, help="file of prompts, or hub:NAME")
    parser.add_argument("--benchmarks", nargs="+", type=str, default=[], help="problems of benchmarks as prompts")
    parser.add_argument("--data-dir", type=str | None, default=None, help="folder with BENCHMARK/test.jsonl")
    parser.add_argument("--num-prompts", type=int, default=64, help="prompts at most")
    parser.add_argument("--n", type=int, default=8, help="samples a prompt")
    parser.add_argument("--max-tokens", type=int, default=4096, help="most tokens of a sample")
    parser.add_argument("--temperature", type=float, default=1.0, help="of sampler and dense model alike")
    parser.add_argument("--seed", type=int, default=0, help="of the samples")
    parser.add_argument("--output", type=str | None, default=None, help="folder for runs, schedule and report")
    parser.add_argument("--resume", action="store_true", help="go on with the calibration in the output folder")
    parser.add_argument("--dry-run", action="store_true", help="show what would run, and stop")
    add_fields(parser, CalibrationConfig)
    add_task_section(parser)
    add_engine(parser)
    return parser


def _config(settings: Namespace) -> CalibrationConfig:
    from sparse_rl.calibrate import CalibrationConfig
    from sparse_rl.config import build_section

    given = {field.name: settings[field.name] for field in fields(CalibrationConfig)}
    return build_section(CalibrationConfig, "calibrate", Namespace(**given))


def _to_train(settings: Namespace, config: CalibrationConfig, results: dict[str, Any]) -> list[str]:
    """The flags of `train`, with the veto that was counted; where the schedule holds less than training would warn of,
    also what it is to warn of.
    """
    from sparse_rl import specs
    from sparse_rl.calibrate.analysis import tail_row
    from sparse_rl.calibrate.config import SPARROW

    name, given = specs.parse(settings.kv, "budget")
    flags = [] if settings.model == "embedded" else [f"--model {shlex.quote(settings.model)}"]
    flags += [f"--kv.policy {name}", *(f"--kv.{key} {value}" for key, value in given.items())]
    flags.append(f"--kv.budget {shlex.quote(str(Path(settings.output) / 'schedule.json'))}")
    flags += [f"--sampling.max_tokens {settings.max_tokens}", "--correction.preset sparse_rl"]
    asked = min(*results["targets"], *tail_row(results["floor"], config))
    notes = ["  (sparse_rl rejects at xi < 1e-4, as counted above; strict, the default recipe's preset, rejects more)"]
    if asked < SPARROW and (config.overlap, config.tokens) == ("top20", "all") and config.tail != "mean":
        flags.append(f"--control.target {max(math.floor(1000 * asked), 1) / 1000:g}")
        flags += ["--control.quantile 0.01"] if config.tail == "p01" else []
        notes.append(
            f"  (training warns of tails far under control.target, and {SPARROW} is more than is asked for here)"
        )
    return [f"to train on it: sparse-rl train {' '.join(flags)} ...", *notes]


def _sampling(settings: Namespace) -> Sampling:
    from sparse_rl.rollout import Sampling
    from sparse_rl.specs import renamed

    if settings.temperature == 0:
        raise ValueError("--temperature is 0, but training samples; give the temperature of training, such as 1.")
    given = {name: settings[name] for name in ("n", "max_tokens", "temperature", "seed")}
    with renamed("sampling", "--"):
        return Sampling(**given)


def _check_source(settings: Namespace, parser: ArgumentParser) -> None:
    """Prompts have one source, and nothing is said of another."""
    from sparse_rl.config import given_of

    if settings.num_prompts < 1:
        raise ValueError(f"--num-prompts is {settings.num_prompts}; it must be at least 1.")
    if settings.prompts and settings.benchmarks:
        raise ValueError("prompts were given both with --prompts and with --benchmarks; use one.")
    if settings.data_dir and not settings.benchmarks:
        raise ValueError(f"--data-dir is {settings.data_dir!r}, but there are no --benchmarks; name some.")
    source = "--prompts" if settings.prompts else "--benchmarks" if settings.benchmarks else None
    default = given_of(parser.get_defaults()["task"])
    given = [key for key, value in given_of(settings["task"]).items() if value != default.get(key)]
    if source and given:
        raise ValueError(f"task.{given[0]} is given, but prompts are those of {source}; leave one of them out.")


def _prompts(settings: Namespace, model: LoadedModel | Reader) -> list[Prompt]:
    """At most `num_prompts` that fit the model's context."""
    from sparse_rl.tasks.prompts import short_enough

    if settings.prompts:
        found = _from_file(settings.prompts, settings.num_prompts, model)
    elif settings.benchmarks:
        found = _from_benchmarks(settings, model)
    else:
        from sparse_rl.config import build_task

        task = build_task(settings.task).build(model.tokenizer, context=model.context)
        found = {f"prompt {i}": prompt for i, prompt in enumerate(task.stream(0, settings.num_prompts, settings.seed))}
    remedy = "give a model with a longer context"
    return short_enough(found, lambda prompt: len(prompt.ids), model.context - 1, remedy)


def _from_file(source: str, most: int, model: LoadedModel | Reader) -> dict[str, Prompt]:
    from sparse_rl.tasks.files import read_table
    from sparse_rl.tasks.layouts import choose_layout
    from sparse_rl.tasks.prompts import as_turn, make_prompt

    table = read_table(source)
    layout = choose_layout("auto", None, None, table.rows[0])
    found = {}
    for row in table.rows[:most]:
        prompt, columns = layout.split(row)
        written = as_turn(prompt, model.tokenizer) if layout.templated and isinstance(prompt, str) else prompt
        found[row.where] = make_prompt({**columns, "prompt": written}, row.where, model.tokenizer)
    return found


def _from_benchmarks(settings: Namespace, model: LoadedModel | Reader) -> dict[str, Prompt]:
    """Problems as `eval` puts them, taken in turn from each benchmark."""
    from itertools import islice, zip_longest

    from sparse_rl.evaluate.protocols import PROTOCOLS
    from sparse_rl.tasks.benchmarks import read_problems
    from sparse_rl.tasks.prompts import Style, find_template, make_prompt

    found: list[list[tuple[str, Prompt]]] = []
    for name in settings.benchmarks:
        style = Style(template=find_template(PROTOCOLS["default"].settings(name).template, model.tokenizer))
        rows = read_problems(name, Path(settings.data_dir).expanduser() if settings.data_dir else None)[0]
        found.append([])
        for row in rows[: settings.num_prompts]:
            where = f"problem {row['id']!r} of {name}"
            written = {**row, "prompt": style.write(row["problem"], where)}
            found[-1].append((where, make_prompt(written, where, model.tokenizer)))
    in_turn = (each for turn in zip_longest(*found) for each in turn if each is not None)
    return dict(islice(in_turn, settings.num_prompts))


def _dry_run(
    settings: Namespace,
    policy: KVPolicy,
    config: CalibrationConfig,
    sampling: Sampling,
    engine: EngineConfig,
    reader: Reader,
) -> None:
    """Prompts, budgets and tokens at most; no weights are loaded."""
    from sparse_rl.calibrate import check_tokens, longest_context

    prompts = _prompts(settings, reader)
    check_tokens(prompts, sampling, config)
    longest = longest_context(prompts, sampling, reader.context)
    budgets = config.grid(policy, longest, engine.page_size or policy.page_size)
    room = sum(sampling.n * min(sampling.max_tokens, reader.context - len(prompt.ids)) for prompt in prompts)
    print(f"{settings.model} with {policy.name}: {len(prompts)} prompts x {sampling.n} samples a run")
    print(
        f"contexts of at most {longest:,} tokens, in bins of {config.bin:,}: {-(-longest // config.bin)} bins at most"
    )
    print(f"{len(budgets)} budgets at most: {', '.join(map(str, budgets))}")
    if not config.budgets and config.highest is None:
        print("  (they end at the longest context that the dense cache comes to, which the first run tells)")
    once = f" and at most {config.verify} runs of schedules" if config.verify else ""
    print(
        f"{1 + len(budgets)} runs{once}, each at most {room:,} tokens; engine.rows {engine.rows} on {settings.device}"
    )
    print(f"target: {config.statistic}, {config.asks}")
