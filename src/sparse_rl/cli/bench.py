# SPDX-License-Identifier: Apache-2.0
"""`sparse-rl bench rollout`: how fast rollouts are on this machine; `bench learner` has a file of its own.

Nothing is timed here, but in bench/rollout.py: these are the flags, the lines that are printed, and the file they are
kept in.
"""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sparse_rl.cli.parsing import add_fields, make_parser, model_dtype, parse, quiet_bars

if TYPE_CHECKING:
    from collections.abc import Callable

    from jsonargparse import ArgumentParser, Namespace

    from sparse_rl.bench import BenchConfig
    from sparse_rl.bench.learner import LearnerBenchConfig
    from sparse_rl.kv import KVPolicy
    from sparse_rl.rollout import EngineConfig

C = TypeVar("C", bound=Any)
ON_CPU = {"rows": 16, "output": 1024}  # of `bench rollout`, where nobody says: half a minute

USAGE = """usage: sparse-rl bench rollout|learner ...

  rollout   tokens a second of the sampler, against the roofline and other engines
  learner   tokens a second and MFU of an update, against TRL

`sparse-rl bench rollout --help` and `sparse-rl bench learner --help` list the settings.
"""

DESCRIPTION = """Measure rollouts: tokens a second, what a step is made of, its share of the roofline, KV memory.

Models have random weights, so nothing is downloaded. Compiling and capturing happen before the clock starts.

  sparse-rl bench rollout --shape tiny --rows 32 --output 256 --kv.policy rkv --kv.budget 64 --kv.interval 32
  sparse-rl bench rollout --shape qwen2.5-1.5b --kv.policy rkv --against generate,vllm --result speed.json
  sparse-rl bench rollout --shape qwen2.5-1.5b --prompt 12288 --n 8 --rows 128 --max-steps 256
  sparse-rl bench rollout --shape qwen3-1.7b --prompt 32000 --rows 24 --max-steps 128 --kv.policy pages_mean \\
      --kv.budget 4096 --against full
"""


def run(arguments: list[str]) -> None:
    if arguments[:1] == ["learner"]:
        from sparse_rl.cli import bench_learner

        bench_learner.run(arguments[1:])
        return
    if arguments[:1] != ["rollout"]:
        if arguments[:1] and arguments[0] in ("-h", "--help"):
            print(USAGE, end="")
            return
        given = repr(arguments[0]) if arguments else "nothing"
        raise ValueError(f"bench measures {given}, which it cannot; write `sparse-rl bench rollout` or `learner`.")
    settings = parse(_parser(), arguments[1:])
    from sparse_rl.bench import measure, measure_rivals
    from sparse_rl.config import build_kv, build_section
    from sparse_rl.kv import policy_record
    from sparse_rl.report.progress import ProgressLine
    from sparse_rl.rollout import EngineConfig

    policy = build_kv(settings.kv)
    config = _config(settings)
    engine = build_section(EngineConfig, "engine", settings.engine)
    dtype = model_dtype(config.dtype)
    assert dtype is not None
    check_result(settings)
    quiet_bars()
    with ProgressLine() as line:
        results = measure(config, policy, engine, dtype, say=line.say, show=line.show)
    parts = {"kv": policy_record(policy), "engine": asdict(engine) | {"rows": config.rows}}
    label = settings.label or default_label(config, policy, engine)
    record = as_record(label, ["bench", *arguments], config, parts, results)

    def rivals() -> dict[str, Any]:
        with ProgressLine() as line:
            return measure_rivals(config, engine, dtype, results["tokens_per_s"], say=line.say)

    show_and_keep(record, lines(record), settings.result, rivals if config.rivals else None)


def _parser() -> ArgumentParser:
    from sparse_rl.bench import BenchConfig
    from sparse_rl.config import add_kv_section, add_section
    from sparse_rl.rollout import EngineConfig

    parser = make_parser("bench rollout", DESCRIPTION)
    add_fields(parser, BenchConfig, on_cpu=ON_CPU)
    add_result(parser)
    add_kv_section(parser)
    add_section(parser, "engine", EngineConfig, leave_out=("rows",))
    return parser


def _config(settings: Namespace) -> BenchConfig:
    """The work that is asked for; on a CPU a small one, where nobody says."""
    from sparse_rl.bench import BenchConfig

    asked = {field.name: settings[field.name] for field in fields(BenchConfig) if settings[field.name] is not None}
    small = {} if _device_name(settings.device).startswith("cuda") else ON_CPU
    return decided(BenchConfig(**{**small, **asked}))


def add_result(parser: ArgumentParser) -> None:
    """Where a measurement's record goes."""
    parser.add_argument("--result", type=str | None, default=None, help="JSON file the measurement is put into")
    parser.add_argument(
        "--label", type=str | None, default=None, help="its name there; an earlier one of this name is replaced"
    )


def check_result(settings: Namespace) -> None:
    """What is wrong with the file is said before the work."""
    from sparse_rl.bench.record import check

    if settings.result is not None:
        check(Path(settings.result))


def as_record(
    label: str,
    arguments: list[str],
    config: BenchConfig | LearnerBenchConfig,
    parts: dict[str, Any],
    results: dict[str, Any],
) -> dict[str, Any]:
    """A measurement as its file holds it; nobody has been measured against it yet."""
    import torch

    from sparse_rl.runfolder import command, provenance

    return {
        "label": label,
        "command": command(arguments),
        **provenance(torch.device(str(config.device))),
        "settings": {**asdict(config), **parts},
        "results": {**results, "against": {}},
    }


def show_and_keep(
    record: dict[str, Any], shown: list[str], result: str | None, rivals: Callable[[], dict[str, Any]] | None
) -> None:
    """Print the measurement and put it into the file; then measure the rivals, if there are any, and do the same."""
    from sparse_rl.bench.record import merge

    print("\n".join(shown), flush=True)
    if result is not None:
        merge(Path(result), record)
    if rivals is not None:
        record["results"]["against"] = rivals()
        print("\n".join(rival_lines(record["results"]["against"])))
        if result is not None:
            merge(Path(result), record)


def decided(config: C) -> C:
    """With the device and the dtype that stand for none given."""
    device = _device_name(config.device)
    dtype = config.dtype or ("bfloat16" if device.startswith("cuda") else "float32")
    return replace(config, device=device, dtype=dtype)


def _device_name(given: str | None) -> str:
    import torch

    return given or ("cuda" if torch.cuda.is_available() else "cpu")


def default_label(config: BenchConfig, policy: KVPolicy, engine: EngineConfig) -> str:
    """What tells this measurement from the others of a file: the work, and every setting that is not the default."""
    parts = [config.shape, str(config.device), str(config.dtype), policy.name]
    if hasattr(policy, "budget"):
        parts.append(f"{policy.budget}+{policy.interval}" if hasattr(policy, "interval") else str(policy.budget))
    parts += [f"{config.rows} rows", f"{config.prompt}+{config.output}", config.work]
    parts += [f"n {config.n}"] if config.n > 1 else []
    parts += [f"adapter {config.adapter}"] if config.adapter else []
    parts += [f"{config.max_steps} steps"] if config.cut else []
    parts += [f"seed {config.seed}"] if config.seed else []
    return ", ".join([*parts, *not_default(policy, "budget", "interval"), *not_default(engine)])


def not_default(settings: Any, *told: str) -> list[str]:
    """The settings that are not the default, but for those that are told already."""
    found = []
    for field in fields(settings):
        value = getattr(settings, field.name)
        if field.name not in told and value is not None and value != field.default:
            found.append(f"{field.name} {value}")
    return found


def lines(record: dict[str, Any]) -> list[str]:
    """A measurement for people."""
    from sparse_rl.plan.show import gb

    results, kv, roofline = record["results"], record["results"]["kv"], record["results"]["roofline"]
    window, step_ms, shown = results["window"], results["step_ms"], []

    def show(name: str, text: str) -> None:
        shown.append(f"{name:9} {text}")

    show("", f"{record['label']}, {record['hardware']}")
    rate = f"{results['tokens_per_s']:,.0f} tok/s"
    if results["cut"]:
        show("speed", f"{rate}, cut: {window['steps']:,.0f} steps from step {window['first_step']:,} on")
    else:
        show("speed", f"{rate} end to end ({results['tokens']:,} tokens in {results['seconds']:.1f} s)")
    if step_ms is None:
        show("step", "no time: too few steps with all rows in flight")
    else:
        show("step", f"{step_ms:.2f} ms at full rows, {window['mean_entries']:,.0f} entries read a row")
        split = {name: ms for name, ms in results["split_ms"].items() if name != "total"}
        parts = [f"{name} {ms:.2f} ms ({100 * ms / step_ms:.1f} %)" for name, ms in split.items()]
        show("split", ", ".join(parts) or "needs a GPU and --profile")
    if roofline is not None:
        least = f"{roofline['step_ms']:.2f} ms a step, {roofline['tokens_per_s']:,.0f} tok/s"
        show("roofline", f"{100 * roofline['share']:.0f} % of it ({least})")
        show("", f"step = {roofline['formula']}")
        show("", f"with {roofline['numbers']}")
    elif step_ms is not None:
        show(
            "roofline",
            "needs a model without experts, and the device's known bandwidth and flops: give --bandwidth and --flops",
        )
    ratio = "" if kv["ratio"] is None else f" ({100 * kv['ratio']:.1f} %)"
    sizes = f"{gb(kv['peak_bytes'])} at the peak, dense {gb(kv['dense_bytes'])}{ratio}"
    shares = f"saved {100 * kv['saved_frac']:.0f} %, read {100 * kv['read_frac']:.0f} % over the steps run"
    show("KV", f"{sizes}, {shares}")
    if plain := results.get("without_adapter"):
        times = plain["tokens_per_s"] / results["tokens_per_s"]
        steps = f", {plain['step_ms']:.2f} ms a step" if plain["step_ms"] is not None else ""
        show("adapter", f"{times:.2f}x the time of the same without it ({plain['tokens_per_s']:,.0f} tok/s{steps})")
    if record["hardware"].startswith("NVIDIA") and not results["graphs"]:
        show("graphs", "none: steps ran one kernel at a time; a warning above says why, or --engine.graphs is off")
    if floor := results["xi_floor"]:
        ours = f"|log xi| mean {floor['mean']:.2g}, max {floor['max']:.2g}: rounding alone"
        show("xi floor", f"{ours}; the module's own {floor['module_mean']:.2g}, {floor['module_max']:.2g}")
    captured = f"{results['capture_s']:.1f} s of it compiling and capturing"
    late = f"{results['late_capture_s']:.1f} s more of that in the run itself"
    show("warm-up", f"{results['warmup_s']:.1f} s, {captured}; {late}")
    return shown


def rival_lines(rivals: dict[str, Any]) -> list[str]:
    return [
        f"{name:9} no figure: {other['error']}"
        if "error" in other
        else f"{name:9} {other['tokens_per_s']:,.0f} tok/s ({other['note']}): ours {other['ratio']:.2f}x"
        for name, other in rivals.items()
    ]
