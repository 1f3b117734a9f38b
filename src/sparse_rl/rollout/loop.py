# SPDX-License-Identifier: Apache-2.0
"""One call of the engine, step by step, and what it collects.

admit:   resume preempted -> prefill prompts -> compress long ones -> start samples
decode:  make room -> one token a row -> compress the rows that are due -> sample
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sparse_rl.kernels.sampling import sample_ref, token_key
from sparse_rl.kv.policy import EvictPolicy
from sparse_rl.model.load import LoadedModel, stop_ids
from sparse_rl.rollout.runner import Runner
from sparse_rl.rollout.sampler import Sampling
from sparse_rl.rollout.scheduler import Scheduler
from sparse_rl.rollout.sequence import Sequence
from sparse_rl.types import KVStats, Prompt, Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a call stands after a decode step."""

    num_requests: int
    num_finished: int
    num_rows: int  # in flight
    num_tokens: int  # sampled so far
    elapsed_s: float
    held_so_far: int  # entries a layer and KV head, summed over all decode steps of all rows
    full_so_far: int  # the same for a dense cache
    pages_used: int
    num_pages: int


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
        self.sampling = sampling
        self.prompts = prompts
        self.sequences = sequences
        self.scheduler = scheduler
        self.runner = runner
        self.on_step = on_step
        self.on_rollout = on_rollout
        self.stop_ids = frozenset(stop_ids(loaded.model) if sampling.stop_ids is None else sampling.stop_ids)
        # A stop string of m bytes spans at most m tokens; a few more keep a cut character from hiding it.
        self.stop_tail = max((len(string.encode()) for string in sampling.stop), default=0) + 4
        self.num_steps = 0
        self.num_tokens = 0
        self.num_finished = 0
        self.held_so_far = 0
        self.full_so_far = 0
        self.began = time.perf_counter()

    def run(self) -> None:
        scheduler = self.scheduler
        while scheduler.busy:
            self.admit()
            if scheduler.running:
                self.decode()
            if self.on_step is not None:
                self.on_step(self.progress())

    def admit(self) -> None:
        scheduler, runner, policy = self.scheduler, self.runner, self.policy
        for sequence in scheduler.resume():
            runner.restore(sequence)
        held = scheduler.prefill()
        if held:
            runner.prefill(held, self.prompts)
        if isinstance(policy, EvictPolicy):
            long = [prompt for prompt in held if prompt.num_entries > policy.target(prompt.prompt_len)]
            runner.compress_prompts(long)
            for prompt in long:
                scheduler.settle(prompt, policy.target(prompt.prompt_len))
        starts = scheduler.start()
        if starts:
            for start in starts:
                sequence = start.sequence
                sequence.num_compressions = start.prompt.num_compressions
                sequence.kept_positions = list(start.prompt.kept_positions)
            self.sample([start.sequence for start in starts], runner.start(starts))

    def decode(self) -> None:
        scheduler, runner, policy = self.scheduler, self.runner, self.policy
        for sequence, pages in scheduler.make_room():
            runner.save(sequence, pages)
        running = list(scheduler.running)
        logits = runner.decode(running)
        self.num_steps += 1
        for sequence in running:
            sequence.num_entries += 1
            sequence.held.append(sequence.num_entries)
            self.held_so_far += sequence.num_entries
            self.full_so_far += sequence.context
        if isinstance(policy, EvictPolicy):
            due = [s for s in running if s.num_entries >= policy.trigger(s.prompt_len)]
            runner.compress(due)
            for sequence in due:
                scheduler.compacted(sequence, policy.target(sequence.prompt_len))
        self.sample(running, logits)

    def sample(self, sequences: list[Sequence], logits_BV: torch.Tensor) -> None:
        """Draw each sequence's next token; those that end give their pages back."""
        keys = [token_key(s.key, len(s.token_ids)) for s in sequences]
        tokens, logprobs, top_ids, top_logprobs = sample_ref(
            logits_BV,
            torch.tensor(keys, device=logits_BV.device),
            temperature=self.sampling.temperature,
            top_k=self.sampling.top_k,
            top_p=self.sampling.top_p,
            num_top=self.sampling.top_logprobs,
        )
        if top_ids is not None and top_logprobs is not None:  # one copy for all rows
            for sequence, ids, values in zip(
                sequences, top_ids.cpu().unbind(), top_logprobs.cpu().unbind(), strict=True
            ):
                sequence.top_ids.append(ids)
                sequence.top_logprobs.append(values)
        for sequence, token, logprob in zip(sequences, tokens.tolist(), logprobs.tolist(), strict=True):
            if not math.isfinite(logprob):
                raise FloatingPointError(
                    f"request {sequence.request} has logits that are not finite at token {len(sequence.token_ids)}; "
                    "check the weights, or load the model in float32."
                )
            sequence.token_ids.append(token)
            sequence.logprobs.append(logprob)
            self.num_tokens += 1
            self.finish(sequence)

    def finish(self, sequence: Sequence) -> None:
        if sequence.token_ids[-1] in self.stop_ids:
            sequence.finish_reason = "stop"
        elif self.sampling.stop and self.has_stop_string(sequence):
            sequence.finish_reason = "stop_string"
        elif len(sequence.token_ids) >= sequence.max_tokens:
            sequence.finish_reason = "length"
        else:
            return
        self.scheduler.finish(sequence)
        self.num_finished += 1
        if self.on_rollout is not None:
            self.on_rollout(self.rollout(sequence))

    def has_stop_string(self, sequence: Sequence) -> bool:
        text = str(self.tokenizer.decode(sequence.token_ids[-self.stop_tail :]))
        return any(string in text for string in self.sampling.stop)

    def progress(self) -> Progress:
        return Progress(
            num_requests=len(self.sequences),
            num_finished=self.num_finished,
            num_rows=len(self.scheduler.running),
            num_tokens=self.num_tokens,
            elapsed_s=time.perf_counter() - self.began,
            held_so_far=self.held_so_far,
            full_so_far=self.full_so_far,
            pages_used=self.scheduler.pool.num_used,
            num_pages=self.scheduler.pool.num_pages,
        )

    def rollout(self, sequence: Sequence) -> Rollout:
        assert sequence.finish_reason is not None
        num_tokens = len(sequence.token_ids)
        contexts = range(sequence.prompt_len + 1, sequence.prompt_len + num_tokens)  # of the decode steps
        peak = max(sequence.prompt_len, *sequence.held, 0)
        page_bytes = self.scheduler.pool.page_size * self.shape.entry_bytes
        return Rollout(
            prompt=self.prompts[sequence.prompt_idx],
            sample=sequence.request % self.sampling.n,
            token_ids=torch.tensor(sequence.token_ids),
            sampler_logprobs=torch.tensor(sequence.logprobs),
            completion_mask=torch.ones(num_tokens, dtype=torch.bool),
            finish_reason=sequence.finish_reason,
            kv=KVStats(
                held=tuple(sequence.held),
                full=sum(contexts),
                hybrid=self.shape.hybrid_entries(contexts),
                peak=peak,
                peak_bytes=self.scheduler.pool.pages_for(peak) * page_bytes
                + self.shape.query_bytes(self.policy.num_queries),
                num_compressions=sequence.num_compressions,
            ),
            top_ids=torch.stack(sequence.top_ids) if sequence.top_ids else None,
            top_logprobs=torch.stack(sequence.top_logprobs) if sequence.top_logprobs else None,
            kept_positions=tuple(sequence.kept_positions) if self.runner.record_kept else None,
        )
