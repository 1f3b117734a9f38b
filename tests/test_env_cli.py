# SPDX-License-Identifier: Apache-2.0
"""`sparse-rl env`: what it tells, and what it does not."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import sparse_rl
from sparse_rl.cli import env, main
from sparse_rl.runfolder import package_commit


def test_it_tells_versions_and_variables_but_no_names(monkeypatch, capsys):
    secret = "hf_do_not_print"
    monkeypatch.setenv("HF_TOKEN", secret)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/tmp/triton_somebody")
    monkeypatch.setenv("TRITON_PRINT_AUTOTUNING", "1")
    monkeypatch.setenv("MASTER_ADDR", "node7.example.org")
    monkeypatch.setenv("SPARSE_RL_CACHE", str(Path.home() / "models"))
    monkeypatch.setenv("HF_HOME", "/home/somebody/hf:/home/somebody")
    main(["env", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch"] == importlib.metadata.version("torch")
    assert found["versions"]["sparse_rl"] == sparse_rl.__version__
    assert found["cache_folder"] == "~/models" and found["variables"]["HF_HOME"] == "~/hf:~"
    assert found["variables"]["TRITON_PRINT_AUTOTUNING"] == "1"
    assert found["sandbox"]["holds"] and isinstance(found["sandbox"]["landlock_version"], int)
    main(["env"])
    text = capsys.readouterr().out
    assert f"  torch: {found['versions']['torch']}\n" in text and "  HF_HOME: ~/hf:~\n" in text
    for hidden in (secret, "node7", "somebody", str(Path.home()) + "/"):
        assert hidden not in text + json.dumps(found)
    assert not re.search(rf"\b{re.escape(platform.node())}\b", text)


def test_only_whole_names_are_home_folders():
    home = str(Path.home())
    assert env.without_homes([f"{home}/x", home, f"{home}stead/x"]) == ["~/x", "~", f"{home}stead/x"]


def test_what_is_missing_is_told_with_its_remedy(monkeypatch):
    monkeypatch.setattr(env, "version", lambda package: None if package == "peft" else "1.0")
    assert env.facts()["optional"]["peft"] == "not installed: pip install 'sparse-rl[lora]'"


def test_every_extra_is_told():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    named = {
        re.split(r"[<>=]", requirement)[0]: f"'sparse-rl[{extra}]'"
        for extra, requirements in project["optional-dependencies"].items()
        if extra not in ("test", "lint", "docs")
        for requirement in requirements
    }
    assert named == {package: how for package, how in env.OPTIONAL.items() if how.startswith("'")}


@pytest.mark.parametrize("tracked", [False, True])
def test_a_commit_is_the_packages_own(tmp_path, monkeypatch, tracked):
    """In another project's `.venv` there is none."""
    package = tmp_path / ".venv" / "sparse_rl"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run([*git, "init", "-q"], check=True)
    if tracked:
        subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout
    monkeypatch.setattr(sparse_rl, "__file__", str(package / "__init__.py"))
    assert package_commit() == (head[:7] if tracked else None)


def test_the_changelog_begins_with_this_version():
    changelog = (Path(__file__).parents[1] / "CHANGELOG.md").read_text()
    assert re.search(r"^## (\d+\.\d+\.\d+)", changelog, re.MULTILINE)[1] == sparse_rl.__version__
