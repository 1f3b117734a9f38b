# SPDX-License-Identifier: Apache-2.0
"""What to change about a run that does not fit: one setting at a time, and the fewest that together are enough.

Remedies are tried in an order of least harm: first those that cost time alone, then those that round, then those that
change what is learnt or what it costs.

How a plan is made is in `memory.py`, how remedies are told in `show.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from sparse_rl.kv import RKV, EvictPolicy, Full, KVPolicy, build_policy
from sparse_rl.plan.memory import Plan, largest, make_plan
from sparse_rl.plan.records import Device, RunSize
from sparse_rl.plan.size import ModelSize
from sparse_rl.rollout.engine import MAX_ROWS

LORA_RANK = 16
SMALLEST_BUDGET = 128
MAX_RANKS = 64
LEAST_SHARE = 0.05  # of what is too much, that a change must take away to be worth a line


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A setting, what it costs, and the plan with it."""

    setting: str
    cost: str
    plan: Plan


Change = Callable[[Plan], tuple[str, RunSize] | None]


def remedies(plan: Plan) -> list[Remedy]:
    """Each change that helps by itself, least harm first."""
    found = []
    for cost, change in CHANGES:
        remedy = _apply(plan, cost, change)
        if remedy is not None:
            found.append(remedy)
    return found


def together(plan: Plan) -> list[Remedy]:
    """The first changes in order that make it fit, without those that were not needed; empty if none do."""
    chosen: list[tuple[str, Change]] = []
    current = plan
    for cost, change in CHANGES:
        remedy = None if current.fits else _apply(current, cost, change)
        if remedy is not None:
            chosen.append((cost, change))
            current = remedy.plan
    if not current.fits:
        return []
    for step in chosen[::-1]:  # the most harmful first
        fewer = _all(plan, [other for other in chosen if other is not step])
        if fewer and fewer[-1].plan.fits:
            chosen.remove(step)
    return _all(plan, chosen)


def rows_that_fit(size: ModelSize, run: RunSize, device: Device, kv: KVPolicy) -> int:
    """Most rows that can be in flight at their longest under a policy, however many are asked for."""

    def fits(rows: int) -> bool:
        asked = replace(run, kv=kv, rows=rows, requests=rows * run.ranks, pool_pages=None)
        return make_plan(size, asked, device).rollout_fits

    return largest(fits, MAX_ROWS)


def sparse_policy(run: RunSize) -> KVPolicy:
    """The run's own policy if it is sparse, else what the recipes use."""
    return run.kv if isinstance(run.kv, EvictPolicy) else RKV()


def _all(plan: Plan, changes: list[tuple[str, Change]]) -> list[Remedy]:
    found: list[Remedy] = []
    for cost, change in changes:
        remedy = _apply(found[-1].plan if found else plan, cost, change)
        if remedy is not None:
            found.append(remedy)
    return found


def _apply(plan: Plan, cost: str, change: Change) -> Remedy | None:
    """The change, if it takes away a fair share of what is too much in a phase."""
    changed = change(plan)
    if changed is None:
        return None
    after = make_plan(plan.size, changed[1], plan.device)
    memory = plan.device.memory
    before_after = [
        (plan.held(plan.learning) - memory, after.held(after.learning) - memory),
        (0 if plan.rollout_fits else plan.wanted - memory, after.wanted - memory),
    ]
    helps = any(before > 0 and before - now >= LEAST_SHARE * before for before, now in before_after)
    helps |= not plan.rollout_fits and after.rows_in_flight > plan.rows_in_flight
    return Remedy(setting=changed[0], cost=cost, plan=after) if helps or after.fits else None


def _fewer_tokens(plan: Plan) -> tuple[str, RunSize] | None:
    run = plan.run
    if run.max_tokens <= run.length:
        return None

    def fits(tokens: int) -> bool:
        return make_plan(plan.size, replace(run, max_tokens=tokens), plan.device).learning_fits

    tokens = max(run.length, largest(fits, run.max_tokens) // 256 * 256)
    return f"update.max_tokens {tokens}", replace(run, max_tokens=tokens)


def _activations(kind: str) -> Change:
    def change(plan: Plan) -> tuple[str, RunSize] | None:
        kinds = ["keep", "recompute", "offload"]
        if kinds.index(kind) <= kinds.index(plan.run.activations) or (kind == "offload" and not plan.device.cuda):
            return None
        return f"update.activations {kind}", replace(plan.run, activations=kind)  # type: ignore[arg-type]

    return change


def _optimizer_to_host(plan: Plan) -> tuple[str, RunSize] | None:
    if plan.run.on_host or plan.run.lora or plan.run.ranks > 1 or not plan.device.cuda:
        return None
    return "optimizer.offload true", replace(plan.run, on_host=True)


def _moments_in_8bit(plan: Plan) -> tuple[str, RunSize] | None:
    if plan.run.moments == "8bit" or plan.run.on_host or plan.run.lora or plan.run.ranks > 1:
        return None
    return "optimizer.kind adamw_8bit", replace(plan.run, moments="8bit")


def _pool_of_its_own(plan: Plan) -> tuple[str, RunSize] | None:
    if plan.rollout_fits or plan.run.pool_pages is None:
        return None
    return "engine.pool_pages null --engine.pool_bytes null", replace(plan.run, pool_pages=None)


def _fewer_rows(plan: Plan) -> tuple[str, RunSize] | None:
    if plan.rollout_fits or plan.run.pool_pages is not None:
        return None

    def fits(rows: int) -> bool:
        return make_plan(plan.size, replace(plan.run, rows=rows), plan.device).rollout_fits

    rows = largest(fits, plan.run.rows)
    return (f"engine.rows {rows}", replace(plan.run, rows=rows)) if rows else None


def _sparse(plan: Plan) -> tuple[str, RunSize] | None:
    if plan.rollout_fits or not isinstance(plan.run.kv, Full):
        return None
    policy = RKV()
    setting = f"kv.policy rkv --kv.budget {policy.budget} --kv.interval {policy.interval}"
    return setting, replace(plan.run, kv=policy)


def _smaller_budget(plan: Plan) -> tuple[str, RunSize] | None:
    policy, auto = plan.run.kv, plan.run.auto
    if not isinstance(policy, EvictPolicy) or isinstance(policy.budget, str):
        return None
    half = policy.budget // 2
    if half < SMALLEST_BUDGET or half <= auto:
        return None
    try:
        smaller = build_policy(policy.name, **asdict(policy) | {"budget": half})
    except ValueError:  # less than it protects
        return None
    return f"{'control.largest' if auto else 'kv.budget'} {half}", replace(plan.run, kv=smaller)


def _more_ranks(plan: Plan) -> tuple[str, RunSize] | None:
    """The fewest processes that fit by themselves, else twice as many."""
    if plan.run.on_host or plan.run.moments == "8bit":
        return None  # neither is sharded
    ranks = 2 * plan.run.ranks
    while ranks < MAX_RANKS and not make_plan(plan.size, replace(plan.run, ranks=ranks), plan.device).fits:
        ranks *= 2
    run = replace(plan.run, ranks=ranks)
    if not make_plan(plan.size, run, plan.device).fits:
        run = replace(plan.run, ranks=2 * plan.run.ranks)
    return f"ranks {run.ranks}", run


def _lora(plan: Plan) -> tuple[str, RunSize] | None:
    if plan.run.lora:
        return None
    return f"lora.r {LORA_RANK}", replace(plan.run, lora=plan.size.adapters(LORA_RANK))


CHANGES: tuple[tuple[str, Change], ...] = (
    ("more forwards of fewer tokens", _fewer_tokens),
    ("every layer's forward runs twice", _activations("recompute")),
    ("the pool is as large as the rows need, or as there is room for", _pool_of_its_own),
    ("rollouts take longer", _fewer_rows),
    ("and hidden states travel to host memory", _activations("offload")),
    ("moments are rounded", _moments_in_8bit),
    ("the optimizer steps in host memory", _optimizer_to_host),
    ("rollouts are sparse, and corrected for it", _sparse),
    ("rollouts are sparser", _smaller_budget),
    ("as many GPUs", _more_ranks),
    ("adapters learn, the model does not", _lora),
)
