# SPDX-License-Identifier: Apache-2.0
"""The import order: a module imports only what stands to its left in ORDER."""

from __future__ import annotations

import ast
import importlib
import re
from functools import reduce
from itertools import pairwise
from pathlib import Path

import sparse_rl

LINE = (
    "types specs metrics runfolder sandbox grading tasks kernels model kv rollout score objective calibrate evaluate "
    "train plan bench report config cli __main__"
)
ORDER = LINE.split()
ROOT = Path(sparse_rl.__file__).parent


def layer_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module)
    return {name for name in found if name.startswith("sparse_rl")}


def test_imports_point_left():
    files = [path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py"]
    assert len(files) > 20
    for path in files:
        own = path.relative_to(ROOT).with_suffix("").parts[0]
        assert own in ORDER, f"{path} is in no layer; add it to ORDER and to CONTRIBUTING.md"
        for module in imports(path):
            layer = layer_of(module)
            if layer and layer != own:
                assert ORDER.index(layer) < ORDER.index(own), f"{path} imports {module}, which stands to its right"


def test_attention_does_not_know_the_cache():
    assert not any("kv" in module for module in imports(ROOT / "model" / "attention.py"))


def test_every_file_has_a_licence_line():
    for path in ROOT.rglob("*.py"):
        assert path.read_text().startswith("# SPDX-License-Identifier: Apache-2.0"), path


def test_the_way_to_the_kernel_that_contributing_shows_is_there():
    """Each place calls the next by name, but for the hops that the text itself names."""
    text = (ROOT.parents[1] / "CONTRIBUTING.md").read_text()
    way = re.findall(r"^    ([a-z]+/[a-z]+)\.([\w.]+)$", text, flags=re.MULTILINE)
    assert 2 < len(way) <= 8 and way[0][0] == "cli/train" and way[-1][1] == "decode_attention"
    for module, name in way:
        found = importlib.import_module("sparse_rl." + module.replace("/", "."))
        assert callable(reduce(getattr, name.split("."), found)), (module, name)
    for (module, _), (_, name) in pairwise(way):
        if module != "rollout/decoder":  # transformers is between
            word = name.split(".")[0] if module == "cli/train" else name.split(".")[-1]
            assert re.search(rf"\b{word}\(", (ROOT / f"{module}.py").read_text()), (module, name)
