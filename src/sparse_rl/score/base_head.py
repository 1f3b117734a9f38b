# SPDX-License-Identifier: Apache-2.0
"""The head of an adapted module without its adapters: the reference model, at no memory of its own.

Of a module that has none, the reference is a copy (train/trainer.py).
"""

from __future__ import annotations

from typing import Any

from sparse_rl.model.lora import adapters_off
from sparse_rl.score.head import Head, TokenScores


class BaseHead(Head):
    """Called as a head is; the adapters are off for as long as the call lasts."""

    def __call__(self, *args: Any, **kwargs: Any) -> TokenScores:
        with adapters_off(self.model):
            return super().__call__(*args, **kwargs)
