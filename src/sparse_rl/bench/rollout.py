# SPDX-License-Identifier: Apache-2.0
"""Rollout speed: tokens a second, end to end, and what a step at full rows and full caches is made of.

Everything that is compiled or captured once is run before the clock starts and reported by itself.

What is run is in work.py, the clock in meter.py, what others need for it in against.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from sparse_rl.bench.against import Timed, measure_each, time_generate, time_vllm
from sparse_rl.bench.floor import FLOOR_ROLLOUTS, FLOOR_TOKENS, rollouts_for, xi_floor
from sparse_rl.bench.meter import Meter, run, run_until, synchronize
from sparse_rl.bench.profile import Profiler
from sparse_rl.bench.roofline import FORMULA, Roofline, device_limits
from sparse_rl.bench.work import (
    BenchConfig,
    check_positions,
    dense_peak_entries,
    full_window,
    make_prompts,
    output_lengths,
    profile_window,
    steps_to_fill,
)
from sparse_rl.calibrate.cost import Machine, Model
from sparse_rl.kv import EvictPolicy, Full, KVPolicy
from sparse_rl.model.load import LoadedModel
from sparse_rl.model.sampler_adapter import SamplerAdapter
from sparse_rl.model.shapes import random_model, shape_config
from sparse_rl.rollout import Engine, EngineConfig, Progress, Sampling
from sparse_rl.runfolder import hardware
from sparse_rl.types import Prompt, Rollout

WARM_TOKENS = 8  # beyond the first compression


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """One work on one loaded model."""

    config: BenchConfig
    policy: KVPolicy
    loaded: LoadedModel
    engine: Engine
    prompts: list[Prompt]
    say: Callable[[str], None]
    show: Callable[[Progress], None]

    @property
    def device(self) -> torch.device:
        return self.loaded.shape.device

    @property
    def sampling(self) -> Sampling:
        return Sampling(n=self.config.n, max_tokens=self.config.output, stop_ids=(), seed=self.config.seed)

    @property
    def capture_s(self) -> float:
        """Spent so far on compiling and capturing decode steps."""
        return sum(decoder.capture_s for decoder in self.engine.decoders.values())

    @property
    def model(self) -> Model:
        """What of it costs time, an adapter included."""
        return Model.of(self.loaded.model, self.config.shape, self.loaded.shape.dtype.itemsize)


def measure(
    config: BenchConfig,
    policy: KVPolicy,
    engine_config: EngineConfig,
    dtype: torch.dtype,
    *,
    say: Callable[[str], None],
    show: Callable[[Progress], None],
    loaded: LoadedModel | None = None,
) -> dict[str, Any]:
    """Results by name; `say` gets a word on what comes next, `show` the engine's progress.

    loaded: the model, where one of this shape is at hand; else one is made.
    """
    assert config.device is not None, "the device is decided by the caller"
    check_positions(config)
    if loaded is None:
        say(f"{config.shape} with random weights on {config.device}")
        loaded = random_model(config.shape, config.device, dtype, config.seed)
    prompts = make_prompts(config, loaded.vocab_size)
    engine = Engine(loaded, policy, replace(engine_config, rows=config.rows))
    bench = Bench(config=config, policy=policy, loaded=loaded, engine=engine, prompts=prompts, say=say, show=show)
    if not config.adapter:
        return _engine_results(bench)
    with SamplerAdapter(loaded.model, config.adapter, config.adapter, config.seed).on(loaded.model):
        results = _engine_results(bench)
    say("the same work without the adapter")
    plain = _engine_results(replace(bench, config=replace(config, adapter=0, profile=False)))
    results["without_adapter"] = {key: plain[key] for key in ("tokens_per_s", "tokens", "seconds", "step_ms")}
    return results


def _engine_results(bench: Bench) -> dict[str, Any]:
    config, prompts = bench.config, bench.prompts
    window = full_window(config, bench.policy, prompts)
    bench.say("warm-up")
    warmup_s, floor = warm_up(bench)
    capture_s = bench.capture_s
    bench.say("measuring")
    meter = Meter(window, config.rows, bench.device, cut=config.cut, exact=config.cut, show=bench.show)
    rollouts, seconds = run(bench.engine, prompts, bench.sampling, meter)
    if config.cut:
        assert meter.closed, f"the run ended before its window of {window}"
        tokens, seconds = meter.steps * config.rows, meter.seconds
    else:
        tokens = sum(len(rollout.token_ids) for rollout in rollouts)
        assert tokens == sum(output_lengths(prompts)) * config.n, "the engine returned other lengths than asked for"
    step_ms = 1e3 * meter.seconds / meter.steps if meter.closed else None
    results: dict[str, Any] = {
        "tokens_per_s": tokens / seconds,
        "tokens": tokens,
        "seconds": seconds,
        "cut": config.cut,
        "step_ms": step_ms,
        "window": {"first_step": window.start, "steps": meter.steps, "mean_entries": meter.entries}
        if meter.closed
        else None,
        "warmup_s": warmup_s,
        "capture_s": capture_s,
        "late_capture_s": bench.capture_s - capture_s,  # in the measured run
        "graphs": all(decoder.uses_graphs for decoder in bench.engine.decoders.values()),
        "compiled": all(decoder.uses_graphs and decoder.compiles for decoder in bench.engine.decoders.values()),
        "xi_floor": floor,
        "kv": _kv(bench, meter),
    }
    results["roofline"] = _roofline(bench, meter)
    results["split_ms"] = _split(bench, step_ms) if step_ms is not None else None
    return results


def warm_up(bench: Bench) -> tuple[float, dict[str, float] | None]:
    """Run once whatever compiles or captures: prefill, full rows, a compression, ever fewer rows; and xi's floor.

    A run that is cut has all its rows to the end, and needs no steps for fewer. The pool is that of the measured run,
    since the last prompt keeps its length and is left unfinished.
    """
    config = bench.config
    synchronize(bench.device)
    began = time.perf_counter()
    num_prompts = max(2, -(-config.rows // config.n))
    fill = steps_to_fill(bench.policy, config.prompt) or FLOOR_TOKENS
    steps = fill + WARM_TOKENS + num_prompts.bit_length()
    earlier = [0 if config.cut else i.bit_length() for i in range(num_prompts)]
    short = [
        replace(prompt, max_tokens=max(1, min(steps - earlier[i], config.output)) if i else config.output)
        for i, prompt in enumerate((bench.prompts * 2)[:num_prompts])
    ]
    finished = run_until(bench.engine, short[::-1], bench.sampling, unfinished=config.n)[:FLOOR_ROLLOUTS]
    for decoder in bench.engine.decoders.values() if not config.cut else ():
        decoder.capture()
    synchronize(bench.device)
    seconds = time.perf_counter() - began
    policy = bench.policy
    cut_at_once = isinstance(policy, EvictPolicy) and config.prompt > policy.target(config.prompt, config.prompt)
    if cut_at_once or policy.selection is not None:
        finished, fill = _dense_rollouts(bench), FLOOR_TOKENS  # nothing of what has finished is dense
    return seconds, xi_floor(bench.loaded, finished, fill)


def _dense_rollouts(bench: Bench) -> list[Rollout]:
    """A few tokens of the same prompts with a dense cache."""
    few = [replace(prompt, max_tokens=min(FLOOR_TOKENS, bench.config.output)) for prompt in bench.prompts]
    few = few[: rollouts_for(bench.config.prompt + FLOOR_TOKENS)]
    config = replace(bench.engine.config, rows=len(few), pool_pages=None, pool_bytes=None)
    return Engine(bench.loaded, Full(), config).generate(few, replace(bench.sampling, n=1))


def _kv(bench: Bench, meter: Meter) -> dict[str, Any]:
    """Bytes at the peak, rings, tables and positions included, and what a dense cache's keys and values would take."""
    config, shape, stats = bench.config, bench.loaded.shape, bench.engine.stats
    if config.cut or stats is None:
        cache, (decoder,) = bench.engine.cache, bench.engine.decoders.values()
        assert cache is not None
        pages = meter.peak_pages * bench.policy.page_bytes(shape, bench.engine.page_size)
        peak = pages + cache.queries.nbytes + decoder.rows.num_bytes
    else:
        peak = stats.peak_bytes
    dense = dense_peak_entries(config, bench.prompts) * bench.model.kv_bytes
    bounded = not config.cut or isinstance(bench.policy, EvictPolicy)  # a dense run that was cut had not reached it
    return {
        "peak_bytes": peak,
        "dense_bytes": dense,
        "ratio": peak / dense if bounded else None,
        "saved_frac": meter.saved_frac,
        "read_frac": meter.read_frac,
    }


def _roofline(bench: Bench, meter: Meter) -> dict[str, Any] | None:
    """None without a window, of a mixture of experts, or where the device's limits are not known."""
    config = bench.config
    known = device_limits(hardware(bench.device), bench.loaded.shape.dtype)
    bandwidth, flops = config.bandwidth or known[0], config.flops or known[1]
    if bandwidth is None or flops is None or not meter.closed or bench.model.mixture:
        return None
    machine = Machine(name=hardware(bench.device), bandwidth=bandwidth, flops=flops)
    roofline = Roofline(model=bench.model, machine=machine, rows=config.rows, entries=meter.entries)
    return {
        "formula": FORMULA,
        "numbers": str(roofline),
        "step_ms": 1e3 * roofline.step_s,
        "tokens_per_s": roofline.tokens_per_s,
        "share": roofline.step_s * meter.steps / meter.seconds,
    }


def _split(bench: Bench, step_ms: float) -> dict[str, float]:
    """A step's milliseconds by kernels, and what is left of it: the host, and gaps between kernels."""
    config = bench.config
    window = profile_window(config, bench.policy, bench.prompts)
    if not config.profile or bench.device.type != "cuda" or window is None:
        return {"total": step_ms}
    bench.say("profiling")
    profiler = Profiler()
    meter = Meter(
        window,
        config.rows,
        bench.device,
        cut=True,
        show=bench.show,
        on_open=profiler.start,
        on_close=profiler.stop,
    )
    try:
        run(bench.engine, bench.prompts, bench.sampling, meter)
    finally:
        if meter.first is not None and not meter.closed:
            profiler.stop()  # or rivals would be measured with it
    if not meter.closed:
        return {"total": step_ms}
    split = {name: 1e3 * seconds / meter.steps for name, seconds in profiler.seconds().items()}
    return {**split, "other": max(0.0, step_ms - sum(split.values())), "total": step_ms}


def time_full(config: BenchConfig, dtype: torch.dtype, engine: EngineConfig, say: Callable[[str], None]) -> Timed:
    """The engine itself with a dense cache, at the same rows."""
    results = measure(
        replace(config, profile=False, adapter=0), Full(), engine, dtype, say=say, show=lambda progress: None
    )
    step_ms, entries = results["step_ms"], (results["window"] or {}).get("mean_entries")
    note = (
        "a dense cache" if step_ms is None else f"a dense cache, {step_ms:.2f} ms a step, {entries:,.0f} entries a row"
    )
    return {**{key: results[key] for key in ("tokens_per_s", "tokens", "seconds", "step_ms")}, "note": note}


def measure_rivals(
    config: BenchConfig, engine: EngineConfig, dtype: torch.dtype, tokens_per_s: float, *, say: Callable[[str], None]
) -> dict[str, Any]:
    """The same work by others."""
    prompts = make_prompts(config, shape_config(config.shape).vocab_size)
    times: dict[str, Callable[[], Timed]] = {
        "full": lambda: time_full(config, dtype, engine, say),
        "generate": lambda: time_generate(config, dtype, prompts),
        "vllm": lambda: time_vllm(config, dtype, prompts),
    }
    return measure_each(times, config.rivals, tokens_per_s, say)
