# SPDX-License-Identifier: Apache-2.0
"""`sparse-rl eval`: what it writes and shows, and one clear sentence for whatever the user can mend."""

from __future__ import annotations

import json
import random
import re
from html.parser import HTMLParser

import pytest
import small_eval
from commands import run
from small_eval import toy

from sparse_rl.evaluate.store import Store
from sparse_rl.report.eval_page import write_eval_report
from sparse_rl.report.progress import duration

LINE = "eval --model tiny --kv full rkv:16 --problems 6 --n 2 --temperature 1 --max-tokens 5 --engine.rows 4"
SMALL = LINE.split()


@pytest.fixture
def data(tmp_path):
    toy(tmp_path / "data", seed=random.randrange(1 << 20))
    yield str(tmp_path / "data")
    del small_eval.BENCHMARKS["toy"]


class Page(HTMLParser):
    """What a page would load, its tags, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.tags: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.loads += [value for name, value in attrs if name in ("src", "href", "xlink:href", "data")]

    def handle_data(self, data):
        self.text += data


def test_one_command_gives_samples_tables_and_a_page(data, tmp_path):
    output = tmp_path / "out"
    arguments = [*SMALL, "--benchmarks", "toy", "lookup:pairs=2", "--data-dir", data, "--output", str(output)]
    code, out, err = run(*arguments)
    assert code == 0, err
    results = json.loads((output / "results.json").read_text())
    markdown = (output / "table.md").read_text()
    for cell in results["cells"]:
        found = cell["metrics"]["avg@2"]
        shown = f"{100 * found['mean']:.1f} ± {100 * found['se']:.1f}"
        line = f"| {cell['benchmark']} | {cell['cache']} | {shown} |"
        assert line in markdown and shown in out
        assert f"| {cell['failed']} | 6 x 2 |" in markdown
    difference = results["cells"][2]["difference"]["avg@2"]
    assert f"| {100 * difference['mean']:+.1f} ± {100 * difference['se']:.1f} |" in markdown
    assert "toy: avg@2 by level" in markdown and "n is 2 instead of 1" in markdown and "n is 2 instead of 1" in out
    assert re.search(r"\[4/4\] tiny, (toy|lookup:pairs=2), rkv:16: 6/6 problems", err) and "4 cells, 24 problems" in err
    assert results["commit"] is None or results["commit"] in markdown
    before = samples = {path: path.read_bytes() for path in output.rglob("samples.jsonl")}
    assert len(samples) == 4 and all(text.count(b"\n") == 12 for text in samples.values())
    code, _, err = run(*arguments, "--resume")
    assert code == 0 and "24 of them done before" in err
    assert before == {path: path.read_bytes() for path in output.rglob("samples.jsonl")}


def test_a_resume_may_compute_elsewhere_and_keeps_the_engine_s_settings(data, tmp_path, monkeypatch):
    line = "eval --model tiny --problems 2 --max-tokens 2 --benchmarks toy"
    arguments = [*line.split(), "--data-dir", data, "--output", str(tmp_path / "out")]
    assert "engine.rows 32 on cpu:0" in run(*arguments, "--device", "cpu:0", "--dry-run")[1]
    assert run(*arguments, "--engine.pool_pages", "64")[0] == 0
    monkeypatch.setattr("sparse_rl.cli.parsing.CPU_ROWS", 256)  # as on a GPU
    for more in (
        ["--device", "cpu:0"],
        ["--engine.compile", "false", "--engine.graphs", "false"],
        ["--engine.pool_bytes", "10000000"],
        ["--engine.rows", "32"],
    ):
        code, _, err = run(*arguments, "--resume", *more)
        assert code == 0 and "2 of them done before" in err, err
    code, _, err = run(*arguments, "--resume", "--engine.rows", "8")
    assert code == 2 and "other settings: engine.rows 32 is now 8; resume" in err
    (tmp_path / "out" / "eval.json").write_text("{}")
    code, _, err = run(*arguments, "--resume")
    assert code == 2 and "is damaged" in err


def test_the_page_needs_nothing_and_believes_nothing(data, tmp_path):
    output = tmp_path / "out"
    run(*SMALL, "--benchmarks", "toy", "--data-dir", data, "--output", str(output))
    results = json.loads((output / "results.json").read_text())
    evil = "<script>alert(1)</script><img src=http://evil.example/x>"
    path = output / results["cells"][0]["samples_file"]
    lines = path.read_text().splitlines()
    lines[0] = json.dumps(json.loads(lines[0]) | {"completion": evil, "problem": evil, "score": None, "failure": evil})
    path.write_text("\n".join(lines) + "\n")
    for cell in results["cells"]:
        cell["model"] = cell["cache"] = f"a|b{evil}"
        cell["departures"], cell["failures"] = [evil], {evil: 3}
    results["notes"], results["command"] = [evil], evil
    write_eval_report(results, output)
    page = Page((output / "report.html").read_text())
    assert page.text.count(evil) >= 6 and not page.tags & {"script", "img", "link", "iframe", "object"}
    assert "svg" in page.tags and all(target.startswith("#") for target in page.loads)
    markdown = (output / "table.md").read_text()
    assert "<script" not in markdown and "<img" not in markdown and "\n| a\\|b&lt;script" in markdown


def test_a_dry_run_says_what_would_run(data, tmp_path):
    arguments = [*SMALL, "--benchmarks", "toy", "lookup:pairs=2", "--data-dir", data, "--dry-run"]
    code, out, _ = run(*arguments, "--models", "no/such-model")
    assert code == 0 and "8 cells: 2 models x 2 benchmarks x 2 caches (full, rkv:16)" in out
    assert "96 samples, at most 480 tokens" in out and "n is 2 instead of 1" in " ".join(out.split())
    assert list(tmp_path.iterdir()) == [tmp_path / "data"] and "…" not in out


def test_an_error_leaves_a_partial_table(data, tmp_path, monkeypatch):
    """The first cell, one block, is written; the second is not."""
    output, real, written = tmp_path / "out", Store.append, []

    def append(self, *args, **kwargs):
        written.append(self)
        if len(written) == 2:
            raise OSError("the disk is full")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Store, "append", append)
    code, _, err = run(*SMALL, "--benchmarks", "toy", "--data-dir", data, "--output", str(output))
    assert (
        code != 0 and "the disk is full" in err and "table.md and report.html hold what is done. PARTIAL: 1 of 2" in err
    )
    markdown = (output / "table.md").read_text()
    assert "(partial)" in markdown and "| toy | full |" in markdown and "| toy | rkv:16 |" not in markdown
    assert "PARTIAL: 1 of 2 cells are done." in Page((output / "report.html").read_text()).text
    monkeypatch.setattr(Store, "append", real)
    arguments = (*SMALL, "--benchmarks", "toy", "--data-dir", data, "--output", str(output), "--resume")
    assert run(*arguments)[0] == 0 and "partial" not in (output / "table.md").read_text()


def test_settings_from_a_file(data, tmp_path):
    config = tmp_path / "eval.yaml"
    config.write_text(f"models: [tiny]\nbenchmarks: [toy]\nkv: [full, 'rkv:16']\ndata_dir: {data}\nproblems: 3\n")
    code, out, err = run("eval", "--config", str(config), "--dry-run")
    assert code == 0 and "3 samples" not in err and "6 samples" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--output out", "--models has nothing in it"),
        ("--models tiny --output out", "--benchmarks has nothing in it"),
        ("--models tiny --benchmarks lookup", "--output is missing"),
        ("--models tiny --benchmarks lookup --output out --kv rvk:64", "did you mean 'rkv'"),
        ("--models tiny --benchmarks lookup --output out --kv rkv:x", "neither a whole number nor a file"),
        ("--models tiny --benchmarks lokup --output out", "did you mean 'lookup'"),
        ("--models tiny --benchmarks lookup:pairs=1 --output out", "pairs is 1"),
        ("--models tiny tiny --benchmarks lookup --output out", "--models has 'tiny' twice"),
        ("--models tiny --benchmarks lookup --output out --n many", "n is 'many'"),
        ("--models tiny --benchmarks lookup --output out --n -1", "n is -1"),
        ("--models tiny --benchmarks lookup --output out --protocol x", "protocol is 'x'"),
        ("--models tiny --benchmarks lookup --output out --max-token 3", "did you mean --max-tokens"),
        ("--models tiny --benchmarks lookup --output out --dtype int3", "dtype 'int3' is unknown"),
        ("--models tiny --benchmarks lookup --output out --engine.rows 0", "engine.rows is 0"),
        ("--models tiny --benchmarks lookup --output out --grading.timeout_s 0", "grading.timeout_s is 0"),
        ("--models tiny --benchmarks lookup --output out --grading.timeout_s .inf", "grading.timeout_s is inf"),
        ("--models no/such/model --benchmarks lookup --output out", "neither a folder nor a hub name"),
        ("--models tiny --benchmarks asdiv --output out --data-dir .", "asdiv/test.jsonl"),
        (
            "--models tiny --benchmarks lookup --output out --max-tokens 999 --engine.pool_pages 1",
            "or shorten the prompt and lower --max-tokens",
        ),
        ("--models tiny --benchmarks lookup --output out --device cuda:99", "cannot be used here"),
        ("--models tiny --benchmarks lookup --output out --resume", "there is no evaluation to resume"),
        ("--models tiny --benchmarks lookup --output file", "something else than an evaluation"),
    ],
)
def test_a_wrong_argument_is_one_sentence(arguments, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "file").write_text("")
    code, _, err = run("eval", *arguments.split())
    last = err.strip().splitlines()[-1]
    assert code == 2 and said in last and "Traceback" not in err


def test_help_is_worth_reading():
    code, out, _ = run("eval", "--help")
    assert code == 0
    for word in ("--resume", "--kv", "rkv:128", "sparse-rl", "--engine.rows", "256 on a GPU", "--unsafe-code"):
        assert word in out
    assert not re.search(r"--[\w.-]+ \S+\n\s*--", out), "an option without a text"


def test_durations():
    assert [duration(s) for s in (None, 0, 59.6, 61, 3600 + 125)] == ["?:??", "0:00", "1:00", "1:01", "1:02:05"]
