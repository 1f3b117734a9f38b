# SPDX-License-Identifier: Apache-2.0
"""One call of the engine, step by step, and what it collects.

admit:    resume preempted -> prefill prompts -> compress long ones -> start samples
decode:   make room -> a few tokens a row -> compress the rows that are due
collect:  fetch drawn tokens -> append them to their sequences -> look for ends

How long every cache is after so many steps is known beforehand, so nothing here waits for the device but `collect`, and
that reads on a GPU what was drawn a few steps ago. A sequence that has ended is thus decoded a little further; what it
draws there is dropped.

Who runs, and on which pages, is decided in `scheduler.py`; tensors are `runner.py`'s.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from sparse_rl.kv.policy import EvictPolicy
from sparse_rl.kv.select import SelectPolicy
from sparse_rl.model.load import LoadedModel, stop_ids
from sparse_rl.rollout.rows import CAPACITY, Drawn, Fetch
from sparse_rl.rollout.runner import Runner
from sparse_rl.rollout.sampler import Sampling
from sparse_rl.rollout.scheduler import Scheduler
from sparse_rl.rollout.sequence import Sequence
from sparse_rl.types import FinishReason, KVStats, Prompt, Rollout


def pace(device: torch.device) -> tuple[int, int]:
    """Steps between two fetches, and how many fetches may be under way.

    A GPU is never waited for, at the price of up to twice the steps decoded in vain after an end; a CPU wastes none.
    """
    return (8, 1) if device.type == "cuda" else (1, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a call stands after a decode step."""

    num_requests: int
    num_finished: int
    num_rows: int  # in flight
    num_steps: int  # decoded
    num_tokens: int  # sampled and read so far
    elapsed_s: float
    held_so_far: int  # entries a layer and KV head, summed over all decode steps of all rows
    read_so_far: float  # those of them that attention read, mean over layers
    full_so_far: int  # the same for a dense cache
    pages_used: int
    num_pages: int


@dataclass(slots=True)
class Flight:
    """Steps whose tokens have not been read, in the order of these sequences."""

    sequences: list[Sequence]
    steps: int


class Loop:
    def __init__(
        self,
        loaded: LoadedModel,
        sampling: Sampling,
        prompts: list[Prompt],
        sequences: list[Sequence],
        scheduler: Scheduler,
        runner: Runner,
        on_step: Callable[[Progress], None] | None,
        on_rollout: Callable[[Rollout], None] | None,
    ) -> None:
        self.shape = loaded.shape
        self.tokenizer = loaded.tokenizer
        self.policy = scheduler.policy
        self.selection = scheduler.policy.selection
        self.sampling = sampling
        self.prompts = prompts
        self.sequences = sequences
        self.scheduler = scheduler
        self.runner = runner
        self.on_step = on_step
        self.on_rollout = on_rollout
        self.stop_ids = np.array(stop_ids(loaded.model) if sampling.stop_ids is None else sampling.stop_ids, dtype=int)
        # A stop string of m bytes spans at most m tokens; a few more keep a cut character, or a space that
        # decoding leaves out at the start, from hiding it.
        self.stop_tail = max((len(string.encode()) for string in sampling.stop), default=0) + 4
        self.interval, self.lag = pace(loaded.shape.device)
        self.flights: list[Flight] = []  # drawn, not fetched
        self.fetches: deque[tuple[list[Flight], Fetch]] = deque()
        self.num_fetched = 0  # steps
        self.num_steps = 0
        self.num_tokens = 0
        self.num_finished = 0
        self.held_so_far = 0
        self.read_so_far = 0.0
        self.full_so_far = 0
        self.began = time.perf_counter()

    def run(self) -> None:
        scheduler = self.scheduler
        while scheduler.busy or self.flights or self.fetches:
            while self.num_unfetched < CAPACITY // 2 and self.admit():
                pass
            if scheduler.running:
                self.decode()
            self.collect()
            if self.on_step is not None:
                self.on_step(self.progress())

    def admit(self) -> bool:
        """Let sequences in; whether any came."""
        scheduler, runner, policy = self.scheduler, self.runner, self.policy
        for sequence in scheduler.resume():
            runner.restore(sequence)
        if not scheduler.refills:
            return False
        held = scheduler.prefill()
        if held:
            runner.prefill(held, self.prompts)
        if isinstance(policy, EvictPolicy):
            long = [prompt for prompt in held if prompt.num_entries > policy.target(prompt.prompt_len, prompt.seen)]
            runner.compress_prompts(long)
            for prompt in long:
                scheduler.settle(prompt, policy.target(prompt.prompt_len, prompt.seen))
        starts = scheduler.start()
        if starts:
            for start in starts:
                start.sequence.compressed_at = list(start.prompt.compressed_at)
                start.sequence.kept_positions = list(start.prompt.kept_positions)
            runner.start(starts)
            self.flights.append(Flight([start.sequence for start in starts], 1))
            self.retire([start.sequence for start in starts])
        return bool(starts)

    def decode(self) -> None:
        scheduler, runner, policy = self.scheduler, self.runner, self.policy
        steps = scheduler.horizon(self.interval)
        if scheduler.short_of_pages(steps):
            self.drain()  # ends that were not known may give pages, and a preempted sequence must know its tokens
            if not scheduler.running:
                return
            steps = scheduler.horizon(self.interval)
        for sequence, pages in scheduler.make_room(steps):
            runner.save(sequence, pages)
        running = list(scheduler.running)
        runner.decode(running, steps)
        if self.flights and self.flights[-1].sequences == running:
            self.flights[-1].steps += steps
        else:
            self.flights.append(Flight(running, steps))
        self.num_steps += steps
        for sequence in running:
            sequence.held.extend(range(sequence.num_entries + 1, sequence.num_entries + steps + 1))
            sequence.num_entries += steps
            sequence.num_drawn += steps
        if isinstance(policy, EvictPolicy):
            due = [s for s in running if s.num_entries >= policy.trigger(s.prompt_len, s.seen)]
            runner.compress(due)
            for sequence in due:
                scheduler.compacted(sequence, policy.target(sequence.prompt_len, sequence.seen))
        self.retire(running)

    def retire(self, sequences: list[Sequence]) -> None:
        """Take those that may draw no more out of their rows."""
        for sequence in sequences:
            if sequence.num_drawn >= sequence.max_tokens:
                self.scheduler.finish(sequence)

    def collect(self) -> None:
        """Fetch what was drawn if there is enough of it, and read what was fetched before."""
        idle = not self.scheduler.running
        if idle or self.num_unfetched >= self.interval:
            self.fetch()
        while len(self.fetches) > (0 if idle else self.lag):
            self.read(*self.fetches.popleft())

    @property
    def num_unfetched(self) -> int:
        return sum(flight.steps for flight in self.flights)

    def drain(self) -> None:
        self.fetch()
        while self.fetches:
            self.read(*self.fetches.popleft())

    def fetch(self) -> None:
        if self.flights:
            count = self.num_unfetched
            batch = max(len(flight.sequences) for flight in self.flights)
            self.fetches.append((self.flights, self.runner.fetch(self.num_fetched, count, batch)))
            self.num_fetched += count
            self.flights = []

    def read(self, flights: list[Flight], fetch: Fetch) -> None:
        drawn = fetch.wait()
        first = 0
        for flight in flights:
            self.read_flight(flight.sequences, drawn.part(slice(first, first + flight.steps), len(flight.sequences)))
            first += flight.steps

    def read_flight(self, sequences: list[Sequence], drawn: Drawn) -> None:
        """Give each sequence what was drawn for it, up to its end if that is among it.

        Ends are looked for in all of it at once: a rollout of a small model waits for this, not for the device.
        """
        ends = np.isin(drawn.tokens, self.stop_ids)
        ended, finite = ends.max(axis=1), np.isfinite(drawn.logprobs).min(axis=1)
        counts = np.where(ended, ends.argmax(axis=1) + 1, ends.shape[1])
        found = zip(sequences, counts.tolist(), ended.tolist(), finite.tolist(), strict=True)
        for i, (sequence, count, has_ended, is_finite) in enumerate(found):
            if sequence.finish_reason is not None:
                continue
            reason: FinishReason | None = "stop" if has_ended else None
            if reason is None and sequence.num_tokens + count >= sequence.max_tokens:
                reason = "length"
            if self.sampling.stop:
                # An end token says more than the string that it completes.
                tokens = drawn.tokens[i, : count - has_ended].tolist()
                if (completed := self.completes_stop(sequence.newest(self.stop_tail), tokens)) is not None:
                    count, reason = completed, "stop_string"
            if not is_finite:
                check_finite(sequence, drawn.logprobs[i, :count])
            sequence.parts.append(drawn)
            sequence.places.append(i)
            self.note(sequence, count)
            if reason is not None:
                self.finish(sequence, reason)

    def completes_stop(self, so_far: list[int], tokens: list[int]) -> int | None:
        """How many of the tokens complete a stop string, if they do."""
        if self.has_stop_string([*so_far, *tokens]):  # only then is it asked which token does
            for i in range(len(tokens)):
                if self.has_stop_string([*so_far, *tokens[: i + 1]][-self.stop_tail :]):
                    return i + 1
        return None

    def note(self, sequence: Sequence, num_tokens: int) -> None:
        """Note that a sequence has so many tokens more, and what their decode steps held and read."""
        before = max(sequence.num_tokens - 1, 0)  # decode steps; the first token came from the prefill
        sequence.num_tokens += num_tokens
        after = sequence.num_tokens - 1
        held = sequence.held[before:after]
        total = sum(held)
        read = total if self.selection is None else self.read_by(self.selection, sequence, held, before)
        sequence.read += read
        self.num_tokens += num_tokens
        self.held_so_far += total
        self.read_so_far += read
        self.full_so_far += sum(range(sequence.prompt_len + before + 1, sequence.prompt_len + after + 1))

    def read_by(self, policy: SelectPolicy, sequence: Sequence, held: list[int], first: int) -> float:
        """Entries a layer and KV head that decode steps from `first` on read of those held, mean over layers."""
        windows, page_size = self.shape.windows, self.scheduler.pool.page_size
        contexts = range(sequence.prompt_len + 1 + first, sequence.prompt_len + 1 + first + len(held))
        read = sum(policy.pages_read(n, context, page_size)[1] for n, context in zip(held, contexts, strict=True))
        share = sum(policy.selects(i, window) for i, window in enumerate(windows)) / len(windows)
        return share * read + (1.0 - share) * sum(held)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        if sequence.holding is not None:  # else it had drawn all it may
            self.scheduler.finish(sequence)
        del sequence.held[sequence.num_tokens - 1 :]
        fired = sum(drawn < sequence.num_tokens for drawn in sequence.compressed_at)
        del sequence.compressed_at[fired:], sequence.kept_positions[fired:]
        self.num_finished += 1
        if self.on_rollout is not None:
            self.on_rollout(self.rollout(sequence))

    def has_stop_string(self, token_ids: list[int]) -> bool:
        text = str(self.tokenizer.decode(token_ids))
        return any(string in text for string in self.sampling.stop)

    def progress(self) -> Progress:
        return Progress(
            num_requests=len(self.sequences),
            num_finished=self.num_finished,
            num_rows=len(self.scheduler.running),
            num_steps=self.num_steps,
            num_tokens=self.num_tokens,
            elapsed_s=time.perf_counter() - self.began,
            held_so_far=self.held_so_far,
            read_so_far=self.read_so_far,
            full_so_far=self.full_so_far,
            pages_used=self.scheduler.pool.num_used,
            num_pages=self.scheduler.pool.num_pages,
        )

    def rollout(self, sequence: Sequence) -> Rollout:
        assert sequence.finish_reason is not None
        num_tokens = sequence.num_tokens
        contexts = range(sequence.prompt_len + 1, sequence.prompt_len + num_tokens)  # of the decode steps
        peak = max(sequence.prompt_len, *sequence.held, 0)
        page_bytes = self.policy.page_bytes(self.shape, self.scheduler.pool.page_size)
        return Rollout(
            prompt=self.prompts[sequence.prompt_idx],
            sample=sequence.request % self.sampling.n,
            token_ids=sequence.joined("tokens"),
            sampler_logprobs=sequence.joined("logprobs"),
            completion_mask=torch.ones(num_tokens, dtype=torch.bool),
            finish_reason=sequence.finish_reason,
            kv=KVStats(
                held=tuple(sequence.held),
                full=sum(contexts),
                hybrid=self.shape.hybrid_entries(contexts),
                peak=peak,
                peak_bytes=self.scheduler.pool.pages_for(peak) * page_bytes
                + self.shape.query_bytes(self.policy.num_queries),
                num_compressions=len(sequence.compressed_at),
                read=sequence.read,
            ),
            top_ids=sequence.joined("top_ids") if self.sampling.top_logprobs else None,
            top_logprobs=sequence.joined("top_logprobs") if self.sampling.top_logprobs else None,
            kept_positions=tuple(sequence.kept_positions) if self.runner.record_kept else None,
            kept_at=tuple(sequence.prompt_len + i for i in sequence.compressed_at) if self.runner.record_kept else None,
        )


def check_finite(sequence: Sequence, logprobs: np.ndarray) -> None:
    if not np.isfinite(logprobs).all():
        raise FloatingPointError(
            f"request {sequence.request} has logits that are not finite at token "
            f"{sequence.num_tokens + int(np.isfinite(logprobs).argmin())}; check the weights (training may have "
            "moved them too far: then lower optimizer.learning_rate), or load the model in float32."
        )
