# SPDX-License-Identifier: Apache-2.0
"""Caches by name, and what an evaluation refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparse_rl.evaluate import Evaluation
from sparse_rl.evaluate.plan import parse_cache
from sparse_rl.kv import RKV, Full, SnapKV, Streaming
from sparse_rl.kv.schedule import Schedule, save
from sparse_rl.rollout import EngineConfig


@pytest.mark.parametrize(
    ("spec", "policy"),
    [
        ("full", Full()),
        ("rkv:128", RKV(budget=128)),
        ("rkv:128,interval=32", RKV(budget=128, interval=32)),
        ("snapkv:budget=64,interval=16", SnapKV(budget=64, interval=16)),
        ("streaming:64,protect_prompt=true,sinks=2", Streaming(budget=64, protect_prompt=True, sinks=2)),
        ("streaming", Streaming()),
    ],
)
def test_a_cache_by_name(spec, policy):
    assert parse_cache(spec) == policy


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("rvk:64", "did you mean 'rkv'"),
        ("", "choose one of"),
        ("full:64", "'budget' is not a setting of 'full'; it takes none"),
        ("rkv:sixty", "budget is 'sixty', which is neither a whole number nor a file"),
        ("rkv:64.5", "neither a whole number"),
        ("rkv:64,32", "'32' is not of the form key=value"),
        ("rkv:budget=", "'budget=' is not of the form key=value"),
        ("rkv:64,budget=32", "budget is given twice"),
        ("rkv:64,intervall=3", "did you mean 'interval'"),
        ("rkv:1", "the protected entries alone are"),
        ("rkv:64,protect_prompt=maybe", "it takes true or false"),
    ],
)
def test_a_cache_that_is_none(spec, said):
    with pytest.raises(ValueError, match=f"cache '{spec}'.*{said}"):
        parse_cache(spec)


def made(**changes):
    return Evaluation(**{"models": ("tiny",), "benchmarks": ("lookup",)} | changes)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"models": ()}, "--models has nothing in it"),
        ({"models": ("",)}, "--models has nothing in it"),
        ({"benchmarks": ("lookup", "lookup")}, "--benchmarks has 'lookup' twice"),
        ({"benchmarks": ("lookup", "lookup:pairs=10")}, "'lookup' and 'lookup:pairs=10', which are the same"),
        ({"benchmarks": ("gms8k",)}, "did you mean 'gsm8k'"),
        ({"kv": ("rkv:64", "rkv:budget=64")}, "which are the same cache"),
        ({"kv": ("full", "pages_mean:32")}, "cache 'pages_mean:32': .* the pages always read are 48"),
        ({"kv": ("rkv:budget=64,select=quest,select_budget=192",)}, "cache 'rkv:.*': .* no more than 192 entries"),
        ({"kv": ("quest:64",), "engine": EngineConfig(page_size=64)}, "cache 'quest:64': .* always read are 192"),
        ({"protocol": "mine"}, "protocol is 'mine'; choose one of default"),
        ({"problems": 0}, "problems is 0"),
        ({"n": 0}, "n is 0"),
        ({"n": 2}, "give a temperature too"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"temperature": 1e-6}, "temperature is 1e-06"),
        ({"top_p": 2.0}, "top_p is 2.0"),
        ({"template": "chatty"}, "template 'chatty' is none of chat, plain"),
        ({"template": "plain", "system": "Be brief."}, "benchmark lookup: .* no place for a system message"),
        ({"dtype": "int8"}, "dtype 'int8' is unknown"),
    ],
)
def test_what_is_refused(changes, said):
    with pytest.raises(ValueError, match=said):
        made(**changes)


def test_a_schedule_that_another_policy_was_calibrated_with_is_said(tmp_path, caplog):
    path = tmp_path / "schedule.json"
    save(Schedule((0,), (40,)), path, kv={"policy": "rkv"})
    made(kv=("full", f"rkv:{path}"))
    assert not caplog.records
    made(kv=("full", f"snapkv:{path}"))
    assert [record.getMessage().partition(" was ")[2] for record in caplog.records] == [
        "found with rkv, not snapkv; calibrate with the policy it is used with."
    ]


def test_settings_follow_the_protocol_but_for_what_is_given():
    assert made().departures("lookup") == []
    changed = made(n=4, temperature=0.5)
    assert changed.settings("lookup").n == 4 and changed.settings("lookup").temperature == 0.5
    assert any("n is 4 instead of 1" in said for said in changed.departures("lookup"))


def test_what_the_chat_template_gets_is_a_departure_where_there_is_a_chat():
    changed = made(chat_template_kwargs={"enable_thinking": False})
    assert changed.departures("lookup") == ['the chat template gets {"enable_thinking": false}']
    assert not any("chat template" in said for said in replace(changed, template="plain").departures("lookup"))


def test_blocks_keep_the_rows_busy_and_hold_whole_problems():
    assert made(engine=EngineConfig(rows=512), n=3, temperature=1.0).block_problems("lookup") == 2048 // 3
    assert made(engine=EngineConfig(rows=2)).block_problems("lookup") == 8
    assert made(n=4096, temperature=1.0).block_problems("lookup") == 1
