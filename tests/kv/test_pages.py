# SPDX-License-Identifier: Apache-2.0
"""No page is lost, held by two unless shared, or written while shared: the scheduler on integers.

The real loop and scheduler run on a fake runner whose pages hold words like (prompt 3, position 7); every decode step
reads a sequence's pages back and compares them with what it must hold.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from replay import scheduled_firings
from schedules import names

from sparse_rl.kv import Full, KVPolicy, Streaming
from sparse_rl.kv.pages import PagePool
from sparse_rl.kv.policy import EvictPolicy
from sparse_rl.model.dry_run import AttentionShape
from sparse_rl.rollout.loop import Loop
from sparse_rl.rollout.rows import Drawn
from sparse_rl.rollout.sampler import Sampling
from sparse_rl.rollout.scheduler import Scheduler, entries_needed, entries_reached
from sparse_rl.rollout.sequence import Sequence
from sparse_rl.types import Prompt

STOP, VOCABULARY = 0, 40


class Interrupt(Exception):
    pass


class FakeRunner:
    """Keeps words instead of tensors, and checks every page it touches."""

    record_kept = False

    def __init__(self, pool: PagePool, policy: KVPolicy, fail_at: int | None) -> None:
        self.pool, self.policy, self.fail_at = pool, policy, fail_at
        self.words: list[list] = [[None] * pool.page_size for _ in range(pool.num_pages + 1)]
        self.expected: dict[int, list] = {}  # by request: what its cache must hold
        self.saved: dict[int, list] = {}
        self.prompt_words: dict[int, list] = {}
        self.drawn: list[list[int]] = []  # tokens of each step
        self.num_calls = 0
        self.num_decodes = 0
        self.num_prefills: dict[int, int] = {}
        self.sequences: list[Sequence] = []  # as they started
        self.prompt_firings: dict[int, list[tuple[int, int]]] = {}  # by prompt: tokens seen, entries kept
        self.firings: dict[int, list[tuple[int, int]]] = {}  # by request, those of its prompt included

    def called(self) -> None:
        """Fail at the n-th call, whichever it is."""
        self.num_calls += 1
        if self.num_calls == self.fail_at:
            raise Interrupt

    def draw(self, count: int) -> None:
        generator = torch.Generator().manual_seed(len(self.drawn))
        self.drawn.append(torch.randint(0, VOCABULARY, (count,), generator=generator).tolist())

    def fetch(self, first: int, count: int, batch: int) -> SimpleNamespace:
        self.called()
        steps = [step + [-1] * (batch - len(step)) for step in self.drawn[first : first + count]]
        assert len(steps) == count, "more was fetched than drawn"
        drawn = Drawn(np.array(steps).T, np.zeros((batch, count)), None, None)
        return SimpleNamespace(wait=lambda: drawn)

    def read(self, pages: list[int], count: int) -> list:
        size = self.pool.page_size
        return [self.words[pages[slot // size]][slot % size] for slot in range(count)]

    def write(self, pages: list[int], start: int, words: list) -> None:
        size = self.pool.page_size
        for slot, word in enumerate(words, start):
            page = pages[slot // size]
            assert self.pool.counts[page] == 1, "a shared page is written"
            self.words[page][slot % size] = word

    def prefill(self, held, prompts) -> None:
        self.called()
        self.pool.check()
        for prompt in held:
            assert len(prompt.holding.pages) == self.pool.pages_for(prompt.prompt_len)
            words = [("prompt", prompt.prompt_idx, position) for position in range(prompt.prompt_len)]
            self.write(prompt.holding.pages, 0, words)
            self.prompt_words[prompt.prompt_idx] = words
            self.num_prefills[prompt.prompt_idx] = self.num_prefills.get(prompt.prompt_idx, 0) + 1

    def compress_prompts(self, held) -> None:
        self.called()
        for prompt in held:
            kept = self.prompt_words[prompt.prompt_idx][-self.policy.target(prompt.prompt_len, prompt.prompt_len) :]
            self.write(prompt.holding.pages, 0, kept)
            self.prompt_words[prompt.prompt_idx] = kept
            self.prompt_firings[prompt.prompt_idx] = [(prompt.prompt_len, len(kept))]

    def start(self, starts) -> None:
        self.called()
        self.pool.check()
        for start in starts:
            for source, target in zip(start.sources, start.targets, strict=True):
                assert self.pool.counts[target] == 1, "a shared page is copied into"
                self.words[target] = list(self.words[source])
            words = self.prompt_words[start.sequence.prompt_idx]
            assert start.sequence.num_entries == len(words)
            self.expected[start.sequence.request] = list(words)
            self.sequences.append(start.sequence)
            self.firings[start.sequence.request] = list(self.prompt_firings.get(start.sequence.prompt_idx, []))
            self.verify(start.sequence)
        self.draw(len(starts))

    def verify(self, sequence) -> None:
        assert self.read(sequence.holding.pages, sequence.num_entries) == self.expected[sequence.request]

    def decode(self, running, steps) -> None:
        self.called()
        assert running and steps > 0
        self.num_decodes += 1
        assert self.num_decodes < 20_000, "the loop makes no progress"
        self.pool.check()
        assert len({sequence.row for sequence in running}) == len(running)
        for sequence in running:
            self.verify(sequence)
            words = [("token", sequence.request, sequence.seen + step) for step in range(steps)]
            self.write(sequence.holding.pages, sequence.num_entries, words)
            self.expected[sequence.request] += words
        for _ in range(steps):
            self.draw(len(running))

    def compress(self, due) -> None:
        self.called()
        for sequence in due:
            kept = self.expected[sequence.request][-self.policy.target(sequence.prompt_len, sequence.seen) :]
            self.write(sequence.holding.pages, 0, kept)
            self.expected[sequence.request] = kept
            self.firings[sequence.request].append((sequence.seen, len(kept)))

    def save(self, sequence, pages) -> None:
        self.called()
        assert not isinstance(self.policy, EvictPolicy), "an evicting sequence was preempted"
        assert sequence.num_drawn == sequence.num_tokens, "a sequence left without its tokens"
        self.saved[sequence.request] = self.read(pages, sequence.num_entries)

    def restore(self, sequence) -> None:
        self.called()
        assert sequence.num_entries == len(self.saved[sequence.request])
        self.write(sequence.holding.pages, 0, self.saved.pop(sequence.request))


SHAPE = AttentionShape(
    num_heads=1, num_kv_heads=1, head_dim=1, value_dim=1, windows=(None,), scales=(1.0,), dtype=torch.float32,
    device=torch.device("cpu"),
)  # fmt: skip


def run(
    policy, prompt_lens, *, n, max_tokens, rows, page_size, spare_pages, max_prefill_tokens, fail_at, interval=1, lag=0
):
    sequences = [
        Sequence(request=i * n + s, prompt_idx=i, prompt_len=length, max_tokens=max_tokens)
        for i, length in enumerate(prompt_lens)
        for s in range(n)
    ]
    needed = max(-(-entries_needed(policy, s) // page_size) for s in sequences)
    pool = PagePool(needed + spare_pages, page_size)
    scheduler = Scheduler(pool, policy, sequences, num_rows=rows, max_prefill_tokens=max_prefill_tokens)
    runner = FakeRunner(pool, policy, fail_at)
    sampling = Sampling(n=n, max_tokens=max_tokens, stop_ids=(STOP,), seed=len(prompt_lens))
    prompts = [Prompt(ids=(1,) * length) for length in prompt_lens]
    loaded = SimpleNamespace(shape=SHAPE, tokenizer=None, model=None)
    loop = Loop(loaded, sampling, prompts, sequences, scheduler, runner, None, None)
    loop.interval, loop.lag = interval, lag
    interrupted = False
    try:
        loop.run()
    except Interrupt:
        interrupted = True
    if not interrupted:
        assert all(s.finish_reason is not None and s.num_tokens <= max_tokens for s in sequences)
        assert pool.num_used == 0 and not pool.holdings, "a finished run left pages behind"
    scheduler.abort()
    pool.check()
    assert pool.num_used == 0 and pool.num_available == pool.num_pages
    assert sorted(scheduler.free_rows) == list(range(rows))
    return scheduler, runner


policies = st.one_of(
    st.just(Full()),
    st.builds(
        Streaming,
        budget=st.integers(4, 12),
        interval=st.integers(1, 9),
        protect_prompt=st.booleans(),
    ),
)


@given(
    policy=policies,
    prompt_lens=st.lists(st.integers(1, 20), min_size=1, max_size=6),
    n=st.integers(1, 4),
    max_tokens=st.integers(1, 24),
    rows=st.integers(1, 6),
    page_size=st.sampled_from([1, 2, 4, 8]),
    spare_pages=st.integers(0, 12),
    max_prefill_tokens=st.sampled_from([1, 16, 1000]),
    fail_at=st.one_of(st.none(), st.integers(1, 60)),
    interval=st.sampled_from([1, 3, 8]),
    lag=st.integers(0, 2),
)
@example(  # a pool of one sequence
    policy=Full(),
    prompt_lens=[5, 5, 5],
    n=3,
    max_tokens=24,
    rows=4,
    page_size=2,
    spare_pages=0,
    max_prefill_tokens=1000,
    fail_at=None,
    interval=1,
    lag=0,
)
@example(  # a row ends and a preempted sequence comes back before the next fetch: as many rows, others
    policy=Full(),
    prompt_lens=[11, 4, 7, 12, 1],
    n=3,
    max_tokens=15,
    rows=5,
    page_size=2,
    spare_pages=8,
    max_prefill_tokens=1000,
    fail_at=None,
    interval=8,
    lag=0,
)
@settings(max_examples=300, deadline=None)
def test_pages_through_whole_runs(**case):
    run(**case)


scheduled = st.builds(
    Streaming,
    budget=names(longest=40, least=4, most=30),
    interval=st.integers(1, 9),
    protect_prompt=st.booleans(),
)


@given(
    policy=scheduled,
    prompt_lens=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    n=st.integers(1, 3),
    max_tokens=st.integers(1, 50),
    rows=st.integers(1, 6),
    page_size=st.sampled_from([1, 4, 8]),
    spare_pages=st.integers(0, 12),
    max_prefill_tokens=st.sampled_from([1, 1000]),
    interval=st.sampled_from([1, 3, 8]),
    lag=st.integers(0, 2),
)
@settings(max_examples=150, deadline=None)
def test_caches_are_cut_when_a_token_by_token_simulation_cuts_them(policy, prompt_lens, n, max_tokens, **case):
    """Whoever else runs, however many steps go at once, in the smallest pool: same times, same counts."""
    scheduler, runner = run(policy, prompt_lens, n=n, max_tokens=max_tokens, fail_at=None, **case)
    assert len(runner.sequences) == n * len(prompt_lens) and scheduler.num_preemptions == 0
    for sequence in runner.sequences:
        firings = scheduled_firings(sequence.prompt_len, sequence.num_drawn, policy)
        assert runner.firings[sequence.request] == firings
        held, expected, left = sequence.prompt_len, [], dict(firings)  # what each decode step attended to
        for seen in range(sequence.prompt_len, sequence.prompt_len + sequence.num_tokens - 1):
            held = left.get(seen, held) + 1
            expected.append(held)
        assert sequence.held == expected and max([0, *expected]) <= entries_reached(policy, sequence)


def test_preemption_happens_and_groups_prefill_once():
    """The cases the property must cover do occur."""
    common = {"n": 3, "max_tokens": 40, "rows": 6, "page_size": 4, "max_prefill_tokens": 1000, "fail_at": None}
    scheduler, _ = run(Full(), [6, 7, 9], spare_pages=6, **common)
    assert scheduler.num_preemptions > 0
    _, runner = run(Full(), [6, 7, 9], spare_pages=100, **common)
    assert set(runner.num_prefills.values()) == {1}
    _, runner = run(Streaming(budget=6, interval=3), [6, 7, 9], spare_pages=2, **common)
    assert set(runner.num_prefills.values()) == {1}


def test_rows_that_end_are_refilled_a_few_at_a_time():
    pool = PagePool(1000, 4)
    sequences = [Sequence(request=i, prompt_idx=i, prompt_len=4, max_tokens=9) for i in range(200)]
    scheduler = Scheduler(pool, Full(), sequences, num_rows=96, max_prefill_tokens=1000)
    assert scheduler.refills
    scheduler.prefill()
    scheduler.start()
    assert len(scheduler.running) == 96
    for sequence in sequences[:2]:
        scheduler.finish(sequence)
    assert not scheduler.refills, "three of 96 are worth a prefill, two are not"
    scheduler.finish(sequences[2])
    assert scheduler.refills
    while len(scheduler.waiting) > 1:
        scheduler.waiting.pop()
    scheduler.prefill()
    scheduler.start()
    scheduler.waiting.append(sequences[199])
    assert scheduler.refills, "the last one need not wait for company"


def test_sharing_saves_pages():
    """Eight samples of a 40-token prompt hold its ten pages once, not eight times."""
    common = {"n": 8, "max_tokens": 4, "rows": 8, "page_size": 4, "max_prefill_tokens": 1000, "fail_at": None}
    scheduler, _ = run(Full(), [40], spare_pages=200, **common)
    assert scheduler.pool.peak_used <= 10 + 8 * 2


def test_what_is_free_bounds_what_is_taken():
    pool = PagePool(4, 16)
    first, second = pool.open(), pool.open()
    assert sorted(first.take(3)) == [1, 2, 3] and pool.num_available == 1, "page 0 is nobody's"
    second.take(1)
    with pytest.raises(AssertionError, match="available"):
        second.take(1)


def test_check_finds_damage():
    pool = PagePool(4, 16)
    holding = pool.open()
    holding.take(2)
    pool.check()
    pool.free.append(holding.pages[0])
    with pytest.raises(AssertionError, match="free list"):
        pool.check()
    pool.free.pop()
    pool.counts[holding.pages[0]] = 2
    with pytest.raises(AssertionError, match="counts"):
        pool.check()


def test_preempted_sequences_come_back_oldest_first_and_before_new_ones():
    pool = PagePool(6, 4)
    sequences = [Sequence(request=i, prompt_idx=i, prompt_len=4, max_tokens=9) for i in range(4)]
    scheduler = Scheduler(pool, Full(), sequences, num_rows=3, max_prefill_tokens=100)
    assert len(scheduler.prefill()) == 3
    assert [start.sequence.request for start in scheduler.start()] == [0, 1, 2]
    for sequence in sequences[:3]:
        sequence.num_entries = 4
    assert scheduler.make_room(1) == []  # each takes one of the three pages left
    for sequence in sequences[:3]:
        sequence.num_entries = 8
    assert [sequence.request for sequence, _ in scheduler.make_room(1)] == [2]  # the youngest makes room for the others
    assert [sequence.request for sequence in scheduler.preempted] == [2]
    assert scheduler.prefill() == [] and scheduler.start() == [], "nothing new while one is out"
    scheduler.finish(sequences[0])
    scheduler.finish(sequences[1])
    assert [sequence.request for sequence in scheduler.resume()] == [2]


def test_several_preempted_sequences_keep_their_order_and_wait_for_a_spare_page():
    pool = PagePool(6, 4)
    sequences = [Sequence(request=i, prompt_idx=i, prompt_len=4, max_tokens=20) for i in range(3)]
    scheduler = Scheduler(pool, Full(), sequences, num_rows=3, max_prefill_tokens=100)
    scheduler.prefill()
    scheduler.start()
    scheduler.make_room(1)
    for sequence in sequences:
        sequence.num_entries = 8
    assert [sequence.request for sequence, _ in scheduler.make_room(5)] == [2, 1]
    assert [sequence.request for sequence in scheduler.preempted] == [1, 2]
    assert pool.num_available == 2 and scheduler.resume() == []
