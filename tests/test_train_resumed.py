# SPDX-License-Identifier: Apache-2.0
"""A run that is resumed from another folder, or whose files are gone."""

from __future__ import annotations

import json
import shutil

import pytest
from commands import assert_one_sentence, run

from sparse_rl.kv.schedule import load as load_schedule

ROW = '{"prompt": "a=b1;b=a2;a|", "answer": "3"}\n'
REWARD = "def mine(completions, **_):\n    return [float('3' in text) for text in completions]\n"
GIVEN = (
    "--model embedded --task.train_file rows.jsonl --task.rewards reward.py:mine --kv.policy rkv "
    "--kv.budget cal/schedule.json --kv.interval 4 --kv.window 4 --sampling.max_tokens 16 "
    "--trainer.prompts_per_step 1 --trainer.steps 1"
)
RESUME = ["--trainer.resume_from_checkpoint", "true", "--trainer.steps", "2"]


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """A run of one step with paths that lead from its own folder."""
    home = tmp_path / "home"
    (home / "cal").mkdir(parents=True)
    (home / "rows.jsonl").write_text(ROW)
    (home / "reward.py").write_text(REWARD)
    (home / "cal" / "schedule.json").write_text(json.dumps({"starts": [0, 16], "budgets": [12, 20]}))
    monkeypatch.chdir(home)
    code, _, err = run("train", *GIVEN.split(), "--trainer.output_dir", str(home / "run"))
    assert code == 0, err
    return home


def test_files_that_are_where_the_run_was_started_are_named(begun, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    resumed = ["train", "--trainer.output_dir", str(begun / "run"), *RESUME]
    assert_one_sentence(run(*resumed), f"was started in {begun}, where rows.jsonl is; resume it from there")
    shutil.copy(begun / "rows.jsonl", tmp_path)
    assert_one_sentence(run(*resumed), f"was started in {begun}, where reward.py is; resume it from there")
    code, _, err = run(*resumed, "--task.rewards", f"{begun / 'reward.py'}:mine")
    assert code == 0 and "steps 1 to 2" in err, err


def test_a_model_in_a_folder_is_named_too(begun, tmp_path, monkeypatch):
    shutil.copytree(begun / "run" / "checkpoint-1", begun / "mine")
    given = [*GIVEN.split(), "--model", "mine", "--kv.budget", "12", "--trainer.output_dir", "tuned"]
    code, _, err = run("train", *given)
    assert code == 0, err
    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "reward.py"):
        shutil.copy(begun / name, tmp_path)
    resume = ["train", "--trainer.output_dir", str(begun / "tuned"), *RESUME]
    assert_one_sentence(run(*resume), f"was started in {begun}, where mine is; resume it from there")
    for name in ("rkv", "rows", "mine2"):  # folders that bear a setting's name
        (begun / name).mkdir()
    shutil.copytree(begun / "mine", tmp_path / "mine")
    code, _, err = run(*resume)
    assert code == 0 and "steps 1 to 2" in err, err


def test_a_folder_of_a_built_in_models_name_is_another_thing(begun, tmp_path, monkeypatch):
    (begun / "embedded").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("rows.jsonl", "reward.py"):
        shutil.copy(begun / name, tmp_path)
    code, _, err = run("train", "--trainer.output_dir", str(begun / "run"), *RESUME)
    assert code == 0 and "steps 1 to 2" in err, err


def test_a_data_set_in_a_folder_is_named_too(begun, tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([json.loads(ROW)]).save_to_disk(begun / "saved")
    given = [*GIVEN.split(), "--kv.budget", "12", "--task.train_file", "saved", "--trainer.output_dir", "of_saved"]
    code, _, err = run("train", *given)
    assert code == 0, err
    monkeypatch.chdir(tmp_path)
    shutil.copy(begun / "reward.py", tmp_path)
    resumed = run("train", "--trainer.output_dir", str(begun / "of_saved"), *RESUME)
    assert_one_sentence(resumed, f"was started in {begun}, where saved is; resume it from there")


def test_a_schedule_that_is_gone_is_as_it_was_read(begun):
    shutil.rmtree(begun / "cal")
    code, _, err = run("train", "--trainer.output_dir", "run", *RESUME)
    assert code == 0 and "steps 1 to 2" in err, err
    assert json.loads((begun / "run" / "run.json").read_text())["config"]["kv"]["budget"] == "12@0+20@16"


def test_a_schedule_that_has_changed_is_read_again(begun, caplog):
    (begun / "cal" / "schedule.json").write_text(json.dumps({"starts": [0, 16], "budgets": [14, 20]}))
    load_schedule.cache_clear()
    code, _, err = run("train", "--trainer.output_dir", "run", *RESUME)
    assert code == 0, err
    kv = json.loads((begun / "run" / "run.json").read_text())["config"]["kv"]
    assert (kv["budget"], kv["schedule"]["budgets"]) == ("cal/schedule.json", [14, 20])


def test_two_schedules_of_any_name_that_are_gone_are_as_they_were_read(begun):
    (begun / "held").write_text(json.dumps({"starts": [0], "budgets": [80]}))
    (begun / "read").write_text(json.dumps({"starts": [0, 16], "budgets": [48, 64]}))
    both = ["--kv.budget", "held", "--kv.select", "pages_mean", "--kv.select_budget", "read", "--kv.window", "2"]
    code, _, err = run("train", *GIVEN.split(), *both, "--trainer.output_dir", "both")
    assert code == 0, err
    for name in ("held", "read"):
        (begun / name).unlink()
    code, _, err = run("train", "--trainer.output_dir", "both", *RESUME)
    assert code == 0 and "steps 1 to 2" in err, err
    kv = json.loads((begun / "both" / "run.json").read_text())["config"]["kv"]
    assert (kv["budget"], kv["select_budget"]) == ("80@0", "48@0+64@16")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--kv.budget cal", "kv.budget is 'cal', a folder; give 'cal/schedule.json'"),
        ("--task.rewards reward.py", "reward 'reward.py' is a file; name a function of it, reward.py:FUNCTION"),
        ("...", "'...' stands for settings of your own; leave it out"),
    ],
)
def test_what_is_left_unsaid_is_asked_for(begun, given, said):
    assert_one_sentence(run("train", *GIVEN.split(), "--trainer.output_dir", "other", *given.split()), said)
