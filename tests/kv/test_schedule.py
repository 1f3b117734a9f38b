# SPDX-License-Identifier: Apache-2.0
"""Budgets by context length: their files and names, and when a cache that follows one is cut."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from schedules import named, names

from sparse_rl.bench.work import steps_to_fill
from sparse_rl.kv import RKV, Streaming, build_policy, policy_record
from sparse_rl.kv.schedule import Origin, Schedule, beyond, constant, is_path, load, origin, published, save
from sparse_rl.rollout.scheduler import entries_reached
from sparse_rl.rollout.sequence import Sequence

SPARROW = {  # first budget, sum of all 20, and last, by hand: 16 x (29 + 3) = 512, 16 x (253 + 3) = 4096, ...
    "1.7b-0.75": (512, 25_600, 1536), "1.7b-0.80": (512, 40_960, 2560), "1.7b-0.83": (512, 50_432, 3072),
    "1.7b-0.86": (512, 64_512, 4096), "1.7b-0.88": (768, 80_384, 5120), "1.7b-0.90": (768, 99_584, 6144),
    "1.7b-0.92": (1024, 128_512, 8192), "1.7b-0.94": (1280, 187_648, 12288), "4b-0.75": (512, 36_352, 3072),
    "4b-0.80": (512, 50_688, 3584), "4b-0.86": (512, 82_944, 8192), "4b-0.88": (512, 126_464, 10240),
    "4b-0.90": (768, 181_760, 14336), "4b-0.92": (768, 250_624, 18432), "8b-0.75": (512, 30_464, 2560),
    "8b-0.80": (512, 50_688, 4096), "8b-0.86": (512, 78_912, 7168), "8b-0.87": (512, 95_488, 8192),
    "8b-0.92": (768, 211_200, 16384), "14b-0.86": (512, 127_488, 14336),
}  # fmt: skip


def test_the_published_tables():
    assert {name for name in published() if name.startswith("sparrow/")} == {f"sparrow/qwen3-{key}" for key in SPARROW}
    for key, (first, total, last) in SPARROW.items():
        schedule = load(f"sparrow/qwen3-{key}")
        assert schedule.starts == tuple(range(0, 40_000, 2000)), key
        assert sum(schedule.budgets) == total, key
        assert (schedule.at(0), schedule.at(1999), schedule.at(38_000), schedule.at(10**6)) == (
            first,
            first,
            last,
            last,
        )
    assert load("sparrow/qwen3-1.7b-0.86").budgets == (
        *(512, 1024, 1536, 1536, 2048, 2560, 3072, 3584, 3584), *(4096,) * 11,
    )  # fmt: skip
    assert load("sparrow/qwen3-4b-0.86").at(15_000) == 16 * (221 + 3)
    assert load("sparrow/qwen3-14b-0.86").at(8000) == 16 * (253 + 3)
    assert load("sparrow/qwen3-8b-0.86").at(34_000) == 6208, "385 + 3 pages, as published"


@given(name=names(longest=50, least=1, most=99), contexts=st.lists(st.integers(0, 60), min_size=1))
@settings(max_examples=60, deadline=None)
def test_one_context_and_a_row_of_them(name, contexts):
    schedule = load(name)
    steps = list(zip(schedule.starts, schedule.budgets, strict=True))
    slow = [max(budget for start, budget in steps if start <= context) for context in contexts]
    assert [schedule.at(context) for context in contexts] == slow
    for dtype in (torch.int64, torch.int32):
        assert schedule.at(torch.tensor(contexts, dtype=dtype)).tolist() == slow


@pytest.mark.parametrize(
    ("starts", "budgets", "said"),
    [
        ((0, 10), (5,), "it has 2 starts and 1 budgets; give as many of both"),
        ((), (), "its first start is missing; it must be 0"),
        ((1, 10), (5, 6), "its first start is 1; it must be 0"),
        ((0, 10, 10), (5, 6, 7), "its start 10 follows 10; starts must ascend"),
        ((0, 10), (0, 6), "its first budget is 0; it must be at least 1"),
        ((0, 10), (6, 5), "its budget falls from 6 to 5 at 10 tokens"),
        ((0, 10), (6, 6.5), "its budgets have 6.5 among them; they must be whole numbers"),
        ((0, True), (6, 7), "its starts have True among them"),
        ((0, 9), (6, 10**20), "its budgets have 1(0){20} among them; they must be at most 16777216"),
    ],
)
def test_a_schedule_that_is_none(tmp_path, starts, budgets, said):
    with pytest.raises(ValueError, match=said):
        Schedule(starts, budgets)
    (tmp_path / "file.json").write_text(json.dumps({"starts": starts, "budgets": budgets}))
    with pytest.raises(ValueError, match=rf"kv.budget is '{tmp_path}/file.json', a file without a schedule: {said}"):
        RKV(budget=str(tmp_path / "file.json"))


def test_a_schedule_found_with_other_settings_is_said(tmp_path, caplog):
    path = tmp_path / "schedule.json"
    save(Schedule((0,), (40,)), path, kv={"policy": "rkv", "interval": 8, "lam": 0.1})
    build_policy("rkv", budget=str(path), interval=8)
    build_policy("rkv", budget=40, interval=16)
    build_policy("rkv", budget="40@0", interval=16)
    build_policy("rkv", budget="+".join(f"{40 + i}@{1000 * i}" for i in range(40)))  # longer than a file's name may be
    assert not caplog.records
    build_policy("rkv", budget=str(path), interval=16)
    build_policy("snapkv", budget=str(path), interval=16)
    settings, policy = (record.getMessage() for record in caplog.records)
    assert "schedule.json was found with interval 8 (here 16); calibrate with the settings" in settings
    assert "schedule.json was found with rkv, not snapkv; calibrate with the policy" in policy


def test_what_a_file_says_of_where_it_comes_from(tmp_path):
    path = tmp_path / "s.json"
    save(constant(64), path, longest=240, model="m")
    assert origin(str(path)) == Origin(kv={}, model="m", longest=240)
    assert beyond(str(path), 240) == "" and "with contexts of at most 240 tokens" in beyond(str(path), 241)
    save(constant(64), path, longest=True, model=3, kv=[])
    assert origin(str(path)) == Origin(kv={}) == origin("sparrow/qwen3-1.7b-0.86") == origin(64) == origin("nowhere")


@pytest.mark.parametrize(
    ("budget", "path"),
    [(512, False), ("auto", False), ("512@0+1024@2000", False), ("sparrow/qwen3-4b-0.86", False), ("gone", True)],
)
def test_which_budgets_name_files(budget, path):
    assert is_path(budget) is path


def test_a_file_that_cannot_be_written_whole_leaves_the_one_before(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    save(constant(64), tmp_path / "s.json")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(constant(32), tmp_path / "s.json")
    assert load(str(tmp_path / "s.json")) == constant(64)


def test_files_are_written_and_read(tmp_path):
    path, schedule = tmp_path / "schedule.json", Schedule((0, 7, 30), (12, 12, 20))
    save(schedule, path, model="tiny", target=0.9)
    assert json.loads(path.read_text()) == {
        "model": "tiny",
        "target": 0.9,
        "starts": [0, 7, 30],
        "budgets": [12, 12, 20],
    }
    policy = RKV(budget=str(path))
    assert load(str(path)) == policy.schedule == schedule
    record = policy_record(policy)
    assert record == {"policy": "rkv", **asdict(policy), "schedule": asdict(schedule)} and record["budget"] == str(path)
    assert "schedule" not in policy_record(RKV(budget=64)), "a number says all"
    record = policy_record(RKV(budget=64, select="quest", select_budget=str(path)))
    assert record["select_schedule"] == asdict(schedule) and "schedule" not in record


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "a file without a schedule: Expecting"),
        ("[1]", 'it must be an object with the lists "starts" and "budgets"'),
        ('{"starts": [0], "budgets": 5}', 'the lists "starts" and "budgets"'),
        ('{"starts": [0], "budgets": [5], "budgets": [6]}', "the key 'budgets' stands there twice"),
    ],
)
def test_files_that_are_no_schedules(tmp_path, content, said):
    (tmp_path / "schedule.json").write_text(content)
    with pytest.raises(ValueError, match=said):
        Streaming(budget=str(tmp_path / "schedule.json"))


def test_what_a_budget_may_not_be(tmp_path):
    with pytest.raises(
        ValueError, match=r"no published|nor a published schedule \(did you mean 'sparrow/qwen3-8b-0.86'"
    ):
        RKV(budget="sparrow/qwen-8b-0.86")
    with pytest.raises(ValueError, match=r"kv.budget is 'gone.json', but there is no such file; check the path"):
        RKV(budget="gone.json")
    with pytest.raises(ValueError, match=r"kv.budget is '(a{300})', which is neither a whole number nor a file"):
        RKV(budget="a" * 300)
    with pytest.raises(ValueError, match=rf"kv.budget is '{tmp_path}'"):
        RKV(budget=str(tmp_path))
    with pytest.raises(ValueError, match=r"which begins with 7, but the protected entries alone are 8 .*to 8 or more"):
        RKV(budget=named((0, 9), (7, 90)))


def test_the_most_that_a_sequence_holds_depends_on_its_length():
    policy = Streaming(budget=named((0, 100, 110), (10, 40, 1000)), interval=5)

    def reached(max_tokens: int) -> int:
        return entries_reached(policy, Sequence(request=0, prompt_idx=0, prompt_len=4, max_tokens=max_tokens))

    assert reached(7) == 10, "4 + 6 tokens, the last is never written"
    assert reached(50) == 15, "10 + 5"
    assert reached(102) == 20, "14 left at 99 tokens, one more for each of 100 to 105"
    assert reached(117) == 35, "14 and 21 more, not the 45 or 1005 that the budgets would let it"
    assert reached(10_000) == 1005
    assert policy.bound == 1005 and replace(policy, protect_prompt=True).bound is None
    assert Streaming(budget=named((0, 9), (30, 30)), interval=5).bound == 35


def test_steps_until_a_cache_is_first_cut():
    assert steps_to_fill(Streaming(budget=20, interval=7), 5) == 22
    policy = Streaming(budget=named((0, 16, 23), (8, 10, 12)), interval=5)
    assert steps_to_fill(policy, 4) == 9, "13 at 13 tokens"
    assert steps_to_fill(policy, 12) == 7, "8 are left of the prompt, 13 at 17 tokens where 15 are due, 15 at 19"
    assert steps_to_fill(policy, 30) == 5
