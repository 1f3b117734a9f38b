# SPDX-License-Identifier: Apache-2.0
"""What a policy refuses, by the setting's name."""

from __future__ import annotations

import pytest

from sparse_rl.kv import build_policy


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "rvk"}, "did you mean 'rkv'"),
        ({"policy": "rkv", "bugdet": 4}, "did you mean 'budget'"),
        ({"policy": "full", "budget": 4}, "it keeps everything; choose another, kv.policy rkv say"),
        ({"policy": "streaming", "window": 4}, "kv.window is not a setting of policy 'streaming'"),
        ({"policy": "rkv", "budget": 7}, "protected entries alone are 8"),
        ({"policy": "streaming", "budget": 3}, "protected entries alone are 4"),
        ({"policy": "rkv", "interval": 0}, "at least 1"),
        ({"policy": "rkv", "sinks": -1}, "at least 0"),
        ({"policy": "snapkv", "window": 0}, "at least 1"),
        ({"policy": "snapkv", "kernel": 4}, "odd"),
        ({"policy": "rkv", "lam": 1.5}, "between 0 and 1"),
        ({"policy": "rkv", "lam": True}, "kv.lam is True; it must be a number between 0 and 1"),
        ({"policy": "rkv", "order": "random"}, "kv.order is .*; choose one of position, score"),
        ({"policy": "knorm", "index": "shard"}, "kv.index is 'shard'; choose one of per_head, shared"),
        ({"policy": "knorm", "recent": -1}, "at least 0"),
        ({"policy": "knorm", "budget": 8, "recent": 7, "sinks": 2}, "protected entries alone are 9"),
        ({"policy": "h2o", "decay": 1.5}, "between 0 and 1"),
        ({"policy": "h2o", "window": 0}, "at least 1"),
        ({"policy": "h2o", "budget": 2, "sinks": 9}, r"sinks 9 \+ newest 0\); raise it to 9 or more"),
        ({"policy": "gkv", "budget": 15}, "protected entries alone are 16"),
        ({"policy": "gkv", "lam": -0.1}, "between 0 and 1"),
        ({"policy": "gkv", "decay": "a"}, "kv.decay is 'a'; it must be a number between 0 and 1"),
        ({"policy": "snapkv", "kernel": "7"}, "kv.kernel is '7'; it must be a whole number"),
        ({"policy": "snapkv", "kernel": 7.0}, "kv.kernel is 7.0; it must be a whole number"),
        ({"policy": "random", "seed": 1.5}, "kv.seed is 1.5; it must be a whole number"),
        ({"policy": "knorm", "sinks": True}, "kv.sinks is True; it must be a whole number"),
        ({"policy": "rkv", "protect_prompt": "no"}, "kv.protect_prompt is 'no'; it must be true or false"),
        ({"policy": "pages_mean", "budget": "nope.json"}, "nope.json"),
        ({"policy": "knorm", "budget": 10**20}, "kv.budget is 1(0){20}; it must be at most 16777216"),
    ],
)
def test_bad_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        build_policy(**settings)


@pytest.mark.parametrize(
    ("policy", "published"),
    [
        ("streaming", {"sinks": 4}),
        ("h2o", {"decay": 1.0, "num_recent": 256}),  # half heavy hitters, half newest
        ("snapkv", {"window": 8, "kernel": 7}),  # as R-KV runs it in decoding
        ("rkv", {"window": 8, "kernel": 7, "lam": 0.1, "threshold": 0.5, "interval": 128}),
        ("gkv", {"window": 16, "kernel": 1, "decay": 0.8, "lam": 0.5}),
        ("pages_mean", {"first": 1, "last": 2, "dense_layers": 2, "page_size": 16}),
        ("quest", {"dense_layers": 2, "page_size": 16}),
    ],
)
def test_defaults_are_the_published_ones(policy, published):
    built = build_policy(policy)
    assert {name: getattr(built, name) for name in published} == published


def test_h2o_keeps_half_of_what_is_beside_the_sinks_for_the_newest():
    assert build_policy("h2o", budget=20, sinks=4).num_recent == 8
    assert build_policy("h2o", budget="20@0+90@50").num_recent == 10
