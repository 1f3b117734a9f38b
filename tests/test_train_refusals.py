# SPDX-License-Identifier: Apache-2.0
"""Settings that `sparse-rl train` cannot run with: one sentence that names the setting and the remedy."""

from __future__ import annotations

import pytest
from commands import assert_one_sentence, train

BAD = {
    "flag": (["--trainer.stepz", "3"], "unknown option 'trainer.stepz'; did you mean --trainer.steps?"),
    "flag with a value": (["--kv.bugdet=3"], "unknown option 'kv.bugdet'; did you mean --kv.budget?"),
    "flag of ours without its section": (["--learning_rat", "1"], "did you mean --learning_rate?"),
    "what the trainer sets": (["--sampling.top_logprobs", "3"], "unknown option 'sampling.top_logprobs'"),
    "abbreviation": (["--trainer.step", "3"], "unknown option 'trainer.step'; did you mean --trainer.steps?"),
    "a word for a number": (["--max_steps", "many"], "trainer.steps is 'many', which is not of type int"),
    "infinity without its dot": (["--correction.upper", "inf"], "not of type float; infinity is written .inf."),
    "a moving budget of no policy": (
        ["--kv.policy", "full", "--kv.budget", "auto"],
        "control.auto moves kv.budget, but kv.policy full has none",
    ),
    "a correction that nothing reads": (
        ["--correction.preset", "none", "--correction.level", "sequence"],
        "correction.level is sequence, which changes nothing; set weight, lower or upper, or make it token.",
    ),
    "unknown task": (["--task.name", "chains"], "task.name is 'chains' (did you mean 'chain'?); choose one of"),
    "a reward without rows": (
        ["--task.rewards", "a:b"],
        "task.rewards is not a setting of the task 'chain'; 'rows' has it: give task.train_file too.",
    ),
    "another task's setting": (
        ["--task.name", "chain", "--task.pairs", "3"],
        "task.pairs is not a setting of the task 'chain'; 'lookup' has it: give task.name lookup, or leave it out.",
    ),
    "rows for another task": (
        ["--task.name", "chain", "--task.train_file", "a"],
        "task.train_file is not a setting of the task 'chain'; 'rows' has it: give task.name rows, or leave it out.",
    ),
    "a file without rewards": (["--task.train_file", "a"], "task.rewards is missing"),
    "unknown layout": (["--task.train_file=a", "--task.rewards=b:c", "--task.layout=sft"], "choose one of auto, verl"),
    "grading": (["--grading.workers", "-1"], "grading.workers is -1; it must be at least 0"),
    "letters": (["--task.letters", "1"], "letters is 1; it must lie between 2 and 16"),
    "no train file": (["--task.name", "rows"], "task.train_file is missing"),
    "unknown preset": (["--correction.preset", "gspo"], "correction.preset is 'gspo'; choose one of none, "),
    "misspelt preset": (
        ["--correction.preset", "sparserl"],
        "is 'sparserl' (did you mean 'sparse_rl'?); choose one of",
    ),
    "misspelt auto": (
        ["--kv.policy", "rkv", "--kv.budget", "aut"],
        "nor a published schedule (did you mean 'auto'?); give 512, ",
    ),
    "no such schedule": (
        ["--kv.policy", "rkv", "--kv.budget", "cal/schedul.json"],
        "kv.budget is 'cal/schedul.json', but there is no such file; check the path",
    ),
    "unknown advantage": (["--trainer.advantage", "gae"], "trainer.advantage is 'gae'; choose one of"),
    "unknown loss": (["--loss_type", "ppo"], "loss_type is 'ppo'; grpo, dr_grpo, dapo, bnpo say how"),
    "a surrogate as a loss": (["--loss_type", "cispo"], "loss.surrogate has cispo"),
    "another surrogate's bound": (["--loss.cispo_max", "3"], "loss.cispo_max is given, but loss.surrogate is 'ppo'"),
    "a bound that cispo does not read": (
        ["--loss.surrogate", "cispo", "--epsilon", "0.1"],
        "loss.clip_low is given, but loss.surrogate is 'cispo'",
    ),
    "a lower bound under 0": (["--loss.clip_low", "3"], "loss.clip_low is 3.0; it must be at most 1"),
    "a budget's end that does not move": (["--control.largest", "64"], "control.largest is given, but the budget does"),
    "negative steps": (["--trainer.steps", "-1"], "trainer.steps is -1; it must be at least 0"),
    "one sample": (["--sampling.n", "1"], "sampling.n is 1, but advantage 'grpo' compares the completions"),
    "top_p": (["--sampling.top_p", "0.9"], "sampling.top_p is 0.9, but training samples from the whole distribution"),
    "top_k": (["--sampling.top_k", "5"], "sampling.top_k is 5, but training samples from the whole distribution"),
    "temperature 0": (["--sampling.temperature", "0"], "sampling.temperature is 0, but training needs samples"),
    "a dense sampler's adapter": (
        ["--kv.policy", "full", "--distill.r", "4"],
        "full is the dense model already; choose",
    ),
    "fewer entries than the pages always read": (
        ["--kv.policy", "quest", "--kv.budget", "32"],
        "kv.budget is 32, but the pages always read are 48",
    ),
    "nan": (["--learning_rate", ".nan"], "optimizer.learning_rate is nan; it must be 0 or more"),
    "missing config": (["--config", "nowhere.yaml"], "'nowhere.yaml' is neither a file nor a recipe; the recipes are"),
    "misspelt recipe": (["--config", "qwen2.5-1.5.yaml"], "(did you mean 'qwen2.5-1.5b.yaml'?)"),
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


def test_one_setting_under_two_names_is_refused():
    result = train("--num_generations", "4", "--sampling.n", "3", "--dry-run")
    assert_one_sentence(result, "--num_generations and --sampling.n are the same setting")
