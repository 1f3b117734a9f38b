# SPDX-License-Identifier: Apache-2.0
"""Runs that several files compare with."""

from __future__ import annotations

import pytest
from guarded_run import trainer_of


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """whole(update): the run that nothing disturbed."""
    folders = {}

    def run(update):
        if update not in folders:
            folders[update] = tmp_path_factory.mktemp("whole") / "run"
            trainer_of(folders[update], update).train()
        return folders[update]

    return run
