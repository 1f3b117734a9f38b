# SPDX-License-Identifier: Apache-2.0
"""The settings of `sparse-rl train`: flags, files and recipes, which of them wins, what a dry run prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from commands import CHAIN as CHAIN_FLAGS
from commands import SPARSE, assert_one_sentence, changes, contents, flags, flat, resolved, train

from sparse_rl.cli.recipes import read_configs, recipes


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--kv.policy", "snapkv", "--kv.budget", "64", "--correction.preset", "tis"],
        ["--correction.preset", "icepop", "--correction.upper", "3", "--correction.level", "geometric"],
        ["--model", "some/model", "--sampling.n", "4", "--bf16", "--device", "cuda:1", "--eval_steps", "0"],
        ["--sampling.stop", '["\\n", ": #", "yes"]', "--sampling.stop_ids", "[1, 2]", "--report_to", '["a", "b"]'],
        ["--trainer.save_total_limit", "null", "--optimizer.eps", "1e-12", "--engine.pool_bytes", "1000000"],
        ["--model=tiny", "--sampling.n=2", "--task.name=rows", "--task.train_file=a: b.jsonl", "--task.rewards=a:b"],
        [
            "--lora_r",
            "8",
            "--lora.alpha",
            "2.5",
            "--lora.target",
            '["q_proj", "v_proj"]',
            "--optimizer.offload",
            "true",
        ],
        ["--resume_from_checkpoint", "runs/default/checkpoint-3", "--trainer.output_dir", "yes"],
    ],
    ids=lambda arguments: " ".join(arguments)[:40] or "nothing",
)
@pytest.mark.some(4)
def test_a_dry_run_prints_a_file_that_gives_the_same_settings(arguments, config):
    """Which it refuses as a run would, once they are printed."""
    code, out, err = train(*arguments, "--dry-run")
    assert (code, err) == (0, "") or (code == 2 and len(err.splitlines()) == 1)
    assert train("--config", config(out), "--dry-run") == (code, out, err)


def test_a_dry_run_touches_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for model, said in (("no-such/model", "# not checked with the model and its data: "), ("embedded", "# fits")):
        code, out, err = train("--trainer.output_dir", "run", "--model", model, "--sampling.n", "2", "--dry-run")
        assert (code, err) == (0, "") and out.splitlines()[-1].startswith(said)
    assert list(tmp_path.iterdir()) == []


ROWS = ["--task.train_file", "rows.jsonl", "--task.rewards", "rewards.py:reward"]
POOL = ["--sampling.max_tokens", "300", "--engine.page_size", "16"]
REFUSED = {
    "task": (["--model", "tiny"], "the task chain is written in the embedded model's tokens"),
    "tracker": (["--trainer.report_to", "nonsense"], "trainer.report_to 'nonsense' cannot be used"),
    "pool": ([*POOL, "--engine.pool_pages", "3"], "the pool has 3 pages"),
    "pool of bytes": ([*POOL, "--engine.pool_bytes", "9000"], "the pool has 0 pages"),
    "pool of the sparse cache": (
        [*POOL, *flags(kv=SPARSE | {"budget": 64}), "--eval.prompts", "0", "--engine.pool_pages", "3"],
        "the pool has 3 pages",
    ),
    "a row that is too long for the pool": (
        [*ROWS, "--sampling.max_tokens", "9", "--engine.page_size", "16", "--engine.pool_pages", "4"],
        "or shorten the prompt",
    ),
    "samples": ([*ROWS, "--trainer.prompts_per_step", "99999", "--sampling.n", "99"], "are over 4194304 samples"),
    "no such file": (["--task.train_file", "none.jsonl", "--task.rewards", "exact"], "none.jsonl: No such file"),
    "no such reward": ([*ROWS[:-1], "rewards.py:rewards"], "has no function 'rewards' (did you mean 'reward'?)"),
    "a column": ([*ROWS[:-1], "math"], "has no right answer"),
    "adapters": (["--lora.r", "4", "--lora.target", "nowhere"], "lora.target has 'nowhere'"),
    "offload": (["--optimizer.offload", "true"], "optimizer.offload needs a GPU"),
    "end tokens": (["--sampling.stop_ids", "[9999]"], "sampling.stop_ids has 9999"),
    "no run": (["--trainer.resume_from_checkpoint", "true"], "there is no run to resume in run"),
    "a folder": (["--trainer.output_dir", "rows.jsonl"], "which is a file; name a folder"),
    "a folder in a file": (["--trainer.output_dir", "rows.jsonl/run"], "and 'rows.jsonl' is a file; name a folder"),
    "a device": (["--device", "nowhere"], "device 'nowhere' cannot be used here"),
    "a path to no model": (["--model", "/no/such/model"], "is neither a folder nor a hub name"),
    "a model": (["--model", "embeded"], "did you mean 'embedded'?"),
    "a model's folder": (["--model", "."], "is not a Hugging Face model folder"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.some(5)
def test_a_dry_run_refuses_what_the_run_refuses(case, tmp_path, monkeypatch):
    """In the same words, and behind the settings."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a=b1;a|"}\n' + json.dumps({"prompt": "a" * 99}) + "\n")
    (tmp_path / "rewards.py").write_text("def reward(completions, **_):\n    return [0.0] * len(completions)\n")
    given, said = REFUSED[case]
    arguments = ["--model", "embedded", "--trainer.output_dir", "run", *given]
    before = sorted(tmp_path.iterdir())
    code, out, err = train(*arguments, "--dry-run")
    assert code == 2 and "trainer" in yaml.safe_load(out) and sorted(tmp_path.iterdir())[: len(before)] == before
    assert said in err and not (tmp_path / "run").exists()
    real = train(*arguments)
    assert (real[0], real[2].splitlines()[-1]) == (code, err.splitlines()[-1])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "given",
    [
        ["--lora.r", "4", "--dtype", "bfloat16"],
        ["--distill.r", "2", "--distill.merged", "true", "--kv.policy", "rkv", "--kv.budget", "32"],
        ["--loss.beta", "0.1", "--trainer.advantage", "remax"],
        ["--kv.policy", "rkv", "--kv.budget", "auto"],
        ["--optimizer.kind", "adamw_8bit"],
    ],
    ids=" ".join,
)
def test_a_dry_run_takes_what_the_run_takes(given, tmp_path):
    pytest.importorskip("torchao" if "adamw_8bit" in given else "peft" if "--lora.r" in given else "torch")
    code, out, err = train("--model", "embedded", "--trainer.output_dir", str(tmp_path / "run"), *given, "--dry-run")
    assert code == 0 and "not checked" not in out, err


def test_a_dry_run_goes_on_with_a_run_as_the_run_would(tmp_path):
    run = tmp_path / "run"
    arguments = [*CHAIN_FLAGS, "--model", "embedded", "--trainer.output_dir", str(run)]
    assert train(*arguments, "--trainer.steps", "1")[0] == 0
    before = contents(run)
    assert train(*arguments, "--dry-run")[2].startswith(f"sparse-rl: error: {run} has a run in it (run.json)")
    resumed = ["--trainer.output_dir", str(run), "--trainer.resume_from_checkpoint", "true", "--dry-run"]
    assert train(*resumed)[::2] == (0, "")
    (run / "checkpoint-1" / "config.json").write_text("{}")
    assert "config.json is not what was written" in train(*resumed)[2]
    assert contents(run) == before | {Path("checkpoint-1/config.json"): b"{}"}


@pytest.mark.parametrize("recipe", recipes("train"))
@pytest.mark.some(4)
def test_every_recipe_loads_by_name_and_is_obeyed(recipe):
    settings = resolved("--config", recipe)
    written = flat(read_configs(recipe, "train")[-1])
    assert written == {key: settings[key] for key in written}


def test_a_file_says_what_differs_from_its_base(config):
    base = resolved("--config", "qwen3-1.7b.yaml")
    own = resolved("--config", config("base: qwen3-1.7b.yaml\nnum_generations: 4\ntrainer: {steps: 3}\n"))
    assert changes(base, own) == {"sampling.n": 4, "trainer.steps": 3}
    fourteen = resolved("--config", "qwen3-14b.yaml")
    named = {"model", "trainer.output_dir", "kv.budget", "engine.rows"}
    assert changes(base, fourteen).keys() == named and fourteen["model"] == "Qwen/Qwen3-14B"


def test_a_base_lies_beside_the_file_that_names_it(tmp_path):
    (tmp_path / "a.yaml").write_text("base: qwen3-1.7b.yaml\ntrainer: {steps: 3}\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\nsampling: {n: 4}\n")
    found = changes(resolved("--config", "qwen3-1.7b.yaml"), resolved("--config", str(tmp_path / "b.yaml")))
    assert found == {"sampling.n": 4, "trainer.steps": 3}


def test_a_file_may_have_the_name_of_the_recipe_that_it_differs_from(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "qwen3-1.7b.yaml").write_text("base: qwen3-1.7b.yaml\nsampling: {n: 4}\n")
    found = changes(resolved("--config", "qwen3-1.7b.yaml"), resolved("--config", "sub/qwen3-1.7b.yaml"))
    assert found == {"sampling.n": 4}
    (tmp_path / "sub" / "a.yaml").write_text("base: ../sub/b.yaml\n")
    (tmp_path / "sub" / "b.yaml").write_text("base: ../sub/a.yaml\n")
    assert_one_sentence(train("--config", "sub/a.yaml"), "goes round in a circle")


def test_a_base_that_is_not_there_or_goes_in_a_circle(tmp_path):
    (tmp_path / "a.yaml").write_text(f"base: {tmp_path / 'b.yaml'}\n")
    (tmp_path / "b.yaml").write_text(f"base: {tmp_path / 'a.yaml'}\n")
    assert_one_sentence(train("--config", str(tmp_path / "a.yaml")), "a.yaml", "goes round in a circle")
    (tmp_path / "b.yaml").write_text("base: qwen3-1.7.yaml\n")
    assert_one_sentence(train("--config", str(tmp_path / "a.yaml")), "base 'qwen3-1.7.yaml' of", "neither a file nor")


def test_the_default_recipe_is_used_unless_a_model_or_a_config_is_named(config):
    default = resolved("--config", "default.yaml")
    assert resolved() == default and default["kv.policy"] != "full"
    assert changes(default, resolved("--trainer.steps", "7")) == {"trainer.steps": 7}
    for arguments in (["--model", "embedded"], ["--model=embedded"], ["--model_name_or_path", "embedded"]):
        assert resolved(*arguments, "--sampling.n", "8")["kv.policy"] == "full"
    for arguments in (["--config", config({"device": "cpu"})], [f"--config={config({'device': 'cpu'})}"]):
        assert resolved(*arguments, "--sampling.n", "8")["kv.policy"] == "full"


def test_flags_win_over_files_and_later_files_over_earlier_ones(config):
    first, second = config({"trainer": {"steps": 3, "seed": 3}}), config({"max_steps": 4})
    settings = resolved("--config", "default.yaml", "--config", first, "--config", second, "--seed", "5")
    assert changes(resolved(), settings) == {"trainer.steps": 4, "trainer.seed": 5}


def test_a_run_s_own_settings_come_before_files_and_flags(config, tmp_path):
    """A budget that is given ends `auto`, another policy leaves out the settings that it does not have."""
    (tmp_path / "run.json").write_text(
        json.dumps(
            {
                "config": {
                    "task": {"name": "chain", "letters": 3, "gone": 1},
                    "kv": {"policy": "rkv", "budget": 40, "lam": 0.3},
                    "control": {"auto": True},
                    "trainer": {"steps": 9, "seed": 4, "output_dir": "elsewhere"},
                }
            }
        )
    )
    resume = ["--trainer.output_dir", str(tmp_path), "--resume_from_checkpoint"]
    own = resolved(*resume)
    assert (own["task.letters"], own["kv.lam"], own["control.auto"], own["trainer.steps"]) == (3, 0.3, True, 9)
    assert own["trainer.output_dir"] == str(tmp_path) and own["kv.interval"] != 8, "the default recipe has no say"
    file = config({"kv": {"policy": "streaming"}, "trainer": {"steps": 5}})
    given = resolved(*resume, "--config", file, "--seed", "6", "--kv.budget", "48")
    assert (given["kv.policy"], given["kv.budget"], given["control.auto"]) == ("streaming", 48, False)
    assert (given["trainer.steps"], given["trainer.seed"], given["task.letters"]) == (5, 6, 3)


def test_flags_win_over_a_file_that_comes_after_them(config):
    path = config({"sampling": {"n": 8}, "trainer": {"steps": 3}})
    assert resolved("--trainer.steps", "7", "--config", path)["trainer.steps"] == 7


def test_a_flag_may_choose_another_surrogate_or_a_budget_that_stands(config, tmp_path):
    """What only the file's own choice reads does not stand in the way."""
    cispo = resolved("--config", "qwen3-1.7b.yaml", "--loss.surrogate", "cispo")
    assert (cispo["loss.delta"], cispo["loss.clip_high"], cispo["loss.surrogate"]) == (None, None, "cispo")
    auto = {"kv": {"policy": "rkv", "budget": "auto"}, "control": {"largest": 640, "bin": 300, "target": 0.9}}
    file = ["--config", config(auto)]
    moves = resolved(*file)
    assert (moves["control.auto"], moves["control.largest"], moves["control.bin"]) == (True, 640, 300)
    for still in (["--kv.budget", "48"], ["--kv.policy", "full"]):
        found = resolved(*file, *still)
        assert (found["control.auto"], found["control.largest"], found["control.bin"]) == (False, None, 300)
    run = tmp_path / "run"
    run.mkdir()
    record = {"task": {"name": "chain"}, "kv": {"policy": "rkv", "budget": 64}, "trainer": {"steps": 9}}
    record["control"] = auto["control"] | {"auto": True, "hazard": 1e-4}
    (run / "run.json").write_text(json.dumps({"config": record}))
    resume = ["--trainer.output_dir", str(run), "--trainer.resume_from_checkpoint", "true"]
    found = [resolved(*resume, *more) for more in ([], ["--kv.budget", "auto"], ["--kv.budget", "48"])]
    assert [each["control.auto"] for each in found] == [True, True, False]
    assert [each["control.largest"] for each in found] == [640, 640, None]


def test_a_flag_may_name_another_policy_than_the_recipe():
    settings = resolved("--kv.policy", "full", "--correction.preset", "none")
    assert settings["kv.policy"] == "full"
    settings = resolved("--kv.policy=streaming")
    assert (settings["kv.policy"], settings["kv.budget"], settings["kv.interval"]) == ("streaming", 56, 8)
    settings = resolved("--config", "qwen2.5-1.5b.yaml", "--kv.policy", "streaming")
    assert settings["kv.budget"] == 512


def test_a_presets_value_is_switched_off_by_0_and_not_by_null(config):
    result = train("--config", config("correction: {preset: sparse_rl, veto: null}\n"), "--dry-run")
    assert_one_sentence(result, "correction.veto is null in")
    assert resolved("--correction.veto", "0")["correction.veto"] == 0


def test_a_model_needs_no_other_setting():
    assert resolved("--model", "embedded")["sampling.n"] > 1


def test_numbers_as_people_write_them_in_yaml(config):
    """YAML 1.1 takes 1e-6 for a word."""
    for text in ("optimizer: {learning_rate: 1e-6}\n", "learning_rate: 1e-6\n"):
        assert resolved("--config", config(text), "--sampling.n", "8")["optimizer.learning_rate"] == 1e-6


def test_a_file_is_a_task_of_its_own(config):
    """Whatever task the config names, and without its settings; several rewards, settings with commas."""
    path = config({"task": {"name": "chain", "letters": 4}})
    rewards = ["math", "overlong:limit=9,buffer=2", 'format:{"pattern": "a{1,2}: b"}']
    for given, expected in ((json.dumps(rewards), rewards), (rewards[1], rewards[1:2]), (rewards[2], rewards[2:])):
        settings = resolved("--config", path, "--task.train_file=mine.jsonl", "--task.rewards", given)
        assert (settings["task.name"], settings["task.train_file"]) == ("rows", "mine.jsonl")
        assert settings["task.rewards"] == expected and "task.letters" not in settings


def test_unsafe_code_is_a_flag_of_grading():
    assert resolved()["grading.unsafe_code"] is False
    for flag in (["--unsafe-code"], ["--grading.unsafe_code", "true"]):
        assert changes(resolved(), resolved(*flag)) == {"grading.unsafe_code": True}


def test_help_names_every_section_and_trl():
    code, out, _ = train("--help")
    assert code == 0
    for setting in ("--trainer.output_dir", "--task.letters", "--task.rewards", "--kv.budget", "--correction.veto"):
        assert setting in out
    for setting in ("--loss.beta", "--optimizer.warmup", "--update.max_tokens", "--eval.prompts", "--engine.rows"):
        assert setting in out
    assert "trainer.steps 20, " in out and "kv.policy rkv, kv.budget 56, " in out, "what the bare command has"
    assert "TRL's names" in out and "--sampling.seed" not in out
    evicting = "random, knorm, keydiff, tova, h2o, snapkv, rkv, gkv"
    assert f"[512: streaming, {evicting}]" in " ".join(out.split()), "defaults that are alike are said once"
    assert f"[4: streaming; 0: {evicting}]" in " ".join(out.split())
