# SPDX-License-Identifier: Apache-2.0
"""`sparse-rl bench rollout`: what it counts, what it writes, what it refuses."""

from __future__ import annotations

import json
import math
import sys

import pytest
import torch

from sparse_rl.bench import BenchConfig, measure
from sparse_rl.bench.record import merge, read
from sparse_rl.bench.work import make_prompts, output_lengths
from sparse_rl.cli import bench as bench_cli
from sparse_rl.cli import main
from sparse_rl.cli.parsing import parse
from sparse_rl.kv import RKV, Full
from sparse_rl.rollout import EngineConfig

SMALL = {"shape": "tiny", "rows": 4, "prompt": 12, "profile": False}
LENGTHS = {"cpu": 40, "cuda": 800}  # a GPU's tokens come in lots
SPARSE = RKV(budget=16, interval=8)


def measured(device, policy=None, **settings):
    config = BenchConfig(**{**SMALL, "device": device, "output": LENGTHS[device], **settings})
    return measure(
        config,
        policy or Full(),
        EngineConfig(page_size=16),
        torch.float32,
        say=lambda text: None,
        show=lambda progress: None,
    )


def bench(*arguments, capsys):
    code = 0
    try:
        main(["bench", *arguments])
    except SystemExit as exit:
        code = exit.code
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    ("flags", "rows", "output"),
    [
        (["--device", "cpu"], 16, 1024),
        (["--device", "cpu", "--rows", "256"], 256, 1024),
        (["--device", "cuda:1", "--output", "64"], 256, 64),
        (["--device", "cuda"], 256, 4096),
    ],
)
def test_a_cpu_gets_little_work_where_nobody_says(flags, rows, output):
    config = bench_cli._config(parse(bench_cli._parser(), flags))
    assert (config.rows, config.output, config.device) == (rows, output, flags[1])


def test_standard_work_counts_every_token(device):
    results = measured(device, SPARSE)
    assert results["tokens"] == 2 * 4 * LENGTHS[device] and not results["cut"]
    assert results["tokens_per_s"] == pytest.approx(results["tokens"] / results["seconds"])
    # Caches grow from 16 to 24 entries and are cut back, a window is whole intervals of that.
    assert results["window"]["mean_entries"] == pytest.approx(20.5, abs=0.5)
    assert results["step_ms"] * results["window"]["steps"] < 1e3 * results["seconds"]
    assert results["kv"]["dense_bytes"] == 4 * (12 + LENGTHS[device] - 1) * 2 * 4 * 2 * 32 * 4
    assert 0 < results["kv"]["ratio"] < 1 and 0 < results["kv"]["saved_frac"] < 1
    floor = results["xi_floor"]
    assert 0 < floor["mean"] <= floor["max"] < 1e-3 and 0 < floor["module_mean"] <= floor["module_max"] < 1e-3
    assert (floor["tokens"], floor["context"]) == (3 * 12, 12 + 12), "12 tokens before the first cut"
    assert results["roofline"] is None or device != "cpu"


def test_dense_saves_nothing(device):
    results = measured(device, n=4)
    assert results["kv"]["saved_frac"] == 0.0 and results["kv"]["ratio"] >= 1.0
    assert results["tokens"] == 2 * 4 * LENGTHS[device]


def test_lognormal_work_counts_every_token(device):
    results = measured(device, SPARSE, work="lognormal", seed=5)
    config = BenchConfig(**SMALL, output=LENGTHS[device], work="lognormal", seed=5)
    lengths = output_lengths(make_prompts(config, 259))
    assert len(lengths) == 16 and len({*lengths}) > 4 and results["tokens"] == sum(lengths)
    assert results["late_capture_s"] == 0.0


def test_a_cut_run_measures_its_window_alone(device):
    results = measured(device, SPARSE, output=2000, max_steps=30)
    assert results["cut"] and results["tokens"] == 4 * results["window"]["steps"]
    assert results["window"]["steps"] == 16 or device != "cpu"
    assert results["step_ms"] == pytest.approx(1e3 * 4 / results["tokens_per_s"])
    assert results["kv"]["ratio"] < 0.05  # of 2012 tokens
    dense = measured(device, prompt=100, output=2000, max_steps=16, n=4)
    assert dense["kv"]["ratio"] is None and 100 < dense["window"]["mean_entries"] < 300


def test_roofline_with_given_limits(device):
    results = measured(device, SPARSE, bandwidth=1e9, flops=1e9)
    roofline = results["roofline"]
    linear = 4 * (128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 384) + 128 * 259
    entries = results["window"]["mean_entries"]
    step = (max(4 * linear, 8 * linear) + 4 * entries * 2048 + 4 * 4 * 259) / 1e9
    assert roofline["step_ms"] == pytest.approx(1e3 * step)
    assert roofline["share"] == pytest.approx(roofline["step_ms"] / results["step_ms"])


def test_a_step_is_split_by_kernels_on_a_gpu(device):
    results = measured(device, SPARSE, output=400 if device != "cpu" else 40, profile=True)
    split = results["split_ms"]
    assert split["total"] == results["step_ms"]
    if device == "cpu":
        assert split == {"total": results["step_ms"]}
        return
    parts = [ms for name, ms in split.items() if name != "total"]
    assert min(split[name] for name in ("attention", "linear", "sampling", "compaction")) > 0
    assert sum(parts) == pytest.approx(split["total"]) or split["other"] == 0


def test_a_pool_too_small_for_the_rows_is_said_in_a_cut_run(device):
    config = BenchConfig(**{**SMALL, "device": device, "prompt": 60, "output": 100, "max_steps": 40})
    with pytest.raises(ValueError, match=r"rows are in flight.*engine.pool_bytes"):
        measure(
            config,
            Full(),
            EngineConfig(page_size=16, pool_pages=12),
            torch.float32,
            say=lambda text: None,
            show=lambda progress: None,
        )


def test_the_command_prints_and_merges_by_label(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COMMIT", "abc1234")
    monkeypatch.setitem(sys.modules, "vllm", None)
    file = tmp_path / "speed.json"
    small = ["rollout", "--device", "cpu", "--rows", "4", "--prompt", "8", "--output", "24", "--no-profile"]
    sparse = ["--kv.policy", "rkv", "--kv.budget", "16", "--kv.interval", "8"]
    more = ["--against", "generate,vllm", "--generate-tokens", "10", "--result", str(file)]
    code, out, _ = bench(*small, *sparse, *more, capsys=capsys)
    assert code == 0 and "vllm      no figure: vLLM is not installed" in out and "tok/s end to end (192 tokens" in out
    assert "outputs of at most 10 tokens" in out and "roofline  needs" in out and "saved" in out
    (record,) = json.loads(file.read_text())
    assert record["label"] == "tiny, cpu, float32, rkv, 16+8, 4 rows, 8+24, standard"
    assert record["commit"] == "abc1234" and record["command"].startswith("sparse-rl bench rollout --device cpu")
    assert record["versions"]["torch"] and record["hardware"]
    assert record["settings"]["kv"]["budget"] == 16 and record["settings"]["engine"]["rows"] == 4
    rival = record["results"]["against"]["generate"]
    assert rival["tokens"] == 40
    assert rival["ratio"] == pytest.approx(record["results"]["tokens_per_s"] / rival["tokens_per_s"], rel=1e-4)

    bench(*small, "--result", str(file), "--label", "dense", capsys=capsys)
    bench(*small, *sparse, "--result", str(file), capsys=capsys)
    again, dense = json.loads(file.read_text())
    assert again["label"] == record["label"] and again["results"]["against"] == {} and dense["label"] == "dense"


def test_choosing_pages_against_a_dense_cache(tmp_path, capsys):
    """Layers 0 and 1 of 4 read all of the 100 to 130 entries, the others at most 48."""
    file = tmp_path / "speed.json"
    work = ["rollout", "--device", "cpu", "--rows", "2", "--prompt", "100", "--output", "60", "--max-steps", "24"]
    select = ["--kv.policy", "pages_mean", "--kv.budget", "48", "--against", "full", "--result", str(file)]
    code, out, err = bench(*work, *select, capsys=capsys)
    assert code == 0 and "a dense cache, " in out, err
    (record,) = json.loads(file.read_text())
    results, dense = record["results"], record["results"]["against"]["full"]
    held = 1 + 100 + (results["window"]["first_step"] + 24 - 1) / 2
    assert results["window"]["mean_entries"] == pytest.approx((held + 40.5) / 2, abs=2)
    assert 0.6 < results["kv"]["read_frac"] < 0.75
    assert results["xi_floor"]["max"] < 1e-4 and results["xi_floor"]["context"] == 160, "of a dense cache"
    assert dense["ratio"] == pytest.approx(dense["step_ms"] / results["step_ms"], rel=1e-3)
    assert record["label"] == "tiny, cpu, float32, pages_mean, 48, 2 rows, 100+60, standard, 24 steps"


@pytest.mark.some(0)
def test_an_adapter_is_timed_beside_the_same_work_without_it(tmp_path, capsys):
    file = tmp_path / "speed.json"
    small = ["rollout", "--device", "cpu", "--rows", "4", "--prompt", "8", "--output", "24", "--adapter", "3"]
    code, out, err = bench(*small, "--result", str(file), capsys=capsys)
    assert code == 0, err
    (record,) = json.loads(file.read_text())
    ours, plain = record["results"], record["results"]["without_adapter"]
    assert plain["tokens"] == ours["tokens"] == 192 and record["label"].endswith("adapter 3")
    assert f"adapter   {plain['tokens_per_s'] / ours['tokens_per_s']:.2f}x the time of the same without it (" in out


def test_a_rival_that_fails_costs_nothing_but_its_own_figure(tmp_path, monkeypatch, capsys):
    def fail(*given):
        raise RuntimeError("CUDA out of memory\nand so on")

    monkeypatch.setattr("sparse_rl.bench.rollout.time_generate", fail)
    file = tmp_path / "speed.json"
    small = ["rollout", "--device", "cpu", "--rows", "2", "--prompt", "8", "--output", "6", "--result", str(file)]
    code, out, _ = bench(*small, "--against", "generate", capsys=capsys)
    assert code == 0 and "tok/s end to end (24 tokens" in out and "generate  no figure: CUDA out of memory\n" in out
    (record,) = json.loads(file.read_text())
    assert record["results"]["against"] == {"generate": {"error": "CUDA out of memory"}}


@pytest.mark.parametrize("settings", [["--rows", "1"], ["--rows", "2", "--n", "4"], ["--kv.budget", "6"]])
@pytest.mark.some(1)
def test_every_work_is_warmed_up_and_has_a_floor(settings, tmp_path, capsys):
    """One row, groups wider than the rows, prompts that are cut at once."""
    file = tmp_path / "speed.json"
    small = ["rollout", "--device", "cpu", "--rows", "2", "--prompt", "8", "--output", "20", "--result", str(file)]
    code, _, err = bench(
        *small, "--kv.policy", "streaming", "--kv.budget", "12", "--kv.interval", "4", *settings, capsys=capsys
    )
    assert code == 0, err
    (record,) = json.loads(file.read_text())
    floor = record["results"]["xi_floor"]
    assert 0 <= floor["mean"] < 1e-4 and 0 <= floor["module_mean"] < 1e-4 and floor["tokens"] > 0


def test_an_interval_of_one_can_be_cut(tmp_path, capsys):
    more = ["--kv.policy", "streaming", "--kv.budget", "8", "--kv.interval", "1", "--max-steps", "20"]
    code, out, err = bench(
        "rollout", "--device", "cpu", "--rows", "4", "--output", "32", "--prompt", "8", *more, capsys=capsys
    )
    assert code == 0 and "cut: 19 steps from step 1 on" in out, err


def test_merge_keeps_what_has_another_label(tmp_path):
    file = tmp_path / "a.json"
    for label, value in (("a", 1 / 3), ("b", 2), ("a", 3), ("c", math.inf)):
        merge(file, {"label": label, "results": {"x": value}})
    assert [(r["label"], r["results"]["x"]) for r in read(file)] == [("a", 3), ("b", 2), ("c", None)]
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    file.write_text('{"label": "a"}')
    with pytest.raises(ValueError, match="something else than measurements"):
        merge(file, {"label": "a"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "qwen2.5-1.5"], "shape 'qwen2.5-1.5' is unknown (did you mean 'qwen2.5-1.5b'?)"),
        (["--rows", "0"], "--rows is 0; it must be at least 1"),
        (["--rows", "65536"], "--rows is 65536; it must be at most 65535"),
        (["--prompt", "100", "--output", "40900"], "are 41000 tokens, but tiny has 40960 positions"),
        (["--device", "cuda:77"], "device 'cuda:77' cannot be used here"),
        (["--work", "gaussian"], "--work is 'gaussian'; choose one of standard, lognormal"),
        (["--against", "generate,sglang"], "--against has 'sglang'; choose among full, generate, vllm"),
        (["--seed", str(2**63)], "--seed is 9223372036854775808; it must be below 2^63"),
        (["--engine.pool_pages", "-4"], "engine.pool_pages is -4; it must be at least 1"),
        (["--result", ""], "--result '.' is a folder; name a file in it"),
        (["--result", "/proc/x.json"], "--result '/proc/x.json' cannot be written"),
        (["--rows", "4", "--n", "3"], "--n is 3, which does not divide the 8 requests"),
        (["--work", "lognormal", "--max-steps", "9"], "--max-steps cuts the standard work"),
        (["--dtype", "int8"], "dtype 'int8' is unknown"),
        (["--result", "no/such/folder.json"], "there is no folder no/such"),
        (["--bugdet", "3"], "unknown option 'bugdet'"),
        (["--kv.policy", "rkv", "--output", "99", "--max-steps", "9"], "--max-steps is 9, but caches are full after"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(arguments, message, capsys):
    code, _, err = bench("rollout", *arguments, capsys=capsys)
    assert code == 2 and message in err and "Traceback" not in err


def test_only_rollouts_are_measured(capsys):
    assert bench("--help", capsys=capsys)[0] == 0
    for arguments in ([], ["training"]):
        code, _, err = bench(*arguments, capsys=capsys)
        assert code == 2 and "sparse-rl bench rollout" in err
