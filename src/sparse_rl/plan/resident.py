# SPDX-License-Identifier: Apache-2.0
"""What stays for the whole run: weights, the optimiser's state, and adapters. What comes and goes is in `memory.py`."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from sparse_rl.kv import EvictPolicy
from sparse_rl.plan.records import ALWAYS, LEARNING, Footprint, RunSize
from sparse_rl.plan.size import ModelSize

BLOCK_8BIT = 256  # values that share an fp32 scale


def resident_lines(size: ModelSize, run: RunSize) -> list[Footprint]:
    """What stays for the whole run, and the gradients, which stay for learning."""
    trained, item = run.lora or size.parameters, size.itemsize
    full = max(4, item)  # an fp32 parameter is its own master
    share, of = -(-trained // run.ranks), f" / {run.ranks} ranks" if run.ranks > 1 else ""
    names = f"{trained:,} {'adapter ' if run.lora else ''}parameters"
    moments = 2 * share * full
    text = f"{names}{of} x 2 x {full}"
    if run.moments == "8bit":
        moments = 2 * (share + 4 * -(-share // BLOCK_8BIT))
        text = f"{names}{of} x 2 x (1 + 4 / {BLOCK_8BIT})"
    own_masters = item < 4 or run.ranks > 1
    lines = [
        Footprint(name="weights", bytes=size.parameters * item, stages=ALWAYS, formula=f"{size.parameters:,} x {item}"),
        Footprint(name="LoRA adapters", bytes=run.lora * item, stages=ALWAYS, formula=f"{run.lora:,} x {item}"),
        Footprint(
            name="masters",
            bytes=(own_masters or run.on_host) * share * full,
            stages=ALWAYS,
            formula=f"{names}{of} x {full}",
            where="host" if run.on_host else "device",
        ),
        Footprint(name="gradients", bytes=share * full, stages=LEARNING, formula=f"{names}{of} x {full}"),
        Footprint(
            name="optimizer moments",
            bytes=moments,
            stages=ALWAYS,
            formula=text,
            where="host" if run.on_host else "device",
        ),
    ]
    lines += _distill(size, run)
    if run.lora and run.ranks > 1:
        base = -(-size.parameters // run.ranks)
        text = f"{size.parameters:,} / {run.ranks} ranks x {item}"
        lines.append(Footprint(name="the learner's base", bytes=base * item, stages=ALWAYS, formula=text))
    if run.reference and not run.lora:  # under LoRA it is the model without its adapters
        lines.append(
            Footprint(
                name="reference model",
                bytes=size.parameters * item,
                stages=ALWAYS,
                formula=f"{size.parameters:,} x {item}",
            )
        )
    return lines


def _distill(size: ModelSize, run: RunSize) -> list[Footprint]:
    """The sampler's adapter, which every process has whole, and what it learns from."""
    if not run.distill:
        return []
    item, full = size.itemsize, max(4, size.itemsize)
    each = item + (item < 4) * full + 2 * full
    lines = [
        Footprint(
            name="sampler's adapter",
            bytes=run.distill * each,
            stages=ALWAYS,
            formula=f"{run.distill:,} parameters x {each}: itself, its master and moments",
        ),
        Footprint(name="its gradients", bytes=run.distill * full, stages=LEARNING, formula=f"{run.distill:,} x {full}"),
    ]
    if run.merged:
        text = f"{size.in_linears:,} weights x {item}"
        lines.append(Footprint(name="merged copy", bytes=size.in_linears * item, stages=ALWAYS, formula=text))
    if isinstance(run.kv, EvictPolicy):
        entries, shape = _recorded(run), size.attention
        lines.append(
            Footprint(
                name="positions kept",
                bytes=4 * run.requests * entries * shape.num_layers * shape.num_kv_heads,
                stages=ALWAYS,
                formula=f"{run.requests} samples x {entries:,} entries of all cuts x {shape.num_layers} layers x "
                f"{shape.num_kv_heads} KV heads x 4",
                where="host",
            )
        )
    return lines


def _recorded(run: RunSize) -> int:
    """Entries left by all cuts of the longest sequence, together; the most of any budget where it moves."""
    kv = run.kv
    assert isinstance(kv, EvictPolicy)
    if not run.auto:
        return _left_by_cuts(kv, run.prompt, run.length)
    most = kv.schedule.most  # the more a cut leaves, the fewer there are: it is neither end
    budgets = range(run.auto, most + 1, max(1, (most - run.auto) // 32))
    return max(_left_by_cuts(replace(kv, budget=budget), run.prompt, run.length) for budget in budgets)


def _left_by_cuts(kv: EvictPolicy, prompt: int, length: int) -> int:
    held, at = min(prompt, kv.target(prompt, prompt)), prompt
    total = held if held < prompt else 0
    for start, end in pairwise((*kv.schedule.starts, length)):
        left = kv.target(prompt, start)
        due = max(start, at + max(1, left + kv.interval - held))
        cuts = max(0, -(-(min(end, length) - due) // kv.interval))
        if cuts:
            total, held, at = total + cuts * left, left, due + (cuts - 1) * kv.interval
    return total
