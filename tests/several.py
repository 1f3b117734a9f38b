# SPDX-License-Identifier: Apache-2.0
"""Processes as torchrun would start them, but forked: nothing is imported twice."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import traceback
import warnings
from pathlib import Path

import torch
import torch.multiprocessing as multiprocessing

from sparse_rl.train.processes import Processes, joined


def several(size, work, *args, timeout=120):
    """What `work(processes, *args)` returned in each of `size` processes: (exit code, result or what it raised)."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        free.close()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
            context = multiprocessing.get_context("fork")
            children = [
                context.Process(target=_child, args=(rank, size, port, folder, work, args)) for rank in range(size)
            ]
            for child in children:
                child.start()
        for child in children:
            child.join(timeout)
        hung = [rank for rank, child in enumerate(children) if child.is_alive()]
        for rank in hung:
            children[rank].kill()
        assert not hung, f"processes {hung} of {size} did not end"
        files = [Path(folder, str(rank)) for rank in range(size)]
        results = [torch.load(file, weights_only=False) if file.exists() else None for file in files]
        return [(child.exitcode, result) for child, result in zip(children, results, strict=True)]


def results_of(size, work, *args, **more):
    """The results alone; every process must have ended well."""
    found = several(size, work, *args, **more)
    assert [code for code, _ in found] == [0] * size, found
    return [result for _, result in found]


def _child(rank, size, port, folder, work, args):
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()}
    torch.set_num_threads(1)
    code, result = 0, None
    try:
        with joined() as processes:
            assert isinstance(processes, Processes) and (processes.rank, processes.size) == (rank, size)
            result = work(processes, *args)
    except BaseException as error:
        traceback.print_exc(file=sys.stderr)
        code, result = 1, f"{type(error).__name__}: {error}"
    torch.save(result, Path(folder, str(rank)))
    sys.stderr.flush()
    os._exit(code)
