# SPDX-License-Identifier: Apache-2.0
"""KV policies by name. Adding one: a file beside these, a line here, a reference in tests/slow_evict.py."""

from __future__ import annotations

import logging
from dataclasses import asdict, fields
from typing import Any

from sparse_rl.kv.full import Full
from sparse_rl.kv.gkv import GKV
from sparse_rl.kv.h2o import H2O
from sparse_rl.kv.inside import check_some_unread
from sparse_rl.kv.keydiff import KeyDiff
from sparse_rl.kv.knorm import Knorm
from sparse_rl.kv.pages_mean import PagesMean
from sparse_rl.kv.policy import EvictPolicy, KVPolicy
from sparse_rl.kv.quest import Quest
from sparse_rl.kv.random import Random
from sparse_rl.kv.rkv import RKV
from sparse_rl.kv.schedule import load, origin
from sparse_rl.kv.select import SelectPolicy
from sparse_rl.kv.snapkv import SnapKV
from sparse_rl.kv.streaming import Streaming
from sparse_rl.kv.tova import TOVA
from sparse_rl.specs import suggestion

logger = logging.getLogger(__name__)

POLICIES: dict[str, type[KVPolicy]] = {
    policy.name: policy
    for policy in (Full, Streaming, Random, Knorm, KeyDiff, TOVA, H2O, SnapKV, RKV, GKV, PagesMean, Quest)
}

SCHEDULED = (("budget", "schedule"), ("select_budget", "select_schedule"))  # settings, and their steps in a record

__all__ = [
    "GKV", "H2O", "POLICIES", "RKV", "SCHEDULED", "TOVA", "EvictPolicy", "Full", "KVPolicy", "KeyDiff", "Knorm",
    "PagesMean", "Quest", "Random", "SelectPolicy", "SnapKV", "Streaming", "build_policy", "check_use",
    "policy_record",
]  # fmt: skip


def build_policy(policy: str = "full", **settings: Any) -> KVPolicy:
    """The named policy with these settings; an unknown name or setting is an error that suggests the right one."""
    if policy not in POLICIES:
        raise ValueError(f"kv.policy is {policy!r}{suggestion(policy, POLICIES)}; choose one of {', '.join(POLICIES)}.")
    known = [field.name for field in fields(POLICIES[policy])]
    for key in settings:
        if key not in known:
            takes = (
                f"it takes {', '.join(known)}" if known else "it keeps everything; choose another, kv.policy rkv say"
            )
            raise ValueError(f"kv.{key} is not a setting of policy {policy!r}{suggestion(key, known)}; {takes}.")
    built = POLICIES[policy](**settings)
    check_use(built)
    return built


def check_use(policy: KVPolicy) -> None:
    """Raise if pages are chosen and all are read; warn if the budget was calibrated with another policy or settings."""
    if isinstance(policy, EvictPolicy):
        check_some_unread(policy)
    own = {"policy": policy.name, **asdict(policy)}
    other = {key: value for key, value in origin(own.get("budget")).kv.items() if own.get(key) != value}
    if "policy" in other:
        logger.warning(
            "%s was found with %s, not %s; calibrate with the policy it is used with.",
            own["budget"],
            other["policy"],
            policy.name,
        )
    elif other:
        said = ", ".join(f"{key} {value} (here {own.get(key)})" for key, value in other.items())
        logger.warning("%s was found with %s; calibrate with the settings it is used with.", own["budget"], said)


def policy_record(policy: KVPolicy) -> dict[str, Any]:
    """Name and settings, as a run's record has them; a schedule with its steps, since a file may change."""
    record = {"policy": policy.name, **asdict(policy)}
    for budget, schedule in SCHEDULED:
        if isinstance(record.get(budget), str):
            record[schedule] = asdict(load(record[budget]))
    return record
