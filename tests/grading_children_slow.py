# SPDX-License-Identifier: Apache-2.0
"""A module that takes long to import, and longer to warm up."""

from __future__ import annotations

import time

time.sleep(0.4)


def warm():
    time.sleep(0.4)


def act(item):
    return item
