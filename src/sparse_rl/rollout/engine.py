# SPDX-License-Identifier: Apache-2.0
"""The sparse rollout engine: prompts in, rollouts with the sampler's log-probs out.

The engine knows tokens, tasks know text; it decodes only to look for stop strings.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from sparse_rl.kv.cache import PagedCache
from sparse_rl.kv.full import Full
from sparse_rl.kv.pages import PagePool
from sparse_rl.kv.policy import EvictPolicy, KVPolicy
from sparse_rl.model.load import LoadedModel
from sparse_rl.rollout.decoder import Decoder
from sparse_rl.rollout.loop import Loop, Progress
from sparse_rl.rollout.requests import check_request, read_prompts, sequences_of
from sparse_rl.rollout.rows import Rows
from sparse_rl.rollout.runner import Runner
from sparse_rl.rollout.sampler import Sampling
from sparse_rl.rollout.scheduler import Scheduler, entries_needed, entries_reached
from sparse_rl.rollout.sequence import Sequence
from sparse_rl.types import Prompt, Rollout

MAX_ROWS = (1 << 16) - 1  # a GPU launches no more blocks of a kernel side by side
HOST_SHARE = 0.5  # of free host memory, for a pool whose size is not given
MAX_DECODERS = 4  # sets of graphs, one for each way to sample
GPU_RESERVE = 0.1  # of a GPU's memory, left to prefill, logits and graphs


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How much runs at once.

    rows: sequences decoded together
    page_size: cache entries a page, a multiple of 16; if not given 64, or 16 where a policy chooses among pages
    pool_pages: pages in the pool; if not given, enough for all rows or what is free less a tenth (on a CPU, half)
    pool_bytes: the same in bytes, keys, values and positions included
    max_prefill_tokens: prompt tokens prefilled in one forward (one longer prompt still goes alone)
    graphs: replay decode steps as CUDA graphs; no effect on a CPU
    compile: compile the decoder layers that go into the graphs; takes up to a minute once, and a C compiler
    """

    rows: int = 32
    page_size: int | None = None
    pool_pages: int | None = None
    pool_bytes: int | None = None
    max_prefill_tokens: int = 8192
    graphs: bool = True
    compile: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= MAX_ROWS:
            raise ValueError(f"engine.rows is {self.rows}; it must be at least 1 and at most {MAX_ROWS}.")
        if self.page_size is not None and (self.page_size < 16 or self.page_size % 16):
            raise ValueError(f"engine.page_size is {self.page_size}; it must be a multiple of 16.")
        for field in ("pool_pages", "pool_bytes"):
            if (value := getattr(self, field)) is not None and value < 1:
                raise ValueError(f"engine.{field} is {value}; it must be at least 1, or leave it out.")
        if self.pool_pages is not None and self.pool_bytes is not None:
            raise ValueError("engine.pool_pages and engine.pool_bytes both give the pool's size; leave one out.")
        if self.max_prefill_tokens < 1:
            raise ValueError(f"engine.max_prefill_tokens is {self.max_prefill_tokens}; it must be at least 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What the last call did as a whole."""

    num_pages: int
    peak_pages: int  # most in use at once, shared pages counted once
    peak_bytes: int  # those pages, with the query rings, page tables and the rest of the rows' state
    num_prefills: int
    num_preemptions: int
    num_steps: int
    capture_s: float  # compiling and capturing decode steps; 0 when those of an earlier call served


class Engine:
    """Samples from a Hugging Face module through a paged cache under a KV policy."""

    def __init__(self, loaded: LoadedModel, kv: KVPolicy | None = None, config: EngineConfig | None = None) -> None:
        self.loaded = loaded
        self.kv = kv or Full()
        self.config = config or EngineConfig()
        self.page_size = self.config.page_size or self.kv.page_size
        self.kv.check_page_size(self.page_size)
        self.cache: PagedCache | None = None
        self.decoders: dict[tuple[object, ...], Decoder] = {}  # by `baked`
        self.stats: EngineStats | None = None
        self.busy = False

    @torch.inference_mode(False)  # tensors made in that mode could not be written to outside of it
    @torch.no_grad()
    def generate(
        self,
        prompts: SequenceOf[Prompt | str | SequenceOf[int]],
        sampling: Sampling | None = None,
        *,
        first: int = 0,
        record_kept: bool = False,
        on_step: Callable[[Progress], None] | None = None,
        on_rollout: Callable[[Rollout], None] | None = None,
    ) -> list[Rollout]:
        """`sampling.n` rollouts of each prompt, in the order of the prompts; `on_rollout` gets each as it ends.

        A rollout depends on the prompt, the weights, the settings, the seed and its place in the list; on the other
        requests, the rows and the pool it depends through rounding alone. `first` is the place of the first prompt, if
        these are a part of a longer list.
        """
        sampling = Sampling() if sampling is None else sampling
        inputs, sequences = self.check(prompts, sampling, first)
        if not sequences:
            return []
        self._check_idle()
        self.busy = True
        try:
            with _current(self.loaded.shape.device):
                return self._generate(inputs, sampling, sequences, record_kept, on_step, on_rollout)
        finally:
            self.busy = False

    def check(
        self, prompts: SequenceOf[Prompt | str | SequenceOf[int]], sampling: Sampling, first: int = 0
    ) -> tuple[list[Prompt], list[Sequence]]:
        """The prompts as tokens, and a sequence for each sample; refuse what the model or a given pool cannot take."""
        inputs = read_prompts(self.loaded, prompts)
        check_request(self.loaded, inputs, sampling, first)
        sequences = sequences_of(self.loaded, inputs, sampling, first)
        if sequences and (given := self._given_pages) is not None:
            self._check_fits(given, sequences)
        return inputs, sequences

    def _generate(
        self,
        inputs: list[Prompt],
        sampling: Sampling,
        sequences: list[Sequence],
        record_kept: bool,
        on_step: Callable[[Progress], None] | None,
        on_rollout: Callable[[Rollout], None] | None,
    ) -> list[Rollout]:
        num_pages = self._num_pages(sampling, sequences)
        cache = self._cache_of(num_pages)
        decoder = self._decoder_of(cache, sampling, sequences)
        pool = PagePool(num_pages, self.page_size)
        scheduler = Scheduler(
            pool,
            self.kv,
            sequences,
            num_rows=min(self.config.rows, len(sequences)),
            max_prefill_tokens=self.config.max_prefill_tokens,
        )
        runner = Runner(decoder, self.kv, record_kept=record_kept)
        loop = Loop(self.loaded, sampling, inputs, sequences, scheduler, runner, on_step, on_rollout)
        modes = [(module, module.training) for module in self.loaded.model.modules()]
        self.loaded.model.eval()
        captured_before = decoder.capture_s
        try:
            loop.run()
        except BaseException:
            scheduler.abort()
            cache.clear()
            raise
        finally:
            for module, training in modes:
                module.training = training
        pool.check()
        assert pool.num_used == 0, f"{pool.num_used} pages were not given back"
        self.stats = EngineStats(
            num_pages=pool.num_pages,
            peak_pages=pool.peak_used,
            peak_bytes=pool.peak_used * self._page_bytes + cache.queries.nbytes + decoder.rows.num_bytes,
            num_prefills=scheduler.num_prefills,
            num_preemptions=scheduler.num_preemptions,
            num_steps=loop.num_steps,
            capture_s=decoder.capture_s - captured_before,
        )
        return [loop.rollout(sequence) for sequence in sequences]

    def release(self) -> bool:
        """Give the pool's memory back, if any; the next call makes a new one, and its graphs stay good."""
        self._check_idle()
        held = self.cache is not None and self.cache.num_pages > 0
        if self.cache is not None:
            self.cache.release()
        return held

    def resume(self) -> None:
        """Take the memory back now rather than in the next call."""
        self._check_idle()
        if self.cache is not None and self.stats is not None:
            with torch.inference_mode(False), _current(self.loaded.shape.device):
                self._cache_of(self.stats.num_pages)

    def use(self, kv: KVPolicy) -> None:
        """From the next call on, the same policy with another budget; what was captured is kept where it still fits."""
        self._check_idle()
        kv.check_page_size(self.page_size)
        assert type(kv) is type(self.kv), f"{kv.name} in an engine of {self.kv.name}"
        if kv.selection != self.kv.selection:
            self.decoders.clear()  # their graphs read as many entries as the budget says
        self.kv = kv

    @property
    def bounded(self) -> bool:
        """Whether the pool stays small however long answers get, so that it need not be released."""
        return self.kv.bound is not None

    def _check_idle(self) -> None:
        if self.busy:
            raise RuntimeError("this engine is in the middle of a call; a callback needs an engine of its own.")

    @property
    def _page_bytes(self) -> int:
        return self.kv.page_bytes(self.loaded.shape, self.page_size)

    @property
    def _given_pages(self) -> int | None:
        """The pool's size, if it is given."""
        if self.config.pool_bytes is not None:
            return self.config.pool_bytes // self._page_bytes
        return self.config.pool_pages

    def _num_pages(self, sampling: Sampling, sequences: list[Sequence]) -> int:
        """The pool's size: as given, or enough for all rows, or what the free memory holds less a reserve.

        What the rows hold beside the pool goes off first, where it is still to be made.
        """
        if (given := self._given_pages) is not None:
            return given
        largest = max(self._pages_needed(sequence) for sequence in sequences)
        wanted = largest * (min(self.config.rows, len(sequences)) + 1)
        held = self.cache.num_pages if self.cache is not None else 0
        device = self.loaded.shape.device
        free = free_bytes(device) + held * self._page_bytes - self._state_bytes(sampling, sequences)
        if device.type == "cuda":
            spare = free - int(GPU_RESERVE * torch.cuda.get_device_properties(device).total_memory)
        else:
            spare = int(HOST_SHARE * free)
        wanted = min(wanted, max(spare // self._page_bytes, largest))
        served = wanted <= held and (self.bounded or held <= 2 * wanted)
        return held if served else wanted  # a pool that serves is kept

    def _state_bytes(self, sampling: Sampling, sequences: list[Sequence]) -> int:
        """Query rings, page tables and tokens drawn, less what earlier calls have made."""
        rows, total = self.config.rows, 0
        if self.cache is None:
            total += (rows + 1) * self.loaded.shape.query_bytes(self.kv.num_queries)
        decoder, entries = self.decoders.get(baked(sampling)), self._max_entries(sequences)
        if decoder is None or decoder.max_entries < entries:
            total += Rows(rows, -(-entries // self.page_size), sampling.top_logprobs, torch.device("meta")).num_bytes
        return total

    def _max_entries(self, sequences: list[Sequence]) -> int:
        """A row ever holds, with room for later calls, so that their graphs are these."""
        longest = max(entries_reached(self.kv, sequence) for sequence in sequences)
        return min(self.kv.bound or 1 << (longest - 1).bit_length(), self.loaded.context)

    def _check_fits(self, num_pages: int, sequences: list[Sequence]) -> None:
        worst = max(sequences, key=self._pages_needed)
        least = self._pages_needed(worst)
        if least > num_pages:
            raise ValueError(
                f"the pool has {num_pages} pages ({num_pages * self._page_bytes} bytes), but prompt {worst.prompt_idx} "
                f"({worst.prompt_len} tokens, up to {worst.max_tokens} sampled) needs {least}; set "
                f"engine.pool_pages to at least {least} or engine.pool_bytes to at least {least * self._page_bytes}, "
                f"or {self._smaller(worst, num_pages * self.page_size)}."
            )

    def _smaller(self, sequence: Sequence, room: int) -> str:
        """What makes a sequence fit into so many entries, all of its prompt among them at first."""
        shorter = "shorten the prompt" if sequence.prompt_len > room else ""
        if not isinstance(self.kv, EvictPolicy):
            fewer = "lower sampling.max_tokens" if not shorter or sequence.max_tokens > room else ""
            return " and ".join(filter(None, (shorter, fewer)))
        if shorter:
            return shorter
        return "turn off kv.protect_prompt" if self.kv.protect_prompt else "lower kv.budget or kv.interval"

    def _pages_needed(self, sequence: Sequence) -> int:
        return -(-entries_needed(self.kv, sequence) // self.page_size)

    def _cache_of(self, num_pages: int) -> PagedCache:
        """The pool's tensors, kept between calls of the same size."""
        try:
            if self.cache is None:
                self.cache = PagedCache(
                    self.loaded.shape,
                    num_pages=num_pages,
                    page_size=self.page_size,
                    num_rows=self.config.rows,
                    num_queries=self.kv.num_queries,
                    num_landmarks=self.kv.num_landmarks,
                    keeps_tally=self.kv.keeps_tally,
                )
            self.cache.resume(num_pages)
        except (RuntimeError, MemoryError) as error:
            raise ValueError(
                f"a pool of {num_pages} pages ({num_pages * self._page_bytes} bytes) and the queries of "
                f"{self.config.rows} rows cannot be allocated on {self.loaded.shape.device}; give a smaller "
                "engine.pool_bytes or fewer engine.rows."
            ) from error
        return self.cache

    def _decoder_of(self, cache: PagedCache, sampling: Sampling, sequences: list[Sequence]) -> Decoder:
        """The decode step of these settings, kept with its graphs between calls."""
        max_entries = self._max_entries(sequences)
        decoder = self.decoders.pop(baked(sampling), None)
        if decoder is None or decoder.max_entries < max_entries:
            if decoder is not None:  # what has grown once may grow again
                max_entries = 1 << (max_entries - 1).bit_length()
            decoder = Decoder(
                self.loaded.model,
                cache,
                sampling,
                num_rows=self.config.rows,
                max_entries=max_entries,
                selection=self.kv.selection,
                graphs=self.config.graphs,
                compiles=self.config.compile,
            )
        self.decoders[baked(sampling)] = decoder  # the newest last
        if len(self.decoders) > MAX_DECODERS:
            del self.decoders[next(iter(self.decoders))]
        decoder.prepare()
        return decoder


def baked(sampling: Sampling) -> tuple[object, ...]:
    """What of the settings a graph is made with."""
    return sampling.temperature, sampling.top_p, sampling.top_k, sampling.top_logprobs


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one, on which kernels are launched and streams made."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def free_bytes(device: torch.device) -> int:
    """Memory that can still be allocated on the device; what graphs keep to themselves cannot."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        segments = [s for s in torch.cuda.memory_snapshot() if s["device"] == index and s["segment_pool_id"] == (0, 0)]
        cached: int = sum(segment["total_size"] - segment["allocated_size"] for segment in segments)
        return torch.cuda.mem_get_info(device)[0] + cached
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux; macOS does not say what is free
        pages = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"
        return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
