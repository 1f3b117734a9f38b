# SPDX-License-Identifier: Apache-2.0
"""Runs of `sparse-rl train`: a folder nobody overwrites, going on, one's own rows and reward, one sentence an error."""

from __future__ import annotations

import json
import shutil

import pytest
from commands import CHAIN, RUN, SHORT, SPARSE, assert_one_sentence, contents, flags, flat, run, strict_json, train

from sparse_rl.cli.train import _same_model
from sparse_rl.metrics import read_log
from sparse_rl.report.runs import load_runs
from sparse_rl.train.checkpoint import STATE


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run of two steps, and what the command said."""
    folder = tmp_path_factory.mktemp("train") / "run"
    return folder, train(*CHAIN, "--trainer.output_dir", str(folder))


def test_a_run_writes_its_folder_and_says_how_it_goes(finished):
    folder, (code, out, err) = finished
    assert code == 0
    assert out == f"the model is in {folder / 'checkpoint-2'}; sparse-rl report {folder} makes a page of the run\n"
    written = {"run.json", "metrics.jsonl", "completions.jsonl", "rejected.jsonl", "checkpoint-2", ".lock"}
    assert {path.name for path in folder.iterdir()} == written
    settings = json.loads((folder / "run.json").read_text())["config"]
    assert settings["task"] == {"name": "chain", "letters": 2, "steps": 2, "filler": 0}
    assert settings["kv"]["budget"] == 12 and settings["trainer"]["steps"] == 2
    lines = read_log(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert lines[1]["completions/max_length"] <= 24 and lines[1]["kv/saved_frac"] > 0
    said = [line for line in err.splitlines() if not line.startswith("eval/")]  # what takes long says how far it is
    assert str(folder) in said[0] and "KV rkv budget 12 + 4" in said[0] and "2 prompts x 4" in said[0]
    assert [line.split()[0] for line in said[1:]] == ["step", "0", "1", "2", "2"]
    assert "held out: dense cache" in said[2] and "sparse cache" in said[-1]


def test_a_second_run_in_the_folder_is_refused_and_changes_nothing(finished):
    folder, _ = finished
    before = contents(folder)
    result = train(*CHAIN, "--trainer.output_dir", str(folder))
    assert_one_sentence(
        result, "has a run in it", "resume it with --trainer.resume_from_checkpoint true", "TrainerConfig("
    )
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
    assert_one_sentence(result, "there is no run to resume", "leave out resume_from_checkpoint")
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_folder_says_which(finished, tmp_path):
    last = finished[0] / "checkpoint-2"
    given = ["--trainer.output_dir", str(tmp_path / "run"), "--trainer.resume_from_checkpoint", str(last)]
    result = train(*CHAIN, *given)
    assert_one_sentence(result, "there is no run to resume", f"give --trainer.output_dir {finished[0]}.")
    shutil.copytree(last, tmp_path / "other" / "checkpoint-2")  # run.json is lost there
    given[-1] = str(tmp_path / "other" / "checkpoint-2")
    result = train(*CHAIN, *given)
    assert_one_sentence(result, "there is no run to resume", f"give --trainer.output_dir {tmp_path / 'other'}.")
    result = train(*CHAIN, *given[:-1], str(finished[0]))  # the run itself
    assert_one_sentence(result, "there is no run to resume", f"give --trainer.output_dir {finished[0]}.")


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


def test_run_json_says_where_rows_and_rewards_came_from(own, tmp_path):
    assert train(*own(FINE), "--trainer.steps", "0")[0] == 0
    settings = json.loads((tmp_path / "run" / "run.json").read_text())["config"]["task"]
    assert settings["train_file"] == str(tmp_path / "train.jsonl") and settings["rewards"]
    assert settings["grading"]["timeout_s"] == 5.0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            "raise KeyError('the\\n judge')",
            "reward function 'mine' raised KeyError: 'the\\n judge' ({file}, line 2); mend",
        ),
        ("raise OSError(2, 'No such file', 'x')", "reward function 'mine' raised FileNotFoundError"),
        ("return [float('nan') for _ in completions]", "reward function 'mine' returned nan for completion 0"),
        ("return ['1' for _ in completions]", "reward function 'mine' returned '1' for completion 0"),
        ("return [1.0]", "reward function 'mine' returned 1 rewards for 8 completions; it is called once"),
        ("pass", "reward function 'mine' returned NoneType"),
    ],
    ids=["raises", "raises OSError", "nan", "text", "too few", "nothing"],
)
@pytest.mark.some(3)
def test_a_broken_reward_stops_the_run_with_one_sentence(body, message, own, tmp_path):
    code, out, err = train(*own(body))
    message = message.replace("{file}", str(tmp_path / "reward.py"))
    last = err.splitlines()[-1]
    assert (code, out) == (2, "") and "Traceback" not in err
    assert last.startswith("sparse-rl: error: ") and message in last and err.count("sparse-rl: error") == 1


def test_a_mended_reward_goes_on_where_it_failed(own, tmp_path):
    assert train(*own("raise KeyError('judge')"))[0] == 2
    assert_one_sentence(train(*own(FINE)), "has a run in it")
    assert train(*own(FINE), "--resume_from_checkpoint")[0] == 0
    assert [line["step"] for line in read_log(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2]


def settings_of(folder) -> dict:
    """Every setting in run.json but how the run goes on."""
    settings = json.loads((folder / "run.json").read_text())["config"]
    del settings["trainer"]["resume_from_checkpoint"]
    return settings


def test_a_resumed_run_keeps_its_settings_and_a_given_flag_wins(own, tmp_path, caplog):
    folder = tmp_path / "run"
    made = ["--correction.preset", "tis", "--correction.upper", "3", "--grading.timeout_s", "2", "--optim=adamw_torch"]
    assert train(*own(FINE), *made, "--task.reward_weights", "0.5", "--trainer.save_every", "1")[0] == 0
    before = settings_of(folder)
    shutil.rmtree(folder / "checkpoint-2")
    resume = ["--trainer.output_dir", str(folder), "--trainer.resume_from_checkpoint", "true"]
    code, _, err = train(*resume)
    assert code == 0 and "steps 1 to 2" in err and settings_of(folder) == before
    assert "other settings" not in caplog.text and before["task"]["grading"]["timeout_s"] == 2.0
    assert [line["rewards/mine/mean"] for line in read_log(folder / "metrics.jsonl")[1:]]

    code, _, err = train(*resume, "--max_steps=3", "--kv.policy", "streaming", "--correction.preset", "sparse_rl")
    assert code == 0 and "steps 2 to 3" in err, err
    after = settings_of(folder)
    assert after["trainer"] == before["trainer"] | {"steps": 3} and after["kv"]["policy"] == "streaming"
    assert after["kv"]["budget"] == 12 and after["correction"]["preset"] == "sparse_rl"
    others = before.keys() - {"trainer", "kv", "correction"}
    assert {name: after[name] for name in others} == {name: before[name] for name in others}, "are the run's"
    assert "kv.policy rkv is now streaming" in caplog.text and "trainer.steps 2 is now 3" in caplog.text


def test_a_run_whose_record_is_lost_keeps_its_settings(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    before = settings_of(folder)
    for name in ("run.json", "completions.jsonl"):
        (folder / name).unlink()
    code, _, err = train("--trainer.output_dir", str(folder), "--trainer.resume_from_checkpoint", "true")
    assert code == 0 and "nothing is left to do; raise trainer.steps to go on" in err
    assert settings_of(folder) == before | {"trainer": before["trainer"] | {"output_dir": str(folder)}}


def test_a_schedule_of_another_model_is_told_of(tmp_path, caplog):
    schedule = {"starts": [0], "budgets": [12], "kv": {"policy": "rkv"}, "model": "other/model", "longest": 11}
    (tmp_path / "schedule.json").write_text(json.dumps(schedule))
    given = ["--kv.policy", "rkv", "--kv.budget", str(tmp_path / "schedule.json"), "--kv.interval", "4"]
    code, _, err = train(*CHAIN, *given, "--trainer.steps", "0", "--trainer.output_dir", str(tmp_path / "run"))
    assert code == 0, err
    assert "kv.budget was calibrated on the model other/model, and this run is of embedded." in caplog.text
    assert "schedule.json was calibrated with contexts of at most 11 tokens; beyond them" in caplog.text


def test_a_models_folder_has_several_names(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path)
    for other, same in (("mine", True), ("./mine/", True), (str(tmp_path / "mine"), True), (".", False), ("m", False)):
        assert _same_model("mine", other) is same and _same_model(other, "mine") is same
    assert _same_model("Qwen/Qwen3-4B", "Qwen/Qwen3-4B")


@pytest.mark.parametrize("damaged", ["", "not json", "[]", "{}"])
@pytest.mark.some(2)
def test_a_run_whose_record_is_damaged_keeps_its_settings_too(finished, damaged, tmp_path, caplog):
    """A checkpoint has them as well; without one, nothing knows them, and the default recipe's are not the run's."""
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    before = settings_of(folder)
    (folder / "run.json").write_text(damaged)
    resume = ["--trainer.output_dir", str(folder), "--trainer.resume_from_checkpoint", "true", "--trainer.steps", "3"]
    code, _, err = train(*resume)
    assert code == 0 and "steps 2 to 3" in err and "run.json was damaged; it is written anew" in caplog.text
    assert settings_of(folder) == before | {"trainer": before["trainer"] | {"steps": 3, "output_dir": str(folder)}}

    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    (folder / "run.json").write_text(damaged)
    state = contents(folder)
    assert_one_sentence(train(*resume), "run.json is damaged, and no checkpoint has", "another --trainer.output_dir")
    assert contents(folder) == state


def test_a_log_that_is_no_runs_is_named(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)
    for line in ('{"step": 4, "rew', "[1]", "{}", '{"step": null}'):
        (folder / "metrics.jsonl").write_text(line + "\n")
        result = train(*CHAIN, "--trainer.output_dir", str(folder), "--resume_from_checkpoint")
        assert_one_sentence(result, f"{folder / 'metrics.jsonl'} has lines that are no run's; mend it, or give another")


def test_infinite_settings_are_written_as_json_and_kept(own, tmp_path, caplog):
    folder = tmp_path / "run"
    infinite = {"correction.upper", "update.max_grad_norm", "loss.clip_high"}
    assert train(*own(FINE), *(word for name in infinite for word in (f"--{name}", ".inf")))[0] == 0
    assert strict_json(folder / "run.json")["config"] == strict_json(folder / "checkpoint-2" / STATE)["settings"]
    before = settings_of(folder)
    assert {name for name, value in flat(before).items() if value == ".inf"} == infinite
    resume = ["--trainer.output_dir", str(folder), "--trainer.resume_from_checkpoint", "true"]
    assert train(*resume, "--trainer.steps", "3")[0] == 0
    assert "resuming with other settings: trainer.steps 2 is now 3.\n" in caplog.text
    assert settings_of(folder) == before | {"trainer": before["trainer"] | {"steps": 3}}
    (reported,) = load_runs([folder])
    assert {reported.settings[name] for name in infinite} == {".inf"}


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
    file = tmp_path / "reward.py"
    given = [*own(FINE), "--task.rewards"]
    assert_one_sentence(train(*given, f"{file}:mime"), "no function 'mime' (did you mean 'mine'?); it has mine.")
    assert_one_sentence(train(*given, f"{file}x.py:mine"), f"there is no file {file}x.py")
    arguments = [*own(FINE), "--task.reward_weights", "[1.0, 2.0]"]
    assert_one_sentence(train(*arguments), "1 reward functions and 2 weights")
    assert not (tmp_path / "run").exists()


def test_the_embedded_task_needs_the_embedded_model(tmp_path):
    result = train("--model", "tiny", "--sampling.n", "2", "--trainer.output_dir", str(tmp_path / "run"))
    assert_one_sentence(result, "written in the embedded model's tokens")
    assert not (tmp_path / "run").exists()
