# SPDX-License-Identifier: Apache-2.0
"""Runs that were not asked the same, runs of another kind, and folders that are no run's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from commands import assert_one_sentence, run
from made_up_runs import Page, config, report, training, write_run

from sparse_rl.calibrate.calibrate import RECORD
from sparse_rl.evaluate.record import NAME
from sparse_rl.metrics import METRICS
from sparse_rl.report.plots import PLOTS, target_of
from sparse_rl.report.runs import CHECKPOINT, OTHERS, load_runs, summary
from sparse_rl.train.checkpoint import STATE

TASK = {"name": "rows", "train_file": "a.jsonl", "rewards": ["math"], "grading": {"workers": 2, "timeout_s": 5.0}}
EVAL = {"every": 10, "prompts": 64, "seed": 0, "n": 1}
DATA = {"train_file": "warm.jsonl", "eval_file": "held_out.jsonl", "train_sha256": "0a"}


def asked(**settings: Any) -> dict[str, Any]:
    """A run's settings; a section that is given is changed, not replaced."""
    base = config() | {"task": TASK, "eval": EVAL}
    sections = {name: base[name] | value if isinstance(value, dict) else value for name, value in settings.items()}
    return base | sections


def notes(folder: Path, *settings: dict[str, Any], evaluated: bool = True) -> list[str]:
    lines = [training(step) for step in range(0 if evaluated else 1, 2)]
    folders = [write_run(folder / f"run{i}", lines, each) for i, each in enumerate(settings)]
    return re.findall('<p class="note">(.*?)</p>', report(*folders))


@pytest.mark.parametrize(
    ("other", "apart"),
    [
        ({"model": "tiny"}, "model: their"),
        ({"task": {"rewards": ["exact"]}}, "task.rewards: their"),
        (
            {"model": "tiny", "task": {"train_file": "b.jsonl", "rewards": []}},
            "model, task.train_file and task.rewards: their",
        ),
        ({"task": {"name": "lookup", "pairs": 10}}, "task.name: their"),
        ({"task": {"train_file": "b.jsonl"}}, "task.train_file: their training"),
        ({"task": {"eval_file": "c.jsonl"}, "eval": {"prompts": 8}}, "eval.prompts and task.eval_file: their held-out"),
        ({"task": {"train_file": "b.jsonl"}, "eval": {"n": 2}}, "task.train_file and eval.n: their"),
    ],
)
@pytest.mark.some(3)
def test_runs_that_were_not_asked_the_same_are_told_of(tmp_path, other, apart):
    assert notes(tmp_path, asked(), asked(), asked(**other)) == [
        f"These runs differ in {apart} rewards cannot be compared."
    ]


def test_what_runs_are_compared_for_is_not_told(tmp_path):
    other = asked(
        kv={"policy": "snapkv", "budget": 32},
        correction={"preset": "tis"},
        trainer={"seed": 1, "steps": 9},
        task={"grading": {"workers": 8, "timeout_s": 9.0}},
        eval={"every": 5, "seed": 3},
    )
    assert notes(tmp_path, asked(), other | {"optimizer": {"learning_rate": 1.0}, "sampling": {"n": 4}}) == []


def test_what_nobody_evaluated_is_not_compared(tmp_path):
    assert notes(tmp_path / "a", asked(), asked(eval={"prompts": 8}), evaluated=False) == []
    (note,) = notes(tmp_path / "b", asked(), asked(task={"train_file": "b.jsonl"}), evaluated=False)
    assert note == "These runs differ in task.train_file: their rewards cannot be compared."


def test_what_an_older_run_did_not_say_is_no_difference(tmp_path):
    assert notes(tmp_path, asked(), asked(eval={"top_p": 0.9})) == []


def test_one_evaluated_run_of_two_has_nothing_to_be_compared_with(tmp_path):
    lines = [training(1)], [training(0), training(1)]
    settings = asked(), asked(task={"train_file": "b.jsonl"})
    runs = [write_run(tmp_path / str(i), *given) for i, given in enumerate(zip(lines, settings, strict=True))]
    assert "differ in task.train_file: their rewards cannot" in report(*runs)


@pytest.mark.slow
def test_a_file_is_known_by_what_is_in_it(tmp_path):
    def other(path: str, digest: str) -> dict[str, Any]:
        return asked(task={"train_file": path, "train_sha256": digest})

    assert notes(tmp_path / "a", other("a.jsonl", "0a"), other("copies/a.jsonl", "0a")) == []
    (note,) = notes(tmp_path / "b", other("a.jsonl", "0a"), other("a.jsonl", "0b"))
    assert note.startswith("These runs differ in task.train_file: their training rewards")
    assert notes(tmp_path / "c", other("a.jsonl", "0a"), asked()) == [], "of one that did not say"


def test_completions_that_end_at_different_lengths(tmp_path):
    folders = [
        write_run(tmp_path / str(limit), [], asked() | {"sampling": {"max_tokens": limit}}) for limit in (64, 99)
    ]
    page = report(*folders)
    assert "These runs differ in sampling.max_tokens: what one cuts off, another may finish.</small>" in page
    assert 'class="note"' not in page and "cuts off" not in report(folders[0])


def supervised_run(folder: Path, steps: int = 20, held_out: bool = True, **data: Any) -> Path:
    settings = {"model": "tiny", "data": DATA | data, "trainer": {"steps": 30}, "optimizer": {"learning_rate": 1e-4}}
    lines: list[dict[str, Any]] = []
    for step in range(steps + 1):
        lines.append({"step": step, "loss": 3 - step / 10, "grad_norm": 1.0, "train/tokens_per_s": 100.0 * step})
        if not step:
            lines[0] = {"step": 0}
        if held_out and step % 10 == 0:
            lines[-1] |= {"eval/loss": 4 - step / 10, "eval/perplexity": 2.0}
    return write_run(folder, lines, settings)


def test_a_supervised_run_by_hand(tmp_path):
    text = report(supervised_run(tmp_path / "warm"), png=tmp_path / "png")
    page = Page(text)
    assert page.tables[0] == [
        ["run", "steps", "loss, last 10", "held-out loss", "tokens/s"],
        ["warm", "20\u00a0of\u00a030", "1.450", "4.000 → 2.000", "1,050"],  # 11 .. 20: 15.5 on the mean; 1 .. 20: 10.5
    ]
    drawn = ["loss", "eval/loss", "grad_norm"]
    assert page.tables[2][1:] == [[name, METRICS[name]] for name in [*drawn, "train/tokens_per_s"]]
    names = {path.stem for path in (tmp_path / "png").iterdir()}
    assert names == {"loss", "held_out_loss", "grad_norm"} and page.tags.count("svg") == 3
    assert "Supervised learning" in text and "einforcement" not in text
    assert not re.search("KV|[Rr]ejected|overlap<|pi_dense", text), "nothing of rollouts"


def test_supervised_runs_without_held_out_rows_and_with_others(tmp_path):
    warm, bare = supervised_run(tmp_path / "warm"), supervised_run(tmp_path / "bare", held_out=False, eval_file=None)
    assert summary(load_runs([bare])[0])["held-out loss"] == "–"
    assert 'class="note"' not in report(warm, bare), "only one has a held-out loss"
    other = supervised_run(tmp_path / "other", eval_file="other.jsonl", train_sha256="0b")
    (note,) = re.findall('<p class="note">(.*?)</p>', report(warm, other))
    assert note == "These runs differ in data.train_file and data.eval_file: their losses cannot be compared."


def test_runs_of_both_kinds_are_refused(tmp_path):
    folders = [supervised_run(tmp_path / "warm"), write_run(tmp_path / "first", [], asked())]
    told = (f"{folders[0]} learnt completions (sft) and {folders[1]} rewards (train)", "report them separately")
    for given in (folders, folders[::-1]):
        assert_one_sentence(run("report", *map(str, given), "--output", str(tmp_path / "page.html")), *told)
    assert not (tmp_path / "page.html").exists()


def test_a_completion_that_was_not_scored(tmp_path):
    record = {"step": 1, "completion": "x", "advantage": 0.0, "accepted": True, "lowest_log_xi": None}
    lost = record | {"advantage": 1.0, "accepted": False}
    page = report(write_run(tmp_path / "run", [training(1)], completions=[record, lost]))
    assert "advantage 0, accepted yes, lowest log xi not scored</p>" in page
    assert "advantage 1, accepted no, lowest log xi –</p>" in page, "whose xi is 0"
    assert "Not scored: its advantage is 0" in page
    scored = report(write_run(tmp_path / "other", [], completions=[record | {"lowest_log_xi": -1.5}]))
    assert "lowest log xi -1.5</p>" in scored and "scored" not in scored


def test_xi_is_explained(tmp_path):
    page = report(write_run(tmp_path / "run", [training(1)]))
    assert "xi = pi_dense / pi_sparse of a sampled token" in page


@pytest.mark.slow
def test_the_tails_target_is_drawn_if_there_is_one(tmp_path):
    plot = next(plot for plot in PLOTS if plot.name == "tail")

    def target(*targets: float | None, measured: bool = True) -> float | None:
        folder = tmp_path / f"{targets}{measured}"
        runs = []
        for i, each in enumerate(targets):
            lines = [training(1, sparse=measured or not i)]
            runs.append(write_run(folder / str(i), lines, config() | ({"control": {"target": each}} if each else {})))
        page = report(*runs)
        found = target_of(plot, load_runs(runs))
        assert (f"target {found:g}" in page) if found is not None else ("target 0" not in page)
        return found

    assert target(0.8) == target(0.8, 0.8) == 0.8
    assert target(0.8, 0.86) is target(None) is target(0.8, None) is None
    assert target(0.8, 0.86, measured=False) == 0.8, "the second has no tail"


def test_other_folders_are_told_what_they_are(tmp_path):
    assert (*OTHERS, CHECKPOINT) == (NAME, RECORD, STATE)
    first = write_run(tmp_path / "first", [])
    saved, copied = first / "checkpoint-2", tmp_path / "copied"
    for folder in (saved, copied):
        folder.mkdir()
        (folder / STATE).write_text("{}")
    evaluated, calibrated = tmp_path / "evaluated", tmp_path / "calibrated"
    for folder, record in ((evaluated, NAME), (calibrated, RECORD)):
        folder.mkdir()
        (folder / record).write_text("{}")
    (evaluated / "report.html").write_text("")
    for folder, said in (
        (saved, f"but a checkpoint; its run is {first}."),
        (copied, "but a checkpoint; give the run it is of."),
        (evaluated, "but an evaluation, which has its own report.html in it; open that."),
        (calibrated, "but a calibration, which writes its own report.html into it; go on with it (--resume)."),
    ):
        assert_one_sentence(run("report", str(folder)), f"{folder} is no run folder, {said}")
