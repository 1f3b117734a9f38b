# SPDX-License-Identifier: Apache-2.0
"""Who runs next, and on which pages: plain integers, no tensors.

A prompt is prefilled once and held; its samples start from it, in the order of the requests.

    evicting policy   a start copies the held entries and takes all pages it can ever need, so it is never preempted
    keeping policy    a start shares the prompt's whole pages and copies the last, partly filled one; it is let in with
                      one page to spare, and when pages run out the youngest sequence is moved to host memory

The last sample of a prompt takes the held pages over instead of copying them. A prefill costs several decode steps
whatever its size, so rows that end are refilled a few at a time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from sparse_rl.kv.pages import PagePool
from sparse_rl.kv.policy import EvictPolicy, KVPolicy
from sparse_rl.rollout.sequence import HeldPrompt, Sequence

REFILL_SHARE = 32  # rows are refilled once one in so many is free


@dataclass(frozen=True, slots=True)
class Start:
    """A sequence begins from a held prompt; pages to copy before it does."""

    sequence: Sequence
    prompt: HeldPrompt
    sources: list[int]
    targets: list[int]


def entries_reached(policy: KVPolicy, sequence: Sequence) -> int:
    """Most entries a sequence can come to hold after its prefill."""
    final, prompt_len = sequence.final_entries, sequence.prompt_len
    if not isinstance(policy, EvictPolicy):
        return final
    # Where the budget steps up, a cache that is short of the trigger by one or more grows by an entry a token.
    steps = [start for start in policy.schedule.starts if prompt_len < start <= final]
    growing = [policy.trigger(prompt_len, start - 1) + final - start for start in steps]
    return min(final, policy.trigger(prompt_len, final), *growing)


def entries_needed(policy: KVPolicy, sequence: Sequence) -> int:
    """Entries a sequence needs room for if it has the pool to itself, prefill included."""
    return max(sequence.prompt_len, entries_reached(policy, sequence))


class Scheduler:
    def __init__(
        self, pool: PagePool, policy: KVPolicy, sequences: list[Sequence], *, num_rows: int, max_prefill_tokens: int
    ) -> None:
        self.pool = pool
        self.policy = policy
        self.evicts = isinstance(policy, EvictPolicy)
        self.waiting = deque(sequences)
        self.running: list[Sequence] = []  # oldest first
        self.preempted: deque[Sequence] = deque()
        self.prompts: dict[int, HeldPrompt] = {}
        self.free_rows = list(range(num_rows - 1, -1, -1))
        self.refill = max(1, num_rows // REFILL_SHARE)
        self.max_prefill_tokens = max_prefill_tokens
        self.num_preemptions = 0
        self.num_prefills = 0
        self.pending = {s.prompt_idx: 0 for s in sequences}
        for sequence in sequences:
            self.pending[sequence.prompt_idx] += 1

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running or self.preempted)

    @property
    def refills(self) -> bool:
        """Whether enough rows are free to be worth a prefill."""
        return not self.running or len(self.free_rows) >= min(self.refill, len(self.waiting))

    def horizon(self, most: int) -> int:
        """Decode steps until a running sequence is full or due for compression, at most `most`."""
        for sequence in self.running:
            most = min(most, sequence.max_tokens - sequence.num_drawn)
            if isinstance(self.policy, EvictPolicy):
                # The trigger may rise meanwhile, never fall: it is not passed unseen.
                most = min(most, self.policy.trigger(sequence.prompt_len, sequence.seen) - sequence.num_entries)
        return most

    def resume(self) -> list[Sequence]:
        """Preempted sequences that fit again, oldest first, with pages for what they held."""
        resumed = []
        while self.preempted and self.free_rows:
            sequence = self.preempted[0]
            num_pages = self.pool.pages_for(sequence.num_entries)
            if num_pages + 1 > self.pool.num_available and (self.running or num_pages > self.pool.num_available):
                break
            self.preempted.popleft()
            sequence.holding = self.pool.open()
            sequence.holding.take(num_pages)
            self._run(sequence)
            resumed.append(sequence)
        return resumed

    def prefill(self) -> list[HeldPrompt]:
        """The next prompts to prefill, with their pages: those whose first sample will then fit."""
        if self.preempted:
            return []
        chosen: list[HeldPrompt] = []
        num_tokens = 0
        num_rows = len(self.free_rows)
        num_pages = self.pool.num_available
        planned: dict[int, int] = {}
        for sequence in self.waiting:
            if num_rows == 0:
                break
            prompt_idx = sequence.prompt_idx
            num_rows -= 1
            planned[prompt_idx] = planned.get(prompt_idx, 0) + 1
            first = planned[prompt_idx] == 1 and prompt_idx not in self.prompts
            prompt_pages = self.pool.pages_for(sequence.prompt_len) if first else 0
            cost = prompt_pages + self._start_cost(sequence, last=planned[prompt_idx] == self.pending[prompt_idx])
            alone = not (self.running or self.prompts or chosen)
            if cost > num_pages and not (alone and first):
                break
            num_pages -= cost
            if first:
                num_tokens += sequence.prompt_len
                if num_tokens > self.max_prefill_tokens and chosen:
                    break
                holding = self.pool.open()
                holding.take(prompt_pages)
                chosen.append(
                    HeldPrompt(
                        prompt_idx=prompt_idx,
                        prompt_len=sequence.prompt_len,
                        holding=holding,
                        num_entries=sequence.prompt_len,
                        num_pending=self.pending[prompt_idx],
                    )
                )
        self.prompts |= {prompt.prompt_idx: prompt for prompt in chosen}
        self.num_prefills += len(chosen)
        return chosen

    def settle(self, prompt: HeldPrompt, num_entries: int) -> None:
        """A held prompt was compressed."""
        prompt.num_entries = num_entries
        prompt.holding.trim(self.pool.pages_for(num_entries))

    def start(self) -> list[Start]:
        """Let waiting sequences begin whose prompt is held, in order."""
        starts: list[Start] = []
        while self.waiting and self.free_rows and not self.preempted:
            sequence = self.waiting[0]
            prompt = self.prompts.get(sequence.prompt_idx)
            if prompt is None:
                break
            takeover = prompt.num_pending == 1
            if self._start_cost(sequence, last=takeover) > self.pool.num_available:
                if self.running or starts:
                    break
                # Nothing else runs, so nothing will free a page: give the sequence the held pages themselves.
                self._drop_prompts(keep=prompt.prompt_idx)
                takeover = True
            self.waiting.popleft()
            starts.append(self._start(sequence, prompt, takeover))
        return starts

    def short_of_pages(self, steps: int) -> bool:
        """Whether `make_room` would have to give up a held prompt or preempt a sequence."""
        return sum(self._missing(sequence, steps) for sequence in self._growing(steps)) > self.pool.num_available

    def make_room(self, steps: int) -> list[tuple[Sequence, list[int]]]:
        """Pages for every running sequence's next entries; returns those preempted, with the pages they had."""
        preempted = []
        for sequence in self._growing(steps):
            while sequence.holding is not None and self._missing(sequence, steps) > self.pool.num_available:
                if self.prompts:
                    self._drop_prompts()
                    continue
                youngest = self.running[-1]
                assert not self.evicts, "an evicting sequence ran out of pages"
                assert youngest is not sequence or len(self.running) > 1, "a sequence does not fit the pool"
                preempted.append((youngest, self._preempt(youngest)))
            if sequence.holding is not None:
                sequence.holding.take(self._missing(sequence, steps))
        for sequence in self.running:
            assert sequence.holding is not None
            assert sequence.holding.writable(sequence.num_entries // self.pool.page_size), (
                "a shared page would be written"
            )
        return preempted

    def _growing(self, steps: int) -> list[Sequence]:
        """Running sequences whose pages do not hold their next entries."""
        size = self.pool.page_size
        return [s for s in self.running if s.holding and s.num_entries + steps > size * len(s.holding.pages)]

    def _missing(self, sequence: Sequence, steps: int) -> int:
        assert sequence.holding is not None
        return self.pool.pages_for(sequence.num_entries + steps) - len(sequence.holding.pages)

    def compacted(self, sequence: Sequence, num_entries: int) -> None:
        """A running sequence was compressed; its pages stay, for it grows into them again."""
        sequence.num_entries = num_entries

    def finish(self, sequence: Sequence) -> None:
        assert sequence.holding is not None
        self.running.remove(sequence)
        self._release(sequence)

    def abort(self) -> None:
        """Give everything back, whatever state a call was in."""
        for sequence in self.running:
            self._release(sequence)
        self._drop_prompts()
        self.running.clear()
        self.waiting.clear()
        self.preempted.clear()

    def _start_cost(self, sequence: Sequence, *, last: bool) -> int:
        """Pages a start takes from what is available, once its prompt is held (and compressed, if it is long)."""
        if isinstance(self.policy, EvictPolicy):
            held = min(sequence.prompt_len, self.policy.target(sequence.prompt_len, sequence.prompt_len))
            return self._reach(sequence) - (self.pool.pages_for(held) if last else 0)
        return 1 if last or sequence.prompt_len % self.pool.page_size == 0 else 2

    def _reach(self, sequence: Sequence) -> int:
        return self.pool.pages_for(entries_reached(self.policy, sequence))

    def _start(self, sequence: Sequence, prompt: HeldPrompt, takeover: bool) -> Start:
        sources: list[int] = []
        targets: list[int] = []
        if takeover:
            sequence.holding = prompt.holding
            del self.prompts[prompt.prompt_idx]
        else:
            sequence.holding = self.pool.open()
            whole = 0 if self.evicts else prompt.num_entries // self.pool.page_size
            sequence.holding.share(prompt.holding.pages[:whole])
            sources = prompt.holding.pages[whole:]
            targets = sequence.holding.take(len(sources))
        if self.evicts:
            sequence.holding.take(max(0, self._reach(sequence) - len(sequence.holding.pages)))
        prompt.num_pending -= 1
        self.pending[prompt.prompt_idx] -= 1
        sequence.num_entries = prompt.num_entries
        sequence.num_cut = prompt.num_cut
        sequence.num_drawn = 1
        self._run(sequence)
        return Start(sequence, prompt, sources, targets)

    def _run(self, sequence: Sequence) -> None:
        sequence.row = self.free_rows.pop()
        self.running.append(sequence)

    def _release(self, sequence: Sequence) -> None:
        assert sequence.holding is not None
        self.free_rows.append(sequence.row)
        sequence.holding.close()
        sequence.holding, sequence.row = None, -1

    def _preempt(self, sequence: Sequence) -> list[int]:
        assert sequence.holding is not None
        pages = list(sequence.holding.pages)
        self.running.remove(sequence)
        self._release(sequence)
        self.preempted.appendleft(sequence)
        self.num_preemptions += 1
        return pages

    def _drop_prompts(self, keep: int | None = None) -> None:
        """Give up held prompts; their remaining samples will prefill again."""
        for prompt_idx in [idx for idx in self.prompts if idx != keep]:
            self.prompts.pop(prompt_idx).holding.close()
