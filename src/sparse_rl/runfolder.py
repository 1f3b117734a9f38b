# SPDX-License-Identifier: Apache-2.0
"""What every folder of results has: a lock, and a record of the command, the code and the machine that made it.

A file is written beside its place and renamed. So is a folder: it is filled under the name of `unfinished`, brought to
disk and renamed by `publish`, so one without that suffix is whole; `digests` say later whether it still is.

What else a run's folder has is in train/folder.py and train/checkpoint.py; its logs are written in train/log.py.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import sparse_rl
from sparse_rl.metrics import finite

if TYPE_CHECKING:
    import torch

UNFINISHED, ASIDE = ".tmp", ".old"
MAKE_ROOM = "make room on the disk, then resume"
IN_YAML = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}  # what JSON has no name for


def lock(folder: Path, doing: str = "training") -> IO[str]:
    """A file that keeps every other process out of the folder until it is closed."""
    file = open(folder / ".lock", "w")  # noqa: SIM115 - held open as long as the run
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ValueError(f"another process is {doing} in {folder}; wait for it, or stop it.") from error
    except OSError as error:
        file.close()
        raise ValueError(f"{folder} is on a file system without locks ({error}); give a folder on another.") from error
    return file


def is_at(file: IO[Any], path: Path) -> bool:
    """Whether an open file is still the one at the path; it may have been deleted, moved or replaced."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except OSError:
        return False


def check_folder(folder: Path, record: str, what: str, *, resume: bool) -> bool:
    """Refuse to mix two in a folder, or to go on with none; whether there is one to go on with.

    record: the file that each has; what: "an evaluation", ...
    """
    if (folder / record).is_file():
        if not resume:
            raise ValueError(f"{folder} has {what} in it; go on with it (--resume), or give another --output.")
        return True
    if folder.exists() and (not folder.is_dir() or any(not path.name.startswith(".") for path in folder.iterdir())):
        raise ValueError(f"{folder} has something else than {what} in it; give another --output.")
    if resume and not folder.exists():
        raise ValueError(f"there is no {what.partition(' ')[2]} to resume in {folder}; leave out --resume.")
    return False  # also where one was killed before it wrote anything


def refuse_changes(where: str, done: str, changed: list[str]) -> None:
    """Raise if what is resumed is no longer what it was."""
    if changed:
        raise ValueError(
            f"{where} was {done} with other settings: {'; '.join(changed)}; resume with those, or give another "
            "--output."
        )


def command(arguments: Sequence[str] | None = None) -> str:
    """As a shell takes it: `sparse-rl` with these arguments, or if there are none, what this process was started as."""
    if arguments is not None:
        return shlex.join(["sparse-rl", *arguments])
    program = Path(sys.argv[0])
    ours = program.name == "sparse-rl" or program.parts[-2:] == ("sparse_rl", "__main__.py")
    return shlex.join(["sparse-rl" if ours else sys.argv[0], *sys.argv[1:]])


def package_commit() -> str | None:
    """The package's commit, if it runs from a repository that it is part of, as it is not in a `.venv` of another."""
    package = Path(sparse_rl.__file__).parent
    command = ["git", "-C", str(package), "rev-parse", "HEAD", "HEAD:./__init__.py"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout[:7] if found.returncode == 0 else None


def provenance(device: torch.device) -> dict[str, Any]:
    """Commit, hardware and versions. The variable COMMIT names the commit where there is no repository."""
    versions = {}
    for package in ("torch", "triton", "transformers", "vllm"):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {
        "commit": os.environ.get("COMMIT") or package_commit(),
        "hardware": hardware(device),
        "versions": {"sparse_rl": sparse_rl.__version__, "python": platform.python_version(), **versions},
    }


def hardware(device: torch.device) -> str:
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):  # not Linux, or not x86
        name = platform.processor() or platform.machine()
    return f"{name}, {torch.get_num_threads()} threads"


def write_json(path: Path, record: Any, remedy: str = MAKE_ROOM) -> None:
    """Write a record, all of it or nothing."""
    write_whole(path, to_json(record), remedy)


def to_json(record: Any) -> str:
    """A record's file; a measured number that is not finite is null, so settings go through `as_settings` first."""
    return json.dumps(finite(record), indent=1, allow_nan=False) + "\n"


def sealed(record: dict[str, Any]) -> dict[str, Any]:
    """The record with the hash of all else that it says."""
    return record | {"digest": record_digest(record)}


def record_digest(record: dict[str, Any]) -> str:
    said = to_json({key: value for key, value in record.items() if key != "digest"})
    return hashlib.sha256(said.encode()).hexdigest()


def as_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as one who reads a record finds them: infinite ones as the text .inf, which flags and YAML take too."""
    found: dict[str, Any] = json.loads(json.dumps(finite(settings, lambda number: IN_YAML[str(number)])))
    return found


def write_whole(path: Path, content: str | bytes | memoryview, remedy: str = MAKE_ROOM) -> None:
    """All of it or nothing: a reader never meets half a file, and it is on disk when this returns."""
    place = Path(os.path.realpath(path))  # of a link, what it leads to
    if (os.path.exists(path) or os.path.lexists(place)) and not os.path.isfile(path):  # a device would become a file
        raise OSError(f"{path} could not be written (it is no file); give another place for it.")
    part = place.with_name(f".{place.name}.part")
    try:
        with open(part, "wb") as file:
            file.write(content.encode(errors="replace") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, place)
        _to_disk(place.parent)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        if isinstance(error, FileNotFoundError) and remedy == MAKE_ROOM:
            remedy = f"{place.parent} was deleted; start again"
        raise OSError(f"{path} could not be written ({error.strerror}); {remedy}.") from error


def unfinished(folder: Path) -> Path:
    """Where a folder is filled, or emptied, while none of its name may be seen."""
    return folder.with_name(folder.name + UNFINISHED)


def publish(temporary: Path, folder: Path) -> None:
    """Bring a folder to disk, then give it its name; one that had it stands aside until then."""
    for path in [*_files(temporary), *_folders(temporary)]:
        _to_disk(path)
    aside, replaced = folder.with_name(folder.name + ASIDE), folder.exists()
    if replaced:
        remove(aside)
        folder.rename(aside)
    temporary.rename(folder)
    _to_disk(folder.parent)
    if replaced:  # else it is somebody else's
        remove(aside)


def recover(parent: Path, pattern: str) -> None:
    """Put back the folders that stood aside for others when the process was killed."""
    for aside in parent.glob(pattern + ASIDE):
        folder = aside.with_name(aside.name.removesuffix(ASIDE))
        if folder.exists():
            remove(aside)
        else:
            aside.rename(folder)


def discard(folder: Path) -> None:
    """Delete a folder, never leaving a part of it under its name."""
    temporary = unfinished(folder)
    remove(temporary)
    remove(folder.rename(temporary))


def remove(folder: Path) -> None:
    """Also where somebody has put a file or a link in its place."""
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)


def digests(folder: Path) -> dict[str, str]:
    """The hash of every file of a folder, by its path in there."""
    return {str(path.relative_to(folder)): digest(path) for path in _files(folder)}


def damage(folder: Path, files: dict[str, str]) -> str:
    """Which of these files is no longer as `digests` found it, in words; empty if all are."""
    for name, before in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if digest(path) != before:
            return f"{name} is not what was written"
    return ""


def digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _folders(folder: Path) -> list[Path]:
    return [*sorted(path for path in folder.rglob("*") if path.is_dir()), folder]


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def differences(
    before: dict[str, Any], after: dict[str, Any], ignored: Sequence[str] = (), prefix: str = ""
) -> list[str]:
    """Settings that are not the same, as "kv.budget 64 is now 48"; `ignored` are names such as kv.budget."""
    found = []
    for key in before.keys() | after.keys():
        name, old, new = f"{prefix}{key}", before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += differences(old, new, ignored, f"{name}.")
        elif name not in ignored and old != new:
            found.append(f"{name} {old} is now {new}")
    return sorted(found)
