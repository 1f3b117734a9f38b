# SPDX-License-Identifier: Apache-2.0
"""Grading beside the generation: a thread grades what has finished and writes the blocks that are whole.

The engine's loop only puts rollouts into a queue. An error of the thread (a grader that raises, a disk that is full) is
raised in the main thread by the next `check`.

Whether an answer is right is for the suite's reward to say (`suite.py`); the table's numbers are made in `results.py`.
"""

from __future__ import annotations

import math
import threading
from queue import Empty, SimpleQueue
from typing import Any

import transformers

from sparse_rl.evaluate.plan import Cell
from sparse_rl.evaluate.store import Sample, Store
from sparse_rl.evaluate.suite import Suite
from sparse_rl.grading.answer import final_answer
from sparse_rl.tasks.base import completion_texts
from sparse_rl.types import Prompt, Rollout

MAX_BATCH = 256  # rollouts graded in one call
GRACE_S = 5.0  # for blocks that only lack grading, when the run is ended
LONGEST_ANSWER = 200  # characters of a right answer that a sample's line still repeats


class Tally:
    """Accuracy of a cell so far."""

    def __init__(self, samples: list[Sample]) -> None:
        self.right = self.graded = 0
        for sample in samples:
            self.add(sample["score"])

    def add(self, score: float | None, count: int = 1) -> None:
        if score is not None:
            self.graded += count
            self.right += count * (score >= 1)

    @property
    def accuracy(self) -> float | None:
        return self.right / self.graded if self.graded else None


class Block:
    """Problems that are generated, graded and written as one."""

    def __init__(
        self,
        cell: Cell,
        suite: Suite,
        store: Store,
        tally: Tally,
        tokenizer: transformers.PreTrainedTokenizerBase,
        start: int,
        prompts: list[Prompt],
    ) -> None:
        self.cell, self.suite, self.store, self.tally, self.tokenizer = cell, suite, store, tally, tokenizer
        self.start, self.stop = start, start + len(prompts)
        self.places = {prompt.columns["id"]: i for i, prompt in enumerate(prompts)}
        self.samples: list[Sample | None] = [None] * (len(prompts) * suite.sampling.n)
        self.times: dict[str, float] | None = None  # once all of it is generated

    def grade(self, rollouts: list[Rollout]) -> None:
        texts = completion_texts(rollouts, self.tokenizer)
        graded = self.suite.rewards.grade_texts(rollouts, texts)
        failures = graded.failures.get(self.suite.rewards.names[0], {})
        for i, (rollout, text, score) in enumerate(zip(rollouts, texts, graded.rewards.tolist(), strict=True)):
            place = self.places[rollout.prompt.columns["id"]] * self.suite.sampling.n + rollout.sample
            failure = failures.get(i, "the grader declined") if math.isnan(score) else None
            before = self.samples[place]
            if before is not None:  # memory ran out, and the block is generated anew
                self.tally.add(before["score"], count=-1)
            self.samples[place] = self._sample(rollout, text, None if failure else score, failure)
            self.tally.add(None if failure else score)

    def write(self) -> None:
        assert self.times is not None
        samples = [sample for sample in self.samples if sample is not None]
        assert len(samples) == len(self.samples), f"{self.cell}: {len(samples)} of {len(self.samples)} were graded"
        self.store.append(self.start, self.stop, samples, **self.times)

    def _sample(self, rollout: Rollout, text: str, score: float | None, failure: str | None) -> Sample:
        row, kv = dict(rollout.prompt.columns), rollout.kv
        if len(str(row["answer"])) > LONGEST_ANSWER:
            del row["answer"]
        return {
            "model": self.cell.model,
            "benchmark": self.cell.benchmark,
            "cache": self.cell.cache,
            "problem": row["id"],
            "sample": rollout.sample,
            "completion": text,
            **({"extracted": final_answer(text)} if self.suite.rewards.names == ("math",) else {}),
            "score": score,
            **({} if failure is None else {"failure": failure}),
            **{key: row[key] for key in ("answer", "level", "subject") if row.get(key) is not None},
            "finish_reason": rollout.finish_reason,
            "prompt_tokens": len(rollout.prompt.ids),
            "tokens": len(rollout.token_ids),
            "kv_held": sum(kv.held),  # entries a layer and KV head, over decode steps
            "kv_read": kv.num_read,  # of those held, the ones that attention read, mean over layers
            "kv_full": kv.full,  # the same of a dense cache
            "kv_saved_frac": kv.saved_frac,
            "kv_peak": kv.peak,
        }


class Grader:
    """`with Grader() as grader`: grades until everything that was put is written; an exception ends it early."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[tuple[Block, Rollout | None] | None] = SimpleQueue()
        self.error: BaseException | None = None
        self.ending = False  # only what is wholly generated still counts
        self.writing = threading.Lock()
        self.abandoned = False  # the folder may be another's: nothing is written any more
        self.thread = threading.Thread(target=self._run, name="grader", daemon=True)

    def __enter__(self) -> Grader:
        self.thread.start()
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self.ending = kind is not None
        self.queue.put(None)
        try:
            if self.ending:
                self.thread.join(GRACE_S)
            while self.thread.is_alive() and not self.ending:
                self.thread.join(0.2)  # short, so that Ctrl-C is heard
        finally:
            with self.writing:  # a block that is on its way is written first
                self.abandoned = True
        if not self.ending:
            self.check()

    def put(self, block: Block, rollout: Rollout) -> None:
        self.queue.put((block, rollout))

    def close(self, block: Block, *, generate_s: float, capture_s: float) -> None:
        """All of the block is generated: it is written once it is graded."""
        block.times = {"generate_s": round(generate_s, 3), "capture_s": round(capture_s, 3)}
        self.queue.put((block, None))

    def check(self) -> None:
        """Raise what ended the thread, if something did."""
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        try:
            going = True
            while going:
                going = self._batch()
        except BaseException as error:
            self.error = error

    def _batch(self) -> bool:
        """Grade what is there, a block at a time in the order of arrival; whether more may come."""
        items = [self.queue.get()]
        while len(items) < MAX_BATCH:
            try:
                items.append(self.queue.get_nowait())
            except Empty:
                break
        batch: dict[Block, list[Rollout]] = {}
        closed: list[Block] = []
        for block, rollout in filter(None, items):
            if self.ending and block.times is None:
                continue
            if rollout is None:
                closed.append(block)
            else:
                batch.setdefault(block, []).append(rollout)
        for block, rollouts in batch.items():
            block.grade(rollouts)
        for block in closed:  # in a queue, the end of a block comes after all of it
            with self.writing:
                if self.abandoned:
                    return False
                block.write()
        return None not in items
