# SPDX-License-Identifier: Apache-2.0
"""The samples of one cell on disk, in blocks that are there whole or not at all.

    samples.jsonl   one line a sample
    blocks.jsonl    one line a block: its problems, bytes and digest, and the seconds it took

The samples of a block are on disk before its line is. What a crash left behind (samples without a line, half a line, a
block that is not what its line says) is cut off when the files are opened again, and made anew.

Which blocks are still to do is for `benchmarks.py` to say; what was asked for is in `record.py`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

Sample = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockLine:
    """What is known of a block that is on disk."""

    start: int  # first problem
    stop: int
    num_bytes: int
    generate_s: float
    capture_s: float  # of those, compiling and capturing decode steps
    tokens: int
    sha256: str = ""  # of the samples and of all the above

    def digest(self, content: bytes) -> str:
        return hashlib.sha256(content + _line(replace(self, sha256=""))).hexdigest()


class Store:
    """Opened, it holds what is good; `append` adds the next block."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.samples, self.index = folder / "samples.jsonl", folder / "blocks.jsonl"
        self.blocks = self._good_blocks()
        for path, size in self._sizes().items():
            with open(path, "ab") as file:
                file.truncate(size)

    def _sizes(self) -> dict[Path, int]:
        """Bytes of the files, of the blocks that are good."""
        return {
            self.samples: sum(block.num_bytes for block in self.blocks),
            self.index: sum(len(_line(block)) for block in self.blocks),
        }

    @property
    def done(self) -> int:
        """Problems that are on disk."""
        return self.blocks[-1].stop if self.blocks else 0

    def append(self, start: int, stop: int, samples: list[Sample], *, generate_s: float, capture_s: float) -> None:
        assert start == self.done, f"block {start} comes after {self.done} problems"
        content = b"".join(json.dumps(sample, allow_nan=False).encode() + b"\n" for sample in samples)
        block = BlockLine(
            start=start,
            stop=stop,
            num_bytes=len(content),
            generate_s=generate_s,
            capture_s=capture_s,
            tokens=sum(sample["tokens"] for sample in samples),
        )
        block = replace(block, sha256=block.digest(content))
        sizes = self._sizes()
        _write(self.samples, content, sizes[self.samples])
        _write(self.index, _line(block), sizes[self.index])
        self.blocks.append(block)

    def read(self) -> list[Sample]:
        content = self.samples.read_bytes() if self.samples.exists() else b""
        _check(self.samples, len(content), self._sizes()[self.samples])
        return [json.loads(line) for line in content.split(b"\n")[:-1]]

    def _good_blocks(self) -> list[BlockLine]:
        """Blocks from the first on, up to the first that is not as it should be."""
        content = self.samples.read_bytes() if self.samples.exists() else b""
        lines = self.index.read_bytes().split(b"\n")[:-1] if self.index.exists() else []
        good: list[BlockLine] = []
        offset = 0
        for line in lines:
            try:
                block = BlockLine(**json.loads(line))
                part = content[offset : offset + block.num_bytes]
            except (ValueError, TypeError):
                break
            if _line(block) != line + b"\n" or block.digest(part) != block.sha256:
                break
            if block.start != (good[-1].stop if good else 0):
                break
            good.append(block)
            offset += block.num_bytes
        if len(good) < len(lines):
            logger.warning("%s is damaged from block %d on; that is made anew.", self.samples, len(good))
        return good


def _line(block: BlockLine) -> bytes:
    return json.dumps(asdict(block)).encode() + b"\n"


def _check(path: Path, found: int, size: int) -> None:
    if found != size:
        raise ValueError(
            f"{path} was deleted or changed under the evaluation: it has {found} bytes, and {size} were written; start "
            "it again with --resume, which makes anew what is missing."
        )


def _write(path: Path, content: bytes, size: int) -> None:
    """At the end of the file, which has so many bytes, and on disk when this returns."""
    try:
        with open(path, "ab") as file:
            _check(path, file.tell(), size)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except FileNotFoundError:
        _check(path, 0, size)
        raise
    except OSError as error:
        raise OSError(f"{path} could not be written ({error.strerror}); make room on the disk, then resume.") from error
