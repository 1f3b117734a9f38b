# SPDX-License-Identifier: Apache-2.0
"""A schedule as the user gives it: flags, files, the grammar of caches; what plans and records say of it."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from commands import run
from small_run import small_trainer

from sparse_rl.bench import BenchConfig
from sparse_rl.cli.bench import default_label
from sparse_rl.evaluate.plan import Evaluation, parse_cache
from sparse_rl.evaluate.record import Record
from sparse_rl.kv import RKV, Streaming
from sparse_rl.kv.schedule import Schedule, constant, load, save
from sparse_rl.rollout import EngineConfig

NAME = "sparrow/qwen3-1.7b-0.86"


@pytest.fixture
def file(tmp_path):
    """A schedule's file that may change: what was read of it is forgotten."""
    path = tmp_path / "schedule.json"

    def write(*budgets: int) -> str:
        save(Schedule(tuple(range(0, 20 * len(budgets), 20)), budgets), path, target=0.9)
        load.cache_clear()
        return str(path)

    return write


def test_flags_and_yaml_take_numbers_names_and_files(tmp_path, file):
    for given, budget in (("64", 64), (NAME, NAME), (file(12, 14), file(12, 14))):
        code, out, err = run("train", "--kv.policy", "rkv", "--kv.budget", given, "--dry-run")
        assert (code, err) == (0, "") and yaml.safe_load(out)["kv"]["budget"] == budget
        (tmp_path / "settings.yaml").write_text(out)
        assert run("train", "--config", str(tmp_path / "settings.yaml"), "--dry-run") == (0, out, "")
    code, _, err = run("train", "--kv.policy", "rkv", "--kv.budget", "sparow/qwen3-1.7b-0.86", "--dry-run")
    assert code != 0 and f"did you mean '{NAME}'?" in err


def test_caches_of_an_evaluation(file):
    path = file(12, 14)
    assert parse_cache(f"rkv:{NAME}") == RKV(budget=NAME)
    assert parse_cache(f"streaming:{path},interval=4") == Streaming(budget=path, interval=4)
    assert parse_cache('rkv:{"budget": 64}') == parse_cache("rkv:64") == RKV(budget=64)
    with pytest.raises(ValueError, match=r"budget is 64.5; it takes a whole number or a text"):
        parse_cache('rkv:{"budget": 64.5}')
    with pytest.raises(ValueError, match=r"^cache 'rkv:sparrow': budget is 'sparrow', which is neither"):
        parse_cache("rkv:sparrow")


def test_the_plan_is_that_of_the_longest_context():
    def plan(max_tokens: int, budget: str) -> dict:
        shape = ["--shape", "qwen2.5-1.5b", "--prompt", "500", "--gpu", "h200", "--engine.rows", "8"]
        kv = ["--kv.policy", "rkv", "--kv.budget", budget, "--kv.interval", "128"]
        return json.loads(run("plan", *shape, *kv, "--sampling.max_tokens", str(max_tokens), "--json")[1])

    def pool(found: dict) -> int:
        return found["phases"]["rollout"]["holds"]["KV pool"]

    scheduled = [plan(length, NAME) for length in (1000, 5500, 5501)]
    # 512 + 128 entries; 1536 + 128; from 6000 tokens on it may hold 2048 + 128, but has not had the time to
    assert [pool(found) for found in scheduled] == [pool(plan(10_000, str(n))) for n in (512, 1536, 1536)]
    assert f": {NAME} (1,536 at 5,999 tokens) + 128 entries a row" in plan(5499, NAME)["formulas"]["KV pool"]
    assert [found["phases"]["learning"]["holds"]["KV pool"] for found in scheduled] == [pool(f) for f in scheduled]
    code, out, _ = run("plan", "--shape", "qwen2.5-1.5b", "--kv.policy", "rkv", "--kv.budget", NAME, "--memory", "9GB")
    assert code == 1 and f"rkv {NAME}+128" in out and "--kv.budget" not in out


def test_a_resumed_run_notices_a_file_that_changed(tmp_path, file, caplog):
    def trained(path: str, steps: int, **more) -> dict:
        kv = RKV(budget=path, interval=4, window=4, select="quest", select_budget=path)
        small_trainer(tmp_path / "run", steps=steps, parts={"kv": kv}, **more).train()
        return json.loads((tmp_path / "run" / "run.json").read_text())["config"]["kv"]

    first = trained(file(48, 64), 1)
    with caplog.at_level(logging.WARNING):
        trained(file(48, 66), 2, resume_from_checkpoint=True)
    for setting in ("", "select_"):
        schedule = f"{setting}schedule"
        assert first[schedule] == {"starts": [0, 20], "budgets": [48, 64]} and first[f"{setting}budget"] == file(48, 64)
        assert f"kv.{schedule}.budgets [48, 64] is now [48, 66]" in caplog.text
        assert f"kv.{schedule}.starts" not in caplog.text


@pytest.mark.parametrize(
    ("cache", "key"),
    [("rkv:{}", "schedules"), ("rkv:budget=90,select=quest,select_budget={}", "select_schedules")],
)
def test_an_evaluation_is_not_gone_on_with_under_another_schedule(tmp_path, file, cache, key):
    def record(*budgets: int, resume: bool) -> Record:
        kv = ("full", cache.format(file(*budgets)))
        return Record(
            tmp_path, Evaluation(models=("tiny",), benchmarks=("lookup",), kv=kv), {}, resume=resume, began=0.0
        )

    record(48, 64, resume=False)
    record(48, 64, resume=True)
    with pytest.raises(ValueError, match=rf"other settings: {key}\..*\.budgets \[48, 64\] is now \[48, 80\]"):
        record(48, 80, resume=True)


def test_a_measurement_has_its_name():
    config = BenchConfig(device="cpu", dtype="float32", rows=4)
    label = default_label(config, RKV(budget=NAME), EngineConfig())
    assert f"rkv, {NAME}+128, 4 rows" in label and label.endswith("standard")
    other = default_label(replace(config, seed=3), RKV(budget=64, lam=0.9), EngineConfig(page_size=16))
    assert other.endswith("standard, seed 3, lam 0.9, page_size 16")


def test_a_schedule_of_another_model_or_of_shorter_contexts_is_said(tmp_path, caplog):
    path = str(tmp_path / "schedule.json")
    given = ("calibrate", "cost", "--shape", "qwen3-1.7b", "--budget", path, "--prompt", "200", "--output", "800")
    save(constant(512), Path(path), model="Qwen/Qwen3-1.7B", longest=1000)
    assert run(*given)[2] == "" and not caplog.records
    save(constant(512), Path(path), model="embedded", kv={"policy": "rkv"}, longest=999)
    run(*given)
    assert f"{path} was calibrated on embedded with rkv; the shape here is qwen3-1.7b." in caplog.text
    assert "calibrated with contexts of at most 999 tokens; beyond them its last budget is kept." in caplog.text
