# SPDX-License-Identifier: Apache-2.0
"""Models x benchmarks x caches: generate, grade, write, and the table's numbers at the end.

    for each model:            loaded once
        for each cache:        one engine
            for each benchmark:
                for each block of problems: generate -> (thread: grade -> write)

A block is a function of the weights, the settings and its place, and is on disk whole or not at all, so an evaluation
that was killed anywhere goes on to the same table. Every model's prompts are made before anything is generated, so
that what is wrong with the last model is known at once; an evaluation that ends early has a table of what is done.

How answers are graded meanwhile is in `grader.py`, what lies on disk in `store.py`, what a sample counts for in
`results.py`.
"""

from __future__ import annotations

import copy
import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers

from sparse_rl.evaluate.grader import MAX_BATCH, Block, Grader, Tally
from sparse_rl.evaluate.observer import EvalObserver, Status
from sparse_rl.evaluate.plan import Cell, Evaluation, parse_cache
from sparse_rl.evaluate.record import NAME, Record, cell_folders
from sparse_rl.evaluate.results import compare, headlines, measure
from sparse_rl.evaluate.store import Store
from sparse_rl.evaluate.suite import Prompts, Suite, build_prompts, build_suites
from sparse_rl.model.load import check_device, load, load_reader
from sparse_rl.rollout import Progress
from sparse_rl.rollout.memory import GuardedEngine, Memory, free
from sparse_rl.runfolder import check_folder, lock, write_json
from sparse_rl.types import Prompt


def evaluate_benchmarks(
    evaluation: Evaluation, output: str | Path, *, resume: bool = False, observer: EvalObserver | None = None
) -> dict[str, Any]:
    """Run what is not on disk yet; the contents of results.json, which lies in the folder with all samples."""
    folder, began = Path(output), time.perf_counter()
    check_device(evaluation.device)
    going_on = check_folder(folder, NAME, "an evaluation", resume=resume)
    suites = build_suites(evaluation)
    prompts = {} if going_on else {name: ask(name, evaluation, suites) for name in evaluation.models}
    folder.mkdir(parents=True, exist_ok=True)
    with lock(folder, "evaluating"):
        going_on = check_folder(folder, NAME, "an evaluation", resume=resume)  # again, now that nobody else writes
        record = Record(folder, evaluation, suites, resume=going_on, began=began)
        run = EvalRun(folder, evaluation, suites, prompts, record, observer or EvalObserver())
        try:
            run.generate()
        except BaseException:
            run.end_early()
            raise
        finally:
            run.observer.on_end()
        return run.write_results()


def ask(name: str, evaluation: Evaluation, suites: dict[str, Suite]) -> dict[str, Prompts]:
    """What the model is asked, by benchmark; its weights are not needed."""
    reader = load_reader(name)
    try:
        return {benchmark: build_prompts(suite, evaluation, reader) for benchmark, suite in suites.items()}
    except ValueError as error:
        raise ValueError(f"model {name!r}: {error}") from error


class Pace:
    """How fast samples come, and how long the rest will take."""

    def __init__(self, samples: int = 0) -> None:
        self.samples, self.finished, self.began = samples, 0, time.perf_counter()

    def left_s(self, more: int) -> float | None:
        """With `more` finished in the block at hand; None as long as there is nothing to go by."""
        finished = self.finished + more
        return (time.perf_counter() - self.began) * (self.samples - finished) / finished if finished else None


class EvalRun:
    """One evaluation under way."""

    def __init__(
        self,
        folder: Path,
        evaluation: Evaluation,
        suites: dict[str, Suite],
        prompts: dict[str, dict[str, Prompts]],
        record: Record,
        observer: EvalObserver,
    ) -> None:
        self.folder, self.evaluation, self.suites, self.observer = folder, evaluation, suites, observer
        self.prompts = prompts  # by model and benchmark
        self.record = record
        self.cells = evaluation.cells
        self.names = cell_folders(self.cells)
        self.stores = self._open()
        self.memory = Memory()
        self.number = 0  # of the cell at hand
        self.whole, self.of_cell = Pace(), Pace()

    def generate(self) -> None:
        left = {cell: self._left(cell) for cell in self.cells}
        models = [name for name in self.evaluation.models if any(left[c] for c in self.cells if c.model == name)]
        for name in models:
            if name not in self.prompts:
                self.prompts[name] = ask(name, self.evaluation, self.suites)
        problems = sum(self.stores[cell].done + left[cell] for cell in self.cells)
        self.observer.on_begin(len(self.cells), problems - sum(left.values()), problems)
        self.whole.samples = sum(left[cell] * self.suites[cell.benchmark].sampling.n for cell in self.cells)
        self.number = sum(not problems for problems in left.values())
        with Grader() as grader:
            for name in models:
                self._model(name, grader)
                self._free()
            if grader.queue.qsize() > MAX_BATCH:
                self.observer.on_note(f"all is generated; about {grader.queue.qsize()} answers are still to be graded.")

    def end_early(self) -> None:
        """Write the results of what is on disk, if anything is; a disk that is full is no second error."""
        with suppress(OSError):
            self.stores = self._open()  # without what is half-written
            if any(store.done for store in self.stores.values()):
                self.observer.on_partial(self.write_results())

    def write_results(self) -> dict[str, Any]:
        """Write results.json; what it holds, as a reader has it."""
        self.record.save()
        path = self.folder / "results.json"
        write_json(path, self.results())
        results: dict[str, Any] = json.loads(path.read_text())
        return results

    def results(self) -> dict[str, Any]:
        """All numbers, made from what is on disk alone."""
        begun = [cell for cell in self.cells if self.stores[cell].done]
        measured = [
            measure(cell, self.evaluation, self.stores[cell].read(), self.stores[cell].blocks) for cell in begun
        ]
        cells = compare(measured)
        for cell, numbers in zip(begun, cells, strict=True):
            known = self.record.models[cell.model]["benchmarks"][cell.benchmark]
            numbers["overlong"], numbers["clipped"] = known["overlong"], known["clipped"]
            numbers["samples_file"] = f"samples/{self.names[cell]}/samples.jsonl"
            numbers["departures"] = self.suites[cell.benchmark].departures
        return {
            "protocol": self.evaluation.protocol,
            "partial": self._partial(begun),
            "cells": cells,
            "headlines": headlines(self.evaluation, [each for each in measured if not self._left(each.cell)]),
            "notes": [note for name in self.record.models for note in self._notes(name)],
            **self.record.contents,
        }

    def _open(self) -> dict[Cell, Store]:
        return {cell: Store(self.folder / "samples" / name) for cell, name in self.names.items()}

    def _partial(self, begun: list[Cell]) -> str | None:
        """What is missing, if anything is."""
        half = [cell for cell in begun if self._left(cell)]
        whole = len(begun) - len(half)
        if whole == len(self.cells):
            return None
        said = [f"{cell} ({self.stores[cell].done} of {self.record.problems(cell)} problems)" for cell in half]
        more = f" Begun: {'; '.join(said)}." if said else ""
        return f"PARTIAL: {whole} of {len(self.cells)} cells are done.{more} --resume goes on with the rest."

    def _model(self, name: str, grader: Grader) -> None:
        """All cells of one model."""
        evaluation = self.evaluation
        dtype = getattr(torch, evaluation.dtype) if evaluation.dtype else None
        loaded = load(name, dtype=dtype, device=evaluation.device)
        prompts = self.prompts.pop(name)
        loaded.fit(max(self._longest(cell, prompts) for cell in self.cells if cell.model == name))
        self.record.add_model(name, loaded, prompts)
        for note in self._notes(name):
            self.observer.on_note(note)
        tokenizer = copy.deepcopy(loaded.tokenizer)  # the thread's own
        for cache in evaluation.kv:
            cells = [cell for cell in self.cells if cell.model == name and cell.cache == cache and self._left(cell)]
            if not cells:
                continue
            # What did not fit with one cache is not tried with the next.
            engine = GuardedEngine(loaded, parse_cache(cache), evaluation.engine, self.memory, stage=name)
            # The longest first: what is captured for it serves the others.
            for cell in sorted(cells, key=lambda cell: self._longest(cell, prompts), reverse=True):
                self._cell(cell, engine, prompts[cell.benchmark], tokenizer, grader)
            del engine
            self._free()

    def _cell(
        self,
        cell: Cell,
        engine: GuardedEngine,
        prompts: Prompts,
        tokenizer: transformers.PreTrainedTokenizerBase,
        grader: Grader,
    ) -> None:
        store, suite = self.stores[cell], self.suites[cell.benchmark]
        tally = Tally(store.read())
        size = self.evaluation.block_problems(cell.benchmark)
        self.number += 1
        self.of_cell = Pace((len(prompts.prompts) - store.done) * suite.sampling.n)
        for start in range(store.done, len(prompts.prompts), size):
            part = prompts.prompts[start : start + size]
            self._block(Block(cell, suite, store, tally, tokenizer, start, part), part, engine, grader)
        self.observer.on_cell(self._status(cell, tally, None))

    def _block(self, block: Block, part: list[Prompt], engine: GuardedEngine, grader: Grader) -> None:
        """Generate a block; the grader writes it."""
        sampling = block.suite.sampling
        began = time.perf_counter()

        def on_step(progress: Progress) -> None:
            grader.check()
            self.observer.on_status(self._status(block.cell, block.tally, progress))

        def on_restart() -> None:
            nonlocal began
            grader.check()  # it may have been the grader's memory
            began = time.perf_counter()

        engine.generate(
            part,
            sampling,
            first=block.start,
            on_step=on_step,
            on_rollout=lambda rollout: grader.put(block, rollout),
            on_restart=on_restart,
        )
        capture_s = engine.stats.capture_s if engine.stats is not None else 0.0
        grader.close(block, generate_s=time.perf_counter() - began, capture_s=capture_s)
        self.record.save()
        for pace in (self.whole, self.of_cell):
            pace.finished += len(part) * sampling.n

    def _free(self) -> None:
        """Make room on a GPU for the next cache or model."""
        device = torch.device(self.evaluation.device)
        if device.type != "cpu":
            free(device)

    def _left(self, cell: Cell) -> int:
        """Problems to do; before its model is loaded the first time, all of the benchmark."""
        problems = self.record.problems(cell)
        return (len(self.suites[cell.benchmark].rows) if problems is None else problems) - self.stores[cell].done

    def _longest(self, cell: Cell, prompts: dict[str, Prompts]) -> int:
        longest = max(len(prompt.ids) for prompt in prompts[cell.benchmark].prompts)
        return longest + self.suites[cell.benchmark].sampling.max_tokens

    def _status(self, cell: Cell, tally: Tally, progress: Progress | None) -> Status:
        finished = progress.num_finished if progress is not None else 0
        problems = self.record.problems(cell) or 0
        left = self.of_cell.samples - self.of_cell.finished - finished
        return Status(
            cell=cell,
            number=self.number,
            num_cells=len(self.cells),
            done=problems - -(-left // self.suites[cell.benchmark].sampling.n),
            problems=problems,
            accuracy=tally.accuracy,
            tokens_per_s=progress.num_tokens / max(progress.elapsed_s, 1e-9) if progress is not None else 0.0,
            cell_left_s=self.of_cell.left_s(finished),
            left_s=self.whole.left_s(finished),
        )

    def _notes(self, name: str) -> list[str]:
        """What a reader of the table should know of a model and its prompts."""
        model = self.record.models[name]
        found = []
        for benchmark, known in model["benchmarks"].items():
            limit = self.suites[benchmark].sampling.max_tokens
            if known["overlong"]:
                found.append(f"{benchmark}: {known['overlong']} prompts fill the context of {name} and are left out.")
            if known["clipped"]:
                found.append(
                    f"{benchmark}: the context of {name}, {model['context']} tokens, is too short for {limit} more "
                    f"after {known['clipped']} of {known['problems']} prompts; answers end where it does."
                )
        plain = [benchmark for benchmark, known in model["benchmarks"].items() if known["plain"]]
        if plain:
            found.append(f"{name} has no chat template: the prompts of {', '.join(plain)} are plain text.")
        return found
