# SPDX-License-Identifier: Apache-2.0
"""The JSONL files of a run folder: appended line by line, and compared with what the run knows it has written.

What is in them is said in metrics.py; when they are checked, in `run.py`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparse_rl.metrics import finite
from sparse_rl.runfolder import is_at, write_whole

logger = logging.getLogger(__name__)

Known = tuple[int, str | None]  # a file's bytes and their hash


class RunLog:
    """The files of one run, cut back to where a checkpoint knew them to be."""

    FILES = ("metrics.jsonl", "completions.jsonl", "rejected.jsonl")

    def __init__(self, folder: Path, known: dict[str, Any] | None = None, names: tuple[str, ...] = FILES) -> None:
        self.files = {name: LogFile(folder / name, (known or {}).get(name, 0)) for name in names}

    def write(self, name: str, record: dict[str, Any]) -> None:
        """One line; a number that JSON does not know becomes null."""
        self.files[name].append(json.dumps(finite(record), allow_nan=False).encode() + b"\n")

    def check(self) -> None:
        """Write anew what was deleted or replaced, without lines that somebody else has put in."""
        for file in self.files.values():
            file.check()

    def sync(self) -> None:
        """Bring all that was written to disk."""
        for file in self.files.values():
            file.sync()

    def written(self) -> dict[str, Known]:
        """Bytes of each file and their hash, on disk or on the way, for a checkpoint."""
        return {name: (file.size, file.sha256.hexdigest()) for name, file in self.files.items()}

    def close(self) -> None:
        for file in self.files.values():
            with suppress(OSError):  # what a full disk did not take
                file.file.close()


class NoLog(RunLog):
    """For a process that writes nothing, since another does."""

    def __init__(self) -> None:
        self.files = {}

    def write(self, name: str, record: dict[str, Any]) -> None:
        pass


class LogFile:
    """One of them."""

    def __init__(self, path: Path, known: Known | int) -> None:
        self.path = path
        there = path.read_bytes() if path.exists() else b""
        size, sha256 = (known, None) if isinstance(known, int) else known  # a number alone: nobody knows the hash
        self._go_on(self._whole(there[:size], there, size, sha256), there)

    def append(self, line: bytes) -> None:
        try:
            self.file.write(line)
            self.file.flush()
        except OSError as error:
            raise self._full(error) from error
        self.size += len(line)
        self.sha256.update(line)

    def check(self) -> None:
        here, size = is_at(self.file, self.path), os.fstat(self.file.fileno()).st_size
        if here and size == self.size:
            return
        logger.warning("%s was %s under the run.", self.path, "changed" if here else "deleted or replaced")
        own = os.pread(self.file.fileno(), size, 0)
        own = self._whole(own, own, self.size, self.sha256.hexdigest())
        self.file.close()
        self._go_on(own, self.path.read_bytes() if self.path.exists() else b"")

    def sync(self) -> None:
        try:
            os.fsync(self.file.fileno())
        except OSError as error:  # some file systems find only now that there is no room
            raise self._full(error) from error

    def _whole(self, kept: bytes, there: bytes, size: int, sha256: str | None) -> bytes:
        """What is kept of a file: if it is not what was written, the lines of it that can still be read."""
        if len(kept) == size and sha256 in (None, hashlib.sha256(kept).hexdigest()):
            return kept
        lines = kept.split(b"\n")[:-1]
        good = [line for line in lines if _is_record(line)]
        if len(good) < len(lines):
            aside = self.path.with_name(f"{self.path.name}.damaged")
            write_whole(aside, there)
            logger.warning(
                "%s has %d lines that are no JSON objects, which the run did not write; they are left out, and kept in "
                "%s, the file as it was.",
                self.path,
                len(lines) - len(good),
                aside,
            )
        else:
            logger.warning("%s has lost or changed lines of steps that were taken; the run goes on.", self.path)
        return b"".join(line + b"\n" for line in good)

    def _go_on(self, kept: bytes, there: bytes) -> None:
        """Append to this content from here on, where `there` is what lies in the file."""
        if not there.startswith(kept):
            write_whole(self.path, kept)
        self.file = open(self.path, "a+b")  # noqa: SIM115 - closed by RunLog.close()
        self.file.truncate(len(kept))  # lines of steps that will be taken again
        self.size, self.sha256 = len(kept), hashlib.sha256(kept)

    def _full(self, error: OSError) -> OSError:
        return OSError(f"{self.path} could not be written ({error.strerror}); make room on the disk, then resume.")


def _is_record(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False
