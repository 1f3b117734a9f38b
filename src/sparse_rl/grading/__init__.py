# SPDX-License-Identifier: Apache-2.0
"""How answers and programs are judged; nothing here knows of models or prompts."""

from sparse_rl.grading.outcome import Failed

__all__ = ["Failed"]
