# SPDX-License-Identifier: Apache-2.0
"""The import order: a module imports only what stands to its left in ORDER."""

from __future__ import annotations

import ast
import re
import traceback
from pathlib import Path

import sparse_rl
from sparse_rl.cli import main
from sparse_rl.kernels.decode import decode_attention

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


def test_the_way_to_the_kernel_is_the_one_that_contributing_shows(tmp_path, monkeypatch):
    """Of the stack inside the kernel, a file a line, but for those that the text says can be passed over."""
    text = (ROOT.parents[1] / "CONTRIBUTING.md").read_text()
    way = re.findall(r"^    ([a-z]+/[a-z]+)\.([\w.]+)$", text, flags=re.MULTILINE)
    passed = re.findall(r"`([a-z]+/[a-z_]+)`", re.search(r"can be passed over: (.*?)\n\n", text, flags=re.DOTALL)[1])
    stacks = []

    def watched(*arguments, **more):
        stacks.append([(Path(f.filename), f.name) for f in traceback.extract_stack()])
        return decode_attention(*arguments, **more)

    monkeypatch.setattr("sparse_rl.kv.cache.decode_attention", watched)
    flags = (
        "--model tiny --task.name lookup --task.pairs 2 --trainer.steps 1 --trainer.prompts_per_step 1 --eval.prompts 0"
    )
    flags += " --sampling.n 2 --sampling.max_tokens 4 --kv.policy rkv --kv.budget 32 --kv.interval 8"
    main(["train", *flags.split(), "--trainer.output_dir", str(tmp_path)])
    calls = [(str(path.relative_to(ROOT).with_suffix("")), name) for path, name in stacks[-1] if ROOT in path.parents]
    files = [file for file in dict.fromkeys(file for file, _ in calls) if file not in passed]
    assert [file for file, _ in way] == [*files, "kernels/decode"]
    assert len(way) <= 8 and all((file, name.split(".")[-1]) in calls for file, name in way[:-1])


def test_files_and_functions_can_be_read_at_a_sitting():
    """400 lines and 80; above a longer function stands why it is one."""
    folders = [Path(__file__).parents[1] / name for name in ("src", "scripts", "benchmarks", "tests")]
    for path in (path for folder in folders for path in folder.rglob("*.py")):
        source = path.read_text()
        assert source.count("\n") <= 400, f"{path} has {source.count(chr(10))} lines"
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno - node.lineno >= 80:
                above = source.splitlines()[node.lineno - len(node.decorator_list) - 2]
                assert above.startswith("# In one piece: "), f"{path}: {node.name} has over 80 lines"
