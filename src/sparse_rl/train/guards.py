# SPDX-License-Identifier: Apache-2.0
"""What keeps a run from being lost.

    SIGTERM, Ctrl-C   it stops at the next place where the work at hand may be thrown away, and is saved; a second
                      signal ends it at once
    out of memory     half the tokens of a learner forward, or half the rows of an engine, and the same work again;
                      where one rollout alone does not fit, an update gets the memory of the KV pool as well
    not finite        the update is skipped and its batch saved; STREAK in a row end the run
    another error     ends the run, and the last step that was learnt is saved

Of several processes a signal stops all, at the next forward or decode step, and so does an error in a rollout or a
grader, which all of them hear of. One that fails in an update, as for lack of memory, ends without a word to the others
and is not saved.

A step is a function of the weights, the seed and its number: one that is thrown away and taken again is the same.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from sparse_rl.rollout.memory import Memory, alone, out_of_memory
from sparse_rl.score.pack import Packable
from sparse_rl.specs import first_line
from sparse_rl.train import checkpoint
from sparse_rl.train.processes import Stopped, known_to_all

if TYPE_CHECKING:
    from sparse_rl.train.learner import Learner

logger = logging.getLogger(__name__)
T = TypeVar("T")

STREAK = 5  # updates in a row that are not finite end the run
POOL = "pool"  # halved once, it is given back before every update
BAD_BATCHES, MAX_BAD_BATCHES = "bad_batches", 3  # kept in the run folder
FORWARDED_S = 1.0  # a launcher forwards a signal that the run has got already
GRADING_S = 10.0  # after which a signal does not wait for the reward functions: one of them may hang


@dataclass(frozen=True, slots=True, kw_only=True)
class BadUpdate:
    """An update whose loss or gradient was not finite."""

    loss: float
    grad_norm: float
    rows: Sequence[Packable]  # it learnt from
    update: int = 0  # which of its step's, from 0
    members: Sequence[int] = ()  # which of the step's rollouts its rows are, if they are
    contents: dict[str, Any] = field(default_factory=dict)  # what else went into it


class Guards(Memory):
    """The guards of one run, and what they have to remember."""

    limit, unit = "update.max_tokens", "rollout"  # the setting that is halved, and what the learner packs
    smaller = (  # the remedy where one alone does not fit
        "lower sampling.max_tokens, recompute or offload activations, or choose an 8-bit or offloaded optimizer, or "
        "LoRA"
    )

    def __init__(self, *, first: bool = True) -> None:
        super().__init__()
        self.first = first  # of the run's processes: the one that writes and speaks
        self.unheard: dict[signal.Signals, Any] = {}  # handlers to give back
        self.stop: signal.Signals | None = None
        self.stop_s = 0.0  # when it came
        self.grading_s: float | None = None  # since when rollouts are graded
        self.streak = 0  # updates in a row that were not finite
        self.told = False  # of the first
        self.give_pool: Callable[[], bool] = lambda: False  # free the rollouts' KV pool; whether there was one

    def listen(self) -> None:
        """Hear SIGTERM and Ctrl-C, in the main thread and unless somebody else does."""
        if threading.current_thread() is threading.main_thread():
            for number, default in ((signal.SIGTERM, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
                if signal.getsignal(number) == default:
                    self.unheard[number] = signal.signal(number, self.on_signal)

    def stop_listening(self) -> None:
        while self.unheard:
            signal.signal(*self.unheard.popitem())

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """The first asks to stop, a second ends the process."""
        if self.stop is None:
            self.stop, self.stop_s = signal.Signals(number), time.monotonic()
            graded_s = 0.0 if self.grading_s is None or not alone() else self.stop_s - self.grading_s
            what = "stopping; a second signal ends the run at once"
            if graded_s > GRADING_S:
                what = f"stopping in the middle of grading, which has taken {graded_s:.0f} s"
            with suppress(OSError):  # nobody may be listening
                os.write(2, f"sparse-rl: {self.stop.name}: {what}.\n".encode() if self.first else b"")
            if graded_s > GRADING_S:
                raise Stopped(self.stop)
        elif time.monotonic() - self.stop_s > FORWARDED_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    @contextmanager
    def grading(self) -> Iterator[None]:
        """While functions of the user's run, which may hang: nothing is lost where a signal ends them."""
        self.grading_s = time.monotonic()
        try:
            yield
        except ValueError:
            if alone():
                self.check()  # a function that a signal broke off is not to blame
            raise
        finally:
            self.grading_s = None

    def check(self) -> None:
        """Stop here if the run was asked to; one of several processes in `together` alone, where the others hear it."""
        if self.stop is not None:
            raise Stopped(self.stop)

    def check_together(self) -> None:
        """The same at a place that all processes of a run pass: a signal that one of them got stops all."""
        if not alone():
            number = torch.tensor(self.stop or 0)
            dist.all_reduce(number, op=dist.ReduceOp.MAX)
            self.stop = signal.Signals(int(number)) if number else None
        if self.stop is not None:
            raise known_to_all(Stopped(self.stop))

    def fit(
        self,
        work: Callable[[int], T],
        max_tokens: int,
        rows: Sequence[Packable],
        learner: Learner,
        stage: str = "an update",
    ) -> T:
        """work(max_tokens); where memory runs out, its gradients are dropped and it is done again with half of that."""
        longest = max(len(row.prompt.ids) + len(row.token_ids) for row in rows)
        while True:
            tokens = self.part("update", max_tokens)
            try:
                return work(tokens)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                smaller = tokens > longest
                if not alone() or not (smaller or self.give_pool()):
                    remedy = f"lower {self.limit}, which is {tokens}" if smaller else self.smaller
                    raise ValueError(
                        f"out of memory in {stage}, whose longest {self.unit} has {longest} tokens; {remedy}."
                    ) from error
            # Out here nothing holds on to the frames of the error, and what they hold can be freed.
            learner.masters.zero_grad()
            learner.head.model.zero_grad()
            self.halve("update" if smaller else POOL, learner.device)
            change = f"{self.limit} is {self.part('update', max_tokens)}"
            logger.warning(
                "out of memory in %s: it is done again, and %s from here on.",
                stage,
                change if smaller else "the KV pool is given back before every update",
            )

    def note(
        self, bad: Sequence[BadUpdate], num_updates: int, rewards: torch.Tensor | None, step: int, run: Path
    ) -> None:
        """Save the batches of a step's updates that were not finite, for torch.load, and say so the first time."""
        for i in range(num_updates):
            self.streak = self.streak + 1 if any(item.update == i for item in bad) else 0
        for item in bad if self.first else ():
            path = run / BAD_BATCHES / f"step-{step}-update-{item.update + 1}.pt"
            others = [found for found in path.parent.glob("*.pt") if found != path]
            saved = f"there are {MAX_BAD_BATCHES} batches in {path.parent} already"
            try:
                if len(others) < MAX_BAD_BATCHES:
                    path.parent.mkdir(exist_ok=True)
                    torch.save(_saved(item, rewards) | {"step": step}, path)
                    saved = f"its batch is in {path} (torch.load)"
                saved += ": look for log-probs, advantages or losses out of range"
            except (OSError, RuntimeError) as error:
                saved = f"its batch could not be saved ({first_line(error)})"
            if not self.told:
                self.told = True
                logger.warning(
                    "the loss (%g) or gradient norm (%g) of an update in step %d is not finite: it changes nothing; "
                    "%s. update/nonfinite counts further ones.",
                    item.loss,
                    item.grad_norm,
                    step,
                    saved,
                )

    def forget_after(self, step: int, run: Path) -> None:
        """Remove the batches of later steps, which are taken again."""
        for path in (run / BAD_BATCHES).glob("step-*-update-*.pt"):
            if int(path.name.split("-")[1]) > step:
                path.unlink()

    def check_finite(self) -> None:
        """End a run that no longer learns."""
        if self.streak >= STREAK:
            raise FloatingPointError(
                f"the last {self.streak} updates had a loss or a gradient that is not finite, and changed nothing; "
                "look at bad_batches in the run's folder, then resume with a lower optimizer.learning_rate or "
                "--dtype float32."
            )

    def state(self) -> dict[str, int]:
        """What a checkpoint keeps."""
        return dict(self.halved)

    def restore(self, halved: dict[str, int], before: dict[str, Any], now: dict[str, Any]) -> None:
        """Go on as before, unless the settings that were halved are now others."""
        self.halved = {
            stage: count for stage, count in halved.items() if self.sized(stage, before) == self.sized(stage, now)
        }

    def sized(self, stage: str, settings: dict[str, Any]) -> Any:
        """The settings that say how much memory the stage takes."""
        return settings["update" if stage == "update" else "engine"]

    def rescue(self, error: BaseException, save: Callable[[], object] | None, run: Path) -> None:
        """Before the run ends early: save what is not saved yet, and say where a signal left it."""
        if save is not None and (alone() or hasattr(error, "known_to_all")):  # else the others would not save with it
            try:
                save()
            except Exception as failure:  # the first error stays the one that counts
                logger.warning("the last step could not be saved: %s", failure)
        if isinstance(error, Stopped):
            found = checkpoint.checkpoints(run)
            where = f"after {found[-1]}" if found else "before the first step was learnt"
            then = "goes on" if found else "starts over"
            logger.warning("stopped by %s %s; --trainer.resume_from_checkpoint true %s.", error.by.name, where, then)


def _saved(bad: BadUpdate, rewards: torch.Tensor | None) -> dict[str, Any]:
    """A bad batch's file; lists go over its rollouts, or rows."""
    graded = {} if rewards is None else {"rewards": rewards[list(bad.members)]}
    return graded | {
        "loss": bad.loss,
        "grad_norm": bad.grad_norm,
        "prompts": [row.prompt.text for row in bad.rows],
        "prompt_ids": [list(row.prompt.ids) for row in bad.rows],
        "token_ids": [row.token_ids for row in bad.rows],
        **bad.contents,
    }


@contextmanager
def optimizer_memory() -> Iterator[None]:
    """A step of the optimiser that ran out of memory cannot be done again: some weights have moved."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        raise ValueError(
            "out of memory in the optimizer's step; choose an 8-bit or offloaded optimizer, or LoRA, then resume."
        ) from error
