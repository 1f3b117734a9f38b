# SPDX-License-Identifier: Apache-2.0
"""`sparse-rl calibrate cost`: what a schedule saves, predicted for a shape and a GPU, and measured on this machine.

The formulas are in calibrate/cost.py, the clock on a step in bench/steps.py.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparse_rl.cli.bench import check_result, decided
from sparse_rl.cli.parsing import make_parser, model_dtype, parse, quiet_bars, show_warnings

if TYPE_CHECKING:
    import torch
    from jsonargparse import ArgumentParser, Namespace

    from sparse_rl.calibrate.cost import Machine, Model, Reading
    from sparse_rl.kv import KVPolicy

logger = logging.getLogger(__name__)

DESCRIPTION = """Predict how much faster rollouts are with a schedule than with a dense cache; --measure checks it here.

eFLOPs are Sparrow's count of operations and of elements moved. The time of a step counts the weights, the entries read
(all of them in dense layers), the landmarks that are read, the logits, and a fixed cost for launching. It is taken at
equal rows: memory that an evicting policy frees can also go into more rows, which is not in it.

The schedule is --budget, read as Sparrow reads (pages of 16 chosen by the mean of their keys, layers 0 and 1 dense), or
that of a policy as --kv has it. --measure times decode steps of this machine at some contexts, dense and with --kv, on
random weights, and sets them against the prediction; the fixed cost is what a step at a short context takes beyond it.

  sparse-rl calibrate cost --shape qwen3-1.7b --gpu h200 --budget sparrow/qwen3-1.7b-0.86 --output 37000
  sparse-rl calibrate cost --shape qwen3-4b --gpu h100 --budget calibrations/mine/schedule.json --pages 16 32 64 128
  sparse-rl calibrate cost --shape qwen3-1.7b --kv rkv:1024 --rows 16 --measure --contexts 8192 16384 32768
"""
PREDICTS = ("gpu", "fixed_ms", "pages", "n", "prompt", "output")  # what only a prediction reads
MEASURES = ("device", "dtype")  # and only a measurement
ANCHOR = 128  # tokens of the context at which the fixed cost is measured


def run(arguments: list[str]) -> None:
    parser = _parser()
    settings = parse(parser, arguments)
    from sparse_rl.bench.record import merge
    from sparse_rl.calibrate.cost import Reading
    from sparse_rl.evaluate.plan import parse_cache
    from sparse_rl.kv.schedule import load
    from sparse_rl.specs import renamed

    _check(settings, parser)
    show_warnings()
    check_result(settings)
    policy = parse_cache(settings.kv) if settings.kv else None
    with renamed("kv", "--"):
        reading = (
            Reading(schedule=load(_budget(settings.budget)), page=settings.page)
            if policy is None
            else Reading.of(policy, settings.page)
        )
    if settings.measure:
        assert policy is not None
        results = _measure(settings, policy, reading)
        if settings.result is not None:
            merge(Path(settings.result), _record(results, _changed(settings, parser)))
    else:
        results = _predict(settings, shape_model(settings.shape, 2), reading, _machine(settings))
        _say_where_from(settings, policy)
    print(json.dumps(results, indent=1) if settings.json else "\n".join(lines(results)))


def _parser() -> ArgumentParser:
    parser = make_parser("calibrate cost", DESCRIPTION)
    parser.add_argument("--shape", type=str, default="qwen3-1.7b", help="a published model's shape")
    parser.add_argument("--gpu", type=str, default="h200", help="a GPU by name: h200, h100, a100-80, 4090, ...")
    parser.add_argument("--bandwidth", type=float | None, default=None, help="bytes a second, instead of the GPU's")
    parser.add_argument("--flops", type=float | None, default=None, help="operations a second, instead of the GPU's")
    parser.add_argument("--fixed-ms", type=float, default=0.0, help="fixed cost of a step, as --measure finds it")
    parser.add_argument("--budget", type=str, default="sparrow/qwen3-1.7b-0.86", help="a schedule, or a number")
    parser.add_argument("--kv", type=str | None, default=None, help="a policy with its budget instead: rkv:1024, ...")
    parser.add_argument("--page", type=int, default=16, help="entries a page that is chosen or not")
    parser.add_argument("--pages", nargs="+", type=int, default=[], help="page sizes to compare")
    parser.add_argument("--rows", type=int, default=16, help="sequences decoded together")
    parser.add_argument("--n", type=int, default=8, help="samples of a prompt, which share its entries in eFLOPs")
    parser.add_argument("--prompt", type=int, default=200, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=37000, help="tokens of an output")
    parser.add_argument(
        "--contexts", nargs="+", type=int, default=[8192, 16384, 32768], help="contexts a step is shown or measured at"
    )
    parser.add_argument("--measure", action="store_true", help="time steps on this machine; needs --kv")
    parser.add_argument("--device", type=str | None, default=None, help="to measure on; a GPU where there is one")
    parser.add_argument("--dtype", type=str | None, default=None, help="to measure in; bfloat16 on a GPU")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument("--result", type=str | None, default=None, help="JSON file that a measurement is put into")
    return parser


def _check(settings: Namespace, parser: ArgumentParser) -> None:
    from sparse_rl.kv.schedule import MOST

    if settings.measure and settings.kv is None:
        raise ValueError("--measure runs a policy, and --kv names none; give one, such as --kv rkv:1024.")
    names, why = (PREDICTS, "with --measure") if settings.measure else (MEASURES, "without --measure")
    unread = dict.fromkeys(names, why)
    if settings.kv is not None:
        unread["budget"] = "with --kv, whose policy has one"
    for name, why in unread.items():
        if settings[name] != parser.get_default(name):
            raise ValueError(
                f"--{name.replace('_', '-')} is {settings[name]!r}, but nothing reads it {why}; leave it out."
            )
    for name in ("rows", "n", "prompt", "output", "page"):
        if not 1 <= settings[name] <= MOST:
            raise ValueError(f"--{name} is {settings[name]}; it must be from 1 to {MOST}.")
    for name in ("pages", "contexts"):
        for each in settings[name]:
            if not 1 <= each <= MOST:
                raise ValueError(f"--{name} has {each} among them; they must be from 1 to {MOST}.")
    for name in ("bandwidth", "flops"):
        if settings[name] is not None and not 0 < settings[name] < math.inf:
            raise ValueError(f"--{name} is {settings[name]}; it must be above 0 and finite.")
    if not 0 <= settings.fixed_ms < math.inf:
        raise ValueError(f"--fixed-ms is {settings.fixed_ms}; it must be at least 0 and finite.")
    if settings.measure and settings.page % 16:
        raise ValueError(f"--page is {settings.page}; to be measured it must be a multiple of 16.")
    if settings.result is not None and not settings.measure:
        raise ValueError(
            "--result keeps what --measure finds, and nothing is measured; give --measure, or leave it out."
        )


def _say_where_from(settings: Namespace, policy: KVPolicy | None) -> None:
    """What a schedule of another model, or of shorter contexts, does not say."""
    from sparse_rl.kv.schedule import beyond, origin
    from sparse_rl.model.shapes import SHAPES

    budget = settings.budget if policy is None else getattr(policy, "budget", None)
    found = origin(budget)
    name = (found.model or "").rpartition("/")[2].lower().removesuffix("-instruct")
    if (name in SHAPES or name in ("embedded", "tiny")) and name != settings.shape.lower():  # else nobody knows
        by = found.kv.get("policy", "a policy")
        logger.warning(
            "%s was calibrated on %s with %s; the shape here is %s.", budget, found.model, by, settings.shape
        )
    if said := beyond(budget, settings.prompt + settings.output):
        logger.warning("%s.", said)


def _budget(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def shape_model(name: str, itemsize: int) -> Model:
    """What of a published shape costs time; nothing is allocated."""
    import torch
    from transformers import AutoModelForCausalLM

    from sparse_rl.calibrate.cost import Model
    from sparse_rl.model.shapes import shape_config

    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(shape_config(name))
    model = Model.of(module, name, itemsize)
    if model.mixture:
        raise ValueError(f"--shape is {name}, a mixture of experts; the cost model knows dense models alone.")
    return model


def _machine(settings: Namespace) -> Machine:
    from sparse_rl.calibrate.cost import Machine, gpu

    both = settings.bandwidth is not None and settings.flops is not None
    known = Machine(name="a device", bandwidth=1.0, flops=1.0) if both else gpu(settings.gpu)
    return replace(
        known,
        bandwidth=settings.bandwidth or known.bandwidth,
        flops=settings.flops or known.flops,
        fixed_s=settings.fixed_ms / 1e3,
    )


def _predict(settings: Namespace, model: Model, reading: Reading, machine: Machine) -> dict[str, Any]:
    import numpy as np

    from sparse_rl.calibrate.cost import by_page, dense_eflops, sparse_eflops, speed_up, step_s

    counted = {"n": settings.n, "prompt": settings.prompt, "output": settings.output}
    timed = {"rows": settings.rows, "prompt": settings.prompt, "output": settings.output}
    dense = dense_eflops(model, **counted)
    alone = replace(reading, dense_layers=0)
    contexts = np.array(settings.contexts)
    pairs = zip(
        step_s(model, machine, contexts, rows=settings.rows),
        step_s(model, machine, contexts, rows=settings.rows, reading=reading),
        strict=True,
    )
    return {
        "shape": model.name,
        "machine": asdict(machine),
        "reading": asdict(reading),
        "work": {**timed, "n": settings.n},
        "eflops": {
            "printed": dense / sparse_eflops(model, alone, **counted, printed=True),
            "corrected": dense / sparse_eflops(model, alone, **counted),
            "with dense layers": dense / sparse_eflops(model, reading, **counted),
        },
        "steps": [
            {"context": context, "dense_ms": 1e3 * a, "sparse_ms": 1e3 * b, "ratio": a / b}
            for context, (a, b) in zip(settings.contexts, pairs, strict=True)
        ],
        "speed_up": speed_up(model, machine, reading, **timed),
        "pages": by_page(model, machine, reading, settings.pages, **timed),
    }


def _measure(settings: Namespace, policy: KVPolicy, reading: Reading) -> dict[str, Any]:
    """Steps of this machine beside what the model says of them."""
    import torch

    from sparse_rl.bench import BenchConfig
    from sparse_rl.bench.steps import device_speed, time_step
    from sparse_rl.kv import Full
    from sparse_rl.model.load import check_device
    from sparse_rl.model.shapes import random_model
    from sparse_rl.report.progress import ProgressLine
    from sparse_rl.rollout import EngineConfig
    from sparse_rl.runfolder import command, provenance

    quiet_bars()
    config = decided(
        BenchConfig(shape=settings.shape, device=settings.device, dtype=settings.dtype, rows=settings.rows)
    )
    check_device(str(config.device))
    dtype, device = model_dtype(config.dtype), torch.device(str(config.device))
    assert dtype is not None
    reached = device_speed(device, dtype)
    model, machine = shape_model(settings.shape, dtype.itemsize), _this_machine(settings, device, dtype, reached)
    engine = EngineConfig(page_size=settings.page) if policy.selection is not None else EngineConfig()
    loaded = random_model(settings.shape, device, dtype, config.seed)
    with ProgressLine() as line:

        def both(kv: KVPolicy, context: int, machine: Machine) -> tuple[float, float]:
            """Seconds of a step, as measured and as predicted."""
            line.say(f"{kv.name} at {context:,} tokens")
            seconds, mean = time_step(loaded, config, kv, engine, context, show=line.show)
            how = None if isinstance(kv, Full) else reading
            return seconds, _step_s(model, machine, round(mean), config.rows, how)

        measured, predicted = both(Full(), min([ANCHOR, *settings.contexts]), machine)
        machine = replace(machine, fixed_s=max(0.0, measured - predicted))
        steps = [
            _compared(context, both(Full(), context, machine), both(policy, context, machine))
            for context in settings.contexts
        ]
    return {
        "command": command(),
        **provenance(device),
        "shape": model.name,
        "kv": settings.kv,
        "machine": asdict(machine),
        "reached": dict(zip(("bandwidth", "flops"), reached, strict=True)),
        "reading": asdict(reading),
        "work": {"rows": config.rows, "dtype": config.dtype, "device": config.device},
        "steps": steps,
    }


def _this_machine(
    settings: Namespace, device: torch.device, dtype: torch.dtype, reached: tuple[float, float]
) -> Machine:
    """What it can do: as given, else as known of it, else as measured now."""
    from sparse_rl.bench.roofline import device_limits
    from sparse_rl.calibrate.cost import Machine
    from sparse_rl.runfolder import hardware

    bandwidth, flops = device_limits(hardware(device), dtype)
    if bandwidth is None or flops is None:
        bandwidth, flops = reached
    return Machine(name=hardware(device), bandwidth=settings.bandwidth or bandwidth, flops=settings.flops or flops)


def _step_s(model: Model, machine: Machine, context: int, rows: int, reading: Reading | None) -> float:
    import numpy as np

    from sparse_rl.calibrate.cost import step_s

    return float(step_s(model, machine, np.array([context]), rows=rows, reading=reading)[0])


def _compared(context: int, dense: tuple[float, float], sparse: tuple[float, float]) -> dict[str, float]:
    """A context's steps, each as seconds measured and predicted."""
    ratio, expected = (dense[i] / sparse[i] for i in range(2))
    return {
        "context": context,
        "dense_ms": 1e3 * dense[0],
        "sparse_ms": 1e3 * sparse[0],
        "ratio": ratio,
        "predicted_dense_ms": 1e3 * dense[1],
        "predicted_sparse_ms": 1e3 * sparse[1],
        "predicted_ratio": expected,
        "error": expected / ratio - 1.0,
    }


def _changed(settings: Namespace, parser: ArgumentParser) -> list[str]:
    """The settings of a measurement that are not the default, but for those of its name."""
    given = {name: settings[name] for name in ("contexts", "page", "bandwidth", "flops")}
    return [f"{name} {value}" for name, value in given.items() if value != parser.get_default(name)]


def _record(results: dict[str, Any], changed: list[str]) -> dict[str, Any]:
    """As the other benchmarks keep theirs."""
    work, steps = results["work"], results["steps"]
    named = [results["shape"], work["device"], work["dtype"], results["kv"], f"{work['rows']} rows"]
    label = ", ".join([*named, *changed])
    kept = {name: results[name] for name in ("command", "commit", "hardware", "versions")}
    settings = {"shape": results["shape"], "kv": results["kv"], **work, "contexts": [s["context"] for s in steps]}
    found = {name: results[name] for name in ("machine", "reached", "steps")}
    found |= {"worst_error": max(abs(s["error"]) for s in steps)}
    return {"label": label, **kept, "settings": settings, "results": found}


def lines(results: dict[str, Any]) -> list[str]:
    """Either kind of results for people."""
    machine, work = results["machine"], results["work"]
    found = [
        f"{results['shape']} on {machine['name']}, {work['rows']} rows: {machine['bandwidth'] / 1e12:.3g} TB/s, "
        f"{machine['flops'] / 1e12:.3g} TFLOP/s, fixed cost {1e3 * machine['fixed_s']:.2f} ms a step"
    ]
    for step in results["steps"]:
        line = f"  step at {step['context']:>7,}: dense {step['dense_ms']:.2f} ms, sparse {step['sparse_ms']:.2f} ms"
        line += f", {step['ratio']:.2f} x"
        if "predicted_ratio" in step:
            line += (
                f"; predicted {step['predicted_dense_ms']:.2f} and {step['predicted_sparse_ms']:.2f} ms, "
                f"{step['predicted_ratio']:.2f} x ({100 * step['error']:+.0f} %)"
            )
        found.append(line)
    if "speed_up" in results:
        found.append(f"whole outputs, {work['prompt']:,} + {work['output']:,} tokens: {results['speed_up']:.2f} x")
        eflops = ", ".join(f"{ratio:.2f} x {name}" for name, ratio in results["eflops"].items())
        found.append(f"eFLOPs, {work['n']} samples a prompt: {eflops}")
        for page, ratio in results["pages"].items():
            found.append(f"  pages of {page:>4}: {ratio:.2f} x")
    return found
