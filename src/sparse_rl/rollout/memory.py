# SPDX-License-Identifier: Apache-2.0
"""Whether an error means that memory ran out, so that less at once may do."""

from __future__ import annotations

import torch


def out_of_memory(error: BaseException | None) -> bool:
    """Whether the error, or what it was raised from, is memory that ran out on a GPU or the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    if error is None:
        return False
    said = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return (isinstance(error, RuntimeError) and any(text in str(error) for text in said)) or out_of_memory(
        error.__cause__
    )
