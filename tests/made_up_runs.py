# SPDX-License-Identifier: Apache-2.0
"""Run folders of which every number is known, and a page of a report as it is read."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from sparse_rl.report.page import write_report

EVAL_STEPS = 10


def config(policy: str = "rkv", budget: int | None = 64, seed: int = 0) -> dict[str, Any]:
    return {
        "model": "embedded:chain",
        "correction": {"preset": "none" if policy == "full" else "sparse_rl"},
        "kv": {"policy": policy, "budget": budget},
        "trainer": {"steps": 30, "seed": seed},
    }


def training(step: int, sparse: bool = True) -> dict[str, Any]:
    """A line in which every number follows from the step."""
    line: dict[str, Any] = {"step": step}
    if step:
        line |= {"reward": step / 40, "grad_norm": 1.5, "completions/mean_length": 100.0 + step}
        line |= {
            "rollout/tokens_per_s": 1000.0 * step,
            "correction/rejection_rate": 0.1 * (step % 2) if sparse else 0.0,
        }
        line |= {"kv/saved_frac": 0.25 + step / 100 if sparse else 0.0, "kv/peak_frac": 0.4 if sparse else 1.0}
    if step and sparse:
        line |= {f"mismatch/xi_{stat}": xi for stat, xi in (("p01", 0.01), ("p05", 0.5), ("p50", 1.0), ("p99", 1.4))}
        line |= {"mismatch/overlap_mean": 0.97, "mismatch/overlap_p05": 0.8, "mismatch/overlap_p01": None}
        line |= {"tail/overlap_lowest": 0.75, "alarm/tail": 0}
        line |= {"rollout_corr/kl": 0.02, "rollout_corr/k3_kl": 0.03}
    if step % EVAL_STEPS == 0:
        line |= {"eval/dense/reward": 0.4 + step / 100, "eval/dense/reward_se": 0.02}
    if step % EVAL_STEPS == 0 and sparse:
        line |= {"eval/sparse/reward": 0.3 + step / 100, "eval/sparse/reward_se": None if step else 0.03}
    return line


def write_run(folder: Path, metrics: list[dict[str, Any]], settings: dict[str, Any] | None = None, **logs: Any) -> Path:
    folder.mkdir(parents=True)
    about = {
        "command": "sparse-rl train",
        "folder": str(folder.parent),
        "config": config() if settings is None else settings,
        "versions": {"torch": "2"},
    }
    (folder / "run.json").write_text(json.dumps(about))
    for name, lines in {"metrics": metrics, **logs}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def report(*folders: Path, **settings: Any) -> str:
    output = folders[0].parent / "out" / "report.html"
    write_report(list(folders), output, **settings)
    assert [path.name for path in output.parent.glob("*") if path.is_file()] == ["report.html"]  # no temporary file
    return output.read_text()


class Page(HTMLParser):
    """The tables of a page as lists of rows, its tags, and whether they close in order."""

    VOID = frozenset({"meta", "path", "use", "rect", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data
