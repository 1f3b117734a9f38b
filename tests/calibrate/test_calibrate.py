# SPDX-License-Identifier: Apache-2.0
"""A calibration as a whole: a schedule that train takes, nothing done twice, one sentence an error."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace

import pytest
from commands import run

from sparse_rl.calibrate import Calibration, CalibrationConfig, CalibrationObserver, calibrate
from sparse_rl.calibrate.analysis import doubts, tail_row
from sparse_rl.calibrate.tokens import Tokens
from sparse_rl.evaluate.plan import parse_cache
from sparse_rl.kv import RKV
from sparse_rl.kv.schedule import load as load_schedule
from sparse_rl.model.load import load
from sparse_rl.report import calibration_page, calibration_plots
from sparse_rl.rollout import EngineConfig, Sampling
from sparse_rl.tasks import Chain

CONFIG = CalibrationConfig(budgets=(12, 24, 40), bin=12, min_tokens=40, bootstrap=10, verify=2)


class Watcher(CalibrationObserver):
    """Which runs were made; after `stop` of them it interrupts."""

    def __init__(self, stop: int | None = None) -> None:
        self.made: list[str] = []
        self.done = 0
        self.stop = stop

    def on_begin(self, budgets, done):
        self.done = done

    def on_run(self, run, seconds, left_s):
        self.made.append(run)
        if len(self.made) == self.stop:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def small():
    return Calibration(
        loaded=load("embedded"),
        policy=RKV(interval=4, window=4),
        prompts=Chain(letters=3, steps=2, filler=0).stream(0, 6, 0),
        sampling=Sampling(n=1, max_tokens=20, stop_ids=()),
        engine=EngineConfig(rows=6, page_size=16),
        config=CONFIG,
    )


def test_a_killed_calibration_goes_on_to_the_same_schedule(small, tmp_path):
    whole = calibrate(small, tmp_path / "whole")
    longest = json.loads((tmp_path / "whole" / "schedule.json").read_text())["longest"]
    assert longest == max(len(prompt.ids) for prompt in small.prompts) + small.sampling.max_tokens
    with pytest.raises(KeyboardInterrupt):
        calibrate(small, tmp_path / "killed", observer=Watcher(stop=3))
    kept = {path.name: path.read_bytes() for path in (tmp_path / "killed" / "runs").iterdir()}
    assert len(kept) == 3
    with pytest.raises(ValueError, match="has a calibration in it; go on with it"):
        calibrate(small, tmp_path / "killed")
    watcher = Watcher()
    again = calibrate(small, tmp_path / "killed", resume=True, observer=watcher)
    assert watcher.done == 2 and watcher.made[0] == "00040" and "full" not in watcher.made
    assert all((tmp_path / "killed" / "runs" / name).read_bytes() == content for name, content in kept.items())
    for key in ("schedule", "runs", "floor", "verified", "bins"):
        assert again[key] == whole[key]
    for name, value in (("seed", 1), ("temperature", 0.5), ("n", 2), ("max_tokens", 21)):
        other = replace(small, sampling=replace(small.sampling, **{name: value}))
        with pytest.raises(ValueError, match=rf"other settings: sampling\.{name} .* is now {value}"):
            calibrate(other, tmp_path / "killed", resume=True)


def test_another_target_needs_no_new_runs_of_budgets(small, tmp_path):
    first = calibrate(small, tmp_path)
    watcher = Watcher()
    config = replace(CONFIG, tail="mean", target=0.999, verify=0)
    second = calibrate(replace(small, config=config), tmp_path, resume=True, observer=watcher)
    assert watcher.made == [] and second["runs"] == first["runs"]
    assert second["schedule"]["budgets"] != first["schedule"]["budgets"]
    relative = replace(config, relative=True, target=0.9)
    third = calibrate(replace(small, config=relative), tmp_path, resume=True)
    assert third["targets"] == pytest.approx([0.9 * floor for floor in tail_row(third["floor"], relative)])


def test_the_grid_ends_at_the_longest_context_that_was_sampled(small, tmp_path):
    config = CalibrationConfig(num_budgets=2, page=8, bin=12, min_tokens=20, bootstrap=0, verify=0)
    sampling = replace(small.sampling, n=8, max_tokens=60, stop_ids=tuple(range(0, 35, 2)))
    asked = replace(small, sampling=sampling, config=config)
    found = calibrate(asked, tmp_path)
    tokens = Tokens.load(tmp_path / "runs" / "full.npz")
    longest = int(tokens.contexts.max()) + 1
    assert longest < max(asked.budgets()) - 8 and longest <= found["budgets"][-1] < longest + 8


def test_who_wants_to_be_sure_asks_it_of_the_intervals_lower_end(small, tmp_path):
    sure = replace(CONFIG, sure=True, relative=True, bootstrap=20, verify=0)
    results = calibrate(replace(small, config=sure), tmp_path)
    found = [each["top20"]["all"] for each in results["runs"][0]["bins"]]
    assert tail_row(results["runs"][0], sure) == [group["p05_interval"][0] for group in found]
    assert any(group["p05_interval"][0] < group["p05"] for group in found)
    floor = [each["top20"]["all"]["p05"] for each in results["floor"]["bins"]]
    assert results["targets"] == pytest.approx([0.915 * p05 for p05 in floor])
    # and that is what is shown
    assert calibration_plots.tails(results["runs"][0], results) == tail_row(results["runs"][0], sure)
    assert calibration_page.summary_lines(results)[0].startswith("lower end of p05 of top20 overlap")
    _, rows = calibration_page.tail_table(results)
    assert rows[0][1:] == [f"{group['p05_interval'][0]:.3f} ({group['p05']:.3f})" for group in found]
    head, rows = calibration_page.schedule_table(results)
    assert head[3] == "alone (p05)" and rows[0][-1] == _three(tail_row(results["floor"], sure)[0])
    place = results["budgets"].index(int(rows[-1][1]))
    assert place == 0 or rows[-1][4] == _three(tail_row(results["runs"][place - 1], sure)[-1])
    plain = results | {"settings": results["settings"] | {"sure": False}}
    assert calibration_plots.asked(plain) == "p05 of top20 overlap"
    assert calibration_plots.tails(results["runs"][0], plain) == [group["p05"] for group in found]


def test_the_curves_are_of_what_decided(small, tmp_path):
    from matplotlib.figure import Figure

    sure = replace(CONFIG, sure=True, bootstrap=20, verify=0)
    results = calibrate(replace(small, config=sure), tmp_path)
    for panel in (calibration_plots._by_budget, calibration_plots._by_context):
        axes = Figure().subplots()
        panel(axes, results)
        assert axes.get_title().startswith("lower end of p05")
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    run = next(run for run in results["runs"] if f"budget {run['budget']}" in drawn)
    assert drawn[f"budget {run['budget']}"] == tail_row(run, sure)


def _three(value):
    return f"{value:.3f}"


def test_the_schedule_is_a_cache_s_budget(small, tmp_path, monkeypatch):
    results = calibrate(small, tmp_path, named={"model": "embedded"})
    path = tmp_path / "schedule.json"
    load_schedule.cache_clear()
    assert list(parse_cache(f"rkv:{path},window=4").schedule.budgets) == list(results["schedule"]["budgets"])
    said = json.loads(path.read_text())
    assert said["model"] == "embedded" and said["target"] == 0.86 and said["kv"]["policy"] == "rkv"
    code, _, err = run("train", "--kv.policy", "rkv", "--kv.window", "4", "--kv.budget", str(path), "--dry-run")
    assert (code, err) == (0, "")
    monkeypatch.setattr(calibration_page, "draw_svg", lambda results: "<svg></svg>")
    shown = calibration_page.page(results | {"command": "<script>", "notes": ["<script>"], "model": "<script>"})
    assert "<script>" not in shown and "Beta fits" in shown


def measured(low, rejected, **more):
    """A run of one bin."""
    return {"bins": [{"top20": {"all": {"p05": 0.9, "p05_interval": [low, 0.99]}}}], "rejected_frac": rejected, **more}


def test_a_schedule_that_would_train_badly_says_so():
    """What counts is the schedule as run, its interval's lower end and its rejections; without that run, its budget."""
    sure, plain = CalibrationConfig(sure=True), CalibrationConfig()
    results = {"bins": [(0, 60)], "targets": [0.86], "schedule": {"starts": [0], "budgets": [40]}}
    results["floor"] = measured(0.95, 0.0)
    results["runs"] = [measured(0.1, 0.9, budget=32), measured(0.5, 0.3, budget=40)]
    (said,) = doubts(results, plain)
    assert "in the contexts 0-60, down to 0.500" in said and "reject 30.0 % of the rollouts" in said
    assert "give --sure, more samples (--n, with another --output) or a larger --target; a veto" in said
    assert said.endswith("(training warns above 15 %): ask more of the tail (--resume --tail p01).")
    (said,) = doubts(results | {"verified": measured(0.85, 0.15)}, sure)
    assert "down to 0.850" in said and "reject" not in said and "--sure" not in said and "a larger --target" in said
    (said,) = doubts(results | {"verified": measured(0.87, 0.16)}, plain)
    assert "interval" not in said and "reject 16.0 %" in said
    more = [*results["runs"], measured(0.9, 0.12, budget=48), measured(0.9, 0.0, budget=56)]
    (said,) = doubts(results | {"runs": more}, CalibrationConfig(tail="p01"))
    assert said.endswith("ask for a larger --target, or take a constant budget: 48 rejects 12.0 %.")
    assert doubts(results | {"verified": measured(0.86, 0.15)}, sure) == []
    no_interval = {"bins": [{"top20": {"all": {"p05": 0.9}}}], "rejected_frac": 0.0}
    assert doubts(results | {"verified": no_interval}, plain) == []
    beyond = results | {"floor": measured(0.7, 0.0), "verified": measured(0.7, 0.0)}
    assert doubts(beyond, sure) == [], "no larger target where the dense cache does not meet this one"


def test_settings_that_cannot_be():
    for settings, said in (
        ({"sure": True, "bootstrap": 0}, "sure needs the intervals"),
        ({"target": 1.2}, "target is 1.2"),
        ({"tail": "p10"}, "tail is 'p10'; choose one of p01, p05, mean"),
        ({"budgets": (8, 8)}, "give each once"),
        ({"lowest": 9, "highest": 8}, "lowest is 9, above highest"),
        ({"min_tokens": 3}, "min_tokens is 3; it must be at least 20"),
        ({"entropy": math.inf}, "entropy is inf"),
        ({"entropy": float("nan")}, "entropy is nan"),
        ({"num_budgets": 10**9}, "num_budgets is 1000000000; it must be at most 1000"),
        ({"bootstrap": 10**9}, "bootstrap is 1000000000; it must be at most 10000"),
        ({"bin": 10**30}, "bin is 10+; it must be at most 16777216"),
    ):
        with pytest.raises(ValueError, match=said):
            CalibrationConfig(**settings)


def test_too_few_tokens(small, tmp_path):
    most = len(small.prompts) * small.sampling.n * small.sampling.max_tokens
    few = replace(small, config=replace(CONFIG, min_tokens=most + 1, budgets=(12,)))
    with pytest.raises(ValueError, match=rf" are {most:,} tokens, fewer than --min-tokens \({most + 1:,}\); give more"):
        calibrate(few, tmp_path / "known before")
    assert not (tmp_path / "known before").exists()
    decision = replace(CONFIG, min_tokens=most, budgets=(12,), tokens="decision", entropy=50)
    with pytest.raises(ValueError, match="the dense cache sampled 0 decision tokens, fewer than --min-tokens"):
        calibrate(replace(small, config=decision), tmp_path / "known after")


def test_the_command(tmp_path, monkeypatch):
    """End to end, at the smallest size."""
    flags = [
        "--num-prompts",
        "4",
        "--n",
        "1",
        "--max-tokens",
        "16",
        "--task.letters",
        "3",
        "--kv",
        "rkv:window=4,interval=4",
    ]
    flags += ["--budgets", "12", "24", "--bin", "16", "--min-tokens", "30", "--verify", "1", "--bootstrap", "5"]
    code, out, err = run("calibrate", *flags, "--dry-run")
    assert code == 0, err
    assert "4 prompts x 1 samples" in out and "2 budgets at most: 12, 24" in out
    code, out, err = run("calibrate", *flags, "--output", str(tmp_path / "c"))
    assert code == 0, err
    assert "schedule.json" in out and "00012: done in" in err
    assert f"--kv.policy rkv --kv.window 4 --kv.interval 4 --kv.budget {tmp_path / 'c' / 'schedule.json'}" in out
    assert (
        re.search(r"schedule.json --sampling.max_tokens \d+ --correction.preset sparse_rl", out)
        and "(sparse_rl rejects at xi < 1e-4" in out
    )
    results = json.loads((tmp_path / "c" / "results.json").read_text())
    assert results["model"] == "embedded"
    low, high = results["verified"]["bins"][0]["top20"]["all"]["p05_interval"]
    assert f"({low:.3f}-{high:.3f})" in out and f"{100 * results['verified']['rejected_frac']:.1f} % of 4" in out
    shown = (tmp_path / "c" / "report.html").read_text()
    assert "<svg" in shown and f"{results['schedule']['budgets'][-1]}, chosen" in shown and ">target<" in shown
    assert (tmp_path / "c" / "report.png").read_bytes().startswith(b"\x89PNG")
    code, _, err = run("calibrate", *flags, "--output", str(tmp_path / "c"))
    assert code == 2 and "--resume" in err
    (tmp_path / "c" / "report.png").unlink()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, _ = run("calibrate", *flags, "--output", str(tmp_path / "c"), "--resume")
    assert code == 0 and "report.html" in out and "report.png" not in out, "there is none without matplotlib"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--kv", "full"], "'full' has no budget to calibrate"),
        (["--kv", "rkw"], "did you mean 'rkv'?"),
        (["--kv", "rkv:64"], "'rkv:64' has a budget, but that is what is looked for; leave it out"),
        (["--kv", 'rkv:{"budget": 64}'], "has a budget, but that is what is looked for"),
        (["--temperature", "0"], "training samples"),
        (["--num-prompts", "0"], "--num-prompts is 0"),
        (["--prompts", "a.jsonl", "--benchmarks", "gsm8k"], "both with --prompts and with --benchmarks"),
        (["--kv", "rkv", "--budgets", "4"], "error: budget is 4, but the protected entries"),
        (["--max-tokens", "0"], "--max-tokens is 0"),
        (["--benchmarks", "gsm8k", "--task.name", "nosuch"], "task.name is given, but prompts are those of --b"),
        (["--prompts", "a.jsonl", "--task.letters", "3"], "task.letters is given, but prompts are those of --prompts"),
        (["--data-dir", "/nonexistent"], "--data-dir is '/nonexistent', but there are no --benchmarks; name some"),
        (["--prompts", "a.jsonl", "--data-dir", "."], "but there are no --benchmarks"),
        (["--targett", "0.9"], "did you mean --target?"),
    ],
)
def test_errors_are_one_sentence(flags, said):
    code, _, err = run("calibrate", *flags, "--dry-run")
    assert code == 2 and said in err and err.count("\n") == 1


def test_prompts_of_a_file_and_a_benchmark(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "a=b1;b=a2;a|"}\n{"prompt": "a=b1;b=a2;b|"}\n')
    own = ["--prompts", str(tmp_path / "mine.jsonl"), "--max-tokens", "30", "--dry-run"]
    code, _, err = run("calibrate", *own)
    assert code == 2 and "2 prompts x 8 samples of 30 tokens are 480 tokens, fewer than --min-tokens (2,000)" in err
    code, out, err = run("calibrate", *own, "--min-tokens", "480")
    assert code == 0, err
    assert "2 prompts" in out and "at most 42 tokens" in out
    tiny = ["--model", "tiny", "--benchmarks", "gsm8k", "svamp", "--num-prompts", "5", "--max-tokens", "64"]
    code, out, err = run("calibrate", *tiny, "--dry-run")
    assert code == 0 and "5 prompts" in out, err


def test_cost_command():
    code, out, err = run("calibrate", "cost", "--shape", "qwen3-1.7b", "--gpu", "h200", "--pages", "16", "64", "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["eflops"]["printed"] == pytest.approx(4.8, rel=0.02) and list(found["pages"]) == ["16", "64"]
    assert found["eflops"]["corrected"] > found["eflops"]["printed"] > found["eflops"]["with dense layers"]
    code, out, err = run("calibrate", "cost", "--fixed-ms", "5", "--page", "64", "--contexts", "8192", "--json")
    assert code == 0, err
    slower = json.loads(out)
    assert slower["steps"][0]["dense_ms"] == pytest.approx(found["steps"][0]["dense_ms"] + 5)
    landmarks = 26 / 28 * 16 * 8192 * 28 * 8 * 128 * 2 * (1 / 16 - 1 / 64) / found["machine"]["bandwidth"]
    saved = found["steps"][0]["sparse_ms"] + 5 - slower["steps"][0]["sparse_ms"]
    assert saved == pytest.approx(1e3 * landmarks), "a quarter of the landmarks"
    for given in ({"bandwidth": 1e12}, {"flops": 1e14}, {"bandwidth": 1e12, "flops": 1e14}):
        flags = [text for name, value in given.items() for text in (f"--{name}", str(value))]
        code, out, err = run("calibrate", "cost", "--gpu", "h200", *flags, "--json")
        assert code == 0, err
        known = {name: found["machine"][name] for name in ("bandwidth", "flops")}
        assert {name: json.loads(out)["machine"][name] for name in known} == known | given
    for flag, value, said in (
        ("--bandwidth", ".nan", "--bandwidth is nan; it must be above 0 and finite"),
        ("--flops", "0", "--flops is 0.0"),
        ("--fixed-ms", ".inf", "--fixed-ms is inf"),
        ("--output", "100000000000", "--output is 100000000000; it must be from 1 to 16777216"),
        ("--pages", "0", "--pages has 0 among them"),
        ("--contexts", str(10**29), "among them; they must be from 1 to 16777216"),
        ("--budget", "²", "error: --budget is '²', which is neither a whole number"),
    ):
        code, _, err = run("calibrate", "cost", flag, value)
        assert code == 2 and said in err, err
    for flags, said in (
        ("--kv rkv:64 --budget 77", "--budget is '77', but nothing reads it with --kv"),
        ("--measure --budget 77", "--measure runs a policy, and --kv names none"),
        ("--device cuda:9", "--device is 'cuda:9', but nothing reads it without --measure"),
        ("--kv rkv:64 --measure --fixed-ms 2", "--fixed-ms is 2.0, but nothing reads it with --measure"),
        ("--kv quest:64 --measure --page 24", "--page is 24; to be measured it must be a multiple of 16"),
    ):
        code, _, err = run("calibrate", "cost", *flags.split())
        assert code == 2 and said in err, err
    code, _, err = run("calibrate", "cost", "--measure")
    assert code == 2 and "--kv names none" in err
    code, _, err = run("calibrate", "cost", "--result", "cost.json")
    assert code == 2 and "nothing is measured" in err


def test_steps_are_measured_with_the_pages_of_the_prediction(monkeypatch):
    sizes = {}

    def time_step(loaded, config, policy, engine, context, *, show):
        sizes[policy.name, context] = engine.page_size
        return 1.0, float(context)  # longer than any machine's bandwidth explains

    monkeypatch.setattr("sparse_rl.bench.steps.time_step", time_step)
    measured = ["--shape", "tiny", "--device", "cpu", "--rows", "2", "--contexts", "64", "--measure", "--page", "32"]
    for kv in ("pages_mean:96", "rkv:budget=128,interval=4,select=pages_mean,select_budget=96"):
        code, out, err = run("calibrate", "cost", *measured, "--kv", kv, "--json")
        assert code == 0, err
        found = json.loads(out)
        assert found["reading"]["page"] == 32 == sizes[kv.partition(":")[0], 64]
        (step,) = found["steps"]
        assert step["predicted_dense_ms"] == pytest.approx(step["dense_ms"]), "what is missing is the fixed cost"
        assert step["predicted_ratio"] == pytest.approx(step["predicted_dense_ms"] / step["predicted_sparse_ms"])
        assert step["error"] == pytest.approx(step["predicted_ratio"] / step["ratio"] - 1)


def test_a_measurement_is_told_from_others_by_every_setting(tmp_path, monkeypatch):
    monkeypatch.setattr("sparse_rl.bench.steps.time_step", lambda *args, show: (1e-3, 64.0))
    file, plain = tmp_path / "cost.json", ["--shape", "tiny", "--device", "cpu", "--kv", "pages_mean:96", "--measure"]
    named = "tiny, cpu, float32, pages_mean:96, 16 rows"
    expected = {
        named: [],
        f"{named}, contexts [64, 128]": ["--contexts", "64", "128"],
        f"{named}, page 32": ["--page", "32"],
        f"{named}, bandwidth 1000000000.0, flops 1000000000.0": ["--bandwidth", "1e9", "--flops", "1e9"],
    }
    for flags in [*expected.values(), []]:
        code, _, err = run("calibrate", "cost", *plain, *flags, "--result", str(file))
        assert code == 0, err
    assert [record["label"] for record in json.loads(file.read_text())] == list(expected)


@pytest.mark.slow
def test_the_cost_model_is_checked_on_this_machine(tmp_path):
    measured = ["--shape", "tiny", "--device", "cpu", "--rows", "2", "--contexts", "24", "--measure"]
    code, out, err = run(
        "calibrate",
        "cost",
        *measured,
        "--kv",
        "rkv:budget=16,interval=4",
        "--json",
        "--result",
        str(tmp_path / "c.json"),
    )
    assert code == 0, err
    found = json.loads(out)
    (step,) = found["steps"]
    (record,) = json.loads((tmp_path / "c.json").read_text())
    assert record["label"] == "tiny, cpu, float32, rkv:budget=16,interval=4, 2 rows, contexts [24]"
    assert record["commit"] == found["commit"]
    assert record["results"]["reached"] == pytest.approx(found["reached"], rel=1e-5)
    assert 1e8 < found["reached"]["bandwidth"] < 1e12 and 1e8 < found["reached"]["flops"] < 1e13, "of a CPU"
    assert record["results"]["worst_error"] == pytest.approx(abs(step["error"]), rel=1e-5)
    assert found["machine"]["fixed_s"] > 0 and step["error"] == pytest.approx(
        step["predicted_ratio"] / step["ratio"] - 1
    )
