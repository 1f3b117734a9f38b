# SPDX-License-Identifier: Apache-2.0
"""`sparse-rl train`: settings by flag, file and TRL's names; a run folder nobody overwrites; one sentence an error."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from dataclasses import fields
from importlib import resources

import pytest
import yaml

from sparse_rl.cli import main
from sparse_rl.cli.recipes import recipes
from sparse_rl.cli.train import train_parser
from sparse_rl.cli.trl_names import NAMES, REFUSED, VALUES, translate_keys
from sparse_rl.metrics import read_log

RECIPES = recipes("train")
OWN = {"sampling": {"n": 8}, "task": {"name": "rows", "train_file": "train.jsonl", "rewards": ["rewards.py:one"]}}
RUN = {"steps": 2, "prompts_per_step": 2}
SHORT = {"n": 4, "max_tokens": 24}
SPARSE = {"policy": "rkv", "budget": 12, "interval": 4, "window": 4}


def run(*arguments: str) -> tuple[int, str, str]:
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(list(arguments))
        except SystemExit as exit:
            code = exit.code
    return code, out.getvalue(), err.getvalue()


def train(*arguments: str) -> tuple[int, str, str]:
    return run("train", *arguments)


def flat(settings: dict) -> dict:
    """{"trainer": {"steps": 20}} as {"trainer.steps": 20}."""
    result = {}
    for section, value in settings.items():
        nested = isinstance(value, dict)
        result |= {f"{section}.{key}": item for key, item in value.items()} if nested else {section: value}
    return result


def resolved(*arguments: str) -> dict:
    """Every setting the command would run with."""
    code, out, err = train(*arguments, "--dry-run")
    assert (code, err) == (0, "")
    return flat(yaml.safe_load(out))


def changes(before: dict, after: dict) -> dict:
    return {key: after[key] for key in before.keys() | after.keys() if before.get(key) != after.get(key)}


def assert_one_sentence(result: tuple[int, str, str], *parts: str) -> None:
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("sparse-rl: error: ") and len(err.splitlines()) == 1, err
    for part in parts:
        assert part in err


@pytest.fixture
def config(tmp_path):
    """config(settings) or config(text): a YAML file, new each time."""

    def write(settings) -> str:
        path = tmp_path / f"config{len(list(tmp_path.glob('config*')))}.yaml"
        path.write_text(settings if isinstance(settings, str) else yaml.safe_dump(settings))
        return str(path)

    return write


# Settings


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
def test_a_dry_run_prints_a_file_that_gives_the_same_settings(arguments, config):
    code, out, err = train(*arguments, "--dry-run")
    assert (code, err) == (0, "")
    assert train("--config", config(out), "--dry-run") == (0, out, "")


def test_a_dry_run_touches_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train("--trainer.output_dir", "run", "--model", "no/such/model", "--sampling.n", "2", "--dry-run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_loads_by_name_and_is_obeyed(recipe):
    settings = resolved("--config", recipe)
    written = flat(yaml.safe_load((resources.files("sparse_rl") / "recipes" / recipe).read_text()))
    assert written == {key: settings[key] for key in written}


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


def test_flags_win_over_a_file_that_comes_after_them(config):
    path = config({"sampling": {"n": 8}, "trainer": {"steps": 3}})
    assert resolved("--trainer.steps", "7", "--config", path)["trainer.steps"] == 7


def test_a_model_needs_no_other_setting():
    assert resolved("--model", "embedded")["sampling.n"] > 1


def test_numbers_as_people_write_them_in_yaml(config):
    """YAML 1.1 takes 1e-6 for a word."""
    for text in ("optimizer: {learning_rate: 1e-6}\n", "learning_rate: 1e-6\n"):
        assert resolved("--config", config(text), "--sampling.n", "8")["optimizer.learning_rate"] == 1e-6


# TRL's names

GIVEN = {  # a value in TRL's words, and the setting it becomes, or why training refuses it
    "model_name_or_path": ("some/model", {"model": "some/model"}),
    "dtype": ("float16", {"dtype": "float16"}),
    "bf16": (True, {"dtype": "bfloat16"}),
    "output_dir": ("runs/other", {"trainer.output_dir": "runs/other"}),
    "max_steps": (7, {"trainer.steps": 7}),
    "seed": (42, {"trainer.seed": 42}),
    "save_steps": (25, {"trainer.save_every": 25}),
    "save_total_limit": (5, {"trainer.save_total_limit": 5}),
    "metric_for_best_model": ("eval/sparse/reward", {"trainer.best_metric": "eval/sparse/reward"}),
    "resume_from_checkpoint": (True, {"trainer.resume_from_checkpoint": True}),
    "report_to": ("trackio", {"trainer.report_to": ["trackio"]}),
    "scale_rewards": ("none", {"trainer.advantage": "dr_grpo"}),
    "reward_weights": ([0.5], {"task.reward_weights": [0.5]}),
    "chat_template_kwargs": ({"enable_thinking": False}, {"task.chat_template_kwargs": {"enable_thinking": False}}),
    "num_generations": (16, {"sampling.n": 16}),
    "max_completion_length": (99, {"sampling.max_tokens": 99}),
    "temperature": (0.7, {"sampling.temperature": 0.7}),
    "top_p": (0.9, "sampling.top_p is 0.9, but training samples from the whole distribution"),
    "top_k": (5, "sampling.top_k is 5, but training samples from the whole distribution"),
    "learning_rate": (3e-06, {"optimizer.learning_rate": 3e-06}),
    "optim": ("adamw_torch_8bit", {"optimizer.kind": "adamw_8bit"}),
    "lr_scheduler_type": ("cosine", {"optimizer.schedule": "cosine"}),
    "warmup_steps": (3, {"optimizer.warmup": 3}),
    "weight_decay": (0.1, {"optimizer.weight_decay": 0.1}),
    "adam_beta1": (0.8, {"optimizer.beta1": 0.8}),
    "adam_beta2": (0.95, {"optimizer.beta2": 0.95}),
    "adam_epsilon": (1e-06, {"optimizer.eps": 1e-06}),
    "lora_r": (16, {"lora.r": 16}),
    "lora_alpha": (16, "lora.alpha is given, but lora.r is 0"),
    "lora_target_modules": (["q_proj", "v_proj"], "lora.target is given, but lora.r is 0"),
    "max_grad_norm": (0.2, {"update.max_grad_norm": 0.2}),
    "num_iterations": (2, {"update.num_iterations": 2}),
    "beta": (0.04, {"loss.beta": 0.04}),
    "epsilon": (0.1, {"loss.clip_low": 0.1}),
    "epsilon_high": (0.28, {"loss.clip_high": 0.28}),
    "delta": (2.0, {"loss.delta": 2.0}),
    "loss_type": ("dr_grpo", {"loss.aggregation": "fixed_length"}),
    "importance_sampling_level": ("sequence", {"loss.surrogate": "gspo"}),
    "mask_truncated_completions": (True, {"loss.mask_truncated_completions": True}),
    "eval_steps": (3, {"eval.every": 3}),
    "num_generations_eval": (4, {"eval.n": 4}),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A file that names a task of one's own, and its settings."""
    path = tmp_path_factory.mktemp("base") / "base.yaml"
    path.write_text(yaml.safe_dump(OWN | {"kv": {"policy": "rkv"}}))
    return str(path), resolved("--config", str(path))


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_trl_changes_one_setting_as_a_flag_and_as_a_key(name, config, base):
    (value, expected), (path, before) = GIVEN[name], base
    flag = [f"--{name}"] if value is True else [f"--{name}", str(value)]  # a flag that is true may stand alone
    for given in (flag, ["--config", config({name: value})]):
        if isinstance(expected, str):
            assert_one_sentence(train("--config", path, *given, "--dry-run"), expected)
        else:
            assert changes(before, resolved("--config", path, *given)) == expected


def test_ways_to_write_a_flag(base):
    path, before = base
    for given in (["--bf16"], ["--bf16", "true"], ["--bf16=true"], ["--bf16=True"], ["--bf16", "True", "--beta=0"]):
        assert changes(before, resolved("--config", path, *given)) == {"dtype": "bfloat16"}
    for given in (["--loss_type=DR_GRPO"], ["--loss_type", "dr_grpo"], ["--loss.aggregation=fixed_length"]):
        assert changes(before, resolved("--config", path, *given)) == {"loss.aggregation": "fixed_length"}


def test_every_name_is_trl_s_and_every_setting_ours():
    trl = pytest.importorskip("trl")
    known = {field.name for config in (trl.GRPOConfig, trl.ModelConfig) for field in fields(config)}
    assert set(NAMES) | set(REFUSED) <= known
    assert not set(NAMES) & set(REFUSED)
    options = {option for action in train_parser()._actions for option in action.option_strings}
    assert {f"--{setting}" for setting in NAMES.values()} <= options
    assert VALUES.keys() <= NAMES.keys()


def test_trl_s_defaults_may_be_written_out(config):
    trl = pytest.importorskip("trl")
    found = {field.name: field.default for kind in (trl.GRPOConfig, trl.ModelConfig) for field in fields(kind)}
    names = NAMES.keys() - {"max_steps", "top_k", "report_to"}  # -1 counts epochs; the others are below
    written = {name: getattr(found[name], "value", found[name]) for name in names if found[name] is not None}
    assert len(written) > 15
    settings = resolved("--config", config({"task": OWN["task"]} | written))
    assert (settings["optimizer.schedule"], settings["trainer.advantage"]) == ("linear", "grpo")


@pytest.mark.parametrize(("name", "value", "expected"), [("top_k", 0, None), ("report_to", "none", [])])
def test_trl_s_words_for_nothing_mean_nothing(name, value, expected):
    code, out, _ = train(f"--{name}", str(value), "--dry-run")
    assert code == 0 and flat(yaml.safe_load(out))[NAMES[name]] == expected


TRANSLATED = {
    ("bf16", "true"): {"dtype": "bfloat16"},
    ("bf16", "false"): {"dtype": "float32"},
    ("scale_rewards", "group"): {},
    ("scale_rewards", "true"): {},
    ("scale_rewards", "none"): {"trainer.advantage": "dr_grpo"},
    ("scale_rewards", "false"): {"trainer.advantage": "dr_grpo"},
    ("loss_type", "grpo"): {"loss.aggregation": "sequence_mean"},
    ("loss_type", "dr_grpo"): {"loss.aggregation": "fixed_length"},
    ("loss_type", "dapo"): {},
    ("loss_type", "bnpo"): {},
    ("importance_sampling_level", "token"): {},
    ("importance_sampling_level", "sequence"): {"loss.surrogate": "gspo"},
    ("optim", "adamw_torch"): {},
    ("optim", "adamw_torch_fused"): {},
    ("optim", "adamw_torch_8bit"): {"optimizer.kind": "adamw_8bit"},
    ("optim", "adamw_bnb_8bit"): {"optimizer.kind": "adamw_8bit"},
    ("lr_scheduler_type", "constant_with_warmup"): {},
    ("top_k", "0"): {},
    ("report_to", "none"): {},
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name in VALUES for value in VALUES[name]])
def test_trl_s_values_are_translated(name, value, config, base):
    path, before = base
    word = value if value not in ("true", "false") else value == "true"
    for given in ([f"--{name}", value], ["--config", config({name: word})]):
        assert changes(before, resolved("--config", path, *given)) == TRANSLATED[name, value]


@pytest.mark.parametrize("name", REFUSED)
def test_names_without_a_counterpart_say_what_to_use(name, config):
    for arguments in ([f"--{name}=1"], ["--config", config({name: 1})]):
        assert_one_sentence(train(*arguments, "--dry-run"), f"{name} has no counterpart here: {REFUSED[name]}.")


def test_settings_that_a_refusal_names_exist():
    settings = {option.lstrip("-") for action in train_parser()._actions for option in action.option_strings}
    for text in REFUSED.values():
        for word in text.replace(",", " ").replace(";", " ").split():
            assert "." not in word or word in settings


def test_a_name_and_its_counterpart_in_one_file_are_refused(config):
    for name, setting in NAMES.items():
        *sections, key = setting.split(".")
        if key != name or sections:
            value = "grpo" if name == "loss_type" else 1
            both = {name: value} | ({sections[0]: {key: value}} if sections else {key: value})
            with pytest.raises(ValueError, match=f"{name} and {setting} are the same setting; give one of them"):
                translate_keys(both)
    result = train("--config", config("sampling: {n: 8}\nnum_generations: 8\n"), "--dry-run")
    assert_one_sentence(result, "num_generations and sampling.n are the same setting")


def test_a_name_and_its_counterpart_with_a_dot_are_refused(config):
    path = config("max_steps: 5\ntrainer.steps: 3\nsampling.n: 8\n")
    assert_one_sentence(train("--config", path, "--dry-run"), "max_steps and trainer.steps are the same setting")


# What the user can mend

BAD = {
    "flag": (["--trainer.stepz", "3"], "unknown option 'trainer.stepz'; did you mean --trainer.steps?"),
    "flag with a value": (["--kv.bugdet=3"], "unknown option 'kv.bugdet'; did you mean --kv.budget?"),
    "flag of ours without its section": (["--learning_rat", "1"], "did you mean --learning_rate?"),
    "what the trainer sets": (["--sampling.top_logprobs", "3"], "unknown option 'sampling.top_logprobs'"),
    "abbreviation": (["--trainer.step", "3"], "unknown option 'trainer.step'; did you mean --trainer.steps?"),
    "a word for a number": (["--max_steps", "many"], "trainer.steps is 'many', which is not of type int"),
    "unknown task": (["--task.name", "chains"], "task.name is 'chains'; choose one of chain, lookup, rows"),
    "another task's setting": (["--task.rewards", "a:b"], "task.rewards is not a setting of the task 'chain'"),
    "a task's old name": (["--task.name", "jsonl"], "the task 'jsonl' has another name now; give --task.name rows"),
    "a file without rewards": (["--task.train_file", "a"], "task.rewards is missing"),
    "unknown layout": (["--task.train_file=a", "--task.rewards=b:c", "--task.layout=sft"], "choose one of auto, verl"),
    "grading": (["--grading.workers", "-1"], "grading.workers is -1; it must be at least 0"),
    "letters": (["--task.letters", "1"], "letters is 1; it must lie between 2 and 16"),
    "no train file": (["--task.name", "rows"], "task.train_file is missing"),
    "unknown preset": (["--correction.preset", "sparse"], "correction.preset is 'sparse'; choose one of"),
    "unknown advantage": (["--trainer.advantage", "gae"], "trainer.advantage is 'gae'; choose one of"),
    "unknown loss": (["--loss_type", "ppo"], "loss_type is 'ppo'; grpo, dr_grpo, dapo, bnpo say how"),
    "negative steps": (["--trainer.steps", "-1"], "trainer.steps is -1; it must be at least 0"),
    "one sample": (["--sampling.n", "1"], "sampling.n is 1, but advantage 'grpo' compares the completions"),
    "top_p": (["--sampling.top_p", "0.9"], "sampling.top_p is 0.9, but training samples from the whole distribution"),
    "top_k": (["--sampling.top_k", "5"], "sampling.top_k is 5, but training samples from the whole distribution"),
    "temperature 0": (["--sampling.temperature", "0"], "sampling.temperature is 0, but training needs samples"),
    "nan": (["--learning_rate", ".nan"], "optimizer.learning_rate is nan; it must be 0 or more"),
    "missing config": (["--config", "nowhere.yaml"], "'nowhere.yaml' is neither a file nor a recipe; the recipes are"),
    "config is a folder": (["--config", "/"], "Is a directory"),
    "empty folder name": (["--trainer.output_dir", ""], "trainer.output_dir is empty"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_wrong_flag_gets_one_sentence(case):
    arguments, message = BAD[case]
    assert_one_sentence(train(*arguments, "--dry-run"), message)


BAD_FILES = {
    "unknown key": ("trainer: {stepz: 3}\n", "unknown option 'trainer.stepz'; did you mean --trainer.steps?"),
    "unknown section": ("optimiser: {learning_rate: 1}\n", "did you mean --optimizer.learning_rate?"),
    "unknown policy key": ("kv: {policy: rkv, bugdet: 3}\n", "did you mean --kv.budget?"),
    "empty": ("", "is not a table of settings"),
    "a list": ("- model\n", "is not a table of settings"),
    "not YAML": ("trainer: [\n", "is not YAML"),
    "a section is null": ("trainer:\n", "must be a table"),
    "a section is a number": ("kv: 3\n", "must be a table"),
    "a section beside auto is a number": ("kv: {policy: rkv, budget: auto}\ncontrol: 3\n", "must be a table"),
    "a value is null": ("trainer: {steps: null}\n", "trainer.steps is null"),
    "a task that is null": ("task: null\n", "task is null"),
    "top_p": ("sampling: {n: 8, top_p: 0.5}\n", "whole distribution"),
    "a number as a key": ("1: 2\n", "1"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_wrong_file_gets_one_sentence(case, config):
    text, message = BAD_FILES[case]
    assert_one_sentence(train("--config", config(text), "--dry-run"), message)


def test_a_misspelt_name_of_trl_is_put_right(config):
    for arguments in (["--num_generation", "3"], ["--config", config({"num_generation": 3})]):
        assert_one_sentence(train(*arguments, "--dry-run"), "did you mean --num_generations?")


@pytest.mark.parametrize(
    "text",
    [
        "trainer:\noutput_dir: runs/other\n",
        "trainer: 3\noutput_dir: runs/other\n",
        "correction: {preset: null}\n",
        "task: {name: null}\n",
    ],
)
def test_a_section_without_its_table_or_choice_gets_one_sentence(text, config):
    assert_one_sentence(train("--config", config(text), "--dry-run"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--eval.temperature", "-1"],
        ["--eval.top_p", "2"],
        ["--trainer.seed", "99999999999999"],
        ["--trainer.log_completions", "-1"],
        ["--trainer.log_rejected", "-1"],
        ["--loss.beta", ".nan"],
        ["--lora.r", "-1"],
        ["--lora.alpha", "0"],
        ["--lora.target", "[]"],
        ["--dtype", "float12"],
    ],
    ids=" ".join,
)
def test_a_value_out_of_range_is_refused_before_anything_runs(arguments):
    assert_one_sentence(train(*arguments, "--dry-run"), arguments[0].lstrip("-"))


# Runs


def flags(**sections) -> list[str]:
    return [word for key, value in flat(sections).items() for word in (f"--{key}", str(value))]


CHAIN = flags(task={"letters": 2, "steps": 2, "filler": 0}, trainer=RUN, sampling=SHORT, eval={"prompts": 4}, kv=SPARSE)


def contents(folder) -> dict:
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two steps, and what the command said."""
    folder = tmp_path_factory.mktemp("train") / "run"
    return folder, train(*CHAIN, "--trainer.output_dir", str(folder))


def test_a_run_writes_its_folder_and_says_how_it_goes(finished):
    folder, (code, out, err) = finished
    assert (code, out) == (0, "")
    written = {"run.json", "metrics.jsonl", "completions.jsonl", "rejected.jsonl", "checkpoint-2", ".lock"}
    assert {path.name for path in folder.iterdir()} == written
    settings = json.loads((folder / "run.json").read_text())["config"]
    assert settings["task"] == {"name": "chain", "letters": 2, "steps": 2, "filler": 0}
    assert settings["kv"]["budget"] == 12 and settings["trainer"]["steps"] == 2
    lines = read_log(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[1]["completions/max_length"] <= 24 and lines[1]["kv/saved_frac"] > 0
    said = err.splitlines()
    assert str(folder) in said[0] and "KV rkv budget 12 + 4" in said[0] and "2 prompts x 4" in said[0]
    assert [line.split()[0] for line in said[1:]] == ["step", "0", "1", "2", "2"]
    assert "held out: dense cache" in said[2] and "sparse cache" in said[-1]


def test_a_second_run_in_the_folder_is_refused_and_changes_nothing(finished):
    folder, _ = finished
    before = contents(folder)
    result = train(*CHAIN, "--trainer.output_dir", str(folder))
    assert_one_sentence(result, "has a run in it", "resume it with --trainer.resume_from_checkpoint true")
    assert contents(folder) == before


def test_a_run_goes_on_and_is_reported(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    more = ["--trainer.output_dir", str(folder), "--trainer.resume_from_checkpoint", "true", "--trainer.steps", "3"]
    code, _, err = train(*CHAIN, *more)
    assert code == 0 and "steps 2 to 3" in err and (folder / "checkpoint-3").is_dir()
    before = read_log(finished[0] / "metrics.jsonl")
    after = read_log(folder / "metrics.jsonl")
    assert after[:3] == before and [line["step"] for line in after] == [0, 1, 2, 3]
    pytest.importorskip("matplotlib")
    page = tmp_path / "report.html"
    assert run("report", str(folder), "--output", str(page)) == (0, f"wrote {page}\n", "")
    assert page.read_text().lstrip().lower().startswith("<!doctype html>")


def test_there_must_be_a_run_to_resume(tmp_path):
    result = train(*CHAIN, "--trainer.output_dir", str(tmp_path / "run"), "--resume_from_checkpoint")
    assert_one_sentence(result, "there is no run to resume")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["metrics.jsonl", "rejected.jsonl", "checkpoint-3/model.safetensors"])
def test_files_of_others_are_not_overwritten(name, tmp_path):
    path = tmp_path / "run" / name
    path.parent.mkdir(parents=True)
    path.write_text("precious")
    assert_one_sentence(train(*CHAIN, "--trainer.output_dir", str(tmp_path / "run")), "give another")
    assert {path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == {b"precious"}


@pytest.fixture
def own(tmp_path):
    """own(reward's body, rows): the arguments of a run on one's own rows with one's own reward."""

    def arguments(body: str, rows: str = '{"prompt": "a=b1;b=a2;a|", "answer": "3"}\n') -> list[str]:
        (tmp_path / "train.jsonl").write_text(rows)
        (tmp_path / "reward.py").write_text(f"def mine(completions, answer, **_):\n    {body}\n")
        task = {"train_file": tmp_path / "train.jsonl", "rewards": f"{tmp_path / 'reward.py'}:mine"}
        folder = {"output_dir": tmp_path / "run"}
        return ["--model", "embedded", *flags(task=task, trainer=RUN | folder, sampling=SHORT, kv=SPARSE)]

    return arguments


FINE = "return [text.count(right) for text, right in zip(completions, answer)]"


def test_a_run_on_one_s_own_rows_and_reward(own, tmp_path):
    code, _, err = train(*own(FINE))
    assert code == 0 and "held out" not in err, "there is nothing to evaluate on"
    assert read_log(tmp_path / "run" / "metrics.jsonl")[-1]["rewards/mine/mean"] > 0


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


def test_run_json_says_where_rows_and_rewards_came_from(own, tmp_path):
    assert train(*own(FINE), "--trainer.steps", "0")[0] == 0
    settings = json.loads((tmp_path / "run" / "run.json").read_text())["config"]["task"]
    assert settings["train_file"] == str(tmp_path / "train.jsonl") and settings["rewards"]
    assert settings["grading"]["timeout_s"] == 5.0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise KeyError('the\\n judge')", "reward function 'mine' raised KeyError: 'the\\n judge'; mend it"),
        ("raise OSError(2, 'No such file', 'x')", "reward function 'mine' raised FileNotFoundError"),
        ("return [float('nan') for _ in completions]", "reward function 'mine' returned nan for completion 0"),
        ("return ['1' for _ in completions]", "reward function 'mine' returned '1' for completion 0"),
        ("return [1.0]", "reward function 'mine' returned 1 rewards for 8 completions"),
        ("pass", "reward function 'mine' returned NoneType"),
    ],
    ids=["raises", "raises OSError", "nan", "text", "too few", "nothing"],
)
def test_a_broken_reward_stops_the_run_with_one_sentence(body, message, own):
    code, out, err = train(*own(body))
    last = err.splitlines()[-1]
    assert (code, out) == (2, "") and "Traceback" not in err
    assert last.startswith("sparse-rl: error: ") and message in last and err.count("sparse-rl: error") == 1


def test_a_mended_reward_goes_on_where_it_failed(own, tmp_path):
    assert train(*own("raise KeyError('judge')"))[0] == 2
    assert_one_sentence(train(*own(FINE)), "has a run in it")
    assert train(*own(FINE), "--resume_from_checkpoint")[0] == 0
    assert [line["step"] for line in read_log(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ('{"prompt": "a|", "answer": "1"}\n{"question": "b|"}\n', 'line 2 of {file} has no "prompt"'),
        ('{"prompt": "a|", "answer": "1"}\n{"prompt": \n', "line 2 of {file} is not JSON"),
        ("", "{file} has no rows"),
    ],
    ids=["no prompt", "not JSON", "empty"],
)
def test_a_wrong_row_is_named_before_anything_is_written(rows, message, own, tmp_path):
    assert_one_sentence(train(*own(FINE, rows)), message.format(file=tmp_path / "train.jsonl"))
    assert not (tmp_path / "run").exists()


def test_a_reward_that_cannot_be_imported_is_named_before_anything_is_written(own, tmp_path):
    assert_one_sentence(train(*own("return [")), "reward.py:mine' cannot be imported: SyntaxError")
    assert_one_sentence(train(*own(FINE), "--task.rewards", "no_such:f"), "'no_such:f' cannot be imported")
    arguments = [*own(FINE), "--task.reward_weights", "[1.0, 2.0]"]
    assert_one_sentence(train(*arguments), "1 reward functions and 2 weights")
    assert not (tmp_path / "run").exists()


def test_the_embedded_task_needs_the_embedded_model(tmp_path):
    result = train("--model", "tiny", "--sampling.n", "2", "--trainer.output_dir", str(tmp_path / "run"))
    assert_one_sentence(result, "written in the embedded model's tokens")
    assert not (tmp_path / "run").exists()


def test_help_names_every_section_and_trl():
    code, out, _ = train("--help")
    assert code == 0
    for setting in ("--trainer.output_dir", "--task.letters", "--task.rewards", "--kv.budget", "--correction.veto"):
        assert setting in out
    for setting in ("--loss.beta", "--optimizer.warmup", "--update.max_tokens", "--eval.prompts", "--engine.rows"):
        assert setting in out
    assert "TRL's names" in out and "--sampling.seed" not in out
    evicting = "random, knorm, keydiff, tova, h2o, snapkv, rkv, gkv"
    assert f"[512: streaming, {evicting}]" in " ".join(out.split()), "defaults that are alike are said once"
    assert f"[4: streaming; 0: {evicting}]" in " ".join(out.split())


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


def test_one_setting_under_two_names_is_refused():
    result = train("--num_generations", "4", "--sampling.n", "3", "--dry-run")
    assert_one_sentence(result, "--num_generations and --sampling.n are the same setting")


def test_a_loss_type_that_is_a_surrogate_is_pointed_to():
    assert_one_sentence(train("--loss_type", "cispo", "--dry-run"), "loss.surrogate has cispo")
