# SPDX-License-Identifier: Apache-2.0
"""A sparse cache for transformers' own `generate`: the engine's pages, policies and firing times, one mechanism.

    model.set_attn_implementation("sparse_rl")
    model.generate(**inputs, past_key_values=SparseCache("rkv", budget=64, interval=16))

transformers hands a cache keys and values, but neither queries nor padding. So `update` gives the keys back with a note
on them, and the package's attention, which sees everything, comes back here with it: prompts go through `PrefillStep`
without their padding, new tokens through `DecodeStep`, and rows that are due are cut after the last layer. `generate`
counts the tokens that were seen, padding included, and its positions follow from the mask; how many entries are held
concerns nobody but the pages.
"""

from __future__ import annotations

import copy
import weakref
from itertools import accumulate
from operator import itemgetter
from typing import Any, Never

import numpy as np
import torch
from transformers import Cache

from sparse_rl.kernels.attention import AttentionCall
from sparse_rl.kv import EvictPolicy, KVPolicy, build_policy
from sparse_rl.kv.cache import NO_WINDOW, DecodeStep, PrefillStep, to_device
from sparse_rl.kv.compress import compress, rows_at_once
from sparse_rl.kv.row_pool import RowPool
from sparse_rl.kv.select import decode_step
from sparse_rl.model.attention import HANDED, HOLDER, UnsupportedModelError, registered
from sparse_rl.model.dry_run import AttentionShape

NAME = registered()  # models can be set to it once this class is there
COUNTS = ("prompt_lens", "contexts", "entries", "cut", "num_compressions")  # a number for each row


class SparseCache(Cache):
    """`past_key_values` under a policy: a name with its settings, or a policy object.

    Works with batches padded on the left, sampling, beam search, and a further `generate` on the same cache. Each row
    is cut when the engine would cut it; after the first prompt a pass of several tokens is cut at its end, if at all. A
    prompt that comes in chunks is cut after each of them; it ends where a pass has one token. `page_size` is the
    engine's; what selecting policies read hangs on it.
    """

    def __init__(
        self, policy: str | KVPolicy = "rkv", budget: int | str | None = None, *, page_size: int = 16, **settings: Any
    ) -> None:
        super().__init__(layers=[])
        if budget is not None:
            settings["budget"] = budget
        if isinstance(policy, str):
            policy = build_policy(policy, **settings)
        elif settings:
            raise ValueError(f"{', '.join(settings)} beside a policy object; set them on the policy instead.")
        if not isinstance(policy, KVPolicy):
            raise ValueError(f"policy is {policy!r}; give a policy's name, or a policy like Streaming(budget=64).")
        if type(page_size) is not int or page_size < 16 or page_size % 16:
            raise ValueError(f"page_size is {page_size!r}; it must be a multiple of 16.")
        policy.check_page_size(page_size)
        self.policy, self.page_size = policy, page_size
        self.make_step = decode_step(policy.selection)
        self.reset()

    def reset(self) -> None:
        """Forget everything; the next forward pass is a prompt."""
        self.pool: RowPool | None = None
        self.num_columns = 0  # tokens seen, padding included
        self.prompt_lens: list[int] = []
        self.in_prompt = True  # what comes may be more of the prompts
        self.contexts: list[int] = []  # tokens seen of each row
        self.entries: list[int] = []  # held of each row
        self.cut: list[int] = []  # entries that each row's last cut left, 0 before its first
        self.num_compressions: list[int] = []
        self.next_layer = 0
        self.handed: int | None = None  # a layer whose keys are on their way to our attention
        self.handed_shape: tuple[int, ...] = ()  # of them, or of the latents that they are made of
        self.padding_BS: torch.Tensor | None = None  # the mask of the pass under way, false where a token is padding
        self.seen_BS: torch.Tensor | None = None  # the last mask there was
        self.num_layers = 0
        self.prompt: PrefillStep | None = None  # the forward pass under way: a prompt,
        self.steps: list[tuple[int, torch.Tensor | None, DecodeStep]] = []  # or its tokens, of all rows or of some
        self.valid_BT: np.ndarray = np.zeros((0, 0), dtype=bool)  # tokens of the pass that are no padding

    # What transformers asks for.

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same keys and values, for our attention to store."""
        if self.handed is not None:
            raise ValueError(
                f"layer {self.handed} did not attend through sparse_rl: call model.set_attn_implementation({NAME!r}) "
                "before generate and start with a new SparseCache, or call reset() if a forward pass was cut short."
            )
        if layer_idx != self.next_layer:
            raise ValueError(
                f"layer {layer_idx} came where layer {self.next_layer} was due: a forward pass was cut short, or the "
                "model's layers do not attend in order; call reset() on the SparseCache, or use another model."
            )
        self.handed, self.handed_shape = layer_idx, key_states.shape
        setattr(key_states, HOLDER, self)
        HANDED.holder = weakref.ref(self)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_columns

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.num_columns

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        if not query_length:
            raise ValueError(
                f"no token is new to this SparseCache, which has seen {self.num_columns}; give all of them and what "
                "is new, or call reset() for other prompts."
            )
        return self.num_columns + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Row i goes on from what row beam_idx[i] holds."""
        assert self.pool is not None
        rows = [int(row) for row in beam_idx]
        self.pool.reorder(rows)
        if self.seen_BS is not None:
            self.seen_BS = self.seen_BS[beam_idx.to(self.seen_BS.device)]
        for name in COUNTS:
            counts = getattr(self, name)
            setattr(self, name, [counts[row] for row in rows])

    def crop(self, *args: Any, **kwargs: Any) -> Never:
        raise ValueError("a SparseCache cannot take tokens back (crop); generate without assisted decoding.")

    def batch_repeat_interleave(self, repeats: int) -> Never:
        raise ValueError("a SparseCache cannot repeat its rows; repeat the prompts instead.")

    def batch_select_indices(self, indices: torch.Tensor) -> Never:
        raise ValueError("a SparseCache cannot change its number of rows; make a new one.")

    @property
    def batch_size(self) -> int:
        return len(self.entries) or -1

    @property
    def is_croppable(self) -> bool:
        return False

    @property
    def is_initialized(self) -> bool:
        return self.pool is not None

    def __len__(self) -> int:
        return self.num_layers

    def __repr__(self) -> str:
        return f"SparseCache({self.policy}, {self.num_columns} tokens seen, entries held {self.entries})"

    @torch.inference_mode(False)  # as where the pool is made
    def __deepcopy__(self, memo: dict[int, Any]) -> SparseCache:
        """A cache that goes its own way, as prompts used several times want it."""
        twin = copy.copy(self)
        for name in ("pool", *COUNTS):
            setattr(twin, name, copy.deepcopy(getattr(self, name), memo))
        return twin

    @property
    def num_bytes(self) -> int:
        """What is held: keys, values, positions, the last queries, and tallies and landmarks if there are any."""
        return 0 if self.pool is None else sum(t.nbytes for t in (*self.pool.page_pools, self.pool.queries))

    def positions(self, row: int) -> torch.Tensor:
        """Which tokens a row holds, L K S, as positions in its text without padding."""
        assert self.pool is not None
        return self.pool.held(row, self.entries[row])

    # What our attention asks for.

    def context(
        self, num_layers: int, padding_BS: torch.Tensor | None, positions_BT: torch.Tensor | None
    ) -> SparseCache:
        if self.pool is not None and num_layers != self.num_layers:
            raise UnsupportedModelError(
                f"a model of {num_layers} layers on a SparseCache that holds the entries of {self.num_layers}; use one "
                "cache a model, or call reset()."
            )
        if self.next_layer == 0:  # or the pass is under way
            self._check_positions(positions_BT)
            self._check_padding(padding_BS)
            self.seen_BS = self.seen_BS if padding_BS is None else padding_BS
        self.num_layers, self.padding_BS = num_layers, padding_BS
        return self

    def expects(self, layer_idx: int, key_BKTD: torch.Tensor) -> bool:
        same_tokens = key_BKTD.shape[::2] == self.handed_shape[::2]
        return self.handed == layer_idx and same_tokens and key_BKTD.shape != self.handed_shape

    def _check_positions(self, positions_BT: torch.Tensor | None) -> None:
        """Several tokens go on behind what was seen; one alone is not looked at, which would wait for the device."""
        if not self.num_columns or positions_BT is None or positions_BT.shape[-1] == 1 or positions_BT[..., 0].any():
            return
        raise ValueError(
            f"{positions_BT.shape[-1]} tokens begin at position 0, but this SparseCache has seen {self.num_columns}: "
            "the text is fed again, as generate does with use_cache=False. Leave use_cache on, or call reset() for "
            "other prompts."
        )

    def _check_padding(self, padding_BS: torch.Tensor | None) -> None:
        """A token that was stored cannot become padding, nor the other way round; without a mask nothing is padding."""
        given = [mask_BS for mask_BS in (padding_BS, self.seen_BS) if mask_BS is not None]
        if not given or not self.num_columns or len(given[0]) != len(self.entries):
            return
        now_BS, then_BS = (torch.ones_like(given[0]) if m is None else m for m in (padding_BS, self.seen_BS))
        changed_BS = now_BS[:, : self.num_columns] != then_BS[:, : self.num_columns]
        if not changed_BS.any():
            return
        rows = ", ".join(map(str, changed_BS.any(dim=1).nonzero().flatten().tolist()))
        raise ValueError(
            f"the attention mask has changed for tokens of row {rows} that this SparseCache has seen: give the padding "
            "of the prompts with it. What generate fed to a row that ended before the others, a cache cannot take "
            "back: call reset() and give the whole texts, or generate one row at a time."
        )

    def attend(self, layer_idx: int, call: AttentionCall) -> torch.Tensor:
        assert self.handed in (layer_idx, None), f"keys of layer {self.handed} at layer {layer_idx}"  # None: shared
        if call.q_BHTD.requires_grad:
            raise ValueError("a SparseCache keeps no gradients; call the model under torch.no_grad().")
        self.handed = None
        if layer_idx == 0:
            self._begin(call)
        pool = self.pool
        assert pool is not None
        names = ("num_heads", "num_kv_heads", "head_dim", "value_dim", "dtype", "device")
        layer, first = ([getattr(shape, name) for name in names] for shape in (self._shape(call), pool.shape))
        if layer != first:
            raise UnsupportedModelError(
                f"layer {layer_idx} has heads, widths, dtype and device {layer}, and the cache began with {first}; "
                "SparseCache needs all layers and passes alike, on one device."
            )
        if self.prompt is not None:
            pool.windows[layer_idx] = call.window or NO_WINDOW
            pool.scales[layer_idx] = call.scale
            out = self._attend_prompt(layer_idx, call)
        else:
            out = self._attend_tokens(layer_idx, call)
        self.next_layer = (layer_idx + 1) % self.num_layers
        if self.next_layer == 0:
            self._end(call.q_BHTD.shape[2])
        return out

    def _attend_prompt(self, layer_idx: int, call: AttentionCall) -> torch.Tensor:
        """The rows side by side in one, without padding, as the engine prefills."""
        assert self.prompt is not None
        valid_BT = torch.from_numpy(self.valid_BT).to(call.q_BHTD.device)
        inside = call.each(lambda x: x.transpose(1, 2)[valid_BT].transpose(0, 1)[None])
        out_BHTE = self._room(call)
        out_BHTE.transpose(1, 2)[valid_BT] = self.prompt.attend(layer_idx, inside)[0].transpose(0, 1)
        return out_BHTE

    def _attend_tokens(self, layer_idx: int, call: AttentionCall) -> torch.Tensor:
        """One token after the other; rows whose token is padding stand still."""
        out_BHTE = self._room(call)
        for t, rows_B, step in self.steps:
            rows, token = slice(None) if rows_B is None else rows_B, slice(t, t + 1)
            out_BHTE[rows, :, token] = step.attend(layer_idx, call.each(itemgetter((rows, slice(None), token))))
        return out_BHTE

    def _shape(self, call: AttentionCall) -> AttentionShape:
        return AttentionShape(
            num_heads=call.q_BHTD.shape[1],
            num_kv_heads=call.k_BKTD.shape[1],
            head_dim=call.k_BKTD.shape[3],
            value_dim=call.v_BKTE.shape[3],
            windows=(None,) * self.num_layers,  # each layer brings its own
            scales=(call.scale,) * self.num_layers,
            dtype=call.k_BKTD.dtype,
            device=call.k_BKTD.device,
        )

    @staticmethod
    def _room(call: AttentionCall) -> torch.Tensor:
        """For the output, B H T E; zeros where a token is padding."""
        return call.q_BHTD.new_zeros((*call.q_BHTD.shape[:3], call.v_BKTE.shape[3]))

    def _begin(self, call: AttentionCall) -> None:
        """A forward pass starts: see which tokens are padding, and make room for the others."""
        batch, _, num_tokens = call.q_BHTD.shape[:3]
        self.valid_BT = np.ones((batch, num_tokens), dtype=bool)
        if self.padding_BS is not None:
            self.valid_BT = self.padding_BS[:, -num_tokens:].cpu().numpy().astype(bool)
        if self.pool is not None:
            if batch != len(self.entries):
                raise ValueError(f"this SparseCache holds {len(self.entries)} rows and got {batch}; make a new one.")
            self._begin_tokens()
            return
        if not self.valid_BT[:, -1].all() or (np.diff(self.valid_BT.astype(int), axis=1) < 0).any():
            raise ValueError(
                "a prompt is empty, is not padded on its left, or begins with a chunk of padding alone; use "
                "padding_side='left', and no prefill_chunk_size with prompts of unlike lengths."
            )
        self.prompt_lens = [int(n) for n in self.valid_BT.sum(axis=1)]
        self.contexts, self.entries, self.cut, self.num_compressions = ([0] * batch for _ in range(4))
        sizes = {"page_size": self.page_size, "num_rows": batch, "num_entries": max(self.prompt_lens)}
        self.pool = pool = RowPool(self._shape(call), self.policy, **sizes)
        pages = [pool.pages(row, length) for row, length in enumerate(self.prompt_lens)]
        self.prompt = PrefillStep(pool, boundaries=[0, *accumulate(self.prompt_lens)], pages=pages)

    def _begin_tokens(self) -> None:
        pool = self.pool
        assert pool is not None
        self._fit(int((np.array(self.entries) + self.valid_BT.sum(axis=1)).max()))
        pages_BN = to_device([pool.pages(row) for row in self._rows], pool.shape.device)
        lengths, positions = np.array(self.entries), np.array(self.contexts)
        self.steps = []
        for t, valid_B in enumerate(self.valid_BT.T):
            if not valid_B.any():
                continue
            lengths = lengths + valid_B
            rows_B, lengths_B, positions_B = to_device(
                np.stack([self._rows, lengths, positions])[:, valid_B], pool.shape.device
            )
            step = self.make_step(
                pool,
                pages_BN=pages_BN[rows_B],
                lengths_B=lengths_B,
                positions_B=positions_B,
                rows_B=rows_B,
                max_length=pool.width * self.page_size,
            )
            self.steps.append((t, None if valid_B.all() else rows_B, step))
            positions = positions + valid_B

    def _end(self, num_tokens: int) -> None:
        """A forward pass is over: count its tokens, and cut the rows that are due."""
        assert self.pool is not None
        added = [int(n) for n in self.valid_BT.sum(axis=1)]
        self.contexts = [n + more for n, more in zip(self.contexts, added, strict=True)]
        self.entries = [n + more for n, more in zip(self.entries, added, strict=True)]
        self.num_columns += num_tokens
        if self.prompt is not None:
            self.pool.queries[:, : len(added)] = self.prompt.queries_LBWHD
        elif self.in_prompt and num_tokens > 1:
            self.prompt_lens = list(self.contexts)
        else:
            self.in_prompt = False
        if isinstance(self.policy, EvictPolicy):
            due = [row for row in self._rows if self._is_due(self.policy, row)]
            size = rows_at_once(self.pool, self.policy, [self.entries[row] for row in due])
            for start in range(0, len(due), size):
                self._cut(self.policy, due[start : start + size])
            self._fit(max(self.entries))
        self.prompt, self.steps = None, []

    def _is_due(self, policy: EvictPolicy, row: int) -> bool:
        """A prompt is cut if it is over the target, a row that has grown once it reaches the trigger."""
        if self.prompt is not None:
            return self.entries[row] > self._target(policy, row)
        return self.entries[row] >= self._trigger(policy, row)

    def _target(self, policy: EvictPolicy, row: int) -> int:
        return policy.target(self.prompt_lens[row], self.contexts[row])

    def _trigger(self, policy: EvictPolicy, row: int) -> int:
        return policy.trigger(self.prompt_lens[row], self.contexts[row])

    def _cut(self, policy: EvictPolicy, rows: list[int]) -> None:
        assert self.pool is not None
        device = self.pool.shape.device
        targets = [self._target(policy, row) for row in rows]
        longest = max(self.entries[row] for row in rows)
        known = (self.entries, self.contexts, self.prompt_lens, self.cut)
        lengths_B, contexts_B, prompt_lens_B, cut_B = to_device([[of[row] for row in rows] for of in known], device)
        compress(
            self.pool,
            policy,
            pages_BN=to_device([self.pool.pages(row, longest) for row in rows], device),
            lengths_B=lengths_B,
            contexts_B=contexts_B,
            prompt_lens_B=prompt_lens_B,
            queries_LBWHD=self.pool.queries[:, to_device(rows, device)],
            max_count=max(targets),
            cut_B=cut_B,
        )
        for row, target in zip(rows, targets, strict=True):
            self.entries[row] = self.cut[row] = target
            self.num_compressions[row] += 1

    @property
    def _rows(self) -> range:
        return range(len(self.prompt_lens))

    def _fit(self, num_entries: int) -> None:
        assert self.pool is not None
        policy = self.policy
        cut_at = [self._trigger(policy, row) for row in self._rows] if isinstance(policy, EvictPolicy) else None
        self.pool.fit(num_entries, max(cut_at) if cut_at else None)
