# SPDX-License-Identifier: Apache-2.0
"""What is known before anything runs, what is left when it ends early, and the record of who went on."""

from __future__ import annotations

import json
import random
import time

import pytest
import small_eval
from small_eval import small, toy

from sparse_rl.evaluate import EvalObserver, evaluate_benchmarks
from sparse_rl.evaluate import benchmarks as module
from sparse_rl.evaluate.store import Store
from sparse_rl.report.eval_table import markdown


@pytest.fixture
def data(tmp_path):
    toy(tmp_path / "data", seed=random.randrange(1 << 20))
    yield tmp_path / "data"
    del small_eval.BENCHMARKS["toy"]


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ("no/such/model", "neither a folder nor a hub name"),
        ("embedded", "model 'embedded': .*unknown to the model's .*give a model that can read it, such as smollm2"),
    ],
)
def test_every_model_is_looked_at_before_anything_runs(data, tmp_path, monkeypatch, other, said):
    monkeypatch.setattr(module, "load", lambda *_, **__: pytest.fail("a model was loaded"))
    with pytest.raises(ValueError, match=said):
        evaluate_benchmarks(small(data, models=("tiny", other)), tmp_path / "out")
    assert not (tmp_path / "out").exists()  # the name stays free for the corrected command


def test_what_ends_early_has_a_table_of_what_is_done(data, tmp_path, monkeypatch):
    """The second model cannot be loaded, and in the second cell of the first the disk is full."""
    evaluation = small(data, models=("tiny", "tiny:qwen3"), benchmarks=("toy", "lookup:pairs=2"), problems=9)
    partial = []

    class Keeps(EvalObserver):
        def on_partial(self, results):
            partial.append(results)

    real_append, appended = Store.append, []

    def append(self, *args, **kwargs):
        appended.append(self)
        if len(appended) == 4:
            with open(self.samples, "ab") as file:
                file.write(b"half a li")
            raise OSError("the disk is full")
        return real_append(self, *args, **kwargs)

    real_load = module.load
    with monkeypatch.context() as patched:
        patched.setattr(Store, "append", append)
        with pytest.raises(OSError, match="the disk is full"):
            evaluate_benchmarks(evaluation, tmp_path / "out", observer=Keeps())
    found = partial.pop()
    assert found == json.loads((tmp_path / "out/results.json").read_text())
    assert [cell["problems"] for cell in found["cells"]] in ([9, 8], [8, 9])
    assert "PARTIAL: 1 of 8 cells are done. Begun: tiny, " in found["partial"] and "8 of 9 problems" in found["partial"]

    def load(name, **more):
        return real_load(name, **more) if name == "tiny" else (_ for _ in ()).throw(ValueError("damaged weights"))

    with monkeypatch.context() as patched:
        patched.setattr(module, "load", load)
        with pytest.raises(ValueError, match="damaged weights"):
            evaluate_benchmarks(evaluation, tmp_path / "out", resume=True, observer=Keeps())
    found = partial.pop()
    assert [cell["model"] for cell in found["cells"]] == ["tiny"] * 4 and "difference" in found["cells"][2]
    assert found["partial"].startswith("PARTIAL: 4 of 8 cells are done. --resume")
    assert evaluate_benchmarks(evaluation, tmp_path / "out", resume=True, observer=Keeps())["partial"] is None
    assert not partial


def test_the_record_is_the_first_starts_and_names_who_went_on(data, tmp_path, monkeypatch):
    evaluation = small(data, problems=2, kv=("full",))
    first = evaluate_benchmarks(evaluation, tmp_path / "out")
    again = evaluate_benchmarks(evaluation, tmp_path / "out", resume=True)
    assert first["resumes"] == again["resumes"] == []
    monkeypatch.setenv("COMMIT", "another")
    monkeypatch.setattr("sparse_rl.evaluate.record.command", lambda: "sparse-rl eval --resume")
    later = evaluate_benchmarks(evaluation, tmp_path / "out", resume=True)
    (resume,) = later.pop("resumes")
    assert resume["commit"] == "another" and resume["command"] == "sparse-rl eval --resume" and "hardware" not in resume
    assert later.pop("wall_s") >= first.pop("wall_s")
    first.pop("resumes")
    assert later == first


@pytest.mark.parametrize(
    "change",
    [
        {"settings": [], "models": {}, "started": 1},
        {"models": {"tiny": 5}},
        {"models": {"tiny": {"benchmarks": {"toy": {}}}}},
        {"resumes": 3},
    ],
)
def test_a_damaged_record_is_said(data, tmp_path, change):
    evaluation = small(data, problems=1, kv=("full",), max_tokens=1)
    evaluate_benchmarks(evaluation, tmp_path / "out")
    path = tmp_path / "out" / "eval.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match="is damaged; give another --output"):
        evaluate_benchmarks(evaluation, tmp_path / "out", resume=True)


def test_the_time_of_all_starts_is_told(data, tmp_path, monkeypatch):
    """What a killed start took is known up to its last block, and the next one adds its own."""
    began = time.perf_counter()
    first = evaluate_benchmarks(small(data), tmp_path / "out")
    took = time.perf_counter() - began
    generated = sum(cell["generate_s"] for cell in first["cells"])
    assert generated - 0.1 <= first["wall_s"] <= took + 0.1
    saved = []
    real = Store.append

    def append(self, *args, **kwargs):
        saved.append(json.loads((tmp_path / "more" / "eval.json").read_text())["wall_s"])
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Store, "append", append)
    evaluate_benchmarks(small(data), tmp_path / "more")
    assert saved == sorted(saved) and saved[-1] > 0
    path = tmp_path / "out" / "eval.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"wall_s": 233.0}))
    again = evaluate_benchmarks(small(data), tmp_path / "out", resume=True)
    assert 233.0 <= again["wall_s"] < 233.0 + took and "3 min 53 s in all." in markdown(again | {"wall_s": 233.0})
