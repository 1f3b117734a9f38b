# SPDX-License-Identifier: Apache-2.0
"""What stands in the place of a score when the grader itself failed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Failed:
    """The grader hung, crashed or was killed: the completion is counted as such and left out, never scored 0."""

    reason: str
