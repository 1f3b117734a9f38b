# SPDX-License-Identifier: Apache-2.0
"""`sparse-rl plan`: the settings of a training run in, what it holds and whether it fits out."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import yaml
from commands import assert_one_sentence, run

from sparse_rl.cli.plan import plan_comments, warn_of_memory
from sparse_rl.cli.train import read, train_parser
from sparse_rl.model.tiny import tiny_model
from sparse_rl.plan import Device

SHAPE = ["--shape", "qwen2.5-1.5b", "--sampling.max_tokens", "4096"]


def plan(*arguments: str) -> tuple[int, dict]:
    code, out, err = run("plan", *arguments, "--json")
    assert err == ""
    return code, json.loads(out)


def test_a_run_that_fits_and_one_that_does_not():
    code, out, _ = run("plan", *SHAPE, "--gpu", "h200")
    assert code == 0 and out.splitlines()[-1].startswith("fits: peak ")
    code, out, _ = run("plan", *SHAPE, "--memory", "20GB")
    assert code == 1 and "does not fit: learning needs " in out and "of 20.0 GB" in out
    assert "what would help, least harm first:" in out and "together: --" in out
    for part in ("weights", "masters", "gradients", "optimizer moments", "KV pool", "activations", "graph pool"):
        assert f"\n{part} " in out


@pytest.mark.parametrize(
    ("policy", "named"),
    [
        ([], "dense cache"),
        (["quest", "--kv.budget", "64"], "quest 64"),
        (["quest", "--kv.budget", "auto"], "quest up to "),
        (["rkv", "--kv.budget", "64", "--kv.interval", "8"], "rkv 64+8"),
    ],
)
def test_the_policy_is_named_whether_it_evicts_or_not(policy, named):
    _, out, err = run("plan", "--model", "tiny", *(["--kv.policy", *policy] if policy else []))
    assert not err and f" rows, {named}" in out and ("dense cache" in out) == (not policy)


def test_the_numbers_are_sums_of_their_parts():
    code, found = plan(*SHAPE, "--memory", "30GB", "--kv.policy", "rkv", "--loss.beta", "0.1")
    assert code == 1 and not found["fits"]
    for phase in found["phases"].values():
        assert phase["peak_bytes"] == sum(phase["holds"].values())
        driver = phase["holds"]["CUDA context"] + phase["holds"]["fragmentation"]
        assert phase["allocated_bytes"] == phase["peak_bytes"] - driver
    assert found["phases"]["rollout"]["holds"]["reference model"] == 2 * found["parameters"]
    assert found["rows"]["sparse"] > found["rows"]["dense"]
    assert found["remedies"] and found["together"][-1]["fits"]
    assert found["formulas"].keys() >= found["phases"]["learning"]["holds"].keys()


def test_every_setting_counts():
    _, base = plan(*SHAPE, "--gpu", "h100", "--kv.policy", "rkv")

    def peaks(found):
        return {phase: values["peak_bytes"] for phase, values in found["phases"].items()}

    for more in (
        ["--engine.rows", "64"],
        ["--kv.budget", "1024"],
        ["--prompt", "2048"],
        ["--update.max_tokens", "16384"],
        ["--dtype", "float32"],
        ["--loss.beta", "0.1"],
        ["--ranks", "2"],
        ["--num_generations", "2", "--trainer.prompts_per_step", "4"],  # TRL's names work too
        ["--engine.pool_bytes", "10000000000"],
        ["--kv.budget", "auto"],
        ["--distill.r", "64"],
    ):
        assert peaks(plan(*SHAPE, "--gpu", "h100", "--kv.policy", "rkv", *more)[1]) != peaks(base), more


def test_a_budget_that_moves_is_planned_at_its_largest():
    """Contexts of 100 + 4096 tokens, less the interval of 128, in multiples of 16."""
    base = [*SHAPE, "--memory", "40GB", "--engine.rows", "128", "--kv.policy", "rkv", "--prompt", "100"]
    auto, fixed = (plan(*base, "--kv.budget", budget)[1] for budget in ("auto", "4080"))
    assert auto["phases"] == fixed["phases"] and auto["rows"] == fixed["rows"]
    assert "up to 4080 + 128 entries a row" in auto["formulas"]["KV pool"]
    settings = {remedy["setting"] for remedy in auto["remedies"]}
    assert "control.largest 2040" in settings and not any("kv.budget" in each for each in settings)
    _, given = plan(*base, "--kv.budget", "auto", "--control.largest", "2040")
    assert "up to 2032 + 128 entries a row" in given["formulas"]["KV pool"]
    code, _, err = run("plan", *base, "--kv.budget", "auto", "--control.smallest", "8192")
    assert code == 2 and "control.auto has no budget to choose from" in err and "Lower control.smallest" in err


def test_a_cache_that_is_never_cut_is_told_of():
    """Sequences of 100 + 195 tokens; a cut is due at budget + 8 entries."""
    for budget, told in (("287", False), ("288", True)):
        _, out, _ = run("plan", "--prompt", "100", "--kv.budget", budget)
        assert ("never cut at such lengths: it is due at 296 entries, and sequences have at most 295" in out) == told


def test_a_latent_model_s_plan_says_what_its_cache_holds():
    _, out, _ = run("plan", "--model", "tiny:deepseek_v3")
    assert "4 expanded heads of 32 + 24 numbers a layer, 3,648 bytes a token" in out
    assert "expanded" not in run("plan", "--model", "tiny:llama")[1]


def test_recipes_and_models_at_hand_need_no_download():
    code, found = plan("--config", "qwen2.5-7b.yaml", "--gpu", "b200")
    assert found["parameters"] == 7_615_616_512 and found["dtype"] == "bfloat16" and found["rows"]["asked"] == 256
    assert code == 1 and "learning needs" in found["summary"]
    assert plan("--model", "Qwen/Qwen2.5-7B", "--gpu", "b200")[1]["dtype"] == "bfloat16", "as it is published"
    assert plan("--model", "smollm2", "--gpu", "b200")[1]["dtype"] == "float32", "as it is loaded"
    code, found = plan()
    assert code == 0 and found["model"] == "embedded" and found["dtype"] == "float32"
    assert "CUDA context" not in found["phases"]["rollout"]["holds"]


def test_a_folder_whose_name_begins_as_ours_has_its_own_dtype(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny_model("llama", dtype=torch.bfloat16).save_pretrained("tinyfoo")
    for model, dtype in (("tinyfoo", "bfloat16"), ("tiny", "float32"), ("tiny:qwen3", "float32")):
        assert plan("--config", "default.yaml", "--model", model)[1]["dtype"] == dtype


def test_an_adapter_is_planned_as_the_model_that_it_is_merged_into(tmp_path):
    _, base = plan()
    record = {"peft_type": "LORA", "base_model_name_or_path": "embedded"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(record))
    code, found = plan("--config", "default.yaml", "--model", str(tmp_path))
    assert code == 0 and found["model"] == str(tmp_path)
    assert found["dtype"] == base["dtype"] and found["phases"] == base["phases"]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--shape", "qwen2.5-77b", "--gpu", "h200"], ["did you mean 'qwen2.5-7b'?"]),
        (["--gpu", "h2000"], ["--gpu 'h2000'", "did you mean 'h200'?"]),
        (["--memory", "lots"], ["--memory is 'lots'"]),
        (["--ranks", "0"], ["--ranks is 0"]),
        (["--prompt", "0"], ["--prompt is 0"]),
        (["--prompt", "100000"], ["--prompt is 100000", "context"]),
        (["--device", "cuda:99"], ["cuda:99", "--gpu NAME"]),
        (["--shpe", "tiny"], ["did you mean --shape?"]),
        (["--dry-run"], ["dry-run"]),
        (["--top_p", "0.5"], ["sampling.top_p is 0.5"]),
        (["--gpu", "h200", "--ranks", "2", "--optimizer.kind", "adamw_8bit"], ["adamw_8bit", "under torchrun"]),
        (["--gpu", "h200", "--ranks", "2", "--optimizer.offload", "true"], ["offload is true", "under torchrun"]),
        (["--gpu", "h200", "--engine.rows", "10000000000000"], ["engine.rows is 10000000000000", "at most"]),
        (["--memory", "1e400GB"], ["--memory is '1e400GB'"]),
        (["--device", "tpu"], ["device 'tpu' cannot be used here"]),
        (["--lora.r", "129"], ["lora.r is 129", "wide (128)"]),
    ],
    ids=lambda value: " ".join(value)[:30],
)
def test_errors_are_one_sentence(arguments, parts):
    code, out, err = run("plan", *arguments)
    assert (code, out) == (2, "") and err.startswith("sparse-rl: error: ") and len(err.splitlines()) == 1
    for part in parts:
        assert part in err


def test_advice_for_several_processes_names_nothing_they_refuse():
    code, out, _ = run("plan", "--shape", "qwen2.5-7b", "--ranks", "2", "--gpu", "a100-40")
    assert code == 1 and "--lora.r" in out
    assert "optimizer.offload" not in out and "adamw_8bit" not in out


def test_advice_is_in_the_words_of_the_command(monkeypatch):
    """A run's processes are torchrun's."""
    run_settings = ["--dtype", "bfloat16", "--kv.policy", "rkv", "--sampling.max_tokens", "4096"]
    code, planned, _ = run("plan", "--shape", "qwen2.5-7b", "--gpu", "a100-80", *run_settings)
    assert code == 1 and "\n  --ranks " in planned and "torchrun" not in planned
    small = Device(name="small", memory=3_000_000)
    monkeypatch.setattr("sparse_rl.plan.choose_device", lambda *_, **__: small)
    code, shown, _ = run("train", "--dry-run")
    assert code == 0 and "\n#   torchrun --nproc-per-node " in shown and "--ranks" not in shown
    monkeypatch.setattr("sparse_rl.plan.choose_device", lambda *_, **__: replace(small, memory=40_000_000_000))
    settings, _, parts = read(["--model", "Qwen/Qwen2.5-7B", *run_settings], train_parser())
    (combined,) = (line for line in plan_comments(settings, parts, 2) if line.startswith("# together: "))
    assert re.match(r"# together: torchrun --nproc-per-node \d+ -m sparse_rl train --", combined)


def test_half_precision_is_refused_before_anything_is_loaded():
    for command in ("plan", "train"):
        assert_one_sentence(run(command, "--dtype", "float16"), "train in bfloat16 or float32")


def test_a_dry_run_has_the_plan_behind_its_settings():
    code, out, err = run("train", "--dry-run")
    assert (code, err) == (0, "")
    comments = [line for line in out.splitlines() if line.startswith("#")]
    assert out.splitlines()[-len(comments) :] == comments and "trainer" in yaml.safe_load(out)
    assert comments[0].startswith("# embedded: ") and comments[-1].startswith("# fits: peak ")


def test_a_dry_run_of_several_processes_plans_for_all(monkeypatch):
    _, planned, _ = run("plan", "--ranks", "4", "--device", "cpu")
    four = SimpleNamespace(first=True, size=4, grouped=False, together=lambda work: work())
    monkeypatch.setattr("sparse_rl.train.processes.joined", lambda: nullcontext(four))
    code, out, err = run("train", "--dry-run")
    assert (code, err) == (0, "")
    assert [line[1:].strip() for line in out.splitlines() if line[:1] == "#"] == [
        x.strip() for x in planned.splitlines()
    ]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [(["--model", "no/such"], "the configuration of 'no/such'"), (["--device", "cuda:99"], "device 'cuda:99'")],
)
def test_a_dry_run_without_a_plan_says_why(arguments, reason):
    code, out, err = run("train", *arguments, "--dry-run")
    *_, no_plan, not_checked = out.splitlines()
    assert (code, err) == (0, "") and no_plan.startswith(f"# no plan: {reason}") and "trainer" in yaml.safe_load(out)
    assert not_checked.startswith("# not checked ") and reason in not_checked


def test_training_warns_before_it_loads_what_will_not_fit(monkeypatch, caplog):
    from sparse_rl.plan import Device

    arguments = ["--model", "Qwen/Qwen2.5-7B", "--device", "cuda", "--dtype", "bfloat16"]
    settings, _, parts = read(arguments, train_parser())
    for ranks, memory, warned in ((1, 140e9, True), (8, 24e9, True), (8, 140e9, False), (1, 1e15, False)):
        device = Device(name="some", memory=int(memory))
        monkeypatch.setattr("sparse_rl.plan.choose_device", lambda name, device=device: device)
        caplog.clear()
        warn_of_memory(settings, parts, ranks)
        assert [("does not fit" in record.message) for record in caplog.records] == [True] * warned
    settings.device = "cpu"
    warn_of_memory(settings, parts)
    assert not caplog.records


def test_its_own_settings_come_first_and_a_misspelled_model_never_asks_the_hub(monkeypatch):
    _, out, _ = run("plan", "--help")
    assert out.index("  --shape ") < out.index("  --json ") < out.index("  --config ") < out.index("  --trainer.steps ")

    def asked(*_, local_files_only, **__):
        assert local_files_only, "the hub was asked"
        raise OSError("not here")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", asked)
    code, _, err = run("plan", "--model", "smolm2")
    assert code == 2 and "did you mean 'smollm2'?" in err
