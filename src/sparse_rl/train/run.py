# SPDX-License-Identifier: Apache-2.0
"""Where a run stands, and its folder: opened once, resumed from a checkpoint, saved into.

What a step does is the trainer's, what a checkpoint holds that of `checkpoint.py`.
"""

from __future__ import annotations

import copy
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from sparse_rl.metrics import Timer
from sparse_rl.model.load import weights_digest
from sparse_rl.runfolder import as_settings, differences, discard, is_at, lock, recover, write_json
from sparse_rl.train import checkpoint
from sparse_rl.train.distill import Distiller
from sparse_rl.train.folder import check_folder, chosen_state, recorded, start_record
from sparse_rl.train.log import NoLog, RunLog
from sparse_rl.train.observer import Observer, tell

if TYPE_CHECKING:  # which import this module
    from sparse_rl.train.sft import SFTTrainer
    from sparse_rl.train.trainer import Trainer

logger = logging.getLogger(__name__)

NO_DIFFERENCE = ("trainer.output_dir", "trainer.resume_from_checkpoint")  # where a run lies, and how it goes on


class Run:
    """Counts steps and tokens, remembers the best checkpoint, holds the folder's lock and its logs.

    Of several processes the first one writes, and decides for all what to resume, what to keep and what is best.
    """

    def __init__(
        self,
        trainer: Trainer | SFTTrainer,
        section: str,
        best_metric: str,
        *,
        lower_is_better: bool = False,
        files: tuple[str, ...] = RunLog.FILES,
        distiller: Distiller | None = None,
    ) -> None:
        self.trainer, self.distiller = trainer, distiller
        self.section = section  # of the settings, that only this kind of run has
        self.best_metric, self.sign = best_metric, -1 if lower_is_better else 1
        self.config, self.learner, self.guards = trainer.config, trainer.learner, trainer.guards
        self.processes = self.learner.processes
        self.folder = Path(self.config.output_dir)
        self.base: str | None = None  # of a run of adapters, the digest of what they are for, which is in no checkpoint
        self.lock: IO[str] | None = None
        self.record: dict[str, Any] = {}  # run.json
        self.log: RunLog = NoLog()
        self.files = files  # of the logs
        self.timer = Timer()
        self.step, self.num_tokens = 0, 0
        self.pending: dict[str, float] | None = {}  # of the newest step, if it was learnt but not evaluated and logged
        self.unsaved: dict[str, Any] | None = None  # where the run stands, if no checkpoint says it
        self.best: dict[str, Any] = {"checkpoint": None, "value": None}
        self.warned: set[str] = set()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Start the folder, or take up the run in it; signals are heard, and what ends the run early saves it first."""
        self._open()
        self.guards.listen()
        begun: list[Observer] = []
        try:
            for observer in self.trainer.observers:
                tell([observer], "on_begin", self.trainer)
                begun.append(observer)
            yield
        except BaseException as error:
            state = self.unsaved
            whole = state is not None and state["step"] and state["num_updates"] == self.learner.num_updates
            self.guards.rescue(error, self._save if whole else None, self.folder)
            raise
        finally:
            self.guards.stop_listening()
            self._close()
            tell(begun, "on_end")

    @property
    def settings(self) -> dict[str, Any]:
        """The trainer's, as records have them."""
        return as_settings(self.trainer.settings())

    @property
    def newest(self) -> tuple[Path, str] | None:
        """The newest checkpoint, and a word on the best where that is another; None where there is none."""
        found = checkpoint.checkpoints(self.folder)
        if not found:  # of a run without steps
            return None
        best = self.best["checkpoint"]
        return found[-1], f" (the best so far in {best})" if best and best != found[-1].name else ""

    def evaluates(self, every: int) -> bool:
        """Whether this step is evaluated: the first, the last, and every so many."""
        return self.step in (0, self.config.steps) or (every > 0 and self.step % every == 0)

    def remember(self, pending: dict[str, float] | None) -> None:
        """Where the run stands now, for a checkpoint; `pending` are a step's metrics that are still to be logged."""
        self.pending = pending
        self.unsaved = {
            "step": self.step,
            "num_tokens": self.num_tokens,
            "num_updates": self.learner.num_updates,
            "best": self.best,
            "logs": self.log.written(),
            "warned": sorted(self.warned),
            "halved": self.guards.state(),
            "streak": self.guards.streak,
            "base": self.base,
            "trainer": copy.deepcopy(self.trainer.state()),
            "pending": pending,
        }

    def finish_step(self, metrics: dict[str, float], began: float) -> None:
        """Write the step's line; save if it is time, or the best so far."""
        seconds, self.timer = self.timer.seconds | {"step_time": time.perf_counter() - began}, Timer()
        line = {"step": self.step, "num_tokens": self.num_tokens, **metrics, **seconds}
        self.processes.together(self._check_folder)
        self.log.write("metrics.jsonl", line)
        tell(self.trainer.observers, "on_log", line)
        best = self.step > 0 and self.processes.by_first(lambda: self._improves(line.get(self.best_metric)))
        due = self.config.save_every and self.step % self.config.save_every == 0
        self.remember(None)
        if self.step and (best or due or self.step == self.config.steps):
            with self.timer("save"):
                self._save()
                self.processes.by_first(self._prune)

    def _improves(self, value: float | None) -> bool:
        """Whether the value is better than at every step before; this step is then remembered as the best."""
        self._check_best()
        best = self.best["value"]
        if value is None or not math.isfinite(value) or (best is not None and self.sign * value <= self.sign * best):
            return False
        self.best = {"checkpoint": f"checkpoint-{self.step}", "value": value}
        return True

    def _save(self) -> None:
        """Write the checkpoint of what is remembered; the weights must still be those."""
        assert self.unsaved is not None and self.unsaved["num_updates"] == self.learner.num_updates
        self.processes.together(self._check_folder)
        state, self.unsaved = self.unsaved, None
        folder = self.folder / f"checkpoint-{state['step']}"
        self.log.sync()
        state = state | {"settings": self.settings}
        checkpoint.save(folder, self.trainer.loaded, self.learner, state, self.distiller)
        tell(self.trainer.observers, "on_save", folder)

    def _check_folder(self) -> None:
        """See that the folder is still there and still the run's; what is missing in it is written anew."""
        if self.lock is None:
            return
        path = self.folder / "run.json"
        if not is_at(self.lock, self.folder / ".lock"):
            self.folder.resolve().mkdir(parents=True, exist_ok=True)  # of a link, what it leads to
            again = lock(self.folder)
            if path.is_file() and recorded(self.folder) != self.record:
                again.close()
                raise ValueError(f"{self.folder} was deleted under the run, and has another run in it; this one stops.")
            self.lock.close()
            self.lock = again
            logger.warning("%s, or the lock in it, was deleted or moved under the run.", self.folder)
        if not path.is_file():
            logger.warning("%s is gone; it is written anew.", path)
            write_json(path, self.record)
        self.log.check()

    def _check_best(self) -> None:
        """Forget a best checkpoint that somebody has deleted."""
        best = self.best["checkpoint"]
        if best and not (self.folder / best).is_dir():
            logger.warning("%s, the best so far, is gone; the best is sought anew.", self.folder / best)
            self.best = {"checkpoint": None, "value": None}

    def _prune(self) -> None:
        checkpoint.prune(self.folder, self.config.save_total_limit, self.best["checkpoint"])

    def _open(self) -> None:
        """Nothing is changed before all of it is known to be well."""
        model = self.trainer.loaded.model
        if "default" in getattr(model, "peft_config", {}):
            self.base = weights_digest(model, adapters=False)
        try:
            chosen, state = self.processes.by_first(self._choose)
            if chosen is not None:
                self._resume(chosen, state)
            self.processes.together(lambda: self._start(state["logs"]) if self.processes.first else None)
        except BaseException:
            self._close()
            raise

    def _close(self) -> None:
        self.log.close()
        if self.lock is not None:
            self.lock.close()

    def check(self) -> tuple[Path | None, dict[str, Any]]:
        """The checkpoint to resume from and what it says, if there is one; refuse what cannot be started or resumed."""
        check_folder(self.config, self.section)
        return chosen_state(self.config, self.settings["optimizer"]["kind"])

    def _choose(self) -> tuple[Path | None, dict[str, Any]]:
        """The same with the folder locked, for as long as the run goes on."""
        check_folder(self.config, self.section)
        self.folder.resolve().mkdir(parents=True, exist_ok=True)
        self.lock = lock(self.folder)
        recover(self.folder, "checkpoint-*")
        chosen, state = self.check()
        best = state.get("best", {}).get("checkpoint")
        if best and not (self.folder / best).is_dir():  # it was pruned for a better one that is now taken back
            state["best"] = {"checkpoint": None, "value": None}
        return chosen, state

    def _start(self, known: dict[str, Any]) -> None:
        """Write run.json, open the logs, and remove what a future that is now taken again has left."""
        self.record = start_record(self.folder, self.settings, self.trainer.loaded, self.processes.size)
        later = [path for path in checkpoint.checkpoints(self.folder) if checkpoint.step_of(path) > self.step]
        if later:
            logger.warning("%s removed: the run goes on from step %d.", ", ".join(p.name for p in later), self.step)
        for path in reversed(later):  # the logs come last, so that a kill leaves no checkpoint that they do not reach
            discard(path)
        self.log = RunLog(self.folder, known, self.files)
        self.guards.forget_after(self.step, self.folder)
        if self.pending is None:  # else the step's end does it, when it is known whether the step is the best
            self._prune()  # if it was stopped just before

    def _resume(self, folder: Path, state: dict[str, Any]) -> None:
        """Take up a checkpoint's state."""
        settings, base = self.settings, state["base"]
        if self.base and base and base != self.base and state["settings"]["dtype"] == settings["dtype"]:
            raise ValueError(
                f"{folder} has adapters for other weights than those of {settings['model']}; give the model that they "
                "were trained on."
            )
        if (longest := state["settings"].get("longest")) != settings.get("longest"):
            raise ValueError(
                f"{folder} was trained with its rotation fixed for {longest} tokens, and the model's is fixed for "
                f"{settings.get('longest')}; load the model with longest={longest}."
            )
        self.processes.together(lambda: checkpoint.restore(folder, self.learner, state["num_updates"], self.distiller))
        changed = differences(state["settings"], settings, NO_DIFFERENCE)
        if changed:
            logger.warning("resuming with other settings: %s.", "; ".join(changed))
        self.step, self.num_tokens, self.best = state["step"], state["num_tokens"], state["best"]
        self.warned, pending = set(state["warned"]), state["pending"]
        if pending is not None:  # JSON has no name for what was not finite
            pending = {name: math.nan if value is None else value for name, value in pending.items()}
        self.pending = pending
        self.guards.restore(state["halved"], state["settings"], settings)
        self.guards.streak = state["streak"]
        self.trainer.restore(state["trainer"])
