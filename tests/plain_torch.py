# SPDX-License-Identifier: Apache-2.0
"""Plain torch where a GPU would run Triton, or Triton on a CPU, in every module that asks which of the two runs."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch

import sparse_rl.rollout
import sparse_rl.score  # noqa: F401  which with the engine imports every kernel
from sparse_rl.kernels import backend


def askers() -> list[ModuleType]:
    """Modules that have a `use_triton` of their own."""
    found = [module for name, module in sys.modules.items() if name.startswith("sparse_rl.")]
    return [module for module in found if hasattr(module, "use_triton") and module is not backend]


def run_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in askers():
        monkeypatch.setattr(module, "use_triton", lambda x: False)


def run_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in askers():
        monkeypatch.setattr(module, "use_triton", lambda x: x.dtype != torch.float64)
