# SPDX-License-Identifier: Apache-2.0
"""A measurement as JSON: what was run, where, by which code; one file holds several, one a label."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

from sparse_rl.train.folder import package_commit


def provenance(device: torch.device) -> dict[str, Any]:
    """Commit, hardware and versions. The variable COMMIT names the commit where there is no repository."""
    versions = {}
    for package in ("torch", "triton", "transformers", "vllm"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "commit": os.environ.get("COMMIT") or package_commit(),
        "hardware": hardware(device),
        "versions": {"python": platform.python_version(), **versions},
    }


def hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):  # not Linux, or not x86
        name = platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


def read(path: Path) -> list[dict[str, Any]]:
    """The records of a file, none if there is no such file."""
    if not path.exists():
        if not path.absolute().parent.is_dir():
            raise ValueError(f"--result {str(path)!r}: there is no folder {path.parent}; make it first.")
        return []
    try:
        records = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"--result {str(path)!r} is not JSON ({error}); name another file.") from error
    if not isinstance(records, list) or not all(isinstance(r, dict) and "label" in r for r in records):
        raise ValueError(f"--result {str(path)!r} holds something else than measurements; name another file.")
    return records


def merge(path: Path, record: dict[str, Any]) -> None:
    """Put a record into the file, in the place of an earlier one with its label."""
    records, record = read(path), _rounded(record)
    places = [i for i, known in enumerate(records) if known["label"] == record["label"]]
    if places:
        records[places[0]] = record
    else:
        records.append(record)
    draft = path.with_name(f"{path.name}.draft")
    draft.write_text(json.dumps(records, indent=1, allow_nan=False) + "\n")
    draft.replace(path)


def _rounded(value: Any) -> Any:
    """Floats with six digits: more is noise."""
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value
