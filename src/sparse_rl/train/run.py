# SPDX-License-Identifier: Apache-2.0
"""Where a run stands, and its folder: opened once, resumed from a checkpoint, saved into."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import Any

from sparse_rl.metrics import RunLog
from sparse_rl.model.load import LoadedModel
from sparse_rl.train import checkpoint
from sparse_rl.train.config import RunConfig
from sparse_rl.train.folder import check_folder, chosen_checkpoint, differences, lock, start_record
from sparse_rl.train.learner import Learner

logger = logging.getLogger(__name__)


class Run:
    """Counts steps and tokens, remembers the best checkpoint, holds the folder's lock and its logs."""

    def __init__(
        self, config: RunConfig, loaded: LoadedModel, learner: Learner, settings: dict[str, Any], section: str
    ) -> None:
        self.config, self.loaded, self.learner, self.settings = config, loaded, learner, settings
        self.section = section  # of the settings, that only this kind of run has
        self.folder = Path(config.output_dir)
        self.step, self.num_tokens = 0, 0
        self.best: dict[str, Any] = {"checkpoint": None, "value": None}

    def open(self) -> None:
        """Start the folder, or take up the run in it. Nothing is changed before all of it is known to be well."""
        check_folder(self.config, self.section)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.lock = lock(self.folder)
        try:
            chosen = chosen_checkpoint(self.config)
            sizes = self._resume(chosen) if chosen is not None else {}
        except BaseException:
            self.lock.close()
            raise
        start_record(self.folder, self.settings, self.loaded)
        self.log = RunLog(self.folder, sizes)
        later = [path for path in checkpoint.checkpoints(self.folder) if checkpoint.step_of(path) > self.step]
        if later:  # of the future that is now taken again
            logger.warning("%s removed: the run goes on from step %d.", ", ".join(p.name for p in later), self.step)
        for path in later:
            checkpoint.discard(path)
        self._prune()  # if it was stopped just before

    def close(self) -> None:
        self.log.close()
        self.lock.close()

    def lowers_best(self, value: float | None) -> bool:
        """Whether the value is lower than at every step before; this step is then remembered as the best."""
        best = self.best["value"]
        if value is None or not math.isfinite(value) or (best is not None and value >= best):
            return False
        self.best = {"checkpoint": f"checkpoint-{self.step}", "value": value}
        return True

    def save(self) -> Path:
        """Write this step's checkpoint, and drop those beyond the limit."""
        folder = self.folder / f"checkpoint-{self.step}"
        state = {
            "step": self.step,
            "num_tokens": self.num_tokens,
            "best": self.best,
            "logs": self.log.sizes(),
            "warned": [],
            "settings": self.settings,
        }
        checkpoint.save(folder, self.loaded, self.learner, state)
        self._prune()
        return folder

    def _prune(self) -> None:
        checkpoint.prune(self.folder, self.config.save_total_limit, self.best["checkpoint"])

    def _resume(self, folder: Path) -> dict[str, int]:
        """Take up a checkpoint's state; returns what the logs' sizes were."""
        state = checkpoint.read_state(folder)
        if state["step"] > self.config.steps:
            raise ValueError(
                f"the run has {self.config.steps} steps, but {folder.name} is beyond them; raise trainer.steps, or "
                "resume from an earlier checkpoint."
            )
        RunLog.check(self.folder, state["logs"])
        checkpoint.restore(folder, self.learner, state["num_updates"])
        changed = differences(state["settings"], json.loads(json.dumps(self.settings)))
        if changed:
            logger.warning("resuming with other settings: %s.", "; ".join(changed))
        self.step, self.num_tokens, self.best = state["step"], state["num_tokens"], state["best"]
        return dict(state["logs"])
