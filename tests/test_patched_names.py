# SPDX-License-Identifier: Apache-2.0
"""What GPU tests patch by name is there: without a GPU they would not notice that it moved."""

from __future__ import annotations

import ast
import pkgutil
import re
from pathlib import Path

import pytest
from plain_torch import askers, run_the_references

import sparse_rl

TESTS = Path(__file__).parent
SOURCE = Path(sparse_rl.__file__).parent
ON_GPU = [
    file
    for file in TESTS.rglob("*.py")
    if file.name != Path(__file__).name and ("mark.gpu" in file.read_text(encoding="utf-8") or file.stem == "conftest")
]


def names(file: Path) -> list[str]:
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    strings = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [text for text in strings if re.fullmatch(r"sparse_rl(\.\w+)+", text)]


@pytest.mark.parametrize("file", ON_GPU, ids=lambda file: file.stem)
def test_names_that_gpu_tests_patch_are_there(file):
    for name in names(file):
        if name.endswith("_triton"):
            pytest.importorskip("triton")
        pkgutil.resolve_name(name)


def test_every_module_that_asks_for_triton_can_be_told_to_do_without(monkeypatch):
    """A module that only some call imports would be missed."""
    importing = {
        f"sparse_rl.{file.relative_to(SOURCE).with_suffix('').as_posix().replace('/', '.')}"
        for file in SOURCE.rglob("*.py")
        if re.search(r"import .*\buse_triton", file.read_text(encoding="utf-8"))
    }
    assert {module.__name__ for module in askers()} == importing
    run_the_references(monkeypatch)
    assert not any(module.use_triton(None) for module in askers())


def test_tests_that_contributing_names_are_there():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (TESTS.parent / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert len(named) >= 20
    for file, test in named:
        assert f"def {test}(" in (TESTS / file).read_text(encoding="utf-8"), f"{file}::{test}"
