# SPDX-License-Identifier: Apache-2.0
"""`sparse-rl sft`: settings by flag, file and recipe; a run folder that `sparse-rl train` goes on from."""

from __future__ import annotations

import json
import os
import shutil
import signal
from importlib import resources

import pytest
import torch
import yaml
from commands import CHAIN, assert_one_sentence, changes, contents, flat, resolved, run, strict_json, train
from safetensors.torch import load_file

from sparse_rl.cli.recipes import recipes
from sparse_rl.metrics import read_log
from sparse_rl.tasks import Chain
from sparse_rl.train import checkpoint
from sparse_rl.train.sft import nll

ROWS = 12


def sft(*arguments: str) -> tuple[int, str, str]:
    return run("sft", *arguments)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Chains with an answer that is always the same, some of them held out."""
    folder = tmp_path_factory.mktemp("data")
    prompts = Chain(letters=2, steps=2, filler=0).stream(0, ROWS + 2, 0)
    rows = [json.dumps({"prompt": prompt.text, "completion": "777"}) + "\n" for prompt in prompts]
    (folder / "warm.jsonl").write_text("".join(rows[:ROWS]))
    (folder / "held_out.jsonl").write_text("".join(rows[ROWS:]))
    return folder


@pytest.fixture(scope="module")
def arguments(data):
    files = ["--data.train_file", str(data / "warm.jsonl"), "--data.eval_file", str(data / "held_out.jsonl")]
    return ["--model", "embedded", *files, "--trainer.rows_per_step", "6", "--trainer.eval_every", "2"]


@pytest.fixture(scope="module")
def finished(arguments, tmp_path_factory):
    """A run of two epochs, and what the command said."""
    folder = tmp_path_factory.mktemp("sft") / "run"
    return folder, sft(*arguments, "--trainer.output_dir", str(folder), "--trainer.epochs", "2")


def test_a_run_writes_its_folder_and_says_how_it_goes(finished):
    folder, (code, out, err) = finished
    assert code == 0, err
    model = folder / "checkpoint-4"
    assert out == (
        f"the model is in {model}; sparse-rl train --model {model} ... goes on from it, sparse-rl report {folder} "
        "makes a page of the run\n"
    )
    lines = read_log(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
    assert lines[4]["eval/loss"] < lines[2]["eval/loss"] < lines[0]["eval/loss"]
    said = err.splitlines()
    assert f"{folder}: " in said[0] and "12 rows and 2 held out, 6 rows a step, steps 0 to 4" in said[0]
    assert [line.split(",")[0] for line in said[1:]] == ["step 0/4", "step 2/4", "step 4/4"]
    assert f"held out: loss {lines[4]['eval/loss']:.4f}" in said[3] and f"loss {lines[4]['loss']:.4f}, grad" in said[3]
    settings = json.loads((folder / "run.json").read_text())["config"]
    assert settings["model"] == "embedded" and settings["data"]["train_file"].endswith("warm.jsonl")
    assert settings["optimizer"]["learning_rate"] == 1e-4 and settings["trainer"]["steps"] == 4


def test_its_report_is_of_losses(finished, tmp_path):
    assert run("report", str(finished[0]), "--output", str(tmp_path / "page.html"))[0] == 0
    page = (tmp_path / "page.html").read_text()
    assert "Supervised learning" in page and "held-out loss" in page and "KV policy" not in page


def test_a_second_run_in_the_folder_is_refused_and_changes_nothing(finished, arguments):
    folder, _ = finished
    before = contents(folder)
    assert_one_sentence(sft(*arguments, "--trainer.output_dir", str(folder)), "has a run in it", "resume it with")
    assert contents(folder) == before


def test_a_run_goes_on(arguments, tmp_path, caplog):
    target = ["--trainer.output_dir", str(tmp_path / "run"), "--trainer.steps", "4"]
    assert sft(*arguments, *target)[0] == 0
    code, _, err = sft(*arguments, *target[:2], "--trainer.epochs", "3", "--trainer.resume_from_checkpoint", "true")
    assert code == 0 and "steps 4 to 6" in err
    assert "trainer.steps 4 is now 6" in caplog.text
    assert [line["step"] for line in read_log(tmp_path / "run" / "metrics.jsonl")] == list(range(7))


def test_there_must_be_a_run_to_resume(tmp_path):
    given = ["--trainer.output_dir", str(tmp_path / "none"), "--trainer.resume_from_checkpoint", "true"]
    assert_one_sentence(sft(*given), "there is no run to resume in", "leave out resume_from_checkpoint")
    (tmp_path / "file").write_text("")
    given = ["--trainer.output_dir", str(tmp_path / "file"), "--trainer.resume_from_checkpoint", "true"]
    assert_one_sentence(sft(*given), "which is a file; name a folder")


def test_other_epochs_in_a_file_are_more_steps(finished, tmp_path):
    folder, file = tmp_path / "run", tmp_path / "more.yaml"
    shutil.copytree(finished[0], folder)
    for epochs, steps in (("2", "steps 4 to 4"), ("3", "steps 4 to 6")):
        file.write_text(f"trainer: {{epochs: {epochs}, output_dir: {folder}, resume_from_checkpoint: true}}\n")
        code, _, err = sft("--config", str(file))
        assert code == 0 and steps in err, err


def test_a_resumed_run_keeps_its_settings(finished, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished[0], folder)
    before = json.loads((folder / "run.json").read_text())["config"]
    code, _, err = sft("--trainer.output_dir", str(folder), "--trainer.resume_from_checkpoint", "true")
    assert code == 0 and "12 rows and 2 held out, 6 rows a step, steps 4 to 4" in err, err
    after = json.loads((folder / "run.json").read_text())["config"]
    changed = changes(flat(before), flat(after))
    assert changed == {"trainer.output_dir": str(folder), "trainer.resume_from_checkpoint": True}


def test_a_run_without_clipping_goes_on(arguments, tmp_path, caplog):
    """As one of `train` does."""
    target = ["--trainer.output_dir", str(tmp_path / "run"), "--trainer.steps", "1"]
    assert sft(*arguments, *target, "--trainer.max_grad_norm", ".inf")[0] == 0
    assert strict_json(tmp_path / "run" / "run.json")["config"]["trainer"]["max_grad_norm"] == ".inf"
    resume = [*target[:2], "--trainer.steps", "2", "--trainer.resume_from_checkpoint", "true"]
    assert sft(*resume)[0] == 0
    assert "resuming with other settings: trainer.steps 1 is now 2.\n" in caplog.text


def test_the_command_leaves_with_the_signals_exit_code(arguments, tmp_path, monkeypatch, caplog):
    calls = []

    def watched(*args):
        if calls.append(1) or len(calls) == 3:  # an evaluation, then a forward a step
            os.kill(os.getpid(), signal.SIGTERM)
        return nll(*args)

    monkeypatch.setattr("sparse_rl.train.sft.nll", watched)
    code, out, _ = sft(*arguments, "--trainer.output_dir", str(tmp_path / "run"), "--trainer.max_tokens", "100000")
    assert (code, out) == (143, "")
    assert f"stopped by SIGTERM after {tmp_path / 'run' / 'checkpoint-2'}" in caplog.text


def test_train_goes_on_from_its_checkpoint(finished, tmp_path):
    folder = checkpoint.checkpoints(finished[0])[-1]
    given = ["--model", str(folder), "--trainer.steps", "1", "--optimizer.learning_rate", "0"]
    code, _, err = train(*CHAIN, *given, "--trainer.output_dir", str(tmp_path))
    assert code == 0, err
    assert json.loads((tmp_path / "run.json").read_text())["config"]["model"] == str(folder)
    ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / "checkpoint-1", folder))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_dry_run_prints_a_file_that_gives_the_same_settings(tmp_path):
    given = ["--data.train_file", "a: b.jsonl", "--trainer.save_total_limit", "null", "--optimizer.schedule", "linear"]
    code, out, err = sft("--model", "no/such", *given, "--trainer.report_to", "trackio", "--dry-run")
    assert (code, err) == (0, "")
    (tmp_path / "config.yaml").write_text(out)
    assert sft("--config", str(tmp_path / "config.yaml"), "--dry-run") == (0, out, "")
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("recipe", recipes("sft"))
def test_every_recipe_loads_by_name_and_is_obeyed(recipe):
    settings = resolved("--config", recipe, command="sft")
    written = flat(yaml.safe_load((resources.files("sparse_rl") / "recipes" / recipe).read_text()))
    assert written == {key: settings[key] for key in written}
    flags = resolved("--trainer.epochs", "1", "--config", recipe, command="sft")
    assert changes(settings, flags) == {"trainer.epochs": 1.0}, "flags win"


def test_recipes_of_the_two_commands_are_told_apart():
    assert "smollm2-warm.yaml" in recipes("sft") and not set(recipes("sft")) & set(recipes("train"))
    every = [e.name for e in (resources.files("sparse_rl") / "recipes").iterdir() if e.name.endswith(".yaml")]
    assert sorted([*recipes("sft"), *recipes("train")]) == sorted(every)
    assert_one_sentence(train("--config", "smollm2-warm.yaml"), "data settings, which belong to `sparse-rl sft`")
    assert_one_sentence(sft("--config", "default.yaml"), "task settings, which belong to `sparse-rl train`")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "data.train_file is missing"),
        (["--data.trainfile", "a"], "unknown option 'data.trainfile'; did you mean --data.train_file?"),
        (["--trainer.epoch", "3"], "did you mean --trainer.epochs?"),
        (["--data.train_file", "a", "--trainer.epochs", "0"], "trainer.epochs is 0"),
        (["--data.train_file", "a", "--optimizer.learning_rate", "fast"], "optimizer.learning_rate is 'fast'"),
        (["--data.train_file", "a", "--dtype", "float12"], "dtype 'float12' is unknown"),
        (["--config", "smollm2-worm.yaml"], "neither a file nor a recipe (did you mean 'smollm2-warm.yaml'?)"),
        (["--config"], "--config needs the name"),
        (["--model", "embedded", "--data.train_file", "no-such.jsonl"], "no-such.jsonl: No such file"),
        (["--kv.budget", "3"], "unknown option 'kv.budget'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_wrong_setting_gets_one_sentence(given, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert_one_sentence(sft(*given), message)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_key_of_a_file_gets_a_suggestion(tmp_path):
    (tmp_path / "config.yaml").write_text("data: {train_file: a, max_lenght: 3}\n")
    assert_one_sentence(sft("--config", str(tmp_path / "config.yaml")), "did you mean --data.max_length?")


def test_a_wrong_row_is_named_before_anything_is_written(arguments, tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a|", "completion": "1"}\n{"prompt": "a|"}\n')
    given = ["--data.train_file", str(tmp_path / "rows.jsonl"), "--trainer.output_dir", str(tmp_path / "run")]
    assert_one_sentence(sft(*arguments, *given), f'line 2 of {tmp_path / "rows.jsonl"} has no "completion"')
    assert not (tmp_path / "run").exists()


def test_several_processes_are_refused(arguments, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert_one_sentence(sft(*arguments, "--trainer.output_dir", str(tmp_path / "run")), "without torchrun")
    assert not (tmp_path / "run").exists()


def test_help_names_every_section():
    code, out, _ = sft("--help")
    assert code == 0 and "sparse-rl train --model runs/warm/checkpoint-300" in out
    for setting in (
        "--trainer.epochs",
        "--trainer.rows_per_step",
        "--data.eval_file",
        "--optimizer.warmup",
        "--dry-run",
    ):
        assert setting in out
