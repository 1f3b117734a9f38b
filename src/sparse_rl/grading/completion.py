# SPDX-License-Identifier: Apache-2.0
"""What the model wrote, in whichever form a reward function is handed it."""

from __future__ import annotations

from typing import Any


def text_of(completion: Any) -> str:
    """A completion's text: itself, or what a chat's last message says, in one piece or in parts."""
    text = completion if isinstance(completion, str) else completion[-1]["content"]
    return text if isinstance(text, str) else "".join(part.get("text", "") for part in text or ())
