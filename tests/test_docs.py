# SPDX-License-Identifier: Apache-2.0
"""README and docs: what they show runs as it stands, what they link to exists, what they repeat of the code is so."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from commands import run

from sparse_rl.cli.sft import _parser as sft_parser
from sparse_rl.cli.train import train_parser
from sparse_rl.cli.trl_names import NAMES, REFUSED
from sparse_rl.kv import POLICIES
from sparse_rl.metrics import METRICS, read_log
from sparse_rl.objective.correction import PRESETS
from sparse_rl.tasks import TASKS
from sparse_rl.tasks.rewards import REWARDS

ROOT = Path(__file__).parents[1]
FILES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks" / "evidence" / "README.md"]
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(FILES)}
EVIDENCE = PAGES["docs/evidence.md"]
PYTHON = {name: re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE) for name, page in PAGES.items()}


@pytest.fixture
def _as_it_was():
    """What pages put into the catalogues is taken out again."""
    before = [(catalogue, dict(catalogue)) for catalogue in (POLICIES, PRESETS, REWARDS, TASKS)]
    yield
    for catalogue, entries in before:
        catalogue.clear()
        catalogue.update(entries)


@pytest.mark.usefixtures("_as_it_was")
@pytest.mark.parametrize("name", [name for name, snippets in PYTHON.items() if snippets])
def test_a_page_s_snippets_run_one_after_the_other(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = ModuleType("snippets")
    monkeypatch.setitem(sys.modules, "snippets", module)  # where a class of theirs is looked for
    for number, snippet in enumerate(PYTHON[name]):
        exec(compile(snippet, f"{name}, snippet {number}", "exec", dont_inherit=True), vars(module))


def test_every_page_that_promises_snippets_has_some():
    has = {name for name, snippets in PYTHON.items() if snippets}
    assert {"README.md", "docs/sample.md", "docs/schedules.md"} <= has
    assert {f"docs/extend_{what}.md" for what in ("policy", "reward", "task", "correction")} <= has


def test_one_s_own_data_and_reward_train(tmp_path, monkeypatch, caplog):
    """Exactly the page's lines, in a shell of their own; the command, which is the last, gets what the shell gives."""
    (script,) = re.findall(r"```bash\n(.*?)```", PAGES["docs/data.md"], re.DOTALL)
    assert len(script.splitlines()) < 10 and re.search(r"^sparse-rl (.*\\\n)*.*\n\Z", script, re.MULTILINE)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sparse-rl").write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$GIVEN"\n')
    (tmp_path / "bin" / "sparse-rl").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}
    environment |= {"GIVEN": str(tmp_path / "given")}
    subprocess.run(["bash", "-e"], input=script, cwd=tmp_path, env=environment, text=True, check=True)
    monkeypatch.chdir(tmp_path)
    caplog.set_level("INFO")
    code, _, err = run(*(tmp_path / "given").read_text().splitlines())
    assert code == 0, err
    assert "mine.jsonl: 2 rows, layout trl, longest prompt 12 tokens." in caplog.text
    steps = [line for line in read_log(tmp_path / "runs" / "mine" / "metrics.jsonl") if line["step"]]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all(line["rewards/right_digits/mean"] > 0 and line["kv/saved_frac"] > 0 for line in steps)
    assert (tmp_path / "runs" / "mine" / "checkpoint-3" / "model.safetensors").exists()


def anchors(page: str) -> set[str]:
    """The headings as a code host and the site name them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken(name: str, page: str) -> list[str]:
    """Links of a page to files that are not there, or to headings that they do not have."""
    text = re.sub(r"^```.*?^```|`[^`\n]+`", "", page, flags=re.DOTALL | re.MULTILINE)
    found = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        target, _, anchor = link.partition("#")
        if re.match(r"https?://", link):
            continue
        path = (ROOT / name).parent / target if target else ROOT / name
        there = path.resolve().is_relative_to(ROOT) and path.exists()
        if not there or (anchor and (path.suffix != ".md" or anchor not in anchors(path.read_text()))):
            found.append(link)
    return found


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_somewhere(name):
    assert broken(name, PAGES[name]) == []


def test_a_link_that_leads_nowhere_is_found():
    well = "[a](#read-on) [b](docs/trl.md#names) `[c](d)`"
    page = f"{well} [e](gone.md) [f](docs/trl.md#gone) [g](../outside) [h](#gone) [i](LICENSE#gone)"
    assert broken("README.md", page) == ["gone.md", "docs/trl.md#gone", "../outside", "#gone", "LICENSE#gone"]


def test_every_page_is_in_the_site_s_contents():
    listed = re.findall(r"^(\w+)$", PAGES["docs/index.md"], re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in FILES if path.parent.name == "docs" and path.stem != "index")


def test_tables_say_what_the_code_says():
    script = runpy.run_path(str(ROOT / "scripts" / "docs_tables.py"))
    assert [name for name, page in PAGES.items() if script["filled"](page) != page] == [], "run scripts/docs_tables.py"
    for page, names in (("metrics", METRICS), ("trl", {**NAMES, **REFUSED})):
        tables = "".join(place[0] for place in script["PLACE"].finditer(PAGES[f"docs/{page}.md"]))
        rows = re.findall(r"^\| `([^`]+)` \|", tables, re.MULTILINE)
        assert sorted(rows) == sorted(names)


@pytest.mark.parametrize(
    ("page", "catalogue"),
    [
        ("docs/policies.md", POLICIES),
        ("docs/choose.md", POLICIES),
        ("docs/method.md", PRESETS),
        ("docs/corrections.md", PRESETS),
        ("docs/data.md", REWARDS),
    ],
)
def test_nothing_of_a_catalogue_is_left_out(page, catalogue):
    assert [name for name in catalogue if not re.search(rf"`{name}\b", PAGES[page])] == []


def test_settings_that_pages_name_exist():
    parsers = (train_parser(), sft_parser())
    known = {option for parser in parsers for action in parser._actions for option in action.option_strings}
    for name, page in PAGES.items():
        assert [option for option in re.findall(r"--[a-z]+\.[a-z]\w*", page) if option not in known] == [], name


def test_the_readme_s_numbers_are_those_of_the_benchmarks():
    (table,) = re.findall(r"^\| what \|.*?\n\n", PAGES["README.md"], re.DOTALL | re.MULTILINE)
    numbers = re.findall(r"\d+,\d{3}|[\d.]+ GB", table)
    assert len(numbers) > 5 and [number for number in numbers if number not in PAGES["docs/benchmarks.md"]] == []


@pytest.mark.parametrize("name", ["README.md", "docs/corrections.md", "docs/calibrate.md"])
def test_what_a_page_says_of_the_evidence_is_what_the_evidence_says(name):
    """Means with their errors; docs/evidence.md is the records' own."""
    told, evidence = (" ".join(page.split()) for page in (PAGES[name].split("## Two commands")[0], EVIDENCE))
    figures = re.findall(r"[-+]?\d\.\d+ ± \d\.\d+", told)
    assert figures and not [figure for figure in figures if figure not in evidence]


def test_how_often_the_alarm_is_on_is_what_the_evidence_says():
    told = re.search(
        r"on in (\d+) of the (\d+) that collapse, but also in (\d+) of the (\d+)", PAGES["docs/metrics.md"]
    )
    lost, total, kept, others = told.groups()
    assert f"| all |  | {lost} of {total} | {kept} of {others} |" in EVIDENCE
