# SPDX-License-Identifier: Apache-2.0
"""`sparse-rl eval`: models x benchmarks x caches, and a table.

Generated and graded in evaluate/benchmarks.py; the table is made in report/eval_table.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_rl.cli.parsing import add_engine, build_engine, make_parser, parse, quiet_bars, show_warnings
from sparse_rl.cli.recipes import add_config, given_configs, with_configs
from sparse_rl.cli.resume import named

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

    from sparse_rl.evaluate import Evaluation

DESCRIPTION = """Evaluate models on benchmarks, with a dense and with compressed KV caches, in one call.

Every model is run on every benchmark with every cache: accuracy with its standard error, the difference to the dense
cache (paired by problem), KV saved, tokens per answer, tok/s. Answers are graded while others are generated; one whose
grader fails is counted and left out. OUTPUT gets every sample (samples/**/samples.jsonl), results.json, table.md and
report.html. An evaluation that was killed, at any point, goes on with the same command and --resume, to the same table,
on another device too; a kill loses at most one block, the last 4 x engine.rows samples. What Ctrl-C or an error ends
has a table of what is done, marked as partial.

A cache is `full`, POLICY:BUDGET, or POLICY:key=value,... with any setting of the policy. A protocol says how each
benchmark is run (prompt, samples, temperature, length, metrics); flags that depart from it are noted in the table.

  sparse-rl eval --models smollm2 --benchmarks gsm8k svamp --kv full rkv:128 --output evals/first
  sparse-rl eval --models smollm2 runs/warm/checkpoint-512 --benchmarks gsm8k lookup:pairs=15 lookup:pairs=60 \\
      --kv full rkv:128 snapkv:budget=64,interval=16 streaming:64 --device cuda --dtype bfloat16 --output evals/caches
  sparse-rl eval --models Qwen/Qwen2.5-1.5B --benchmarks math500 aime24 --protocol sparse-rl --data-dir data --dry-run
  sparse-rl eval ... --output evals/caches --resume
"""

FLAGS = {  # fields of an evaluation that are flags of the same name
    "data_dir": str,
    "problems": int,
    "n": int,
    "max_tokens": int,
    "temperature": float,
    "top_p": float,
    "seed": int,
    "template": str,
    "system": str,
    "dtype": str,
}


def run(arguments: list[str]) -> None:
    parser, (configs, others) = _parser(), given_configs(arguments, "eval")
    settings = parse(parser, with_configs(configs, others))
    if settings.resume and settings.output:
        settings = parse(parser, with_configs([_own(Path(settings.output), configs, others), *configs], others))
    evaluation = _evaluation(settings)
    if settings.dry_run:
        _dry_run(evaluation)
        return
    if not settings.output:
        raise ValueError("--output is missing; name a folder for the samples and the table.")
    from sparse_rl.evaluate import evaluate_benchmarks
    from sparse_rl.report.eval_live import EvalLive
    from sparse_rl.report.eval_page import write_eval_report
    from sparse_rl.report.eval_table import print_tables
    from sparse_rl.specs import renamed

    show_warnings()
    quiet_bars()
    folder = Path(settings.output)
    with renamed("sampling", "--"), renamed("kv", ""):
        results = evaluate_benchmarks(evaluation, folder, resume=settings.resume, observer=EvalLive(folder))
    write_eval_report(results, folder)
    print_tables(results)
    print(f"{folder / 'results.json'}, {folder / 'table.md'}, {folder / 'report.html'}")


def _own(folder: Path, configs: list[dict[str, Any]], flags: list[str]) -> dict[str, Any]:
    """The engine's settings of the evaluation that is resumed, as a config file has them."""
    from sparse_rl.evaluate.record import recorded_engine

    engine, pool = recorded_engine(folder), ("pool_pages", "pool_bytes")
    if any(named("engine", key, flags, configs) is not None for key in pool):
        engine = {key: value for key, value in engine.items() if key not in pool}
    return {"engine": engine}


def _parser() -> ArgumentParser:
    from sparse_rl.config import add_section, field_texts
    from sparse_rl.evaluate import Evaluation
    from sparse_rl.evaluate.protocols import PROTOCOLS
    from sparse_rl.tasks.rewards import GradingConfig

    texts = field_texts(Evaluation)
    parser = make_parser("eval", DESCRIPTION)
    add_config(parser)
    for name, alias in (("models", "model"), ("benchmarks", "benchmark")):
        parser.add_argument(f"--{name}", f"--{alias}", nargs="+", type=str, default=[], help=texts[name])
    parser.add_argument("--kv", nargs="+", type=str, default=["full"], help=texts["kv"])
    choices = f"{texts['protocol']}; one of {', '.join(PROTOCOLS)}"
    parser.add_argument("--protocol", type=str, default="default", help=choices)
    for name, kind in FLAGS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind | None, default=None, help=texts[name])
    parser.add_argument("--chat-template-kwargs", type=dict | None, default=None, help=texts["chat_template_kwargs"])
    parser.add_argument("--device", type=str, default="cpu", help=texts["device"])
    parser.add_argument("--output", type=str | None, default=None, help="folder for samples, results.json and tables")
    parser.add_argument("--resume", action="store_true", help="go on with the evaluation in the output folder")
    parser.add_argument("--dry-run", action="store_true", help="show what would run, and stop")
    parser.add_argument(
        "--unsafe-code", action="store_true", help="as --grading.unsafe_code true: run programs without isolation"
    )
    add_engine(parser)
    add_section(parser, "grading", GradingConfig)
    return parser


def _evaluation(settings: Namespace) -> Evaluation:
    from sparse_rl.config import build_section
    from sparse_rl.evaluate import Evaluation
    from sparse_rl.tasks.rewards import GradingConfig

    grading = build_section(GradingConfig, "grading", settings.grading)
    if settings.unsafe_code:
        grading = replace(grading, unsafe_code=True)
    return Evaluation(
        models=tuple(settings.models),
        benchmarks=tuple(settings.benchmarks),
        kv=tuple(settings.kv),
        chat_template_kwargs=settings.chat_template_kwargs or {},
        engine=build_engine(settings),
        grading=grading,
        **{name: settings[name] for name in ("protocol", "device", *FLAGS)},
    )


def _dry_run(evaluation: Evaluation) -> None:
    """Cells, prompts and tokens at most; problems are read, graders made, no model is loaded."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from sparse_rl.evaluate.suite import build_suites

    suites = build_suites(evaluation)
    table = Table(title=f"protocol {evaluation.protocol}", title_justify="left")
    heads = ("benchmark", "problems", "n", "temperature", "top-p", "max tokens", "template", "metrics", "reward")
    for head in heads:
        table.add_column(head, overflow="fold")
    samples = tokens = 0
    for name, suite in suites.items():
        own = suite.settings
        count = len(suite.rows) * own.n
        samples, tokens = samples + count, tokens + count * own.max_tokens
        numbers = (len(suite.rows), own.n, own.temperature, own.top_p, own.max_tokens)
        table.add_row(
            name,
            *(str(number) for number in numbers),
            escape(own.template),
            ", ".join(own.metrics),
            escape(suite.rewards.names[0]),
        )
    console, runs = Console(), len(evaluation.models) * len(evaluation.kv)
    console.print(table)
    for name, suite in suites.items():
        changed = ", ".join(suite.departures)
        if changed:
            console.print(f"{name} departs from the protocol: {changed}", highlight=False, markup=False)
    console.print(
        f"{len(evaluation.cells)} cells: {len(evaluation.models)} models x {len(suites)} benchmarks x "
        f"{len(evaluation.kv)} caches ({', '.join(evaluation.kv)})\n"
        f"{runs * samples:,} samples, at most {runs * tokens:,} tokens; engine.rows {evaluation.engine.rows} on "
        f"{evaluation.device}",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )
