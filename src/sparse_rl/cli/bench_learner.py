# SPDX-License-Identifier: Apache-2.0
"""`sparse-rl bench learner`: how fast updates are on this machine.

Updates are timed in bench/learner.py; what is kept of them, and how, is in `bench.py`.
"""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from sparse_rl.cli.bench import add_result, as_record, check_result, decided, not_default, show_and_keep
from sparse_rl.cli.parsing import add_fields, make_parser, model_dtype, parse, quiet_bars

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

    from sparse_rl.bench.learner import LearnerBenchConfig
    from sparse_rl.train import OptimizerConfig, UpdateConfig

DESCRIPTION = """Measure updates: real tokens a second, the share of the device's matrix units (MFU), peak memory.

Models have random weights, so nothing is downloaded. Compiling happens before the clock starts.

  sparse-rl bench learner --shape tiny --sequences 16 --output 256 --median 64
  sparse-rl bench learner --shape qwen2.5-1.5b --update.max_tokens 16384 --against trl --result speed.json
  sparse-rl bench learner --shape qwen2.5-1.5b --spread equal --output 16384 --sequences 8 --update.activations offload
"""


def run(arguments: list[str]) -> None:
    settings = parse(_parser(), arguments)
    from sparse_rl.bench.learner import LearnerBenchConfig, measure_learner, measure_learner_rivals
    from sparse_rl.config import build_section
    from sparse_rl.report.progress import ProgressLine
    from sparse_rl.train import OptimizerConfig, UpdateConfig

    config = decided(LearnerBenchConfig(**{f.name: settings[f.name] for f in fields(LearnerBenchConfig)}))
    update = build_section(UpdateConfig, "update", settings["update"])
    optimizer = build_section(OptimizerConfig, "optimizer", settings["optimizer"])
    dtype = model_dtype(config.dtype)
    assert dtype is not None
    check_result(settings)
    quiet_bars()
    with ProgressLine() as line:
        results = measure_learner(config, update, optimizer, dtype, say=line.say)
    parts = {"update": asdict(update), "optimizer": asdict(optimizer)}
    label = settings.label or default_label(config, update, optimizer)
    record = as_record(label, ["bench", "learner", *arguments], config, parts, results)

    def rivals() -> dict[str, Any]:
        with ProgressLine() as line:
            return measure_learner_rivals(config, update, dtype, results["tokens_per_s"], line.say)

    show_and_keep(record, lines(record), settings.result, rivals if config.rivals else None)


def _parser() -> ArgumentParser:
    from sparse_rl.bench.learner import LearnerBenchConfig
    from sparse_rl.config import add_section
    from sparse_rl.train import OptimizerConfig, UpdateConfig

    parser = make_parser("bench learner", DESCRIPTION)
    add_fields(parser, LearnerBenchConfig)
    add_result(parser)
    add_section(parser, "update", UpdateConfig)
    add_section(parser, "optimizer", OptimizerConfig)
    return parser


def default_label(config: LearnerBenchConfig, update: UpdateConfig, optimizer: OptimizerConfig) -> str:
    """What tells this measurement from the others of a file: the work, and every setting that is not the default."""
    lengths = f"{config.prompt}+{config.output}"
    if config.spread == "lognormal":
        lengths += f" lognormal {config.median} {config.sigma:g}"
    parts = [config.shape, str(config.device), str(config.dtype), f"{config.sequences} x {lengths}"]
    parts += [f"{update.max_tokens} tokens a forward", update.activations]
    parts += [optimizer.kind] if optimizer.kind != "adamw" else []
    parts += ["offload"] if optimizer.offload else []
    parts += [f"seed {config.seed}"] if config.seed else []
    parts += not_default(update, "max_tokens", "activations")
    return ", ".join([*parts, *not_default(optimizer, "kind", "offload")])


def lines(record: dict[str, Any]) -> list[str]:
    """A measurement for people."""
    from sparse_rl.plan.show import gb

    results = record["results"]
    shown = [
        ("", f"{record['label']}, {record['hardware']}"),
        ("speed", f"{results['tokens_per_s']:,.0f} tok/s ({results['tokens']:,} tokens in {results['seconds']:.2f} s)"),
        ("lengths", f"mean {results['mean_length']:,.0f}, weighted by tokens {results['weighted_length']:,.0f}"),
    ]
    if results["mfu"] is None:
        shown.append(("MFU", "needs the device's known flops: give --flops"))
    else:
        shown.append(("MFU", f"{100 * results['mfu']:.1f} % of {results['flops']:.3g} a second"))
    shown.append(("", f"MFU = {results['formula']}"))
    if results["peak_bytes"] is not None:
        shown.append(("memory", f"{gb(results['peak_bytes'])} at the peak"))
    shown.append(("warm-up", f"{results['warmup_s']:.1f} s"))
    return [f"{name:9} {text}" for name, text in shown]
