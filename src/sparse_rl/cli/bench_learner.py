# SPDX-License-Identifier: Apache-2.0
"""`sparse-rl bench learner`: how fast updates are on this machine."""

from __future__ import annotations

from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_rl.cli.bench import add_flags, decided, in_bytes, rival_lines
from sparse_rl.cli.parsing import make_parser, model_dtype, parse, quiet_bars

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

DESCRIPTION = """Measure updates: real tokens a second, the share of the device's matrix units (MFU), peak memory.

Models have random weights, so nothing is downloaded. Compiling happens before the clock starts.

  sparse-rl bench learner --shape tiny --sequences 16 --output 256 --median 64
  sparse-rl bench learner --shape qwen2.5-1.5b --update.max_tokens 16384 --against trl --result speed.json
  sparse-rl bench learner --shape qwen2.5-1.5b --spread equal --output 16384 --sequences 8 --update.activations offload
"""


def run(arguments: list[str]) -> None:
    settings = parse(_parser(), arguments)
    from sparse_rl.bench.learner import LearnerBenchConfig, measure_learner, measure_learner_rivals
    from sparse_rl.bench.record import check, merge
    from sparse_rl.config import build_section
    from sparse_rl.report.progress import ProgressLine
    from sparse_rl.runfolder import command, provenance
    from sparse_rl.train import OptimizerConfig, UpdateConfig

    config = decided(LearnerBenchConfig(**{f.name: settings[f.name] for f in fields(LearnerBenchConfig)}))
    update = build_section(UpdateConfig, "update", settings["update"])
    optimizer = build_section(OptimizerConfig, "optimizer", settings["optimizer"])
    dtype = model_dtype(config.dtype)
    assert dtype is not None
    if settings.result is not None:
        check(Path(settings.result))  # what is wrong with it is said before the work
    quiet_bars()
    with ProgressLine() as line:

        def say(text: str) -> None:
            line.print(f"sparse-rl: {text}")

        results = measure_learner(config, update, optimizer, dtype, say=say)
    import torch

    record: dict[str, Any] = {
        "label": settings.label or default_label(config, update, optimizer),
        "command": command(["bench", "learner", *arguments]),
        **provenance(torch.device(config.device or "cpu")),
        "settings": {**asdict(config), "update": asdict(update), "optimizer": asdict(optimizer)},
        "results": {**results, "against": {}},
    }
    print("\n".join(lines(record)), flush=True)
    if settings.result is not None:
        merge(Path(settings.result), record)
    if config.rivals:
        rivals = measure_learner_rivals(config, update, dtype, results["tokens_per_s"], say)
        record["results"]["against"] = rivals
        print("\n".join(rival_lines(rivals)))
        if settings.result is not None:
            merge(Path(settings.result), record)


def _parser() -> ArgumentParser:
    from sparse_rl.bench.learner import LearnerBenchConfig
    from sparse_rl.config import add_section
    from sparse_rl.train import OptimizerConfig, UpdateConfig

    parser = make_parser("bench learner", DESCRIPTION)
    add_flags(parser, LearnerBenchConfig)
    add_section(parser, "update", UpdateConfig)
    add_section(parser, "optimizer", OptimizerConfig)
    return parser


def default_label(config: Any, update: Any, optimizer: Any) -> str:
    """What tells this measurement from the others of a file."""
    lengths = f"{config.prompt}+{config.output}"
    if config.spread == "lognormal":
        lengths += f" lognormal {config.median} {config.sigma:g}"
    parts = [config.shape, config.device, config.dtype, f"{config.sequences} x {lengths}"]
    parts += [f"{update.max_tokens} tokens a forward", update.activations]
    parts += [optimizer.kind] if optimizer.kind != "adamw" else []
    return ", ".join([*parts, *(["offload"] if optimizer.offload else [])])


def lines(record: dict[str, Any]) -> list[str]:
    """A measurement for people."""
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
        shown.append(("memory", f"{in_bytes(results['peak_bytes'])} at the peak"))
    shown.append(("warm-up", f"{results['warmup_s']:.1f} s"))
    return [f"{name:9} {text}" for name, text in shown]
