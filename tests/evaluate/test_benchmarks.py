# SPDX-License-Identifier: Apache-2.0
"""Evaluations of tiny models: the table's numbers, grading beside generation, and going on after any end."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import statistics
import threading
import time
from dataclasses import replace

import pytest
import small_eval
import torch
from small_eval import results_of, samples_of, small, timeless, toy

from sparse_rl.evaluate import EvalObserver, evaluate_benchmarks
from sparse_rl.evaluate import benchmarks as module
from sparse_rl.evaluate.grader import Block, Grader, Tally
from sparse_rl.model import rope
from sparse_rl.model.tiny import tiny_model, tiny_tokenizer
from sparse_rl.rollout import Engine, EngineConfig
from sparse_rl.runfolder import lock
from sparse_rl.tasks.rewards import GradingConfig

SEED = random.randrange(1 << 20)


@pytest.fixture
def data(tmp_path):
    toy(tmp_path / "data", seed=SEED)
    yield tmp_path / "data"
    del small_eval.BENCHMARKS["toy"]


class Watcher(EvalObserver):
    def __init__(self):
        self.notes, self.seen = [], []

    def on_note(self, note):
        self.notes.append(note)

    def on_status(self, status):
        self.seen.append(status)


def samples(folder, cache="full"):
    lines = [json.loads(line) for text in samples_of(folder).values() for line in text.splitlines()]
    return [line for line in lines if line["cache"] == cache]


def test_the_numbers_are_those_of_the_samples(data, tmp_path):
    """Recomputed from the samples in the plainest way."""
    watcher = Watcher()
    results = evaluate_benchmarks(small(data), tmp_path / "out", observer=watcher)
    accuracies = {}
    for cell in results["cells"]:
        lines = samples(tmp_path / "out", cell["cache"])
        assert [(line["problem"], line["sample"]) for line in lines] == [
            (f"toy-{i}", s) for i in range(10) for s in (0, 1)
        ]
        assert cell["samples"] == 20 and cell["problems"] == 10 and cell["n"] == 2
        failed = [line["failure"] for line in lines if line["score"] is None]
        assert cell["failed"] == len(failed) and cell["failures"] == {why: failed.count(why) for why in set(failed)}
        by_problem = {}
        for line in lines:
            if line["score"] is not None:
                by_problem.setdefault(line["problem"], []).append(line["score"])
        values = accuracies[cell["cache"]] = {name: sum(found) / len(found) for name, found in by_problem.items()}
        found = cell["metrics"]["avg@2"]
        assert found["mean"] == pytest.approx(statistics.mean(values.values())) and found["count"] == len(values)
        assert found["se"] == pytest.approx(statistics.stdev(values.values()) / len(values) ** 0.5)
        assert cell["tokens_per_answer"] == sum(line["tokens"] for line in lines) / 20
        held, full = (sum(line[key] for line in lines) for key in ("kv_held", "kv_full"))
        assert cell["kv_saved_frac"] == pytest.approx(1 - held / full)
        assert cell["kv_read_frac"] == pytest.approx(held / full)
        assert cell["truncated"] == sum(line["finish_reason"] == "length" for line in lines)
        assert sum(group["count"] for group in cell["by_level"].values()) == len(values)
    dense, sparse = accuracies["full"], accuracies["rkv:budget=16,interval=8"]
    differences = [sparse[name] - dense[name] for name in dense.keys() & sparse.keys()]
    found = results["cells"][1]["difference"]["avg@2"]
    assert found["mean"] == pytest.approx(statistics.mean(differences), abs=1e-12)
    assert found["se"] == pytest.approx(statistics.stdev(differences) / len(differences) ** 0.5)
    assert results["cells"][0]["kv_saved_frac"] == 0 < results["cells"][1]["kv_saved_frac"]
    assert "difference" not in results["cells"][0] and results == json.loads(
        (tmp_path / "out/results.json").read_text()
    )
    assert watcher.seen[-1].problems == 10 and watcher.seen[-1].left_s is not None
    assert "no chat template" in watcher.notes[0] and results["notes"] == watcher.notes


def test_several_models_on_several_benchmarks(data, tmp_path, monkeypatch):
    loads = []
    real = module.load
    monkeypatch.setattr(module, "load", lambda name, **more: loads.append(name) or real(name, **more))
    models = ("tiny", "tiny:qwen3")
    evaluation = small(data, models=models, benchmarks=("toy", "lookup:pairs=2"), problems=3)
    results = evaluate_benchmarks(evaluation, tmp_path / "out")
    assert loads == list(models)  # each once
    cells = [(cell["model"], cell["cache"], cell["benchmark"]) for cell in results["cells"]]
    assert cells == [(m, c, b) for m in models for c in evaluation.kv for b in evaluation.benchmarks]
    assert all(cell["problems"] == 3 for cell in results["cells"])
    texts = samples_of(tmp_path / "out")
    assert len(texts) == 8 and len(set(texts.values())) == 8
    again = replace(evaluation, problems=5)
    evaluate_benchmarks(again, tmp_path / "more")
    taken = [{line["problem"] for line in samples(tmp_path / name)} for name in ("out", "more")]
    assert taken[0] < taken[1]  # a smaller sample is part of a larger one


def test_every_sample_of_every_block_has_random_numbers_of_its_own(data, tmp_path):
    path = data / "toy" / "test.jsonl"
    rows = [json.loads(line) | {"problem": "the same"} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluate_benchmarks(small(data, kv=("full",)), tmp_path / "out")
    assert len(next((tmp_path / "out").rglob("blocks.jsonl")).read_text().splitlines()) == 2
    assert len({line["completion"] for line in samples(tmp_path / "out")}) == 20


@pytest.mark.parametrize("num_points", [2, pytest.param(5, marks=pytest.mark.slow)])
def test_killed_anywhere_it_resumes_to_the_same_table(num_points, data, tmp_path, seed):
    small_eval.kill_and_resume(data, tmp_path, random.Random(seed), num_points)


def test_a_last_block_that_is_cut_is_made_again(data, tmp_path):
    evaluate_benchmarks(small(data), tmp_path / "out")
    expected = results_of(tmp_path / "out"), samples_of(tmp_path / "out")
    draw = random.Random(SEED)
    for name in ("samples.jsonl", "blocks.jsonl"):
        path = next((tmp_path / "out").rglob(name))
        path.write_bytes(path.read_bytes()[: -draw.randrange(1, 200)])
        results = evaluate_benchmarks(small(data), tmp_path / "out", resume=True)
        assert (timeless(results), samples_of(tmp_path / "out")) == expected


def test_a_finished_evaluation_resumes_without_a_model(data, tmp_path, monkeypatch):
    first = evaluate_benchmarks(small(data), tmp_path / "out")
    monkeypatch.setattr(module, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    again = evaluate_benchmarks(small(data), tmp_path / "out", resume=True)
    assert again.pop("wall_s") >= first.pop("wall_s") > 0
    first.pop("started"), again.pop("started")
    assert again == first  # seconds and tok/s too: they are those of the blocks


def waits(event, slow_s):
    def grade(completions, **columns):
        if not event.wait(slow_s):
            raise AssertionError("decoding waits for the grader")
        return [1.0] * len(completions)

    return grade


def test_decoding_does_not_wait_for_the_grader(data, tmp_path, monkeypatch):
    """The grader gets nothing done before the last cell is generated."""
    event = threading.Event()
    monkeypatch.setattr(small_eval, "grade", waits(event, 30))

    class Setter(EvalObserver):
        def on_cell(self, status):
            if status.number == status.num_cells:
                event.set()

    results = evaluate_benchmarks(small(data), tmp_path / "out", observer=Setter())
    assert [cell["metrics"]["avg@2"]["mean"] for cell in results["cells"]] == [1, 1]


def test_an_interrupt_ends_it_soon_and_keeps_whole_blocks(data, tmp_path, monkeypatch):
    evaluate_benchmarks(small(data), tmp_path / "whole")

    class Interrupts(EvalObserver):
        def on_status(self, status):
            if next((tmp_path / "out").rglob("full/blocks.jsonl")).stat().st_size:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate_benchmarks(small(data), tmp_path / "out", observer=Interrupts())
    kept, whole = samples_of(tmp_path / "out"), samples_of(tmp_path / "whole")
    first = min(kept)
    assert kept[first] and whole[first].startswith(kept[first]) and kept != whole
    resumed = evaluate_benchmarks(small(data), tmp_path / "out", resume=True)
    assert timeless(resumed) == results_of(tmp_path / "whole")


@pytest.mark.parametrize("when", ["generating", "waiting for the grader"])
@pytest.mark.some(1)
def test_a_grader_that_hangs_holds_nobody_up_and_writes_nothing_later(data, tmp_path, monkeypatch, when):
    """Its blocks are whole but for the grades. Another goes on with the folder; then the first grader wakes up."""
    evaluate_benchmarks(small(data), tmp_path / "whole")
    real, run, hung = small_eval.grade, Grader._run, []
    wake, ended = threading.Event(), threading.Event()

    def hangs(completions, **columns):
        hung[:] = hung or [threading.current_thread()]
        if threading.current_thread() is hung[0]:
            wake.wait(60)
        return real(completions, **columns)

    def runs(grader):
        run(grader)
        if threading.current_thread() is hung[0]:
            ended.set()

    monkeypatch.setattr(small_eval, "grade", hangs)
    monkeypatch.setattr(Grader, "_run", runs)
    monkeypatch.setattr("sparse_rl.evaluate.grader.GRACE_S", 0.2)

    class Early(EvalObserver):
        def on_cell(self, status):
            if when == "generating":
                raise KeyboardInterrupt
            if status.number == status.num_cells:
                threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()

    began = time.perf_counter()
    with pytest.raises(KeyboardInterrupt):
        evaluate_benchmarks(small(data), tmp_path / "hung", observer=Early())
    assert time.perf_counter() - began < 10 and not ended.is_set()
    resumed = evaluate_benchmarks(small(data), tmp_path / "hung", resume=True)
    wake.set()
    assert ended.wait(30)
    assert samples_of(tmp_path / "hung") == samples_of(tmp_path / "whole")
    again = evaluate_benchmarks(small(data), tmp_path / "hung", resume=True)
    assert timeless(resumed) == timeless(again) == results_of(tmp_path / "whole")


def test_a_grader_that_raises_is_named_and_can_be_mended(data, tmp_path, monkeypatch):
    real, calls = small_eval.grade, []

    def breaks(completions, **columns):
        calls.append(len(completions))
        if len(calls) > 2:
            raise ZeroDivisionError("odd")
        return real(completions, **columns)

    with monkeypatch.context() as patched:
        patched.setattr(small_eval, "grade", breaks)
        with pytest.raises(ValueError, match=r"'breaks' raised ZeroDivisionError: odd \(.*, line \d+\); mend it, then"):
            evaluate_benchmarks(small(data), tmp_path / "out")
    resumed = evaluate_benchmarks(small(data), tmp_path / "out", resume=True)
    evaluate_benchmarks(small(data), tmp_path / "whole")
    assert timeless(resumed) == results_of(tmp_path / "whole")


def test_a_grader_that_always_fails_leaves_no_number(data, tmp_path, monkeypatch):
    monkeypatch.setattr(small_eval, "grade", lambda completions, **_: [None] * len(completions))
    cell = evaluate_benchmarks(small(data), tmp_path / "out")["cells"][0]
    assert cell["failed"] == 20 and cell["metrics"]["avg@2"]["mean"] is None and cell["metrics"]["avg@2"]["count"] == 0


def test_other_settings_are_refused_with_the_difference(data, tmp_path):
    evaluate_benchmarks(small(data, kv=("full",), problems=2), tmp_path / "out")
    for change, said in (
        ({"max_tokens": 9}, "max_tokens 6 is now 9"),
        ({"kv": ("rkv:16",)}, r"kv \['full'\] is now \['rkv:16'\]"),
        ({"engine": EngineConfig(rows=5)}, "engine.rows 4 is now 5"),
        ({"grading": GradingConfig(timeout_s=9)}, "grading.timeout_s 5.0 is now 9"),
    ):
        evaluation = small(data, **{"kv": ("full",), "problems": 2} | change)
        with pytest.raises(ValueError, match=f"evaluated with other settings: {said}(.0)?; resume"):
            evaluate_benchmarks(evaluation, tmp_path / "out", resume=True)
    other = small(data, kv=("full",), problems=2, benchmarks=("toy", "lookup:pairs=2"))
    with pytest.raises(ValueError, match=r"other settings: benchmarks .*toy is now toy lookup:pairs=2; resume"):
        evaluate_benchmarks(other, tmp_path / "out", resume=True)
    same = small(data, kv=("full",), problems=2, grading=GradingConfig(workers=3))  # how many grade is no difference
    evaluate_benchmarks(same, tmp_path / "out", resume=True)
    toy(data, seed=SEED + 1)
    with pytest.raises(ValueError, match=r"benchmarks.toy.digest \w+ is now \w+"):
        evaluate_benchmarks(small(data, kv=("full",), problems=2), tmp_path / "out", resume=True)


def test_another_model_under_the_same_name_is_refused(data, tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    evaluation = small(data, models=(str(tmp_path / "model"),), problems=2, kv=("full",))
    evaluate_benchmarks(evaluation, tmp_path / "out")
    next((tmp_path / "out").rglob("blocks.jsonl")).unlink()  # something is left to do
    with torch.no_grad():
        model.lm_head.weight.mul_(1.01)
    model.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=r"digest \w+ is now \w+"):
        evaluate_benchmarks(evaluation, tmp_path / "out", resume=True)


def test_a_folder_is_one_evaluations_own(data, tmp_path):
    (tmp_path / "out").mkdir()
    with lock(tmp_path / "out"), pytest.raises(ValueError, match="another process is evaluating in"):
        evaluate_benchmarks(small(data), tmp_path / "out")
    with pytest.raises(ValueError, match="there is no evaluation to resume"):
        evaluate_benchmarks(small(data), tmp_path / "none", resume=True)
    with pytest.raises(ValueError, match="something else than"):
        evaluate_benchmarks(small(data), data)
    evaluate_benchmarks(small(data, problems=1), tmp_path / "out")
    with pytest.raises(ValueError, match="has an evaluation in it; go on with it"):
        evaluate_benchmarks(small(data, problems=1), tmp_path / "out")
    (tmp_path / "out" / "eval.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        evaluate_benchmarks(small(data, problems=1), tmp_path / "out", resume=True)


def test_overlong_prompts_are_left_out_and_short_contexts_said(tmp_path, data):
    tiny_model(max_position_embeddings=64).save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    path = data / "toy" / "test.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row["problem"] = "1"
    rows[3]["problem"] = "x" * 100
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluation = small(data, models=(str(tmp_path / "model"),), kv=("full",), template="{problem}", max_tokens=64)
    watcher = Watcher()
    results = evaluate_benchmarks(evaluation, tmp_path / "out", observer=watcher)
    assert results["cells"][0]["problems"] == 9 and results["cells"][0]["overlong"] == 1
    assert "toy-3" not in {line["problem"] for line in samples(tmp_path / "out")}
    assert max(line["tokens"] for line in samples(tmp_path / "out")) == 63  # of 64, after "1"
    assert "1 prompts fill the context" in watcher.notes[0] and "9 of 9 prompts" in watcher.notes[1]
    rows[4]["problem"] = "x" * 100
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match="2 of 10 rows have more than 63 tokens, the first in problem 'toy-3' of toy"):
        evaluate_benchmarks(evaluation, tmp_path / "other")


def test_a_rotation_is_that_of_the_longest_answer_or_of_the_training(tmp_path, data):
    for name in ("base", "trained"):
        tiny_model("phi3", num_hidden_layers=1).save_pretrained(tmp_path / name)
        tiny_tokenizer().save_pretrained(tmp_path / name)
    rope.save(8192, tmp_path / "trained")
    models = tuple(str(tmp_path / name) for name in ("base", "trained"))
    for max_tokens, of_base in ((2, 64), (60, 8192)):
        evaluation = small(data, models=models, kv=("full",), template="{problem}", max_tokens=max_tokens, problems=1)
        found = evaluate_benchmarks(evaluation, tmp_path / f"out {max_tokens}")["models"]
        assert [found[name]["context"] for name in models] == [of_base, 8192]


def test_out_of_memory_halves_the_rows_and_takes_the_block_again(data, tmp_path, monkeypatch):
    """For that cache and the next; what was graded before counts once."""
    real, tried, seen = Engine.generate, [], []

    def generate(self, prompts, sampling, on_rollout=None, **more):
        tried.append(self.config.rows)
        if self.config.rows > 2 and len(tried) > 1:
            given = real(self, prompts[:2], sampling, on_rollout=on_rollout, **more)  # some had been given out
            assert given
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, prompts, sampling, on_rollout=on_rollout, **more)

    monkeypatch.setattr(Engine, "generate", generate)
    monkeypatch.setattr(module, "Tally", lambda samples: seen.append(Tally(samples)) or seen[-1])
    evaluation = small(data, engine=EngineConfig(rows=8), n=8, max_tokens=2)  # blocks of 4 problems
    results = evaluate_benchmarks(evaluation, tmp_path / "out")
    assert tried == [8, 8, 4, 2, 2, 2, 2, 2] and [cell["samples"] for cell in results["cells"]] == [80, 80]
    for cell, tally in zip(results["cells"], seen, strict=True):
        scores = [line["score"] for line in samples(tmp_path / "out", cell["cache"]) if line["score"] is not None]
        assert (tally.graded, tally.right) == (len(scores), sum(scores))
    monkeypatch.setattr(Engine, "generate", lambda *_, **__: (_ for _ in ()).throw(torch.OutOfMemoryError("no")))
    with pytest.raises(ValueError, match=r"out of memory while sampling \(tiny\); give a smaller engine.pool_bytes"):
        evaluate_benchmarks(evaluation, tmp_path / "other")


def test_a_grader_out_of_memory_is_not_the_engine_s(data, tmp_path, monkeypatch, caplog):
    def full(block, rollouts):
        raise MemoryError("of the grader")

    monkeypatch.setattr(Block, "grade", full)
    with pytest.raises(MemoryError, match="of the grader"):
        evaluate_benchmarks(small(data), tmp_path / "out")
    assert "out of memory" not in caplog.text


def test_the_copy_of_a_folder_resumes_too(data, tmp_path):
    evaluate_benchmarks(small(data, problems=4), tmp_path / "out")
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    next((tmp_path / "copy").rglob("blocks.jsonl")).unlink()
    moved = tmp_path / "moved"
    shutil.copytree(data, moved)  # the data may lie elsewhere: its digest counts
    resumed = evaluate_benchmarks(replace(small(data, problems=4), data_dir=str(moved)), tmp_path / "copy", resume=True)
    expected = results_of(tmp_path / "out")
    resumed["settings"]["data_dir"] = expected["settings"]["data_dir"]
    assert timeless(resumed) == expected
