# SPDX-License-Identifier: Apache-2.0
"""A plan for people, and for programs. It is made in `memory.py`, and what would help is found in `advice.py`."""

from __future__ import annotations

from typing import Any

from sparse_rl.kv import EvictPolicy, Full, KVPolicy
from sparse_rl.plan.advice import Remedy, remedies, rows_that_fit, sparse_policy, together
from sparse_rl.plan.memory import Plan
from sparse_rl.plan.records import RunSize

STAGES = {
    "head": "while logits are scored",
    "layers": "in the backward pass",
    "embedding": "at the end of the backward pass",
}


def summary(plan: Plan) -> str:
    """The verdict with its numbers, in one line."""
    memory, rollout, learning = plan.device.memory, plan.held("rollout"), plan.held(plan.learning)
    if plan.fits:
        phase, peak = ("rollout", rollout) if rollout >= learning else ("learning", learning)
        return f"fits: peak {gb(peak)} of {gb(memory)} in {phase}"
    parts = []
    if not plan.learning_fits:
        parts.append(f"learning needs {gb(learning)} of {gb(memory)} {STAGES[plan.learning]}")
    if not plan.pool_fits:
        wanted, have = plan.pages_wanted * plan.page_bytes, plan.pages * plan.page_bytes
        parts.append(
            f"the KV of {plan.run.rows_used} rows ({_name(plan.run.kv, plan.run.auto)}) needs {gb(wanted)} at "
            f"{plan.pages_a_row * plan.run.page_size:,} entries a row, {gb(have)} are free beside {_resident(plan)} "
            f"and the engine's reserve: {_count(plan.rows_in_flight, 'row')} in flight"
        )
    elif not plan.rollout_fits:
        parts.append(f"the rollout needs {gb(rollout)} of {gb(memory)}")
    return "does not fit: " + "; ".join(parts)


def lines(plan: Plan, command: str = "plan") -> list[str]:
    """Everything that is held, rows that fit, the verdict, and what to change, as flags of the command."""
    size, run = plan.size, plan.run
    dtype = str(size.dtype).removeprefix("torch.")
    text = [
        f"{size.name}: {size.parameters:,} parameters in {dtype}, on {plan.device.name} ({gb(plan.device.memory)})"
        + (f", {run.ranks} ranks" if run.ranks > 1 else ""),
        f"{run.requests} samples a step, {run.rows} rows, {_name(run.kv, run.auto)}; prompts of up to {run.prompt:,} "
        f"and completions of up to {run.completion:,} tokens; learner forwards of up to {run.forward_tokens:,} tokens",
        "",
        f"{'':26}{'rollout':>10}{'learning':>10}",
    ]
    for line in plan.holds("rollout", plan.learning):
        shown = [gb(line.bytes) if stage in line.stages else "" for stage in ("rollout", plan.learning)]
        text.append(f"{line.name:26}{shown[0]:>10}{shown[1]:>10}   {line.formula}")
    peaks = [gb(plan.held(stage)) for stage in ("rollout", plan.learning)]
    text.append(f"{'peak':26}{peaks[0]:>10}{peaks[1]:>10}   of {gb(plan.device.memory)}; {STAGES[plan.learning]}")
    for line in plan.in_host_memory:
        text.append(f"{'in host memory':26}{gb(line.bytes):>20}   {line.name}: {line.formula}")
    shape = size.attention
    if shape.value_dim != shape.head_dim:
        text.append(
            f"latent attention: the cache holds {shape.num_kv_heads} expanded heads of {shape.head_dim} + "
            f"{shape.value_dim} numbers a layer, {shape.entry_bytes:,} bytes a token in all; latents are not stored"
        )
    policies = {"dense": Full(), _name(run.kv): run.kv, _name(sparse_policy(run)): sparse_policy(run)}
    policies.pop("dense cache", None)
    fitting = [f"{rows_that_fit(plan.size, run, plan.device, kv):,} {name}" for name, kv in policies.items()]
    text += [
        "",
        f"rows in flight that fit: {', '.join(fitting)}",
        summary(plan),
        *_never_cut(plan.run),
    ]
    return text if plan.fits else text + _advice(plan, command)


def _never_cut(run: RunSize) -> list[str]:
    """A hint where the longest sequence is too short for the policy to evict anything."""
    if not isinstance(run.kv, EvictPolicy) or run.auto:
        return []
    due = run.kv.trigger(run.prompt, run.length)
    if run.length >= due:
        return []
    return [
        f"{_name(run.kv)} is never cut at such lengths: it is due at {due:,} entries, and sequences have at most "
        f"{run.length:,} tokens; a smaller kv.budget would save memory."
    ]


def rows_by_policy(plan: Plan) -> tuple[int, int]:
    """Most rows in flight, dense and sparse."""
    dense, sparse = (
        rows_that_fit(plan.size, plan.run, plan.device, policy) for policy in (Full(), sparse_policy(plan.run))
    )
    return dense, sparse


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan's numbers; `allocated_bytes` is what torch's allocator will show, without the driver's share."""
    dense, sparse = rows_by_policy(plan)
    return {
        "model": plan.size.name,
        "dtype": str(plan.size.dtype).removeprefix("torch."),
        "parameters": plan.size.parameters,
        "device": {"name": plan.device.name, "memory_bytes": plan.device.memory},
        "fits": plan.fits,
        "summary": summary(plan),
        "phases": {
            phase: {
                "peak_bytes": plan.held(stage),
                "allocated_bytes": plan.held(stage, driver=False),
                "holds": {line.name: line.bytes for line in plan.holds(stage)},
            }
            for phase, stage in (("rollout", "rollout"), ("learning", plan.learning))
        },
        "host": {line.name: line.bytes for line in plan.in_host_memory},
        "formulas": {line.name: line.formula for line in plan.lines},
        "rows": {"asked": plan.run.rows, "in_flight": plan.rows_in_flight, "dense": dense, "sparse": sparse},
        "remedies": [] if plan.fits else [_remedy(remedy) for remedy in remedies(plan)],
        "together": [] if plan.fits else [_remedy(remedy) for remedy in together(plan)],
    }


def gb(count: float) -> str:
    """Bytes in a unit that leaves a few digits."""
    for unit, name in ((1e9, "GB"), (1e6, "MB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count / 1e3:.1f} kB"


def _advice(plan: Plan, command: str) -> list[str]:
    def spelt(remedy: Remedy) -> str:
        name, _, value = remedy.setting.partition(" ")
        started = f"torchrun --nproc-per-node {value} -m sparse_rl train"
        return started if (name, command) == ("ranks", "train") else f"--{remedy.setting}"

    alone, combined = remedies(plan), together(plan)
    if not alone:
        return ["nothing that is known here helps; take a smaller model, or shorter completions."]
    text = ["what would help, least harm first:"]
    width = max(len(spelt(remedy)) for remedy in alone)
    text += [f"  {spelt(remedy):{width}}  {_phases(plan, remedy.plan)}: {remedy.cost}" for remedy in alone]
    if not combined:
        return [*text, "all of it together does not; take a smaller model, or shorter completions."]
    settings = " ".join(sorted(map(spelt, combined), key=lambda setting: setting.startswith("--")))
    return [*text, f"together: {settings}", f"  {summary(combined[-1].plan)}"]


def _phases(before: Plan, after: Plan) -> str:
    """The phases that did not fit, as a change leaves them."""
    shown = []
    if not before.learning_fits:
        shown.append(f"learning {gb(after.held(after.learning))}")
    if not before.rollout_fits:
        shown.append(f"rollout {gb(after.wanted)}, {_count(after.rows_in_flight, 'row')}")
    return ", ".join(shown) + (", fits" if after.fits else "")


def _remedy(remedy: Remedy) -> dict[str, Any]:
    plan = remedy.plan
    return {
        "setting": remedy.setting,
        "cost": remedy.cost,
        "fits": plan.fits,
        "rollout_bytes": plan.wanted,
        "learning_bytes": plan.held(plan.learning),
        "rows_in_flight": plan.rows_in_flight,
    }


def _name(policy: KVPolicy, auto: int = 0) -> str:
    if isinstance(policy, Full):
        return "dense cache"
    interval = f"+{policy.interval}" if isinstance(policy, EvictPolicy) else ""
    return f"{policy.name} {'up to ' if auto else ''}{getattr(policy, 'budget', '')}{interval}".rstrip()


def _resident(plan: Plan) -> str:
    kept = ("weights", "masters", "optimizer moments", "reference model")
    names = [line.name for line in plan.lines if line.name in kept and line.where == "device"]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
